"""``kf.edits`` beyond the four, and ``dims=``: against the arithmetic by hand; what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kwflow as kf
from kwflow.errors import AxesError, KwargError, ShapeError
from kwflow.kwargs.edit import check
from kwflow.kwargs.kwarg import Place
from tests.oracle import assert_bits, assert_close
from tests.oracle.tiny import TWO, Requests, flow, folder, ids, make_flow, random, span

D, B, S = 32, 4, 4
X = random(B, S, D)


def changed(*edits: Any, point: str = "resid", layer: int = 1) -> tuple[Tensor, Tensor]:
    """What is at a point without and with the edits."""
    one = flow("llama", TWO)
    plain = one.capture({point: layer}, X)[1][point, layer]
    return plain, one.capture({point: layer}, X, edit=list(edits))[1][point, layer]


def test_dims_are_those_of_the_last_axis() -> None:
    """Whatever the edit: it acts as on an activation that has these dims only, and leaves the others to the bit."""
    dims, others = [7, 2, 30], [n for n in range(D) if n not in (7, 2, 30)]
    v, scale = random(3, seed=2), 2.0
    for edit, by_hand in (
        (kf.add(v, 1, dims=dims, scale=scale), lambda x: x + scale * v),
        (kf.put(v, 1, dims=dims), lambda x: v.expand_as(x)),
        (kf.scale(3.0, 1, dims=dims), lambda x: 3.0 * x),
        (kf.project_out(v, 1, dims=dims), lambda x: x - (x @ v / (v @ v))[..., None] * v),
        (kf.edits.clamp_max(0.1, 1, dims=dims), lambda x: x.clamp(max=0.1)),
    ):
        plain, out = changed(edit)
        assert_bits(out[..., others], plain[..., others])
        assert_close(out[..., dims], by_hand(plain[..., dims]), edit.kind)


def test_neurons_by_their_numbers_and_dims_within_heads() -> None:
    plain, out = changed(kf.scale(0.0, 1, point="neuron", dims=[40, 3]), point="neuron")
    assert bool((out[..., [3, 40]] == 0).all())
    plain[..., [3, 40]] *= 0
    assert_bits(out, plain)
    v = random(2, 3, seed=3)  # "head head_dim"
    plain, out = changed(kf.put(v, 1, point="head", heads=[3, 0], dims=[1, 5, 2]), point="head")
    for number, head in enumerate((3, 0)):
        plain[..., head, [1, 5, 2]] = v[number]
    assert_bits(out, plain)


def test_a_component_is_what_it_was_set_to() -> None:
    d, to = random(D, seed=4), torch.tensor([1.0, -2.0, 0.0, 3.0])
    plain, out = changed(kf.edits.set_component(d, 1, to=kf.axes(to, "batch")))
    unit = d / d.norm()
    assert_close(out @ unit, to[:, None].expand(B, S), "along")
    assert_close(out - (out @ unit)[..., None] * unit, plain - (plain @ unit)[..., None] * unit, "the rest")
    removed, out = changed(kf.project_out(d, 1))[1], changed(kf.edits.set_component(d, 1, to=0.0))[1]
    assert_close(out, removed)
    plain, out = changed(kf.edits.set_component(torch.zeros(D), 1, to=5.0))
    assert_bits(out, plain, "a direction of zeros")


def test_a_rotation_takes_a_subspace_from_the_source() -> None:
    basis = torch.linalg.qr(random(D, 3, seed=5))[0]
    source = random(B, D, seed=6)
    plain, out = changed(kf.edits.rotate(kf.axes(source, "batch hidden"), 1, basis=basis, at=[2]))
    assert_close(out[:, 2] @ basis, source @ basis, "inside")
    assert_close(out[:, 2] - out[:, 2] @ basis @ basis.T, plain[:, 2] - plain[:, 2] @ basis @ basis.T, "the rest")
    assert_bits(out[:, [0, 1, 3]], plain[:, [0, 1, 3]])
    whole = torch.linalg.qr(random(D, D, seed=7))[0]
    assert_close(changed(kf.edits.rotate(source[0], 1, basis=whole))[1], source[0].expand(B, S, D), "all of it")


def test_a_rotation_is_learned() -> None:
    """As distributed alignment search does: the basis is trained through the workers."""
    one, target = flow("llama", TWO), random(D, seed=9)
    raw = torch.nn.utils.parametrizations.orthogonal(torch.nn.Linear(2, D, bias=False))
    optimizer = torch.optim.Adam(raw.parameters(), 0.05)
    losses = []
    for _ in range(5):
        out = one(X, edit=kf.edits.rotate(target, 1, basis=raw.weight))
        loss = (out - one(X, edit=kf.put(target, 1))).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_a_model_that_keeps_keys_learns_any_tensor_of_an_edit() -> None:
    """With all of the model frozen: what requires grad in the edit says that this is no session."""
    own = make_flow("llama", TWO, own_ends=True)
    model = kf.AutoDistributedModelForCausalLM.from_pretrained(folder("llama"), flow=own).requires_grad_(False)
    basis, v, to = torch.linalg.qr(random(D, 2))[0], random(D), torch.tensor(0.5)
    for leaf, edit in (
        (v, lambda leaf: kf.add(leaf, 1)),
        (basis, lambda leaf: kf.edits.rotate(v, 1, basis=leaf)),
        (to, lambda leaf: kf.edits.set_component(v, 1, to=leaf)),
    ):
        wanted = leaf.clone().requires_grad_()
        logits = model(input_ids=ids(2, 5), use_cache=True, edit=edit(wanted)).logits
        (gradient,) = torch.autograd.grad(logits.square().sum(), wanted)
        assert bool((gradient != 0).any())


def test_bounds_have_the_gradient_of_clamp() -> None:
    bound = torch.tensor(0.2, requires_grad=True)
    hidden = X.clone().requires_grad_()
    one = flow("llama", TWO)[1:2]
    one(hidden, edit=kf.edits.clamp_max(bound, 1, point="resid_pre")).sum().backward()
    assert bound.grad is not None and hidden.grad is not None and bool((hidden.grad[X > 0.2] == 0).all())


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"heads": [0]}, "heads=.* belong to point='head'"),
        ({"dims": [True]}, "dims=.*there are dims 0:32"),
        ({"dims": []}, "dims=.*there are dims 0:32"),
        ({"dims": {"0": 1}}, "dims="),
        ({"basis": kf.axes(random(D, 2), "hidden rank")}, "it has no basis"),
        ({"kind": "rotate"}, "it takes a basis"),
        ({"kind": "exec"}, "it takes what kf.add"),
        ({"point": "q_proj.out.x"}, "no point 'q_proj.out.x'"),
        ({"point": 7}, "no point 7"),
        ({"code": "x"}, "carries 'code'"),
    ],
)
def test_what_a_peer_sends_is_checked(more: dict[str, Any], words: str) -> None:
    schema = span("llama", 0, 4).schema
    place = Place("edit[0]", schema.kwargs["edit"], {**schema.sizes, "batch": B, "seq": S}, schema.projections, True)
    entry = {"kind": "add", "point": "resid", "value": kf.axes(random(D), "hidden"), "strength": 1.0}
    check(entry, place)
    with pytest.raises(KwargError, match=words):
        check({**entry, **more}, place)


def test_what_is_wrong_is_refused_before_anything_is_sent() -> None:
    one = make_flow("llama", TWO)
    v = random(D)
    wrong = [
        (kf.add(v, 1, dims=[0, 1]), ShapeError, "hidden = 32, expected 2"),
        (kf.scale(0.0, 1, dims=[D]), KwargError, r"kf.scale: dims=\[32\]; there are dims 0:32"),
        (kf.scale(0.0, 1, point="head", heads=[4]), KwargError, r"heads=\[4\]; there are heads 0:4"),
        (kf.scale(0.0, 1, point="neuron", dims=[48]), KwargError, "dims 0:48"),
        (kf.edits.rotate(v, 1, basis=random(D - 1, 2)), ShapeError, "basis has hidden = 31"),
        (kf.edits.rotate(v, 1, basis=random(D)), ShapeError, "basis is .* of rank 1"),
        (kf.edits.rotate(v, 1, basis=None), KwargError, "it takes a basis"),
        (kf.edits.clamp_min(v, 1), AxesError, "kf.edits.clamp_min, value"),
        (kf.edits.set_component(v, 1, to=v), (AxesError, ShapeError), "kf.edits.set_component, scale"),
    ]
    with Requests(one) as requests:
        one.kwargs()
        for edit, error, words in wrong:
            with pytest.raises(error, match=words):
                one(X, edit=edit)
        with pytest.raises(KwargError, match="give at least one, each once"):
            kf.add(v, 1, dims=[1, 1])
        with pytest.raises(TypeError, match="neurons"):
            kf.scale(0.0, 1, neurons=[3])  # type: ignore[call-arg]
        assert not len(requests)
