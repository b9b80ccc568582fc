"""Attention patterns against the Hugging Face model's own, loaded with eager attention."""

# B batch, S seq and key, H head

from __future__ import annotations

import functools
import inspect
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import jvp

import kwflow as kf
from kwflow.errors import KwargError
from tests.families.configs import CONFIGS
from tests.families.marks import marks
from tests.kwargs.rows import filled, prefix_sizes
from tests.oracle import assert_bits, assert_close, assert_near, cache_name, residual
from tests.oracle.tiny import (
    HEADS,
    HIDDEN,
    LAYERS,
    TWO,
    flow,
    folder,
    ids,
    left_padded,
    make_flow,
    positions_of,
    random,
    span,
)

PADS, S = (0, 3, 1), 9
B, MASK, IDS = len(PADS), left_padded(PADS, S), ids(len(PADS), S)
NONE = ("bloom", "gpt_neo", "falcon", "falcon_multi_query", "falcon_alibi", "mpt")
QUICK = ("llama", "gpt2", "gpt_oss", "gemma3_text")  # the last two have sinks, and a sliding window
HAVING = [pytest.param(n, marks=marks(n, QUICK, ())) for n in CONFIGS if n not in NONE]


@functools.cache
def eager(family: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder(family), attn_implementation="eager", dtype=dtype)
    return model.eval().requires_grad_(False)


def patterns(model: Any, tokens: Tensor, mask: Tensor, **more: Any) -> list[Tensor]:
    """(batch, pos, head, key) of every layer; positions counted as generate does."""
    if "position_ids" in inspect.signature(model.forward).parameters:
        more["position_ids"] = positions_of(mask)
    out = model(tokens, attention_mask=mask, output_attentions=True, **more)
    return [weights.transpose(1, 2) for weights in out.attentions]


@pytest.mark.parametrize("family", HAVING)
def test_the_pattern_of_every_family(family: str) -> None:
    remote = flow(family, TWO)
    x, expected = remote.inputs({"input_ids": IDS, "attention_mask": MASK}), patterns(eager(family), IDS, MASK)
    out, acts = remote.capture({"pattern": range(LAYERS), "resid": [1]}, **x)
    for layer in range(LAYERS):
        assert acts["pattern", layer].shape == (B, S, HEADS, S)
        for row, pads in enumerate(PADS):
            assert_close(acts["pattern", layer][row, : S - pads], expected[layer][row, pads:], f"{layer} {row}")
    plain = remote(**x)
    for row, pads in enumerate(PADS):
        assert_close(out[row, pads:], plain[row, pads:])
    whole = patterns(eager(family), IDS, torch.ones_like(MASK))
    _, acts = remote.capture({"pattern": [2]}, at="prompt[-2:]", **remote.inputs(IDS))
    assert_close(acts["pattern", 2], whole[2][:, -2:])


@pytest.mark.parametrize("family", NONE)
def test_a_family_that_gives_none_says_so(family: str) -> None:
    with pytest.raises(KwargError, match="no point 'pattern' in these blocks; they have embed"):
        flow(family).capture({"pattern": [1]}, random(2, 3, HIDDEN))


def test_a_pattern_is_looked_at_only() -> None:
    with pytest.raises(KwargError, match="no point 'pattern'"):
        kf.add(random(HIDDEN), 1, point="pattern")


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_four_dimensional_mask(dtype: torch.dtype) -> None:
    allowed = torch.ones(S, S, dtype=torch.bool).tril()
    allowed[5:, 2] = False
    mask = allowed if dtype is torch.bool else torch.zeros(S, S).masked_fill(~allowed, float("-inf"))
    hidden = random(B, S, HIDDEN)
    _, acts = flow("llama", TWO).capture({"pattern": [3]}, hidden, attention_mask=mask.expand(B, 1, S, S))
    kept: list[Tensor] = []
    attention = eager("llama").get_submodule("model.layers.3.self_attn")
    keep = (attention, "post", lambda _, __, out: kept.append(out[1]))
    given = torch.zeros(S, S).masked_fill(~allowed, torch.finfo(torch.float32).min).expand(B, 1, S, S)
    residual(eager("llama"), hidden, attention_mask=given, extra=[keep])
    assert_close(acts["pattern", 3], kept[0].transpose(1, 2))
    assert not acts["pattern", 3][:, 5:, :, 2].any()


def test_the_sessions_keys_grow() -> None:
    remote = flow("llama", TWO)
    x, whole = remote.inputs({"input_ids": IDS, "attention_mask": MASK}), patterns(eager("llama"), IDS, MASK)
    acts = kf.Capture(pattern=[0, 3], resid=[1])
    with torch.no_grad(), remote.session(max_length=S + 2) as s:
        for start, stop in ((0, 4), (4, 7), (7, 8), (8, 9)):
            parts = {k: v[:, start:stop] for k, v in x.items() if k != "attention_mask"}
            s.step(**parts, attention_mask=MASK[:, :stop], capture=acts)
    for row, pads in enumerate(PADS):
        for layer in (0, 3):
            assert_near(acts["pattern", layer][row, : S - pads], whole[layer][row, pads:], f"{layer} {row}")


@pytest.mark.parametrize("options", [{}, {"num_beams": 3, "num_return_sequences": 2}])
def test_generate_captures_patterns(options: dict[str, Any]) -> None:
    remote, acts = flow("llama", TWO), kf.Capture(pattern=[2])
    ours: Any = kf.AutoDistributedModelForCausalLM.from_pretrained(remote.ends.folder, flow=remote)
    found = ours.generate(IDS, attention_mask=MASK, max_new_tokens=4, eos_token_id=None, **options, capture=acts)
    assert acts["pattern", 2].shape == (len(found), S + 3, HEADS, S + 3)
    for row, tokens in enumerate(found):
        pads = PADS[row // (len(found) // B)]
        ran, mask = tokens[None, :-1], left_padded([pads], S + 3)
        expected = patterns(eager("llama"), ran, mask)[2][0, pads:]
        assert_near(acts["pattern", 2][row, : S + 3 - pads], expected, f"row {row}")


def test_derivatives_of_a_pattern() -> None:
    remote, model = flow("gpt2", TWO, torch.float64), eager("gpt2", torch.float64)
    hidden, v, d = (random(*s, dtype=torch.float64) for s in ((1, 4, HIDDEN), (HIDDEN,), (HIDDEN,)))
    weights = random(1, 4, HEADS, 4, dtype=torch.float64)

    def ours(v: Tensor) -> Tensor:
        _, acts = remote.capture({"pattern": [3]}, hidden, steer={1: v})
        return (acts["pattern", 3] * weights).sum()

    def theirs(v: Tensor) -> Tensor:
        kept: list[Tensor] = []
        attention = model.get_submodule("transformer.h.3.attn")
        residual(model, hidden, steer={1: v}, extra=[(attention, "post", lambda _, __, out: kept.append(out[1]))])
        return (kept[0].transpose(1, 2) * weights).sum()

    for run in (lambda f: torch.autograd.grad(f(own := v.clone().requires_grad_()), own)[0],
                lambda f: jvp(f, (v,), (d,))[1], lambda f: torch.func.hessian(f)(v) @ d):  # fmt: skip
        assert_close(run(ours), run(theirs))


@pytest.mark.slow
def test_calls_beside_one_that_looks_at_patterns_are_as_ever() -> None:
    """The layers share a config: what one call computes eagerly must not become another's, of the same layers."""
    remote, spec, done = make_flow("llama", TWO), span("llama", 0, 2, torch.float32), threading.Event()
    x = remote.inputs({"input_ids": IDS, "attention_mask": MASK})
    run, hidden, given = kf.chain(spec.blocks), x["hidden"], {"attention_mask": MASK}
    expected = run(spec.params, hidden, **given)

    def look() -> None:
        while not done.is_set():
            remote.capture({"pattern": [0, 1]}, **x)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        for _ in range(100):
            assert_bits(run(spec.params, hidden, **given), expected)
    finally:
        done.set()
        thread.join()
    assert_bits(run(spec.params, hidden, **given), expected)


@pytest.mark.parametrize("pads", [PADS, (0, 0, 0)], ids=["padded", "no pads"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_prefix_has_keys_in_the_pattern_too(family: str, pads: tuple[int, ...]) -> None:
    """Its columns stand first; in a session as well."""
    remote, sizes, mask = flow(family, TWO), prefix_sizes(family), left_padded(pads, S)
    kv = {name: random(LAYERS, 1, *size, seed=i) for i, (name, size) in enumerate(sizes.items())}
    ahead = sizes["k"][1]
    x = remote.inputs({"input_ids": IDS, "attention_mask": mask}, prefix=ahead)
    cache = filled([{name: tensor[layer] for name, tensor in kv.items()} for layer in range(LAYERS)], B)
    seen = torch.cat([torch.ones(B, ahead, dtype=torch.long), mask], 1)
    given = {"position_ids": positions_of(mask) + ahead, cache_name(eager(family)): cache}
    local = eager(family)(IDS, attention_mask=seen, output_attentions=True, **given)
    _, acts = remote.capture({"pattern": [0, 3]}, **x, prefix_kv=kv)
    with torch.no_grad(), remote.session(ahead + S + 1) as session:
        session.step(**x, prefix_kv=kv, capture=(steps := kf.Capture(pattern=[0, 3])))
        session.step(**session.inputs(ids(B, 1, seed=5)), capture=(later := kf.Capture(pattern=[0])))
    assert_close(later["pattern", 0].sum(-1), torch.ones(B, 1, HEADS))
    assert later["pattern", 0].shape == (B, 1, HEADS, ahead + S + 1)
    for layer in (0, 3):
        for row, first in enumerate(pads):
            expected = local.attentions[layer].transpose(1, 2)[row, first:]
            assert_close(acts["pattern", layer][row, : S - first], expected, f"call {layer} {row}")
            assert_near(steps["pattern", layer][row, : S - first], expected, f"session {layer} {row}")
