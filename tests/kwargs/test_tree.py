"""Trees: split and joined again without loss, refused by name where they cannot be sent."""

from __future__ import annotations

import collections
import json
import math
import struct
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kwflow.errors import KwargError, ProtocolError
from kwflow.kwargs.axes import Axed, axes
from kwflow.kwargs.tree import DEPTH, INT_BITS, Slot, flatten, from_json, map_leaves, paths, to_json, unflatten

KEYS = st.text(max_size=4) | st.sampled_from(["$", "$tuple", "axes", "v"]) | st.integers()
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.just(math.nan)
    | st.text(max_size=6)
)


def trees(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(
        leaves,
        lambda part: (
            st.lists(part, max_size=3)
            | st.lists(part, max_size=3).map(tuple)
            | st.dictionaries(KEYS, part, max_size=3)
            | st.dictionaries(st.integers(0, 30), part, max_size=3)
        ),
        max_leaves=12,
    )


def assert_same(a: Any, b: Any) -> None:
    """Raise unless two trees are the same to the bit: types, order of keys, axes, and NaN payloads of tensors."""
    assert type(a) is type(b), (a, b)
    if isinstance(a, dict):
        assert [(type(key), key) for key in a] == [(type(key), key) for key in b]
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            assert_same(one, other)
    elif isinstance(a, Axed):
        assert a.axes == b.axes
        assert_same(a.tensor, b.tensor)
    elif isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        dense = [t.detach().clone(memory_format=torch.contiguous_format).reshape(-1) for t in (a, b)]
        one, other = (t.view(torch.uint8) for t in dense)
        assert torch.equal(one, other), (a, b)
    elif isinstance(a, float):
        assert (math.isnan(a) and math.isnan(b)) or struct.pack("d", a) == struct.pack("d", b)
    else:
        assert a == b


TENSOR = torch.arange(6.0).view(2, 3)
LEAVES = st.sampled_from([TENSOR, TENSOR.T, axes(TENSOR, "layer hidden"), axes(torch.tensor(1), "")])


@given(trees(SCALARS | LEAVES))
def test_flatten_and_json_round_trip(given_tree):
    leaves, skeleton = flatten(given_tree)
    text = json.dumps(to_json(skeleton), allow_nan=False)
    assert_same(from_json(json.loads(text)), from_json(to_json(skeleton)))
    joined = unflatten(leaves, from_json(json.loads(text)))
    assert_same(joined, given_tree)
    bare = [leaf if isinstance(leaf, torch.Tensor) else leaf.tensor for leaf in leaves]
    assert_same(unflatten(bare, skeleton), given_tree)  # the skeleton remembers the axes
    assert all(one is other for one, other in zip(flatten(joined)[0], leaves, strict=True))
    assert len(paths(given_tree)) == len(leaves)


def test_json_form_is_pinned():
    given_tree = {
        "hidden": TENSOR,
        "steer": {12: axes(TENSOR, "batch hidden")},
        "edit": [(1, True, None, -0.0, math.inf, -math.inf, math.nan)],
        "$": {},
    }
    assert json.dumps(to_json(flatten(given_tree)[1])) == (
        '{"$items": [["hidden", {"$": 0}],'
        ' ["steer", {"$items": [[12, {"$": 1, "axes": "batch hidden"}]]}],'
        ' ["edit", [{"$tuple": [1, true, null, -0.0, {"$float": "inf"}, {"$float": "-inf"}, {"$float": "nan"}]}]],'
        ' ["$", {}]]}'
    )


class Strange:
    pass


CYCLE: list[Any] = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"lora": {"q_proj": [{1, 2}]}}, r"lora\['q_proj'\]\[0\] is of type set"),
        ({"gain": {3: Strange()}}, r"gain\[3\] is of type .*Strange"),
        ({"a": b"bytes"}, "a is of type bytes"),
        ([1j], r"\[0\] is of type complex"),
        (Strange(), "the tree is of type"),
        ({"a": collections.OrderedDict()}, "a is of type collections.OrderedDict"),
        ({"a": collections.namedtuple("P", "x")(1)}, r"a is of type .*\.P"),
        ({"a": {True: 1}}, "a has a key of type bool"),
        ({"a": {None: 1}}, "a has a key of type NoneType"),
        ({"a": {1.0: 1}}, "a has a key of type float"),
        ({"a": {"\ud800": 1}}, "a has, as key, a str that is not Unicode"),
        ({"a": "\udfff"}, "a is a str that is not Unicode"),
        ({"a": 1 << INT_BITS}, "a is an int of more than"),
        ({"x y": [{2}]}, r"\['x y'\]\[0\] is of type set"),
        (CYCLE, f"deeper than {DEPTH} levels"),
        (Slot(0), "the tree is of type kwflow.kwargs.tree.Slot"),
    ],
)
def test_what_is_no_tree_is_refused_by_path_and_type(bad, says):
    for use in (flatten, paths, lambda tree: map_leaves(lambda leaf: leaf, tree)):
        with pytest.raises(KwargError, match=says):
            use(bad)


def test_the_deepest_tree_and_the_largest_int_pass():
    deep: Any = (1 << INT_BITS) - 1
    for level in range(DEPTH):
        deep = {level: deep}
    _, skeleton = flatten(deep)
    assert_same(from_json(json.loads(json.dumps(to_json(skeleton)))), deep)
    with pytest.raises(KwargError, match="deeper"):
        flatten([deep])


def test_map_leaves_gives_axed_to_fn_and_keeps_the_rest():
    seen: list[Any] = []
    axed = axes(TENSOR, "layer hidden")
    out = map_leaves(lambda leaf: seen.append(leaf) or len(seen), {"b": axed, "a": (TENSOR, None, 7)})
    assert out == {"b": 1, "a": (2, None, 7)}
    assert seen[0] is axed
    assert seen[1] is TENSOR


def test_unflatten_puts_none_and_refuses_a_wrong_count():
    _, skeleton = flatten({"a": TENSOR, "b": axes(TENSOR, "layer hidden")})
    assert unflatten([None, None], skeleton) == {"a": None, "b": None}
    for leaves in ([], [TENSOR], [TENSOR] * 3):
        with pytest.raises(KwargError, match="given"):
            unflatten(leaves, skeleton)


def _nested(levels: int) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = [value]
    return value


HOSTILE = {
    "unknown tag": {"$code": "import os"},
    "tag with more": {"$tuple": [], "x": 1},
    "tag beside a key": {"x": 1, "$tuple": []},
    "tuple of no list": {"$tuple": {"a": 1}},
    "float unknown": {"$float": "1e5"},
    "float no text": {"$float": 1},
    "float unhashable": {"$float": []},
    "infinite number": 1e999,
    "tensor skipped": [{"$": 1}],
    "tensor twice": [{"$": 0}, {"$": 0}],
    "tensor reversed": [{"$": 1}, {"$": 0}],
    "tensor negative": {"$": -1},
    "tensor bool": {"$": False},
    "tensor float": {"$": 0.0},
    "tensor text": {"$": "0"},
    "tensor extra": {"$": 0, "dtype": "F32"},
    "axes before": {"axes": "", "$": 0},
    "bytes": b"",
    "axes spaces": {"$": 0, "axes": "layer  hidden"},
    "axes no names": {"$": 0, "axes": "layer; hidden"},
    "axes twice": {"$": 0, "axes": "layer layer"},
    "axes list": {"$": 0, "axes": ["layer"]},
    "axes null": {"$": 0, "axes": None},
    "items no list": {"$items": {}},
    "items no pair": {"$items": [["a", 1, 2]]},
    "items text pair": {"$items": ["ab"]},
    "items bool key": {"$items": [[True, 1]]},
    "items list key": {"$items": [[[1], 1]]},
    "items key twice": {"$items": [[1, 1], [1, 2]]},
    "surrogate": "\ud800",
    "surrogate key": {"\ud800": 1},
    "huge int": 1 << INT_BITS,
    "huge int key": {"$items": [[1 << INT_BITS, 1]]},
    "too deep": _nested(DEPTH + 1),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_json_is_refused(name):
    with pytest.raises(ProtocolError):
        from_json(HOSTILE[name])


@given(
    st.recursive(
        SCALARS,
        lambda part: (
            st.lists(part, max_size=3)
            | st.dictionaries(
                st.sampled_from(["$", "$tuple", "$items", "$float", "axes", "a"]),
                part | st.lists(st.tuples(st.integers() | st.text(max_size=1), part).map(list), max_size=2),
                max_size=2,
            )
        ),
        max_leaves=8,
    )
)
def test_any_json_is_read_to_a_tree_that_can_be_written_or_refused(json_value):
    try:
        skeleton = from_json(json_value)
    except ProtocolError:
        return
    assert_same(from_json(to_json(skeleton)), skeleton)
