"""Axes: every cut and join, property-tested; nothing is inferred from a size."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

import kwflow as kf
from kwflow.errors import AxesError, ShapeError
from kwflow.kwargs.axes import (
    BROADCAST,
    MODEL_SIZES,
    RESERVED,
    Axed,
    Axes,
    axes,
    expand,
    index_rows,
    is_cut,
    join,
    join_steps,
    parse,
    part,
    part_adjoint,
    pick_layer,
    repeat_rows,
    spread,
)
from kwflow.kwargs.signatures import bind_tensor, check_sizes, expansions, without_layer

NAMES = sorted(RESERVED | MODEL_SIZES | {"prefix", "rank", "x_1"})
CUT = ["layer", "batch", "seq", "key", "pos"]


@st.composite
def leaves(draw: st.DrawFn, names: Sequence[str] = NAMES, need: str = "") -> Axed:
    """A float64 leaf with any axes; sizes 1 to 4, so that many are equal."""
    chosen = draw(st.lists(st.sampled_from(names), unique=True, max_size=4))
    if need and need not in chosen:
        chosen.insert(draw(st.integers(0, len(chosen))), need)
    shape = [draw(st.integers(1, 4)) for _ in chosen]
    return Axed(_noise(shape, draw(st.integers(0, 99))), tuple(chosen))


def _noise(shape: Sequence[int], seed: int) -> Tensor:
    return torch.randn(list(shape), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def assert_adjoint(image: Tensor, cotangent: Tensor, leaf: Tensor, back: Tensor) -> None:
    """<A x, y> == <x, A* y>."""
    assert image.shape == cotangent.shape and back.shape == leaf.shape and back.dtype == leaf.dtype
    torch.testing.assert_close((image * cotangent).sum(), (leaf * back).sum(), rtol=1e-12, atol=1e-12)


def cuts_of(size: int, draw: st.DrawFn) -> list[tuple[int, int]]:
    inner = sorted(draw(st.sets(st.integers(1, size - 1), max_size=3))) if size > 1 else []
    return list(zip([0, *inner], [*inner, size], strict=True))


# ---- cuts


@given(leaves(), st.sampled_from(CUT), st.data())
def test_a_part_is_the_slice_and_its_adjoint_puts_it_back(leaf: Axed, axis: str, data: st.DataObject) -> None:
    size = leaf.size(axis) if is_cut(leaf, axis) else 4
    assert size is not None
    start = data.draw(st.integers(0, size - 1))
    stop = data.draw(st.integers(start, size))
    piece = part(leaf, axis, start, stop)
    assert piece.axes == leaf.axes
    if axis not in leaf.axes or (leaf.size(axis) == 1 and axis in BROADCAST):
        assert piece is leaf  # whole: it broadcasts, or knows no such axis
    else:
        assert torch.equal(piece.tensor, leaf.tensor.index_select(leaf.axes.index(axis), torch.arange(start, stop)))
    y = _noise(piece.tensor.shape, 7)
    assert_adjoint(piece.tensor, y, leaf.tensor, part_adjoint(y, leaf, axis, start, stop))


@given(leaves(), st.sampled_from(CUT), st.data())
def test_joining_what_was_cut_is_identity(leaf: Axed, axis: str, data: st.DataObject) -> None:
    size = leaf.size(axis) if is_cut(leaf, axis) else 4
    assert size is not None
    parts = [part(leaf, axis, *cut) for cut in cuts_of(size, data.draw)]
    joined = join(parts, axis, cut=is_cut(leaf, axis))
    assert joined.axes == leaf.axes and torch.equal(joined.tensor, leaf.tensor)


@given(leaves(), st.integers(0, 3))
def test_one_layer(leaf: Axed, index: int) -> None:
    count = leaf.size("layer")
    assume(count is None or count == 1 or index < count)
    one = pick_layer(leaf, index)
    assert one.axes == tuple(axis for axis in leaf.axes if axis != "layer")
    if count:
        at = 0 if count == 1 else index
        assert torch.equal(one.tensor, leaf.tensor.movedim(leaf.axes.index("layer"), 0)[at])


@given(leaves(), st.sampled_from(["layer", "batch", "seq", "head"]), st.integers(1, 5))
def test_expand(leaf: Axed, axis: str, size: int) -> None:
    wide = expand(leaf, axis, size)
    if leaf.size(axis) == 1:
        assert wide.size(axis) == size
    else:
        assert wide is leaf


@pytest.mark.parametrize("axis", ["key", "hidden", "pos", "prefix"])
def test_what_does_not_broadcast_is_never_expanded(axis: str) -> None:
    leaf = Axed(torch.ones(1), (axis,))
    assert expand(leaf, axis, 3) is leaf
    assert is_cut(leaf, axis)


@given(leaves(), st.integers(1, 3))
def test_beams_repeat_rows(leaf: Axed, repeats: int) -> None:
    many = repeat_rows(leaf, repeats)
    if leaf.size("batch") not in (None, 1):
        dim = leaf.axes.index("batch")
        assert torch.equal(many.tensor, leaf.tensor.repeat_interleave(repeats, dim))
    else:
        assert many is leaf


@given(leaves(), st.data())
def test_beams_reorder_rows(leaf: Axed, data: st.DataObject) -> None:
    count = leaf.size("batch") or 4
    rows = torch.tensor(data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=6)))
    other = index_rows(leaf, rows)
    if leaf.size("batch") in (None, 1):
        assert other is leaf


@given(leaves(["layer", "batch", "seq", "hidden"]))
def test_spread_broadcasts_by_name(leaf: Axed) -> None:
    order = ("layer", "batch", "seq", "hidden")
    wide = spread(leaf, order)
    assert wide.shape == tuple(leaf.size(axis) or 1 for axis in order)
    back = wide.permute([order.index(a) for a in leaf.axes] + [i for i, a in enumerate(order) if a not in leaf.axes])
    assert torch.equal(back.reshape(leaf.tensor.shape), leaf.tensor)


# ---- sizes that could be mistaken for each other


def test_equal_sizes_are_told_apart_by_name() -> None:
    """batch == head == rank == seq == layer == 4: each cut takes the axis it names."""
    names = ("layer", "batch", "head", "seq", "rank")
    leaf = Axed(torch.arange(4.0**5).view(4, 4, 4, 4, 4), names)
    for dim, axis in enumerate(names):
        assert torch.equal(part(leaf, axis, 1, 3).tensor, leaf.tensor.narrow(dim, 1, 2))
    assert torch.equal(repeat_rows(leaf, 2).tensor, leaf.tensor.repeat_interleave(2, 1))
    assert torch.equal(pick_layer(leaf, 2).tensor, leaf.tensor[2])
    square = Axed(torch.ones(4, 4), ("head", "rank"))
    for axis in ("batch", "seq", "layer"):
        assert part(square, axis, 0, 1) is square


def test_a_key_of_size_one_is_cut_a_batch_of_size_one_is_not() -> None:
    assert part(Axed(torch.ones(1, 1), ("batch", "key")), "batch", 2, 4).tensor.shape == (1, 1)
    assert is_cut(Axed(torch.ones(1, 1), ("batch", "key")), "key")


# ---- how steps join on replay


def test_steps_join_along_seq() -> None:
    one, two = _noise((2, 3, 4), 1), _noise((2, 1, 4), 2)
    joined = join_steps([Axed(one, ("batch", "seq", "hidden")), Axed(two, ("batch", "seq", "hidden"))], [3, 1])
    assert joined is not None and torch.equal(joined.tensor, torch.cat([one, two], 1))
    # a size-1 seq stands for all columns of its step
    joined = join_steps([Axed(one, ("batch", "seq", "hidden")), Axed(two, ("batch", "seq", "hidden"))], [3, 2])
    assert joined is not None and torch.equal(joined.tensor, torch.cat([one, two, two], 1))


def test_steps_join_only_where_values_allow() -> None:
    v = _noise((4,), 1)
    same = join_steps([Axed(v, ("hidden",)), Axed(v.clone(), ("hidden",))], [2, 1])
    assert same is not None and torch.equal(same.tensor, v)
    assert join_steps([Axed(v, ("hidden",)), Axed(v + 1, ("hidden",))], [2, 1]) is None
    assert join_steps([Axed(v, ("hidden",)), Axed(v.float(), ("hidden",))], [2, 1]) is None
    assert join_steps([Axed(v, ("hidden",)), Axed(v, ("seq",))], [2, 1]) is None
    narrow, wide = (
        Axed(_noise((1, 2, 4), 1), ("batch", "seq", "hidden")),
        Axed(_noise((3, 2, 4), 1), ("batch", "seq", "hidden")),
    )
    assert join_steps([narrow, wide], [2, 2]) is None


def test_the_last_mask_stands_for_all() -> None:
    first, last = Axed(torch.ones(2, 3), ("batch", "key")), Axed(torch.ones(2, 4), ("batch", "key"))
    assert join_steps([first, last], [3, 1]) is last
    square = [Axed(torch.ones(1, 1, n, 3), ("batch", "head", "seq", "key")) for n in (3, 1)]
    assert join_steps(square, [3, 1]) is None


@given(leaves(["batch", "seq", "hidden"], need="seq"), st.data())
def test_joining_the_steps_of_a_cut_prefill_is_identity(leaf: Axed, data: st.DataObject) -> None:
    assume(leaf.size("seq") != 1)
    cuts = cuts_of(leaf.size("seq"), data.draw)  # type: ignore[arg-type]
    joined = join_steps([part(leaf, "seq", *cut) for cut in cuts], [b - a for a, b in cuts])
    assert joined is not None and torch.equal(joined.tensor, leaf.tensor)


# ---- declaring


@given(st.lists(st.sampled_from(NAMES), unique=True, max_size=5))
def test_what_is_parsed_is_what_was_written(names: list[str]) -> None:
    assert parse(" ".join(names)) == tuple(names)
    assert axes(torch.zeros([1] * len(names)), " ".join(names)).axes == tuple(names)


@pytest.mark.parametrize("text", ["Batch hidden", "batch, hidden", "batch 1", "batch [seq]", "a-b", "ä", "batch batch"])
def test_what_is_no_signature_is_refused(text: str) -> None:
    with pytest.raises(AxesError):
        parse(text)
    with pytest.raises(ValueError, match="axes"):
        kf.axes(torch.zeros(1, 1), text)


@pytest.mark.parametrize(
    ("slip", "meant"),
    [("layr", "layer"), ("keys", "key"), ("heads", "head"), ("kvhead", "kv_head"), ("batches", "batch")],
)
def test_a_slip_of_the_pen_is_no_free_axis(slip: str, meant: str) -> None:
    """A free axis is never cut: 'layr' would reach every layer whole."""
    with pytest.raises(AxesError, match=f"{slip!r} .*did you mean {meant!r}"):
        axes(torch.zeros(1, 1), f"{slip} hidden")
    with pytest.raises(AxesError, match=f"did you mean {meant!r}"):
        Axes[f"hidden | [{slip}] seq"]
    for free in ("rank", "prefix", "adapter", "vocab", "token", "expert", "feature", "dose", "row", "step", "i"):
        assert Axes[f"{free} hidden"].signatures == (f"{free} hidden",)


def test_rank_and_axes_must_agree() -> None:
    with pytest.raises(AxesError, match=r"name 2 dimensions, the tensor float32\(3,\) has 1"):
        axes(torch.zeros(3), "batch hidden")
    with pytest.raises(AxesError, match="torch.Tensor, got list"):
        axes([1.0], "hidden")  # type: ignore[arg-type]


def test_gradients_flow_through_a_declaration() -> None:
    v = torch.ones(3, requires_grad=True)
    axes(v, "hidden").tensor.sum().backward()
    assert v.grad is not None


@pytest.mark.parametrize(
    ("signature", "count"), [("hidden", 1), ("[batch] hidden", 2), ("[layer] [batch] [seq] hidden", 8), ("", 1)]
)
def test_brackets_may_be_left_out(signature: str, count: int) -> None:
    forms = expansions(signature)
    assert len(set(forms)) == count and all("[" not in name for form in forms for name in form)
    assert set(expansions(without_layer(signature))) == {f for f in forms if "layer" not in f}


def test_the_type_of_a_block_fn_s_kwarg() -> None:
    kind = Axes["layer hidden | [batch] hidden"]
    assert kind.signatures == ("layer hidden", "[batch] hidden") and "layer hidden" in repr(kind)
    with pytest.raises(AxesError):
        Axes["layer Hidden"]
    with pytest.raises(TypeError, match="annotation"):
        kind()


# ---- binding


def test_a_bare_tensor_is_taken_when_one_signature_has_its_rank() -> None:
    signatures = ["batch key", "batch head seq key"]
    assert bind_tensor(torch.ones(2, 3), signatures, what="m").axes == ("batch", "key")
    assert bind_tensor(torch.ones(2, 1, 3, 3), signatures, what="m").axes == ("batch", "head", "seq", "key")
    with pytest.raises(ShapeError, match=r"m is float32\(3,\), of rank 1; it takes 'batch key'"):
        bind_tensor(torch.ones(3), signatures, what="m")
    with pytest.raises(AxesError, match=r"(?s)may mean 'batch hidden' or 'seq hidden'.*kf.axes"):
        bind_tensor(torch.ones(4, 4), ["batch hidden", "seq hidden"], what="v")
    with pytest.raises(AxesError, match="does not take a tensor without declared axes"):
        bind_tensor(torch.ones(4), ["hidden"], what="v", bare=False)


def test_declared_axes_must_be_taken() -> None:
    leaf = axes(torch.ones(4, 4), "seq hidden")
    assert bind_tensor(leaf, ["[batch] [seq] hidden"], what="v") is leaf
    with pytest.raises(AxesError, match="declared 'seq hidden'; it takes 'batch hidden'"):
        bind_tensor(leaf, ["batch hidden"], what="v")
    assert bind_tensor(leaf, [], what="v") is leaf  # a free tree takes any


def test_sizes_are_compared_by_name() -> None:
    sizes = {"batch": 4, "seq": 4, "hidden": 8, "head": 4}
    check_sizes(axes(torch.ones(4, 1, 8), "batch seq hidden"), sizes, {}, what="v")
    for bad, says in [
        (axes(torch.ones(3, 8), "batch hidden"), "batch = 3, expected 4 or 1"),
        (axes(torch.ones(4, 1), "batch hidden"), "hidden = 1, expected 8 "),
        (axes(torch.ones(2), "head"), "head = 2, expected 4 or 1"),
    ]:
        with pytest.raises(ShapeError, match=says):
            check_sizes(bad, sizes, {}, what="v")
    with pytest.raises(ShapeError, match=r"batch = 2, expected 1 \("):
        check_sizes(axes(torch.ones(2, 8), "batch hidden"), sizes | {"batch": 1}, {}, what="v")


def test_a_free_axis_has_one_size_within_a_kwarg() -> None:
    free: dict[str, int] = {}
    check_sizes(axes(torch.ones(2, 8), "rank hidden"), {"hidden": 8}, free, what="lora")
    check_sizes(axes(torch.ones(8, 2), "hidden rank"), {"hidden": 8}, free, what="lora")
    with pytest.raises(ShapeError, match="rank = 1, expected 2 "):  # a free axis does not broadcast
        check_sizes(axes(torch.ones(8, 1), "hidden rank"), {"hidden": 8}, free, what="lora")
