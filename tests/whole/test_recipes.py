"""docs/recipes.md: every function on it is run, over two workers, against plain hooks on the local model."""

# B batch, S seq, D hidden, V vocab, L layers

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import kwflow as kf
from tests.oracle import Hook, assert_bits, assert_close, assert_near, hooked, layers_of
from tests.oracle.tiny import HEADS, HIDDEN, LAYERS, TWO, flow, huggingface
from tests.whole.test_house import ROOT

PAGE = (ROOT / "docs" / "recipes.md").read_text()
BLOCKS = [code for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if code.startswith("def ")]
RECIPES: dict[str, Any] = {"torch": torch, "kf": kf}
for code in BLOCKS:
    exec(compile(code, "docs/recipes.md", "exec"), RECIPES)

TEXTS, OTHERS = ["w1 w2 w3 w4 w5", "w6 w7 w8"], ["w9 w2 w3 w4 w5", "w10 w7 w8"]  # left pads: 0 and 2
EVEN, OTHERS_EVEN = ["w1 w2 w3 w4", "w6 w7 w8 w2"], ["w9 w2 w3 w4", "w6 w10 w8 w2"]
B, S = 2, 5
WEIGHTS = torch.randn(B, 64, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
EVERY = range(LAYERS)
HEAD_DIM = HIDDEN // HEADS

every_model = pytest.mark.parametrize(
    "model", [("gpt2", torch.float64), pytest.param(("llama", torch.float32), marks=pytest.mark.rest)], ids=str
)
Model = tuple[str, torch.dtype]


def score(logits_BV: Tensor) -> Tensor:
    return (logits_BV * WEIGHTS[: len(logits_BV)].to(logits_BV.dtype)).sum()


def assert_same(model: Model, ours: Tensor, expected: Tensor, what: str = "") -> None:
    (assert_close if model[1] is torch.float64 else assert_near)(ours, expected, what)


# ---- the local model ---------------------------------------------------------------------------------------------


class Local:
    """Hugging Face's model with hooks on its modules; ``family`` decides what they are called."""

    def __init__(self, model: Model):
        self.model: Any = huggingface(*model)
        self.layers, self.flow = layers_of(self.model), flow(model[0], TWO, model[1])
        self.gpt2 = model[0] == "gpt2"

    def logits(self, texts: Sequence[str], hooks: Iterable[Hook] = (), embeds: Tensor | None = None) -> Tensor:
        """(batch, vocab) at the last column."""
        tokens = self.flow.ends.tokenize(texts)  # type: ignore[attr-defined]
        mask = tokens["attention_mask"]
        given = {"input_ids": tokens["input_ids"]} if embeds is None else {"inputs_embeds": embeds}
        with hooked(list(hooks)):
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            return self.model(**given, attention_mask=mask, position_ids=positions, use_cache=False).logits[:, -1]

    def embeds(self, texts: Sequence[str]) -> Tensor:
        """What goes into layer 0."""
        seen: dict[Any, Tensor] = {}
        self.logits(texts, [(self.layers[0], "pre", keep(seen, 0))])
        return seen[0]

    def acts(self, texts: Sequence[str], where: str, hooks: Iterable[Hook] = ()) -> dict[int, Tensor]:
        """What every layer's module has, (batch, seq, features)."""
        seen: dict[Any, Tensor] = {}
        self.logits(texts, [*hooks, *[(*self.at(n, where), keep(seen, n)) for n in EVERY]])
        return seen

    def at(self, layer: int, where: str) -> tuple[nn.Module, str]:
        """The module of a point, and whether the point is what it is given or what it gives."""
        block: Any = self.layers[layer]
        attention = block.attn if self.gpt2 else block.self_attn
        return {
            "resid": (block, "post"),
            "resid_pre": (block, "pre"),
            "attn": (attention, "post"),
            "mlp": (block.mlp, "post"),
            "head": (attention.c_proj if self.gpt2 else attention.o_proj, "pre"),
            "c_attn": (getattr(attention, "c_attn", None), "post"),
            "ln_1": (getattr(block, "ln_1", None), "pre"),
            "ln_2": (getattr(block, "ln_2", None), "pre"),
            "neuron": (block.mlp.c_proj if self.gpt2 else block.mlp.down_proj, "pre"),
        }[where]

    def change(self, layer: int, where: str, change: Callable[[Tensor], Tensor]) -> Hook:
        """A hook that changes what is there."""
        module, when = self.at(layer, where)
        return module, when, changing(when, change)


def first(value: Any) -> Tensor:
    return value[0] if isinstance(value, tuple) else value


def keep(seen: dict[Any, Tensor], key: Any) -> Callable[..., None]:
    """A hook of either kind that remembers what it sees: what a module gives, else what it is given."""

    def hook(_: nn.Module, args: Any, out: Any = None) -> None:
        seen[key] = first(args if out is None else out)

    return hook


def changing(when: str, change: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    def hook(_: nn.Module, args: Any, out: Any = None) -> Any:
        value = args if when == "pre" else out
        changed = change(first(value))
        return (changed, *value[1:]) if isinstance(value, tuple) else changed

    return hook


def placed(where: Any, value: Any) -> Callable[[Tensor], Tensor]:
    """A change that puts a value at an index."""

    def change(x: Tensor) -> Tensor:
        x = x.clone()
        x[where] = value
        return x

    return change


# ---- the recipes -------------------------------------------------------------------------------------------------


def test_they_are_short_and_say_where_they_are_from() -> None:
    sections = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
    for section in sections:
        codes = re.findall(r"```python\n(def .*?)```", section, re.DOTALL)
        assert len(codes) == 1 and len(codes[0].splitlines()) <= 15, section.splitlines()[0]
        assert re.search(r"\b(19|20)\d\d\b", section.partition("```")[0]), section.splitlines()[0]
    assert len(sections) == len(BLOCKS)


@pytest.mark.parametrize("model", [("llama", torch.float32), ("gpt2", torch.float64)], ids=str)
def test_logit_lens(model: Model) -> None:
    local = Local(model)
    ours = RECIPES["logit_lens"](local.flow, TEXTS)
    resid = local.acts(TEXTS, "resid")
    stacked = torch.stack([resid[n][:, -1] for n in EVERY])
    base = local.model.base_model
    expected = local.model.lm_head((base.ln_f if local.gpt2 else base.norm)(stacked))
    assert_bits(ours, expected)
    assert_same(model, ours[-1], local.logits(TEXTS))


def test_logit_attribution() -> None:
    model = ("llama", torch.float32)
    local, answers, others = Local(model), [3, 4], [5, 6]
    ours = RECIPES["logit_attribution"](local.flow, TEXTS, answers, others)
    seen: dict[Any, Tensor] = {}
    logits = local.logits(TEXTS, [(local.model.base_model.norm, "pre", keep(seen, "whole"))])
    norm, unembed = local.model.base_model.norm, local.model.lm_head.weight
    divisor = (seen["whole"][:, -1].pow(2).mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()
    directions = norm.weight * (unembed[answers] - unembed[others]) / divisor
    written = [local.embeds(TEXTS), *local.acts(TEXTS, "attn").values(), *local.acts(TEXTS, "mlp").values()]
    expected = torch.stack([(part[:, -1] * directions).sum(-1) for part in written])
    assert_near(ours, expected)
    rows = range(B)
    assert_near(ours.sum(0), logits[rows, answers] - logits[rows, others])


@every_model
def test_activation_patching(model: Model) -> None:
    local = Local(model)
    ours = RECIPES["activation_patching"](local.flow, EVEN, OTHERS_EVEN, score)
    clean = local.acts(EVEN, "resid")

    def patched(layer: int, token: int) -> Tensor:
        at = (slice(None), token)
        return score(local.logits(OTHERS_EVEN, [local.change(layer, "resid", placed(at, clean[layer][at]))]))

    assert_same(model, ours, torch.stack([torch.stack([patched(n, token) for token in range(4)]) for n in EVERY]))


@every_model
def test_head_ablation(model: Model) -> None:
    local = Local(model)
    ours = RECIPES["head_ablation"](local.flow, TEXTS, HEADS, score)

    def without(layer: int, head: int) -> Tensor:
        columns = slice(head * HEAD_DIM, (head + 1) * HEAD_DIM)
        return score(local.logits(TEXTS, [local.change(layer, "head", placed((..., columns), 0.0))]))

    assert_same(model, ours, torch.stack([torch.stack([without(n, head) for head in range(HEADS)]) for n in EVERY]))


@every_model
def test_neuron_ablation(model: Model) -> None:
    local, neurons = Local(model), [0, 5, 17, 30]
    ours = RECIPES["neuron_ablation"](local.flow, TEXTS, 1, neurons, score)
    hooks = [local.change(1, "neuron", placed((..., neuron), 0.0)) for neuron in neurons]
    assert_same(model, ours, torch.stack([score(local.logits(TEXTS, [hook])) for hook in hooks]))


def test_alignment_search() -> None:
    """The same rotation trained by a local loop, from the same start."""
    model, layer, rank, steps, labels = ("gpt2", torch.float64), 1, 2, 4, [7, 9]
    local = Local(model)
    torch.manual_seed(5)
    basis, losses = RECIPES["alignment_search"](local.flow, TEXTS, OTHERS, labels, layer, rank, steps)
    torch.manual_seed(5)
    linear: Any = nn.utils.parametrizations.orthogonal(nn.Linear(rank, HIDDEN, bias=False, dtype=torch.float64))
    optimizer, expected = torch.optim.Adam(linear.parameters(), 1e-2), []
    source = local.acts(OTHERS, "resid")[layer][:, -1]
    for _ in range(steps):

        def swap(x: Tensor) -> Tensor:
            weight = linear.weight
            last = x[:, -1] + (source - x[:, -1]) @ weight @ weight.T
            return torch.cat([x[:, :-1], last[:, None]], 1)

        loss = cross_entropy(local.logits(TEXTS, [local.change(layer, "resid", swap)]), torch.tensor(labels))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.detach())
    assert_close(basis, linear.weight.detach())
    assert_close(losses.double(), torch.stack(expected).float().double())
    assert losses[-1] < losses[0], "nothing was learnt"


@every_model
def test_causal_tracing(model: Model) -> None:
    local, subject = Local(model), [1, 2]
    text = TEXTS[:1]
    torch.manual_seed(6)
    ours = RECIPES["causal_tracing"](local.flow, text[0], subject, score, samples=2)
    clean, embeds = local.acts(text, "resid"), local.embeds(text).expand(2, -1, -1)
    torch.manual_seed(6)
    added = torch.zeros_like(embeds)
    added[:, subject] = 3 * embeds.std() * torch.randn(2, 2, HIDDEN, dtype=embeds.dtype)
    corrupt = local.change(0, "resid_pre", lambda x: x + added)

    def restored(layer: int, token: int) -> Tensor:
        put = local.change(layer, "resid", placed((slice(None), token), clean[layer][0, token]))
        return score(local.logits(text * 2, [corrupt, put]))

    assert_same(model, ours, torch.stack([torch.stack([restored(n, token) for token in range(S)]) for n in EVERY]))


@every_model
def test_contrastive_steering(model: Model) -> None:
    local, strengths = Local(model), [0.5, -2.0]
    positive, negative = ["w11 w12", "w13"], ["w14", "w15 w16 w17", "w18"]
    ours = RECIPES["contrastive_steering"](local.flow, positive, negative, 2, TEXTS, strengths)
    means = [local.acts(texts, "resid")[2][:, -1].double().mean(0) for texts in (positive, negative)]
    vector = (means[0] - means[1]).to(model[1])
    added = torch.tensor(strengths, dtype=model[1])[:, None, None] * vector
    assert_same(model, ours, local.logits(TEXTS, [local.change(2, "resid", lambda x: x + added)]))


@every_model
def test_integrated_gradients(model: Model) -> None:
    local, steps = Local(model), 8
    ours = RECIPES["integrated_gradients"](local.flow, TEXTS, OTHERS, score, steps)
    start, stop, total = local.embeds(OTHERS), local.embeds(TEXTS), 0
    for step in range(steps):
        x = (start + (stop - start) * (step + 0.5) / steps).requires_grad_()
        given = local.change(0, "resid_pre", lambda _, x=x: x)
        total += torch.autograd.grad(score(local.logits(TEXTS, [given])), x)[0]
    assert_same(model, ours, (total * (stop - start) / steps).sum(-1))
    finer = RECIPES["integrated_gradients"](local.flow, TEXTS, OTHERS, score, steps=64)
    gap = finer.sum() - (score(local.logits(TEXTS)) - score(local.logits(OTHERS)))
    assert gap.abs() < 1e-2 * finer.abs().sum(), "not complete"


@every_model
def test_attribution_patching(model: Model) -> None:
    local = Local(model)
    ours = RECIPES["attribution_patching"](local.flow, EVEN, OTHERS_EVEN, score)
    clean, corrupted = local.acts(EVEN, "resid"), local.acts(OTHERS_EVEN, "resid")
    leaves = [torch.zeros_like(corrupted[n]).requires_grad_() for n in EVERY]
    hooks = [local.change(n, "resid", lambda x, n=n: x + leaves[n]) for n in EVERY]
    grads = torch.autograd.grad(score(local.logits(OTHERS_EVEN, hooks)), leaves)
    expected = [((clean[n] - corrupted[n]) * grads[n]).sum((0, 2)) for n in EVERY]
    assert_same(model, ours, torch.stack(expected))


@pytest.mark.parametrize(("part", "head"), [(0, 1), (1, 3), (2, 0)], ids=["queries", "keys", "values"])
def test_path_patching(part: int, head: int) -> None:
    """From head 2 of layer 0 to one head of layer 3; gpt2 has its three projections side by side in one."""
    model, dims = ("gpt2", torch.float64), [part * HIDDEN + head * HEAD_DIM + i for i in range(HEAD_DIM)]
    local = Local(model)
    ours = RECIPES["path_patching"](local.flow, EVEN, OTHERS_EVEN, (0, 2), 3, "c_attn", dims)
    columns = (..., slice(2 * HEAD_DIM, 3 * HEAD_DIM))
    hooks = [local.change(0, "head", placed(columns, local.acts(OTHERS_EVEN, "head")[0][columns]))]
    for point, layers in (("attn", (1, 2)), ("mlp", (0, 1, 2))):
        held = local.acts(EVEN, point)
        hooks += [local.change(n, point, lambda _, value=held[n]: value) for n in layers]
    carried = local.acts(EVEN, "c_attn", hooks)[3][..., dims]
    expected = local.logits(EVEN, [local.change(3, "c_attn", placed((..., dims), carried))])
    assert_close(ours, expected)
    assert (expected - local.logits(EVEN)).abs().max() > 1e-6, "nothing was carried"


@every_model
def test_attention_knockout(model: Model) -> None:
    """Cut in layers 1 and 2 by a hook that changes the mask which their attention is given."""
    local, tokens = Local(model), [0, 2]
    ours = RECIPES["attention_knockout"](local.flow, EVEN, tokens, 1, 3)
    cut = torch.zeros(B, 1, 4, 4, dtype=model[1]).masked_fill(torch.ones(4, 4).triu(1).bool(), float("-inf"))
    cut[:, :, -1, tokens] = float("-inf")

    def masked(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "attention_mask": cut}

    handles = [local.at(n, "attn")[0].register_forward_pre_hook(masked, with_kwargs=True) for n in (1, 2)]
    try:
        expected = local.logits(EVEN)
    finally:
        for handle in handles:
            handle.remove()
    assert_same(model, ours, expected)
    assert (expected - local.logits(EVEN)).abs().max() > 1e-6, "nothing was cut"


def test_edge_attribution() -> None:
    """A reader's gradient is that of a leaf added to what its norm is given, and to nothing else."""
    local = Local(("gpt2", torch.float64))
    ours = RECIPES["edge_attribution"](local.flow, EVEN, OTHERS_EVEN, score)
    names = [(norm, n) for n in EVERY for norm in ("ln_1", "ln_2")]
    leaves = [torch.zeros_like(local.embeds(EVEN)).requires_grad_() for _ in range(2 * LAYERS + 1)]
    hooks = [local.change(n, norm, lambda x, i=i: x + leaves[i]) for i, (norm, n) in enumerate(names)]
    hooks.append((local.model.transformer.ln_f, "pre", changing("pre", lambda x: x + leaves[-1])))
    grads = torch.autograd.grad(score(local.logits(OTHERS_EVEN, hooks)), leaves)

    def written(texts: Sequence[str]) -> list[Tensor]:
        attn, mlp = local.acts(texts, "attn"), local.acts(texts, "mlp")
        return [local.embeds(texts), *(part[n] for n in EVERY for part in (attn, mlp))]

    differences = [a - b for a, b in zip(written(EVEN), written(OTHERS_EVEN), strict=True)]
    expected = torch.stack([torch.stack([(d * g).sum() for g in grads]) for d in differences])
    follows = torch.tensor([[reader >= writer for reader in range(len(grads))] for writer in range(len(grads))])
    assert_close(ours, torch.where(follows, expected, torch.zeros_like(expected)))
