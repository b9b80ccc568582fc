"""Trees: split and joined again without loss, refused by name where they cannot be sent."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
from hypothesis import given

from kwflow.errors import KwargError
from kwflow.kwargs.axes import axes
from kwflow.kwargs.tree import DEPTH, INT_BITS, Slot, flatten, map_leaves, paths, unflatten
from tests.oracle.trees import LEAVES, SCALARS, TENSOR, assert_same, trees


@given(trees(SCALARS | LEAVES))
def test_what_is_flattened_is_joined_again(given_tree):
    leaves, skeleton = flatten(given_tree)
    joined = unflatten(leaves, skeleton)
    assert_same(joined, given_tree)
    bare = [leaf if isinstance(leaf, torch.Tensor) else leaf.tensor for leaf in leaves]
    assert_same(unflatten(bare, skeleton), given_tree)  # the skeleton remembers the axes
    assert all(one is other for one, other in zip(flatten(joined)[0], leaves, strict=True))
    assert len(paths(given_tree)) == len(leaves)


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
    assert_same(unflatten([], flatten(deep)[1]), deep)
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
