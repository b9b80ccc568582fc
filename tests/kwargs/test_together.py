"""Kwargs together: sizes that are all equal, clients side by side, a training run; and no weight changes."""

# B batch, S seq, D hidden, L layers, R rank

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import kwflow as kf
from kwflow.blocks.precision import LiftFloat32
from kwflow.errors import CallerError, KwflowError
from tests.families.marks import families
from tests.families.table import S, distributed
from tests.kwargs.row import B, D, Given, L, Place, Row
from tests.kwargs.rows import ROWS
from tests.kwargs.sides import given, inputs, leaves, of_call
from tests.oracle import Hook, assert_bits, assert_close, assert_near, hooked, layers_of, residual, with_prompts
from tests.oracle.tiny import TWO, derivable, flow, folder, huggingface, ids, random, span

BY_NAME = {row.name: row for row in ROWS}
# in the order in which a block does them
ORDER = ("prompts", "head_mask", "ia3", "lora", "edit: put", "edit: scale", "steer", "edit: add", "edit: project_out")


def of_one_size(row: Row, family: str, n: int) -> dict[str, Tensor]:
    """A row's values with as many rows, prompts and ranks as there are columns."""
    shapes = dict(row.sizes(family))
    if row.name == "prompts":
        shapes = {"p": (n, D)}
    if row.name == "lora":
        shapes = {name: (n, own[1]) if name.endswith("A") else (own[0], n) for name, own in shapes.items()}
    return {name: random(L, n, *own, seed=i + 1, scale=row.spread) for i, (name, own) in enumerate(shapes.items())}


@families(["llama", "gpt2"])
@pytest.mark.parametrize("n", [pytest.param(2, marks=pytest.mark.slow), 4])
def test_a_batch_as_large_as_heads_ranks_prompts_and_columns(family: str, n: int) -> None:
    """Alone and all in one call, cut into rows or not: an axis that is guessed by its size is guessed wrong.

    4 are the heads, the layers and gpt2's kv heads; 2 are llama's kv heads.
    """
    sizes = span(family, 0, L).schema.sizes
    assert n in (sizes["head"], sizes["kv_head"]) or family == "gpt2"
    hidden, mask, whole, everywhere = random(n, n, D), torch.ones(n, n).long(), {}, []

    def compare(what: str, kwargs: dict[str, Any], hooks: list[Hook]) -> None:
        expected = residual(huggingface(family), hidden, attention_mask=mask, extra=hooks)
        for rows in (1, n):
            out = flow(family, TWO).options(batch_tokens=rows * n)(hidden, attention_mask=mask, **kwargs)
            assert_near(out, expected, f"{what}, {rows} rows at once")

    for row in (BY_NAME[name] for name in ORDER if n > 2 or name != "edit: put"):  # it puts at token position 2
        x = of_one_size(row, family, n)
        own = row.given(Given(family, x, own_rows=True))
        places = [
            Place(family, layer, number, {k: v[number] for k, v in x.items()}, mask, mask.sum(1), {})
            for number, layer in enumerate(layers_of(huggingface(family)))
        ]
        hooks = [hook for place in places for hook in row.hooks(place)]
        compare(row.name, own, hooks)
        everywhere += hooks
        whole = {**own, **whole} if "edit" not in own else {**whole, "edit": [*whole.get("edit", []), *own["edit"]]}
    compare("together", whole, everywhere)


# ---- clients side by side, in one swarm of processes


@pytest.fixture(scope="module")
def swarm() -> Iterator[Any]:
    with kf.local_swarm(folder("llama"), workers=2) as swarm:
        yield swarm


def asked(number: int) -> tuple[Row, dict[str, Tensor], dict[str, Any]]:
    """What a client asks for: a row of the kwargs, and values of its own."""
    row = ROWS[number % len(ROWS)]
    x = leaves(row, "llama", torch.float32, rows=B)
    x = {name: value * (1 + number / 10) for name, value in x.items()}
    kwargs = row.given(given(row, "llama", x))
    return row, x, {**of_call(row, x, slice(None), slice(0, S), slice(0, S)), **kwargs}


def answers(remote: Any, number: int) -> list[Tensor]:
    """A call, a gradient, a session of two steps; in the middle a mistake, and what comes after it."""
    row, _, kwargs = asked(number)
    hidden = inputs(torch.float32)
    leaf = hidden.clone().requires_grad_()
    found = [row.run("llama", remote, hidden, kwargs)]
    with pytest.raises(CallerError):
        row.run("llama", remote, hidden, row.wrong("llama"))
    if number % 3 == 0:  # a mistake that only a worker sees
        with pytest.raises(KwflowError), torch.no_grad(), remote.session(1 << 30) as session:
            session.step(hidden)
    found.append(remote(hidden))
    out = row.run("llama", remote, leaf, kwargs)
    found += torch.autograd.grad((out * out).sum(), leaf)
    static = {
        name: value for name, value in kwargs.items() if name not in ("attention_mask", "position_ids", "capture")
    }
    with torch.no_grad(), remote.session(S) as session:
        found.append(session.step(hidden[:, :9], phase="prompt", **static))
        static.pop("prefix_kv", None)  # it stands before the first step
        found += [session.step(hidden[:, n : n + 1], phase="generated", **static) for n in (9, 10)]
    return found


@pytest.mark.swarm
@pytest.mark.slow
@pytest.mark.parametrize("count", [5, pytest.param(20, marks=pytest.mark.rest)])
def test_clients_at_once_are_each_as_alone(swarm: Any, count: int) -> None:
    """To the bit; after their mistakes too, and the plain call is the baseline."""
    alone = [answers(flow("llama", TWO), number) for number in range(count)]
    clients = [kf.connect(swarm.model, peers=swarm.peers) for _ in range(count)]
    try:
        baseline = clients[0](inputs(torch.float32))
        with ThreadPoolExecutor(count) as pool:
            together = list(pool.map(answers, clients, range(count)))
        assert_bits(clients[0](inputs(torch.float32)), baseline)
    finally:
        for client in clients:
            client.close()
    assert_bits(baseline, flow("llama", TWO)(inputs(torch.float32)))
    for number, (ours, expected) in enumerate(zip(together, alone, strict=True)):
        for part, (a, b) in enumerate(zip(ours, expected, strict=True)):
            assert_bits(a, b, f"client {number}, {asked(number)[0].name}, part {part}")


# ---- a training run

STEPS = 30


def tunables(layers: int, width: int, projection: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    """Deep prompts, and a LoRA's A and B; B begins with zeros."""
    prompts, a = random(layers, 1, 3, width, seed=1, scale=0.1), random(layers, 4, projection[0], seed=2, scale=0.1)
    made = [prompts, a, torch.zeros(layers, projection[1], 4)]
    return [tensor.to(dtype).requires_grad_() for tensor in made]


def plain_hooks(model: Any, name: str, tensors: list[Tensor], mask: Tensor) -> list[Hook]:
    """The same on the local model."""
    prompts, a, b = tensors
    hooks: list[Hook] = []
    for number, layer in enumerate(layers_of(model)):

        def before(_: Any, args: Any, own: Tensor = prompts[number]) -> Any:
            return (with_prompts(args[0], own, mask), *args[1:])

        def after(_: Any, args: Any, out: Tensor, own: tuple[Tensor, Tensor] = (a[number], b[number])) -> Tensor:
            return out + 2.0 * (args[0] @ own[0].mT @ own[1].mT)

        hooks += [(layer, "pre", before), (layer.get_submodule(name), "post", after)]
    return hooks


def trained(loss: Callable[[list[Tensor]], Tensor], tensors: list[Tensor]) -> Tensor:
    """The loss before each step of Adam."""
    optimizer, losses = torch.optim.Adam(tensors, lr=0.01), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        value = loss(tensors)
        value.backward()
        optimizer.step()
        losses.append(value.detach())
    return torch.stack(losses)


def both_ways(remote: Any, local: Any, sizes: tuple[Any, ...], x: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The losses through the workers, and of the Hugging Face model with hooks."""
    name = "self_attn.v_proj"
    labels = x["input_ids"].masked_fill(x["attention_mask"] == 0, -100)

    def ours(tensors: list[Tensor]) -> Tensor:
        prompts, a, b = tensors
        return remote(**x, labels=labels, prompts=prompts, lora={"v_proj": {"A": a, "B": b, "scale": 2.0}}).loss

    def theirs(tensors: list[Tensor]) -> Tensor:
        with hooked(plain_hooks(local, name, tensors, x["attention_mask"])):
            return local(**x, labels=labels).loss

    losses = trained(ours, tunables(*sizes)), trained(theirs, tunables(*sizes))
    assert losses[0][-1] < 0.8 * losses[0][0], "nothing was learnt"
    return losses


@pytest.mark.slow
def test_thirty_steps_of_prompts_and_a_lora_in_fp64() -> None:
    """Every step within the table: nothing is lost of a gradient, and nothing drifts."""
    dtype = torch.float64
    projection = span("llama", 0, L).schema.projections["self_attn.v_proj"]
    x = {"input_ids": ids(4, 8), "attention_mask": (torch.arange(8) >= torch.tensor([[0], [1], [3], [0]])).long()}
    with LiftFloat32(), sdpa_kernel(SDPBackend.MATH):
        ours, theirs = both_ways(distributed("llama", dtype), derivable("llama"), (L, D, projection, dtype), x)
    for step, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert_close(a, b, f"step {step}")


SENTENCES = ["The weather in Paris is fine today.", "Hello, my name is Ada."]


@pytest.mark.swarm
@pytest.mark.rest
def test_thirty_steps_of_prompts_and_a_lora_on_smollm2(smollm2_swarm: Any, smollm2: Path) -> None:
    """Through two workers with as many threads: the losses of Hugging Face with hooks, or the gap is printed."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2, padding_side="left")
    x = dict(tokenizer(SENTENCES, return_tensors="pt", padding=True))
    local = AutoModelForCausalLM.from_pretrained(smollm2).eval().requires_grad_(False)
    remote = kf.AutoDistributedModelForCausalLM.from_pretrained("smollm2-135m", initial_peers=smollm2_swarm.peers)
    ours, theirs = both_ways(remote, local, (30, 576, (576, 192), torch.float32), x)
    gap = (ours - theirs).abs().max().item()
    print(f"losses {ours[0]:.4f} to {ours[-1]:.4f}; largest gap to the local run {gap:.2g}")
    assert_bits(ours[0], theirs[0], "the first loss")
    assert gap < 1e-3
