"""``kf.edits.noise``: a token's numbers are those of its place, whoever computes it, and when."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import kwflow as kf
from kwflow.errors import AxesError, KwargError, ShapeError, SpanError, UnsupportedError
from kwflow.kwargs.edit import check
from kwflow.kwargs.kwarg import Place
from tests.doubles.mortal import Swarm
from tests.families.table import distributed
from tests.kwargs.rows import normal
from tests.oracle import assert_bits, assert_close, assert_near
from tests.oracle.tiny import TWO, Requests, flow, huggingface, ids, left_padded, make_flow, positions_of, random, span

D, B, S, NEW, SEED = 32, 4, 6, 3, 5
X, MASK = random(B, S + NEW, D), left_padded([0, 2, 3, 1], S + NEW)
POSITION = positions_of(MASK)


def drawn(point: str = "resid", layer: int = 1, columns: int = S + NEW, *shape: int, seed: int = SEED) -> Tensor:
    """Each token's numbers by hand, zeros at pads."""
    features = shape or (D,)
    out = torch.zeros(B, columns, *features)
    for row, column in MASK[:, :columns].nonzero().tolist():
        out[row, column] = normal(seed, point, layer, row, int(POSITION[row, column]), *features)
    return out


def what_is_added(edit: Any, key: tuple[str, int], columns: int = S + NEW, tokens: int = B * S) -> Tensor:
    """At a point, of a call."""
    one, call = flow("llama", TWO).options(batch_tokens=tokens), {"attention_mask": MASK[:, :columns]}
    points = {key[0]: key[1]}
    plain = one.capture(points, X[:, :columns], **call)[1][key]
    return one.capture(points, X[:, :columns], edit=edit, **call)[1][key] - plain


def aligned(value: Tensor) -> Tensor:
    """As captures are: rows begin at their first token."""
    rows = [torch.cat([row[mask.bool()], row[~mask.bool()]]) for row, mask in zip(value, MASK[:, : value.shape[1]])]  # noqa: B905
    return torch.stack(rows)


@pytest.mark.parametrize("tokens", [S + NEW, 3 * (S + NEW), 64 * S])
def test_the_numbers_are_those_of_the_place_however_rows_are_cut(tokens: int) -> None:
    one = flow("llama", TWO).options(batch_tokens=tokens)
    out = one(X, attention_mask=MASK, edit=kf.edits.noise(0.5, [0, 1], seed=SEED))
    by_hand = [
        kf.add(kf.axes(aligned(drawn(layer=n)), "batch pos hidden"), n, at=kf.axes(MASK.bool(), "batch seq"), scale=0.5)
        for n in (0, 1)
    ]
    assert_bits(out, one(X, attention_mask=MASK, edit=by_hand))


def test_a_session_has_a_calls_numbers() -> None:
    """In any steps, and once more after a rollback; in each row's own number of tokens."""
    embed = kf.edits.noise(0.5, point="embed", seed=SEED)
    expected = X + 0.5 * drawn("embed", 0)
    for steps in ((0, S + NEW), (0, S, S + NEW), (0, 4, *range(5, S + NEW + 1))):
        acts = kf.Capture(resid_pre=[0])
        with torch.no_grad(), flow("llama", TWO).session() as s:
            for start, stop in zip(steps, steps[1:], strict=False):
                call = {"attention_mask": MASK[:, :stop], "capture": acts}
                s.step(X[:, start:stop], edit=embed, **call)
                if start:
                    s.rollback(start)
                    s.step(X[:, start:stop], edit=embed, **call)
        assert_bits(acts["resid_pre", 0], aligned(torch.where(MASK.bool()[..., None], expected, 0)), str(steps))


@pytest.mark.parametrize("mode", ["stepwise", "merged"])
def test_who_takes_over_has_the_same_numbers(mode: str) -> None:
    edit = kf.edits.noise(0.5, [1, 2], seed=SEED)
    outs = []
    for dies in (False, True):
        swarm = Swarm("llama", (0, 1), (1, 3), (3, 4), (1, 2), (2, 3))
        swarm.hidden = {3, 4}
        with torch.no_grad(), swarm.flow.session(replay=mode) as s:
            mine = [s.step(X[:, :S], attention_mask=MASK[:, :S], edit=edit)]
            for column in range(S, S + NEW):
                if dies and column == S + 1:
                    swarm.kill(1, 0)
                    swarm.hidden = {1}
                mine.append(s.step(X[:, column : column + 1], edit=edit))
            assert bool(s.replays) == dies
        outs.append(torch.cat(mine, 1))
    (assert_bits if mode == "stepwise" else assert_near)(outs[1], outs[0])


@pytest.mark.parametrize("more", [{}, {"num_beams": 3, "num_return_sequences": 2}])
def test_beams_have_their_rows_numbers(more: dict[str, int]) -> None:
    model, text = distributed("llama", torch.float32), ids(B, S)
    call = {"input_ids": text, "attention_mask": MASK[:, :S], "do_sample": False, "max_new_tokens": NEW, **more}
    value = torch.stack([torch.stack([normal(SEED, "resid", 1, b, p, D) for p in range(S + NEW)]) for b in range(B)])
    by_hand = kf.add(kf.axes(value, "batch pos hidden"), 1, at=range(S + NEW), scale=2.0)
    noisy = model.generate(**call, edit=kf.edits.noise(2.0, 1, seed=SEED))
    assert torch.equal(noisy, model.generate(**call, edit=by_hand))
    assert not torch.equal(noisy, model.generate(**call))


def test_a_plain_model_has_the_same_numbers_but_for_beams() -> None:
    model, edit = huggingface("llama"), kf.edits.noise(0.5, [1, 3], seed=SEED)
    call: dict[str, Any] = {"input_ids": ids(B, S), "attention_mask": MASK[:, :S], "max_new_tokens": NEW}
    remote = distributed("llama", torch.float32)
    with kf.steering.as_hooks(model, edit):
        assert torch.equal(model.generate(**call, do_sample=False), remote.generate(**call, do_sample=False, edit=edit))
        with pytest.raises(UnsupportedError, match="goes by rows, which beams"):
            model.generate(**call, do_sample=False, num_beams=2)


def test_exact_match_knows_noise() -> None:
    edits = [kf.edits.noise(0.5, 1, seed=SEED), kf.edits.noise(0.5, 2, seed=SEED, point="head", heads=[3, 1])]
    one = flow("llama", TWO).options(batch_tokens=3 * (S + NEW))
    match = kf.verify.exact_match(one, huggingface("llama"), X, attention_mask=MASK, edit=edits)
    assert match.bitwise, str(match)


def test_a_sweep_is_its_variants_one_by_one() -> None:
    x = {"hidden": X, "attention_mask": MASK}
    one = flow("llama", TWO)
    for at in ("all", "prompt[-1]"):
        variants = kf.grid(functools.partial(kf.edits.noise, layers=1, at=at), std=[0.5, 2.0], seed=[1, 2])
        swept = kf.sweep(one, x, variants)
        for i, std in enumerate((0.5, 2.0)):
            for j, seed in enumerate((1, 2)):
                assert_close(swept[i, j], one(**x, edit=kf.edits.noise(std, 1, at=at, seed=seed)))


def test_heads_and_dims_have_their_own_numbers() -> None:
    whole = what_is_added(kf.edits.noise(1.0, 1, point="head", seed=SEED), ("head", 1))
    assert_close(whole, aligned(drawn("head", 1, S + NEW, 4, 8)))
    some = what_is_added(kf.edits.noise(1.0, 1, point="head", seed=SEED, heads=[3, 1], dims=[6, 0]), ("head", 1))
    chosen = torch.zeros(4, 8, dtype=torch.bool)
    chosen[[[3], [1]], [6, 0]] = True
    assert_bits(some, torch.where(chosen, whole, 0))


@pytest.mark.parametrize("point", ["neuron", "q_proj.out", "mlp.down_proj.in", "attn"])
def test_every_point_has_noise(point: str) -> None:
    added = what_is_added(kf.edits.noise(1.0, 1, point=point, seed=SEED, at=[0, 2]), (point, 1))
    name = "self_attn.q_proj.out" if point == "q_proj.out" else point
    expected = torch.stack([normal(SEED, name, 1, row, 2, added.shape[-1]) for row in range(B)])
    assert_close(added[:, 2], expected)
    assert bool((added[:, 1] == 0).all())


def test_what_differs_draws_anew() -> None:
    """Seeds, also those of 64 bits; points, layers, rows and positions: uncorrelated, and of the deviation asked."""
    one, x = flow("llama", TWO), torch.zeros(B, 64, D)
    seen = []
    for point, layer, seed in (
        ("resid", 1, 0),
        ("resid", 2, 0),
        ("attn", 1, 0),
        ("resid", 1, 1),
        ("resid", 1, 2**64 - 1),
    ):
        points = {point: layer}
        edit = kf.edits.noise(1.0, layer, point=point, seed=seed)
        both = [one.capture(points, x, **more)[1][point, layer] for more in ({"edit": edit}, {})]
        seen += list((both[0] - both[1]).flatten(1))
    together = torch.corrcoef(torch.stack(seen)) - torch.eye(len(seen))
    assert together.abs().max() < 0.12  # of 2048 numbers: 5 standard deviations
    assert abs(torch.cat(seen).std() - 1) < 0.02


def test_std_has_a_gradient_and_a_row_its_own() -> None:
    one, std = flow("llama", TWO)[:2], torch.tensor([0.0, 0.5, 1.0, 2.0], requires_grad=True)
    noise = kf.edits.noise(kf.axes(std, "batch"), 1, seed=SEED)
    (gradient,) = torch.autograd.grad(one(X, attention_mask=MASK, edit=noise).sum(), std)
    assert_close(gradient, drawn().sum((1, 2)))
    by_layer = kf.edits.noise({1: 0.5, (2, 3): 1.0}, seed=SEED)
    apart = [kf.edits.noise(0.5, 1, seed=SEED), kf.edits.noise(1.0, [2, 3], seed=SEED)]
    assert_bits(flow("llama", TWO)(X, edit=by_layer), flow("llama", TWO)(X, edit=apart))


@pytest.mark.parametrize("shape", [(2, 0), (0, 4)])
def test_an_empty_call_takes_noise(shape: tuple[int, int]) -> None:
    hidden = random(*shape, D)
    assert flow("llama", TWO)(hidden, edit=kf.edits.noise(1.0, 1, seed=0)).shape == hidden.shape
    nowhere = torch.zeros(B, S + NEW, dtype=torch.bool)
    plain = flow("llama", TWO)(X)
    assert_bits(flow("llama", TWO)(X, edit=kf.edits.noise(1.0, 1, seed=0, at=nowhere)), plain)


def test_what_is_wrong_is_refused_before_anything_is_sent() -> None:
    one = make_flow("llama", TWO)
    with Requests(one) as requests:
        one.kwargs()
        for make, error, words in (
            (lambda: kf.edits.noise(1.0, 1, seed=-1), KwargError, "seed=-1; give a whole number"),
            (lambda: kf.edits.noise(1.0, 1, seed=2**64), KwargError, "seed="),
            (lambda: kf.edits.noise(1.0, 1, seed=True), KwargError, "seed=True"),
            (lambda: kf.edits.noise(1.0, 1, seed=0.5), KwargError, "seed=0.5"),  # type: ignore[arg-type]
            (lambda: kf.edits.noise(-1.0, 1, seed=0), KwargError, "std=-1.0; give a finite number"),
            (lambda: kf.edits.noise({1: float("nan")}, seed=0), KwargError, "std=nan"),
            (lambda: kf.edits.noise(1.0, seed=0), KwargError, "kf.edits.noise: say where"),
            (lambda: kf.edits.noise(1.0, 1, seed=0, heads=[0]), KwargError, "belong to point='head'"),
            (lambda: kf.edits.noise(1.0, 9, seed=0), SpanError, "names layer 9"),
            (lambda: kf.edits.noise(random(D), 1, seed=0), ShapeError, "kf.edits.noise, std has batch = 32"),
            (lambda: kf.edits.noise(random(B, D), 1, seed=0), ShapeError, "kf.edits.noise, std is"),
            (lambda: kf.edits.noise(kf.axes(random(D), "hidden"), 1, seed=0), AxesError, "kf.edits.noise, std was"),
            (lambda: kf.edits.noise("much", 1, seed=0), KwargError, "kf.edits.noise, std is 'much'"),
            (lambda: kf.edits.noise(1.0, 1, seed=0, dims=[D]), KwargError, r"kf.edits.noise: dims=\[32\]"),
        ):
            with pytest.raises(error, match=words):
                one(X, edit=make())
        with pytest.raises(TypeError, match="seed"):
            kf.edits.noise(1.0, 1)  # type: ignore[call-arg]
        assert not len(requests)


@pytest.mark.parametrize("more", [{"kind": "noise"}, {"seed": 3}, {"value": {"seed": 3, "layer": 1}}, {"value": 3.0}])
def test_a_peer_cannot_have_noise_drawn(more: dict[str, Any]) -> None:
    schema = span("llama", 0, 4).schema
    place = Place("edit[0]", schema.kwargs["edit"], {**schema.sizes, "batch": B, "seq": S}, schema.projections, True)
    entry = {"kind": "add", "point": "resid", "value": kf.axes(random(D), "hidden"), "strength": 1.0}
    check(entry, place)
    with pytest.raises(KwargError):
        check({**entry, **more}, place)


def test_what_is_mapped_over_has_the_same_noise() -> None:
    """vmap, over hidden and over std: as one by one."""
    one, edit = flow("llama", TWO), functools.partial(kf.edits.noise, layers=1, seed=SEED)
    hiddens, stds = torch.stack([X, 2 * X]), torch.tensor([0.5, 2.0])
    mapped = torch.func.vmap(lambda hidden, std: one(hidden, edit=edit(std)))(hiddens, stds)
    assert_close(mapped, torch.stack([one(x, edit=edit(std)) for x, std in zip(hiddens, stds, strict=True)]))
