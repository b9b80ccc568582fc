"""Skeletons as JSON: read back as they were, and what nobody wrote is refused."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kwflow.errors import ProtocolError
from kwflow.kwargs.axes import axes
from kwflow.kwargs.tree import DEPTH, INT_BITS, flatten, unflatten
from kwflow.wire.skeleton import from_json, to_json
from tests.oracle.trees import LEAVES, SCALARS, TENSOR, assert_same, trees


@given(trees(SCALARS | LEAVES))
def test_round_trip(given_tree):
    leaves, skeleton = flatten(given_tree)
    text = json.dumps(to_json(skeleton), allow_nan=False)
    assert_same(from_json(json.loads(text)), from_json(to_json(skeleton)))
    assert_same(unflatten(leaves, from_json(json.loads(text))), given_tree)


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


def test_the_deepest_tree_and_the_largest_int_pass():
    deep: Any = (1 << INT_BITS) - 1
    for level in range(DEPTH):
        deep = {level: deep}
    assert_same(from_json(json.loads(json.dumps(to_json(flatten(deep)[1])))), deep)


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
