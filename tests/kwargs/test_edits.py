"""Edits at points and token positions, against Hugging Face models with hooks that edit one row and column at once."""

# B batch, S seq, D hidden, L layers, P pos

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import kwflow as kf
from kwflow.errors import AxesError, CallerError, KwargError, KwflowError, SessionError, ShapeError, SpanError
from kwflow.kwargs.edit import apply
from kwflow.models.families import FAMILIES as ROWS
from tests.families.configs import HEADS
from tests.families.marks import every_family, families
from tests.families.table import MASK, B, D, L, S
from tests.oracle import assert_bits, assert_close, assert_near, layers_of, residual
from tests.oracle.tiny import (
    EACH,
    THREE,
    TWO,
    Requests,
    flow,
    huggingface,
    ids,
    random,
    span,
)

TOKENS = MASK.sum(1).tolist()
SOME = ("llama", "gpt2", "bloom", "gemma2", "opt", "gpt_neox")
One = Callable[[Tensor, int, int], Tensor]  # (features, row, token position) to the same


def token(mask: Tensor, row: int, column: int) -> int:
    return int(mask[row, : column + 1].sum()) - 1


def edited(activation: Tensor, mask: Tensor, change: One, where: Callable[[int, int], bool]) -> Tensor:
    """Change the tokens that ``where(row, token position)`` says, one at a time."""
    flat = activation.reshape(*mask.shape, activation.shape[-1])
    rows = []
    for row in range(mask.shape[0]):
        columns = []
        for column in range(mask.shape[1]):
            at = token(mask, row, column)
            chosen = bool(mask[row, column]) and where(row, at)
            columns.append(change(flat[row, column], row, at) if chosen else flat[row, column])
        rows.append(torch.stack(columns))
    return torch.stack(rows).reshape(activation.shape)


def hooked(
    family: str,
    hidden: Tensor,
    mask: Tensor,
    edits: list[tuple[int, str, One, Callable[[int, int], bool]]],
    model: nn.Module | None = None,
) -> Tensor:
    """The residual of the Hugging Face model with ``(layer, point, change, where)`` done by hooks on its modules."""
    model = huggingface(family) if model is None else model
    hooks: list[Any] = []
    row = ROWS[family]
    for layer, point, change, where in edits:
        block = layers_of(model)[layer]

        def before(_: Any, args: Any, change: One = change, where: Any = where) -> Any:
            return (edited(args[0], mask, change, where), *args[1:])

        def after(_: Any, __: Any, out: Any, change: One = change, where: Any = where) -> Any:
            done = edited(out[0] if isinstance(out, tuple) else out, mask, change, where)
            return (done, *out[1:]) if isinstance(out, tuple) else done

        if point in ("embed", "resid_pre"):
            residual_hook = before
            hooks.append((block, "pre", residual_hook))
        elif point == "head":
            hooks.append((block.get_submodule(row.out), "pre", before))
        else:
            module = block if point == "resid" else block.get_submodule({"attn": row.attn, "mlp": row.mlp}[point])
            hooks.append((module, "post", after))
    return residual(model, hidden, attention_mask=mask, extra=hooks)


V, W = random(D, seed=1), random(B, D, seed=2)
P3 = random(B, 3, D, seed=3)
LAST = lambda row, at: at == TOKENS[row] - 1  # noqa: E731

CASES: dict[str, tuple[Any, list[tuple[int, str, One, Callable[[int, int], bool]]]]] = {
    "add": ([kf.add(V, 2, scale=0.5)], [(2, "resid", lambda x, r, t: x + 0.5 * V, lambda r, t: True)]),
    "add to layers, each row its own, at the end": (
        [kf.add(kf.axes(W, "batch hidden"), range(1, 3), at="prompt[-1]")],
        [(n, "resid", lambda x, r, t: x + W[r], LAST) for n in (1, 2)],
    ),
    "add by layer": (
        [kf.add({0: V, 3: 2 * V}, at=[0, 4])],
        [
            (0, "resid", lambda x, r, t: x + V, lambda r, t: t in (0, 4)),
            (3, "resid", lambda x, r, t: x + 2 * V, lambda r, t: t in (0, 4)),
        ],
    ),
    "put, each position its own": (
        [kf.put(P3, 1, at="prompt[1:4]")],
        [(1, "resid", lambda x, r, t: P3[r, t - 1], lambda r, t: 1 <= t < 4)],
    ),
    "put at listed positions in their order": (
        [kf.put(kf.axes(P3[0], "pos hidden"), 1, at=[5, 0, 2])],
        [(1, "resid", lambda x, r, t: P3[0, [5, 0, 2].index(t)], lambda r, t: t in (0, 2, 5))],
    ),
    "put at each row's own positions": (
        [kf.put(P3, 2, at=torch.tensor([[3, 1, 0], [5, 4, 2], [0, 2, 4], [1, 2, 3]]))],
        [
            (
                2,
                "resid",
                lambda x, r, t: P3[r, [[3, 1, 0], [5, 4, 2], [0, 2, 4], [1, 2, 3]][r].index(t)],
                lambda r, t: t in [[3, 1, 0], [5, 4, 2], [0, 2, 4], [1, 2, 3]][r],
            )
        ],
    ),
    "scale from the end": (
        [kf.scale(0.25, [0, 2], at="prompt[-3:]")],
        [(n, "resid", lambda x, r, t: 0.25 * x, lambda r, t: t >= TOKENS[r] - 3) for n in (0, 2)],
    ),
    "project out": (
        [kf.project_out(V, range(4), scale=0.75)],
        [(n, "resid", lambda x, r, t: x - 0.75 * (x @ V) / (V @ V) * V, lambda r, t: True) for n in range(4)],
    ),
    "several at one point, in order": (
        [kf.add(V, 1), kf.scale(2.0, 1), kf.put(W[0], 1, at=[0]), kf.add(-V, 1, at=[0, 1])],
        [
            (
                1,
                "resid",
                lambda x, r, t: {0: W[0] - V, 1: 2 * (x + V) - V}.get(t, 2 * (x + V)),
                lambda r, t: True,
            )
        ],
    ),
    "embed and resid_pre": (
        [kf.add(V, point="embed", at="prompt[0]"), kf.scale(0.5, 3, point="resid_pre")],
        [
            (0, "embed", lambda x, r, t: x + V, lambda r, t: t == 0),
            (3, "resid_pre", lambda x, r, t: 0.5 * x, lambda r, t: True),
        ],
    ),
    "attn and mlp": (
        [
            kf.add(V, 1, point="attn", at="prompt[:-1]"),
            kf.put(W[1], 2, point="mlp", at=[3]),
            kf.scale(0.0, 3, point="attn"),
        ],
        [
            (1, "attn", lambda x, r, t: x + V, lambda r, t: t < TOKENS[r] - 1),
            (2, "mlp", lambda x, r, t: W[1], lambda r, t: t == 3),
            (3, "attn", lambda x, r, t: 0 * x, lambda r, t: True),
        ],
    ),
    "heads": (
        [
            kf.scale(0.0, 1, point="head", heads=[1, 3]),
            kf.put(kf.axes(random(2, 8, seed=9), "head head_dim"), 2, point="head", heads=[2, 0], at="prompt[-1]"),
        ],
        [
            (1, "head", lambda x, r, t: x * torch.tensor([1.0, 0, 1, 0]).repeat_interleave(8), lambda r, t: True),
            (
                2,
                "head",
                lambda x, r, t: torch.cat([random(2, 8, seed=9)[1], x[8:16], random(2, 8, seed=9)[0], x[24:]]),
                LAST,
            ),
        ],
    ),
}  # fmt: skip


@families(["llama", "gemma2", "opt"])
@pytest.mark.parametrize("case", CASES)
def test_every_edit_is_what_hooks_do(family: str, case: str) -> None:
    edits, by_hand = CASES[case]
    hidden = random(B, S, D)
    expected = hooked(family, hidden, MASK, by_hand)
    real = MASK.bool()
    for cuts, rows in ((TWO, B), (EACH, 3)):
        out = flow(family, cuts).options(batch_tokens=rows * S)(hidden, attention_mask=MASK, edit=edits)
        assert_near(out[real], expected[real], f"{case}, {cuts}")
    spec = span(family, 0, L)
    alone = kf.chain(spec.blocks)(spec.params, hidden, attention_mask=MASK, edit=edits)
    assert_bits(flow(family, TWO)(hidden, attention_mask=MASK, edit=edits), alone, "local")


@families(SOME, quick=("llama", "opt"))
def test_the_points_are_what_the_parts_add(family: str) -> None:
    """Without what attention and feed-forward add, every layer is the identity (all families: test_captures.py)."""
    hidden = random(2, 5, D)
    nothing = [kf.scale(0.0, range(L), point=point) for point in ("attn", "mlp")]
    out = flow(family, TWO)(hidden, edit=nothing)
    assert_bits(out + 0.0, hidden + 0.0)
    for kept in ("attn", "mlp"):
        only = [kf.scale(0.0, range(L), point=point) for point in ("attn", "mlp") if point != kept]
        assert (flow(family, TWO)(hidden, edit=only) - hidden).abs().max() > 1e-3


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
def test_a_head_is_a_slice_of_the_output_projection(family: str) -> None:
    """Scaling head 2 is scaling its columns (rows of a Conv1D) of the projection's weight."""
    hidden, spec = random(2, 5, D), span(family, 0, L)
    name = f"{ROWS[family].out}.weight"
    params = [dict(own) for own in spec.params]
    weight = params[1][name].clone()
    (weight if family == "gpt2" else weight.T)[16:24] *= 0.5
    params[1][name] = weight
    expected = kf.chain(spec.blocks)(params, hidden)
    assert_close(flow(family, TWO)(hidden, edit=kf.scale(0.5, 1, point="head", heads=2)), expected)


# ---- in sessions: the same row means the same, however its columns come


SELECTORS: dict[str, Callable[[int, int, int], bool]] = {  # (row, token position, tokens of the row's prompt)
    "all": lambda row, at, n: True,
    "prompt": lambda row, at, n: at < n,
    "generated": lambda row, at, n: at >= n,
    "prompt[-1]": lambda row, at, n: at == n - 1,
    "prompt[1]": lambda row, at, n: at == 1,
    "prompt[1:-1]": lambda row, at, n: 1 <= at < n - 1,
    "prompt[2:]": lambda row, at, n: 2 <= at < n,
    "[2, 7]": lambda row, at, n: at in (2, 7),
    "of each row": lambda row, at, n: at in EACH_ROW[row],
    "columns": lambda row, at, n: bool(COLUMNS[row, S - n + at]),
}
EACH_ROW = [[3, 15], [5, 14], [0, 2], [6, 9]]  # token positions of the prompt and of what follows
COLUMNS = random(B, S + 4, seed=7) > 0


def at_of(selector: str, columns: slice) -> Any:
    """``at=`` as it is given in a step of these columns."""
    special: dict[str, Any] = {"[2, 7]": [2, 7], "of each row": torch.tensor(EACH_ROW), "columns": COLUMNS[:, columns]}
    return special.get(selector, selector)


@every_family
@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("chunks", [(14,), (5, 4, 5)])
def test_selectors_mean_the_same_token_by_token(family: str, selector: str, chunks: tuple[int, ...]) -> None:
    """Prefill in one piece or several, then four steps: every column equals an uncached run with hooks."""
    assert sum(chunks) == S
    chosen, total = SELECTORS[selector], S + 4
    mask = torch.cat([MASK, torch.ones(B, 4).long()], 1)
    hidden = random(B, total, D)
    where = lambda row, position: chosen(row, position, TOKENS[row])  # noqa: E731
    expected = hooked(family, hidden, mask, [(2, "resid", lambda x, r, t: x + V, where)])
    remote, outs, done = flow(family, TWO), [], 0
    with torch.no_grad(), remote.session(max_length=total) as s:
        for size in (*chunks, 1, 1, 2):
            phase = "prompt" if done < S else "generated"
            more = {"prompt_length": MASK.sum(1)} if phase == "prompt" and len(chunks) > 1 else {}
            columns = slice(done, done + size)
            given = {"attention_mask": mask[:, : done + size], "edit": kf.add(V, 2, at=at_of(selector, columns))}
            outs.append(s.step(hidden[:, columns], phase=phase, **more, **given))
            done += size
    out, real = torch.cat(outs, 1), mask.bool()
    assert_near(out[real], expected[real], selector)


def test_a_session_says_when_it_cannot_know() -> None:
    remote, hidden = flow("llama", TWO), random(2, 4, D)
    with torch.no_grad(), remote.session(max_length=20) as s:
        with pytest.raises(SessionError, match="names a phase"):
            s.step(hidden, edit=kf.add(V, 1, at="prompt"))
        with pytest.raises(SessionError, match="phase is 'begin'"):
            s.step(hidden, phase="begin")
        s.step(hidden, phase="prompt", edit=kf.add(V, 1, at="prompt[-1]"))
        with pytest.raises(SessionError, match="goes on after"):
            s.step(hidden, phase="prompt")
        s.step(hidden[:, :1], phase="generated", edit=kf.add(V, 1, at="generated"))
        assert s.position == 5


def test_only_what_a_layer_needs_is_sent() -> None:
    remote, hidden = flow("llama", THREE), random(2, 4, D)
    with torch.no_grad(), Requests(remote) as requests:
        remote(hidden, edit=[kf.add(V, [0, 3]), kf.add(2 * V, 2)])
    sent = {tuple(request.meta["span"]): request.tree.get("kwargs", []) for _, request, _ in requests.seen}
    assert [[layers for layers, _ in sent[span]] for span in ((0, 1), (1, 3), (3, 4))] == [[[0]], [[2]], [[3]]]
    with torch.no_grad(), remote.session(max_length=8) as s, Requests(remote) as requests:
        s.step(hidden, phase="prompt", edit=kf.add(V, 1, at="prompt[-1]"))
        s.step(hidden[:, :1], phase="generated", edit=kf.add(V, 1, at="prompt[-1]"))
    kwargs = [request.tree.get("kwargs", []) for _, request, _ in requests.seen]
    assert [len(one) for one in kwargs] == [0, 1, 0, 0, 0, 0]  # nothing is selected in the second step


def test_what_is_wrong_is_refused_before_anything_is_sent() -> None:
    remote, hidden = flow("llama", TWO), random(2, 3, D)
    mask = torch.tensor([[1, 1, 1], [0, 1, 1]])
    four = torch.ones(1, 1, 3, 3).tril().bool()
    refused: list[tuple[Callable[[], Any], type[KwflowError], str]] = [
        (lambda: kf.add(V, 1, point="residual"), KwargError, "Did you mean 'resid'"),
        (lambda: kf.add(V, 1, point="resid_post"), KwargError, "Did you mean 'resid'"),
        (lambda: kf.add(V), KwargError, "say where"),
        (lambda: [kf.add(V, 1)], KwargError, "edit=[.v.edits"),  # a list in the list
        (lambda: kf.steering.Vectors({1: V}), KwargError, "is a Vectors; .*v.edits"),
        (lambda: kf.add({1: V}, 1), KwargError, "not both"),
        (lambda: kf.add(V, 9), SpanError, "layer 9"),
        (lambda: kf.add(V, -1), SpanError, "layer -1"),
        (lambda: kf.add(V, []), KwargError, "at least one"),
        (lambda: kf.add(V, "1"), KwargError, "layers='1'"),
        (lambda: kf.add(V, 1, point="embed"), SpanError, "layer 0"),
        (lambda: kf.add(V, 1, heads=[0]), KwargError, "point='head'"),
        (lambda: kf.add(V[:-1], 1), ShapeError, "hidden = 31"),
        (lambda: kf.add(W, 1), AxesError, "kf.axes"),
        (lambda: kf.add(kf.axes(W, "layer hidden"), 1), AxesError, "layer hidden"),
        (lambda: kf.add(kf.axes(W[:3], "batch hidden"), 1), ShapeError, "batch = 3"),
        (lambda: kf.add(V.long(), 1), KwargError, "int64"),
        (lambda: kf.add(1.0, 1), KwargError, "1.0"),
        (lambda: kf.add(V, 1, scale="2"), KwargError, "'2'"),
        (lambda: kf.put(P3[:2], 1, at=[0, 1]), ShapeError, "2 positions"),
        (lambda: kf.put(P3[:2, :2], 1, at="all"), ShapeError, "3 positions"),
        (lambda: kf.add(V, 1, at="promt"), KwargError, "'promt' is none of"),
        (lambda: kf.add(V, 1, at="generated"), KwargError, "plain call"),
        (lambda: kf.add(V, 1, at="prompt[3]"), KwargError, "row 0 has 3 tokens"),
        (lambda: kf.add(V, 1, at=[2]), KwargError, "row 1 has 2 tokens"),
        (lambda: kf.add(V, 1, at=[-1]), KwargError, "from 0 on"),
        (lambda: kf.add(V, 1, at=[1, 1]), KwargError, "each once"),
        (lambda: kf.add(V, 1, at=1.5), KwargError, "none of"),
        (lambda: kf.add(V, 1, at=torch.ones(2, 3)), KwargError, "float32"),
        (lambda: kf.add(V, 1, at=torch.ones(2, 4, dtype=torch.bool)), ShapeError, "bool mask"),
        (lambda: kf.add(V, 1, at=torch.zeros(3, 1).long()), ShapeError, "3 rows"),
        (lambda: kf.scale(2.0, 1, point="head", heads=[4]), KwargError, "heads 0:4"),
        (lambda: kf.add(random(3, 8), 1, point="head", heads=[0]), ShapeError, "head = 3"),
        (lambda: {"steer": V}, KwargError, "dict"),
    ]
    with Requests(remote) as requests:
        for make, error, says in refused:
            with pytest.raises(error, match=says.replace("(", r"\(").replace("[", r"\[")):
                remote(hidden, attention_mask=mask, edit=[make()])
        with pytest.raises(KwargError, match="4-D"):
            remote(hidden, attention_mask=four, edit=kf.add(V, 1, at=[0]))
        with pytest.raises(KwargError, match="kf.per_layer"):
            remote(hidden, **kf.per_layer({1: {"edit": kf.add(V, 1)}}))
        assert len(requests) == 0
    remote(hidden, attention_mask=four, edit=kf.add(V, 1))


def test_granite_scales_what_its_parts_add() -> None:
    with pytest.raises(KwargError, match="no point 'mlp' in .*; they have embed, .*, head, neuron, resid"):
        flow("granite", TWO)(random(2, 3, D), edit=kf.scale(0.0, 1, point="mlp"))


def test_an_edit_leaves_nothing_behind() -> None:
    remote, hidden, model = flow("llama", TWO), random(2, 4, D), huggingface("llama")
    before = remote(hidden)
    value = V.clone()
    for point in ("embed", "resid_pre", "attn", "mlp", "resid"):
        changed = remote(hidden, edit=kf.put(value, 0, point=point))
        assert (changed - before).abs().max() > 1e-3
        assert_bits(remote(hidden, edit=kf.add(value, 0, point=point, scale=0.0)) + 0.0, before + 0.0, point)
    assert_bits(value, V)
    assert_bits(remote(hidden), before)
    assert_close(before, residual(model, hidden))


def test_heads_of_the_row_have_the_projections_features() -> None:
    for family in SOME:
        module = layers_of(huggingface(family))[0].get_submodule(ROWS[family].out)
        weight: Any = module.weight
        assert weight.numel() == HEADS * 8 * D, family


def test_ids_and_masks_are_not_needed_for_all() -> None:
    remote = flow("gpt2", TWO)
    x = remote.inputs(ids(2, 5))
    assert_bits(
        remote(**x, edit=kf.add(V, 1)), remote(x["hidden"], attention_mask=x["attention_mask"], steer={1: V}), "steer"
    )


@families(SOME)
def test_exact_match_knows_edits(family: str) -> None:
    """Bitwise against the Hugging Face model with the same edits as hooks, and against its layers one by one."""
    remote, hidden = flow(family, TWO), random(B, S, D)
    edits = [edit for made, _ in CASES.values() for edit in made]
    for reference in (huggingface(family), kf.stream(remote.ends.folder)):
        match = kf.verify.exact_match(remote, reference, hidden, attention_mask=MASK, edit=edits)
        assert match.bitwise, str(match)


# ---- what researchers give


def test_numbers_come_from_anywhere() -> None:
    remote, hidden = flow("llama", TWO), random(2, 4, D)
    expected = remote(hidden, edit=kf.add(V, [1, 2], at=[0, 3], scale=2.0))
    for layers in (np.array([1, 2]), torch.tensor([1, 2]), range(1, 3), (np.int64(1), torch.tensor(2))):
        assert_bits(remote(hidden, edit=kf.add(V, layers, at=[0, 3], scale=2.0)), expected)
    for at in (np.array([0, 3]), torch.tensor([0, 3]), range(0, 4, 3), np.array([[True, False, False, True]])):
        assert_bits(remote(hidden, edit=kf.add(V, [1, 2], at=at, scale=2.0)), expected)
    for strength in (2, np.float64(2), np.float32(2), np.int64(2), torch.tensor(2.0)):
        assert_bits(remote(hidden, edit=kf.add(V, [1, 2], at=[0, 3], scale=strength)), expected)
    for one in (np.int64(1), np.array(1), torch.tensor(1)):
        assert_bits(remote(hidden, edit=kf.add(V, one, at=one)), remote(hidden, edit=kf.add(V, 1, at=1)))
    first = remote(hidden, edit=kf.add(V, point="embed"))
    for edit in (kf.add(V, [0], point="embed"), kf.add({0: V}, point="embed")):
        assert_bits(remote(hidden, edit=edit), first)
    assert_bits(remote(hidden, edit=kf.scale(np.float32(0.5), 1)), remote(hidden, edit=kf.scale(0.5, 1)))


@pytest.mark.parametrize(
    "make",
    [
        lambda: kf.add(V, 1, at=[False, True]),
        lambda: kf.add(V, 1, at=[10**30]),
        lambda: kf.add(V, 1, at=range(10**12)),
        lambda: kf.add(V, 1, at="prompt[99999999999999999999]"),
        lambda: kf.add(V, 1, at="prompt[:99999999999999999999]"),
        lambda: kf.add(V, 1, at=torch.zeros(0).long()),
        lambda: kf.add(V, 1, at=np.array(["a"])),
        lambda: kf.add(V, 1, at=kf.axes(torch.zeros(1, 1).long(), "pos batch")),
        lambda: kf.add(V, True),
        lambda: kf.add(V, range(10**12)),
        lambda: kf.scale(0.0, 1, point="head", heads=[False, True]),
        lambda: kf.scale(0.0, 1, point="head", heads=np.array([False, True])),
        lambda: kf.add(V, torch.tensor([0, 1]), point="embed"),
        lambda: kf.put(random(4, 1), 1, point="head"),
        lambda: kf.put(random(3, 4, 8), 1, point="head"),
        lambda: kf.add(V.numpy(), 1),
        lambda: kf.add(V.tolist(), 1),
    ],
)
def test_what_is_odd_is_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(CallerError) as caught:
        flow("llama", TWO)(random(2, 4, D), edit=make())
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("shape", [(2, 0), (0, 4)])
def test_an_empty_call_takes_edits(shape: tuple[int, int]) -> None:
    remote, hidden, value = flow("llama", TWO), random(*shape, D), V.clone().requires_grad_()
    for edit in (kf.add(value, 1), kf.add(value, 1, at="prompt"), kf.put(random(1, 4, D), 1)):
        assert remote(hidden, edit=edit).shape == hidden.shape
    with torch.no_grad(), remote.session(4) as s:
        assert s.step(hidden, phase="prompt", prompt_length=4, edit=kf.add(V, 1)).shape == hidden.shape


def test_a_bare_value_for_every_row_and_position() -> None:
    """What flow.capture gives at a point can be put there."""
    remote, hidden, other = flow("llama", TWO), random(2, 5, D), random(2, 5, D, seed=5)
    out, acts = remote.capture({"head": range(L), "mlp": range(L)}, hidden)
    edits = [kf.put(acts[point, n], n, point=point) for n in range(L) for point in ("head", "mlp")]
    assert_close(remote(other, edit=edits) - other, out - hidden)
    factor = random(2, 5)
    changed = remote.capture({"resid": 1}, hidden, edit=kf.scale(factor, 1))[1]["resid", 1]
    assert_bits(changed, remote.capture({"resid": 1}, hidden)[1]["resid", 1] * factor[..., None])


def test_other_heads_get_a_gradient() -> None:
    """What projects on some heads leaves the others', and their gradients, as they are."""
    remote, hidden, direction = flow("gpt2", TWO), random(2, 3, D), random(2, 8, seed=3)
    leaves = [hidden.requires_grad_(), direction.requires_grad_()]
    out = remote(hidden, edit=kf.project_out(direction, 1, point="head", heads=[3, 1]))

    def local(x: Tensor, row: int, at: int) -> Tensor:
        heads = list(x.unflatten(0, (4, 8)))
        for number, d in zip((3, 1), direction, strict=True):
            heads[number] = heads[number] - (heads[number] @ d) / (d @ d) * d
        return torch.cat(heads)

    expected = hooked("gpt2", hidden, torch.ones(2, 3).long(), [(1, "head", local, lambda r, t: True)])
    weight = random(2, 3, D, seed=8)
    for ours, theirs in zip(
        torch.autograd.grad((out * weight).sum(), leaves),
        torch.autograd.grad((expected * weight).sum(), leaves),
        strict=True,
    ):
        assert_close(ours, theirs)


def test_a_projection_does_not_overflow_in_float16() -> None:
    x, d = random(2, 3, D) * 60, random(D, seed=1) * 80
    entry = {"kind": "project_out", "point": "resid", "value": kf.axes(d.half(), "hidden"), "strength": 1.0}
    wide = x.half().double()
    direction = d.half().double()
    expected = wide - (wide @ direction)[..., None] / (direction @ direction) * direction
    assert (apply(x.half(), entry, HEADS).double() - expected).abs().max() < 0.2  # one ulp of 200 is 0.125


def test_along_zero_nothing_is_removed() -> None:
    """Also for a row of zeros beside others, and in gradients."""
    remote, hidden = flow("llama", TWO), random(2, 3, D).requires_grad_()
    d = torch.stack([torch.zeros(D), V]).requires_grad_()
    out = remote(hidden, edit=kf.project_out(kf.axes(d, "batch hidden"), 1))
    assert_bits(out[0], remote(hidden)[0])
    assert_bits(out[1], remote(hidden, edit=kf.project_out(V, 1))[1])
    for gradient in torch.autograd.grad(out.sum(), (hidden, d)):
        assert gradient.isfinite().all()


def test_a_float32_call_of_the_float64_option() -> None:
    remote, hidden = flow("llama", TWO), random(2, 3, D)
    out = remote.options(dtype="float64")(hidden, edit=kf.add(V, 1))
    assert_close(out, remote(hidden, edit=kf.add(V, 1)))


@pytest.mark.parametrize("point", ["attn", "mlp"])
def test_falcon_maps_over_what_one_of_its_parts_gets(point: str) -> None:
    """It adds one part's output to the other's in place, of which vmap has but one row where nothing is mapped over."""
    remote, hidden, many = flow("falcon", TWO), random(2, 3, D), random(3, D, seed=1)
    found = torch.func.vmap(lambda v: remote(hidden, edit=kf.add(v, 0, point=point)))(many)
    for v, out in zip(many, found, strict=True):
        assert_near(out, remote(hidden, edit=kf.add(v, 0, point=point)))


def test_positions_are_not_mapped_over() -> None:
    remote, hidden = flow("llama", TWO), random(2, 4, D)
    with pytest.raises(KwargError, match="vmap"):
        torch.func.vmap(lambda at: remote(hidden, edit=kf.add(V, 1, at=at)))(torch.tensor([[0], [1]]))
    with pytest.raises(KwargError, match="vmap"):
        torch.func.vmap(lambda m: remote(hidden, attention_mask=m, edit=kf.add(V, 1)))(torch.ones(2, 2, 4).long())
    given = torch.ones(2, 4).long(), torch.tensor([1])
    torch.func.grad(lambda v, m, at: remote(hidden, attention_mask=m, edit=kf.add(v, 1, at=at)).sum())(V, *given)


# ---- steps that are taken again


def test_a_prompt_is_begun_again() -> None:
    remote, hidden = flow("llama", TWO), random(2, 4, D)
    end = kf.add(V, 1, at="prompt[-1]")
    with torch.no_grad(), remote.session(8) as s:
        s.step(hidden[:, :2], phase="prompt")
        with pytest.raises(ShapeError):
            s.step(hidden[:, 2:], phase="prompt", edit=kf.add(V[:3], 1, at="prompt[-1]"))
        s.step(hidden[:, 2:], phase="prompt", edit=end)  # the one before did not happen
        s.rollback(0)
        s.step(hidden[:, :2], phase="prompt")
        s.step(hidden[:, 2:], phase="prompt", edit=end)
        s.rollback(2)
        plain = s.step(hidden[:, 2:3], phase="generated")
        s.rollback(2)
        changed = s.step(hidden[:, 2:3], phase="generated", edit=kf.add(V, 3, at="generated"))
        assert_near(changed, plain + V)


@pytest.mark.parametrize("length", ["x", 2.5, -1, True, 3, torch.tensor([4.0]), torch.tensor([4, 3])])
def test_a_prompt_length_is_a_number_of_tokens(length: Any) -> None:
    with torch.no_grad(), flow("llama", TWO).session(8) as s, pytest.raises(SessionError, match="prompt_length"):
        s.step(random(2, 4, D), phase="prompt", prompt_length=length)


# ---- by hand, in threads


def test_blocks_in_threads_have_their_own_params_and_edits() -> None:
    spec, hidden = span("llama", 0, L), random(2, 4, D)
    fn = kf.chain(spec.blocks)
    params = [[{name: p * (1 + n / 10) for name, p in own.items()} for own in spec.params] for n in range(3)]
    jobs = [(own, kf.add(V * n, 1, point="attn")) for n, own in enumerate([spec.params, *params])] * 12
    expected = [fn(own, hidden, edit=edit) for own, edit in jobs]
    with ThreadPoolExecutor(4) as pool:
        for ours, theirs in zip(pool.map(lambda job: fn(job[0], hidden, edit=job[1]), jobs), expected, strict=True):
            assert_bits(ours, theirs)
