"""Kwargs: named, checked, bound to axes and cut; what is wrong is an error that names what would be right."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import kwflow as kf
from kwflow.errors import AxesError, KwargError, ShapeError, SpanError, UnknownKwarg
from kwflow.kwargs import tree
from kwflow.kwargs.bind import bind_kwargs, check_bound
from kwflow.kwargs.bound import Bound
from kwflow.kwargs.builtin import BUILTIN, schema
from kwflow.kwargs.points import ENTRIES
from kwflow.kwargs.schema import Schema, Spec
from kwflow.wire.message import Message, dumps, loads
from tests.oracle import assert_bits

MODEL = {"hidden": 4, "head": 4, "kv_head": 2, "head_dim": 1}
SIZES = {"batch": 4, "seq": 4, "key": 4}
BUILT_IN = schema(MODEL, positions=True, refused={})
NO_POSITIONS = schema(MODEL, positions=False, refused={"position_ids": "this family uses ALiBi"})
SPAN = (10, 14)  # numbers are absolute


def with_kwargs(**specs: Spec) -> Schema:
    return Schema({**BUILT_IN.kwargs, **specs}, MODEL)


def bound(kwargs: dict[str, Any], *schemas: tuple[tuple[int, int], Schema], **sizes: int) -> Bound:
    return bind_kwargs(schemas or [(SPAN, BUILT_IN)], SPAN, kwargs, {**SIZES, **sizes})


def values(layer: int, b: Bound) -> dict[str, Any]:
    return b.for_layer(layer)


# ---- what each layer gets


def test_a_layer_axis_is_relative_and_dict_keys_are_absolute() -> None:
    v = torch.arange(16.0).view(4, 4)
    by_axis = bound({"steer": kf.axes(v, "layer hidden")})
    by_dict = bound({"steer": {10 + i: v[i] for i in range(4)}})
    by_list = bound(kf.per_layer([{"steer": row} for row in v]))
    for b in (by_axis, by_dict, by_list):
        for i in range(4):
            assert_bits(b.for_layer(10 + i)["steer"].tensor, v[i])
            assert b.for_layer(10 + i)["steer"].axes == ("hidden",)


def test_layers_that_are_not_named_get_nothing() -> None:
    v = torch.ones(4)
    b = bound({"steer": {11: v}})
    assert [sorted(b.for_layer(n)) for n in range(10, 14)] == [[], ["steer"], [], []]
    b = bound(kf.per_layer([None, {"steer": v}, {}, {"steer": None}]))
    assert [sorted(b.for_layer(n)) for n in range(10, 14)] == [[], ["steer"], [], []]


def test_none_is_as_if_not_given() -> None:
    b = bound({"steer": None, "attention_mask": None, "prompts": None})
    assert b.tensors == () and b.to_tree() == []
    assert bound({"position_ids": None}, (SPAN, NO_POSITIONS)).tensors == ()
    with pytest.raises(UnknownKwarg, match="stear"):  # but a name that nobody takes is wrong whatever its value
        bound({"stear": None})


def test_parts() -> None:
    steer, mask = torch.randn(4, 4, 4, 4), torch.ones(4, 4).long()
    b = bound(
        {
            "steer": kf.axes(steer, "layer batch seq hidden"),
            "attention_mask": mask,
            **kf.per_layer({13: {"prompts": torch.ones(1, 2, 4)}}),
        }
    )
    mine, keep = b.part((1, 3), (11, 13))
    assert (mine.start, mine.stop) == (11, 13) and len(keep) == 2  # layer 13's prompts are not sent there
    assert_bits(mine.for_layer(12)["steer"].tensor, steer[2, 1:3])
    assert_bits(mine.call()["attention_mask"].tensor, mask[1:3])
    again, _ = mine.part(None, (12, 13))
    assert_bits(again.for_layer(12)["steer"].tensor, steer[2, 1:3])
    last, _ = b.part((0, 1), (13, 14))
    assert last.for_layer(13)["prompts"].tensor.shape == (1, 2, 4)


def test_beams_repeat_the_rows_that_are_there() -> None:
    v, w = torch.randn(2, 4), torch.randn(4)
    b = bound(
        {"steer": {10: kf.axes(v, "batch hidden"), 11: w, 12: kf.axes(v[:1], "batch hidden")}}, batch=2
    ).repeat_rows(3)
    assert_bits(b.for_layer(10)["steer"].tensor, v.repeat_interleave(3, 0))
    assert_bits(b.for_layer(11)["steer"].tensor, w)
    assert b.for_layer(12)["steer"].tensor.shape == (1, 4)


def test_a_free_tree_keeps_its_structure() -> None:
    spec = with_kwargs(extra=Spec(tree=True))
    given_tree = {
        "a": [kf.axes(torch.randn(4, 4), "layer rank"), None, 3, "text"],
        7: (kf.axes(torch.randn(4, 2), "batch free"), {"x": 0.5}),
    }
    b = bound({"extra": given_tree}, (SPAN, spec))
    got = b.part((2, 4), (11, 12))[0].for_layer(11)["extra"]
    assert got["a"][1:] == [None, 3, "text"] and got[7][1] == {"x": 0.5} and isinstance(got[7], tuple)
    assert_bits(got["a"][0].tensor, given_tree["a"][0].tensor[1])
    assert_bits(got[7][0].tensor, given_tree[7][0].tensor[2:4])
    with pytest.raises(AxesError, match="kf.axes"):
        bound({"extra": {"a": torch.ones(4)}}, (SPAN, spec))
    with pytest.raises(ShapeError, match="rank = 2, expected 3"):
        bound({"extra": [kf.axes(torch.ones(3), "rank"), kf.axes(torch.ones(2), "rank")]}, (SPAN, spec))
    with pytest.raises(KwargError, match="set"):
        bound({"extra": {"a": {1, 2}}}, (SPAN, spec))


def test_without_takes_one_name_out() -> None:
    b = bound(
        {
            "attention_mask": torch.ones(4, 4).long(),
            "position_ids": torch.zeros(4, 4).long(),
            "steer": {11: torch.ones(4)},
        }
    )
    less = b.without("attention_mask")
    assert sorted(less.call()) == ["position_ids"] and sorted(less.for_layer(11)) == ["steer"]
    assert_bits(less.call()["position_ids"].tensor, torch.zeros(4, 4).long())
    assert less.without("position_ids").call() == {} and b.without("nothing") is b


# ---- scalars


def test_scalars_have_a_type() -> None:
    spec = with_kwargs(
        scale=Spec(scalars=("float",)),
        count=Spec(scalars=("int",)),
        flag=Spec(scalars=("bool",)),
        mode=Spec(scalars=("str",)),
    )
    good = {"scale": 2, "count": 3, "flag": False, "mode": "a"}
    assert values(12, bound(good, (SPAN, spec))) == good
    for bad in (
        {"scale": "2"},
        {"count": 2.0},
        {"count": True},
        {"flag": 1},
        {"mode": 3},
        {"scale": torch.ones(())},
        {"mode": b"x"},
    ):
        with pytest.raises(KwargError, match=next(iter(bad))):
            bound(bad, (SPAN, spec))


# ---- refusals


@pytest.mark.parametrize(
    ("given", "hint"), [("stear", "steer"), ("attention_masks", "attention_mask"), ("prompt", "prompts")]
)
def test_an_unknown_name_gets_a_hint(given: str, hint: str) -> None:
    with pytest.raises(TypeError, match=f"flow got '{given}'; layers 10:14 take .*Did you mean '{hint}'"):
        bound({given: torch.ones(4)})


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ("input_ids", "flow.inputs"),
        ("output_hidden_states", "flow.capture"),
        ("output_attentions", "flow.capture.*pattern"),
        ("past_key_values", "flow.session"),
        ("adapter", "kf.adapters.read"),
        ("timeout", r"flow.options\(timeout="),
    ],
)
def test_a_name_from_elsewhere_says_where_it_is_here(given: str, where: str) -> None:
    with pytest.raises(UnknownKwarg, match=f"flow got '{given}'; layers 10:14 take .*\\. .*{where}"):
        bound({given: True})


def test_a_refused_name_says_why() -> None:
    with pytest.raises(KwargError, match="position_ids is not taken by layers 10:14: this family uses ALiBi"):
        bound({"position_ids": torch.zeros(4, 4).long()}, (SPAN, NO_POSITIONS))


@pytest.mark.parametrize(
    ("kwargs", "error", "says"),
    [
        ({"steer": torch.ones(4)}, AxesError, "without declared axes"),
        ({"steer": {14: torch.ones(4)}}, SpanError, r"layer 14; this flow has layers 10:14 \(numbers are absolute\)"),
        ({"steer": {0: torch.ones(4)}}, SpanError, "layer 0"),
        ({"steer": {True: torch.ones(4)}}, SpanError, "True"),
        ({"steer": {11: torch.ones(3)}}, ShapeError, r"steer\[11\] has hidden = 3, expected 4"),
        ({"steer": {11: torch.ones(4, 4)}}, AxesError, r"steer\[11\].*may mean"),
        ({"steer": {11: kf.axes(torch.ones(4, 4), "layer hidden")}}, AxesError, "layer"),
        ({"steer": kf.axes(torch.ones(2, 4), "layer hidden")}, ShapeError, "layer = 2, expected 4 or 1"),
        ({"steer": {11: torch.ones(4, dtype=torch.long)}}, KwargError, "int64.*takes float"),
        (
            {"steer": {11: 1.0}},
            KwargError,
            r"steer\[11\] takes a tensor with axes '\[batch\] \[seq\] hidden', got float 1.0",
        ),
        ({"steer": {11: torch.ones(4).numpy()}}, KwargError, "takes a tensor with .*, got ndarray$"),
        ({"steer": kf.steering.Vectors({11: torch.ones(4)})}, KwargError, r"got Vectors; edit=v.edits\(\)"),
        ({"steer": {11: {11: torch.ones(4)}}}, KwargError, "got dict: it is one layer's own"),
        ({"prompts": {11: torch.ones(4, 2, 4)}}, KwargError, r"got dict; kf.per_layer\({layer: {'prompts': …}}\)"),
        ({"prompts": torch.ones(4, 4)}, ShapeError, "rank 2; it takes 'layer batch prefix hidden'"),
        ({"prompts": torch.ones(4, 3, 2, 4)}, ShapeError, "batch = 3, expected 4 or 1"),
        ({"attention_mask": torch.ones(4, 5).long()}, ShapeError, "key = 5, expected 4"),
        ({"attention_mask": torch.ones(4, 1).long()}, ShapeError, "key = 1, expected 4"),  # key never broadcasts
        ({"attention_mask": torch.ones(4, 4)}, KwargError, "float32.*takes int or bool"),
        ({"attention_mask": torch.ones(4, 2, 4, 4)}, ShapeError, "head = 2, expected 4 or 1"),
        ({"attention_mask": torch.ones(4, 4, 4, 4).long()}, KwargError, "takes bool or float"),
        ({"position_ids": torch.zeros(4, 4)}, KwargError, "float32.*takes int"),
        ({"attention_mask": "all"}, KwargError, "str"),
        (kf.per_layer([{"steer": torch.ones(4)}]), ShapeError, "list of 1 for the 4 layers 10:14"),
        (kf.per_layer({11: {"prompts": torch.ones(4, 1, 2, 4)}}), ShapeError, "prompts"),
    ],
)
def test_what_does_not_fit_is_refused(kwargs: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        bound(kwargs)


def test_per_layer_takes_dicts_of_kwargs() -> None:
    with pytest.raises(KwargError, match="dict of kwargs for each layer, got Tensor for 1"):
        kf.per_layer([None, torch.ones(4)])  # type: ignore[list-item]


def test_layers_that_lack_a_kwarg_are_named() -> None:
    more = with_kwargs(gain=Spec(forms=(("[layer] hidden", ("float",)),)))
    route = [((10, 12), BUILT_IN), ((12, 14), more)]
    with pytest.raises(UnknownKwarg, match=r"'gain' is not taken by layers 10:12 \(it is by 12:14\); .*flow\[12:14\]"):
        bound({"gain": kf.axes(torch.ones(4), "hidden")}, *route)
    b = bound(kf.per_layer({13: {"gain": torch.ones(4)}}), *route)
    assert sorted(b.for_layer(13)) == ["gain"]
    with pytest.raises(UnknownKwarg, match="not taken by layers 11:12"):
        bound(kf.per_layer({11: {"gain": torch.ones(4)}}), *route)


def test_a_kwarg_without_a_default_must_be_given() -> None:
    needs = with_kwargs(gain=Spec(forms=(("[layer] hidden", ("float",)),), required=True))
    route = [((10, 12), BUILT_IN), ((12, 14), needs)]
    with pytest.raises(KwargError, match=r"layers 12:14 need 'gain' \(a tensor with axes '\[layer\] hidden'\)"):
        bound({}, *route)
    with pytest.raises(KwargError, match=r"layers 13:14 need 'gain'"):
        bound(kf.per_layer({12: {"gain": torch.ones(4)}}), *route)
    with pytest.raises(KwargError, match="layers 10:12, 13:14 need 'gain'"):
        bound(kf.per_layer({12: {"gain": torch.ones(4)}}), (SPAN, needs))
    bound(kf.per_layer({12: {"gain": torch.ones(4)}, 13: {"gain": torch.ones(4)}}), *route)
    bound({"gain": torch.ones(4)}, (SPAN, needs))


def test_a_worker_checks_again() -> None:
    good = bound({"steer": {11: torch.ones(4)}, "attention_mask": torch.ones(4, 4).long()})
    check_bound(good, BUILT_IN, SIZES)
    with pytest.raises(ShapeError):
        check_bound(good, BUILT_IN, {**SIZES, "key": 3})
    with pytest.raises(UnknownKwarg):
        check_bound(good, Schema({}, MODEL), SIZES)
    with pytest.raises(SpanError):
        check_bound(replace(good, start=12), BUILT_IN, SIZES)


# ---- across the wire


SPECS = st.builds(
    Spec,
    forms=st.lists(
        st.tuples(
            st.sampled_from(["hidden", "[layer] [batch] hidden"]), st.sampled_from([("float",), ("int", "bool")])
        ),
        max_size=2,
    ).map(tuple),
    scalars=st.lists(st.sampled_from(["float", "int", "bool", "str"]), max_size=2).map(tuple),
    tree=st.booleans(),
    bare=st.booleans(),
    by_layer=st.booleans(),
    required=st.booleans(),
    group=st.sampled_from(["layers", "call"]),
)


@settings(max_examples=15)
@given(
    st.dictionaries(st.text(min_size=1, max_size=4), SPECS, max_size=3),
    st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2),
)
def test_a_schema_survives_json(kwargs: dict[str, Spec], refused: dict[str, str]) -> None:
    sent = Schema(kwargs, MODEL, refused)
    assert Schema.from_json(json.loads(json.dumps(sent.to_json()))) == sent


def test_a_newer_worker_may_say_more() -> None:
    said = BUILT_IN.to_json()
    said["kwargs"]["steer"]["invented"] = 3
    said["also"] = {}
    assert Schema.from_json(said) == BUILT_IN


def test_kwargs_survive_the_wire() -> None:
    spec = with_kwargs(extra=Spec(tree=True), scale=Spec(scalars=("float",)))
    extra = {"a": [kf.axes(torch.randn(4, 4), "layer rank"), None], "n": (1, "x")}
    b = bound(
        {
            "steer": {11: torch.ones(4), 13: kf.axes(torch.ones(4, 4), "seq hidden")},
            "extra": extra,
            "scale": 0.5,
            "attention_mask": torch.ones(4, 4).long(),
        },
        (SPAN, spec),
    )
    back = Bound.from_tree(SPAN, loads(dumps(Message({}, b.to_tree()))).tree)
    assert back.leaves == b.leaves and back.sections == b.sections
    for layer in range(*SPAN):
        ours, theirs = tree.flatten(back.for_layer(layer)), tree.flatten(b.for_layer(layer))
        assert ours[1] == theirs[1] and [leaf.axes for leaf in ours[0]] == [leaf.axes for leaf in theirs[0]]


@pytest.mark.parametrize(
    "said",
    [
        3,
        {"layers": {}},
        [["layers", 1]],
        [["layers", {}, 3]],
        [["elsewhere", {}]],
        [[[True], {}]],
        [[[], {}]],
        [[torch.ones(1), {}]],
        [["layers", {3: 1}]],
        [["layers", {"steer": torch.ones(4)}]],
    ],
)
def test_kwargs_that_cannot_be_read_are_the_sender_s_fault(said: Any) -> None:
    with pytest.raises(KwargError):
        Bound.from_tree(SPAN, said)


@pytest.mark.parametrize("name", ["attention_mask", "position_ids"])
def test_what_holds_for_the_whole_call_cannot_differ_by_layer(name: str) -> None:
    with pytest.raises(KwargError, match="whole call"):
        bound(kf.per_layer({11: {name: torch.ones(4, 4).long()}}))


def test_what_is_a_list_of_entries_is_what_the_table_lowers() -> None:
    assert {name for name, row in BUILTIN.items() if row.lower is not None} == ENTRIES
