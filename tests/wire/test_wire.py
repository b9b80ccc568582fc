"""Bytes: what is sent arrives to the bit, version 1 is pinned, hostile bytes are refused before anything is allocated.

``python -m tests.wire.test_wire`` writes the golden files again, after a change of the format that is meant.
"""

from __future__ import annotations

import json
import math
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from kwflow.errors import BudgetError, KwargError, ProtocolError
from kwflow.kwargs.axes import axes
from kwflow.swarm.directory import ModelRecord, WorkerRecord, records_of
from kwflow.wire.frames import FRAME_BYTES, Frames, Kind, frame, frames
from kwflow.wire.hello import Fingerprint, Hello, WorkerLimits
from kwflow.wire.message import LIMITS, Limits, Message, dumps, loads
from tests.oracle.trees import SCALARS, assert_same, trees

GOLDEN = Path(__file__).parent / "golden"
DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]
NAN = torch.tensor([0x7FC00001, 0x7F800001, -1], dtype=torch.int32).view(torch.float32)  # quiet, signalling, negative


# ---------------------------------------------------------------------------------------------------- round trips


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Any bits of any dtype, 0-dim and empty too, as a dense tensor or as a view that is not."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    size = math.prod(shape) * dtype.itemsize
    raw = torch.tensor(list(draw(st.binary(min_size=size, max_size=size))), dtype=torch.uint8)
    dense = (raw % 2 if dtype is torch.bool else raw).view(dtype).view(shape)
    match draw(st.sampled_from(["dense", "transposed", "strided", "expanded", "offset", "leaf"])):
        case "transposed":
            return dense.permute(list(reversed(range(dense.ndim))))
        case "strided" if dense.ndim:
            return dense[..., ::2]
        case "expanded":
            return dense.unsqueeze(0).expand(3, *dense.shape)
        case "offset" if dense.ndim:
            return dense[1:]
        case "leaf" if dtype.is_floating_point:
            return dense.requires_grad_()
    return dense


LEAVES = tensors() | tensors().map(lambda t: axes(t, " ".join(f"axis{i}" for i in range(t.ndim))))
METAS = st.dictionaries(st.text(max_size=5), trees(SCALARS), max_size=3)


@given(METAS, trees(SCALARS | LEAVES), st.sampled_from([bytes, bytearray, memoryview]))
@example({}, None, bytes)
@example({"$": "é\u2028\0"}, {"nan": NAN}, bytes)
def test_what_is_sent_arrives_to_the_bit(meta, tree, kind):
    data = dumps(Message(meta, tree))
    message = loads(kind(data))
    assert_same(message.meta, meta)
    assert_same(message.tree, tree)
    assert dumps(message) == data
    assert dumps(Message(meta, tree)) == data  # and the same message is always the same bytes


@given(st.lists(tensors(), max_size=4))
def test_safetensors_reads_it_too(given_tensors):
    data = dumps(Message({"op": "forward"}, given_tensors))
    read = safetensors.torch.load(data)
    assert len(read) == len(given_tensors)
    assert_same([read[str(i)] for i in range(len(given_tensors))], given_tensors)


def test_safe_open_reads_a_message_kept_in_a_file(tmp_path):
    path = tmp_path / "message.safetensors"
    path.write_bytes(dumps(Message({"op": "forward"}, {"hidden": torch.ones(2, 3, dtype=torch.bfloat16)})))
    with safetensors.safe_open(path, "pt") as file:
        assert json.loads(file.metadata()["kwflow"])["meta"] == {"op": "forward"}
        assert_same(file.get_tensor("0"), torch.ones(2, 3, dtype=torch.bfloat16))


def test_sent_tensors_are_detached_and_not_changed():
    leaf = torch.randn(3, requires_grad=True)
    out = loads(dumps(Message({}, leaf * 2))).tree
    assert not out.requires_grad
    for size in (1, 3):  # a view that torch negates when it is read; with one element it is contiguous as it is
        negated = torch.full((size,), 1 + 2j).conj().imag
        assert negated.is_neg()
        assert loads(dumps(Message({}, negated))).tree.tolist() == [-2.0] * size


def test_received_tensors_are_writable_and_own_or_share_the_bytes():
    sent = {"a": torch.arange(4, dtype=torch.int16), "b": torch.tensor([True, False]), "c": torch.zeros(2)}
    data = dumps(Message({}, sent))
    for copied in (data, memoryview(data), memoryview(bytearray(b"x" + data))[1:]):  # read-only, or not aligned
        tree = loads(copied).tree
        for tensor in tree.values():
            assert tensor.data_ptr() % 64 == 0
            tensor.fill_(1)
        assert bytes(copied) == data
    for start in range(0, 64, 8):  # wherever the bytes lie, what is computed from them does not depend on it
        room = torch.zeros(len(data) + 128, dtype=torch.uint8)
        at = start - room.data_ptr() % 64 + 64
        room[at : at + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        tree = loads(memoryview(room.numpy())[at : at + len(data)]).tree
        assert all(tensor.data_ptr() % 64 == 0 for tensor in tree.values())
        del room  # the tensors keep it alive
        assert_same(tree, sent)


def test_a_decode_step_is_small():
    hidden = torch.zeros(1, 1, 576)
    step = Message({"op": "step", "id": 1234, "start": 1233}, {"hidden": hidden})
    assert len(dumps(step)) - hidden.nbytes <= 200
    reply = Message({"queue": 0.00012, "compute": 0.06358}, hidden)
    assert len(dumps(reply)) - hidden.nbytes <= 200


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({"lora": [torch.ones(2, dtype=torch.complex64)]}, r"lora\[0\] is a tensor of torch.complex64"),
        ({"a": torch.eye(2).to_sparse()}, "a is a sparse"),
        ({"a": torch.empty(2, device="meta")}, "a is a meta tensor"),
        ({"a": torch.ones(2, dtype=torch.float8_e5m2)}, "float8"),
        ({"a": {1, 2}}, "a is of type set"),
    ],
)
def test_what_cannot_be_sent_is_the_callers_error(tree, says):
    with pytest.raises(KwargError, match=says):
        dumps(Message({}, tree))


@pytest.mark.parametrize("meta", [{"t": torch.ones(1)}, {1: 2}, [], None])
def test_meta_is_a_dict_without_tensors(meta):
    with pytest.raises(KwargError, match="meta"):
        dumps(Message(meta, None))


@pytest.mark.parametrize(
    "tree",
    [
        torch.ones(1).expand(1 << 14, 1 << 15),  # 2 GiB once it is dense
        [torch.ones(1).expand(1 << 14, 1 << 13)] * 3,
        torch.empty(0, 1 << 31),
        ["x" * 1000] * 9000,
        torch.ones((1,) * 65),
        [torch.ones(())] * 100_001,
    ],
    ids=["expanded", "together", "empty", "text", "rank", "count"],
)
def test_beyond_the_limits_is_the_callers_error(tree):
    with pytest.raises(BudgetError):
        dumps(Message({}, tree))


def test_limits_are_the_readers_own():
    data = dumps(Message({"a": [[1]]}, [torch.ones(2, 2), torch.ones(1)]))
    loads(data, Limits(message_bytes=len(data), header_bytes=len(data), tensors=2, rank=2, depth=3))
    for limits in (
        Limits(message_bytes=len(data) - 1),
        Limits(header_bytes=64),
        Limits(tensors=1),
        Limits(rank=1),
        Limits(depth=2),
    ):
        with pytest.raises(ProtocolError):
            loads(data, limits)


# ---------------------------------------------------------------------------------------------------- golden bytes


def _golden_messages() -> dict[str, Message]:
    ones = {str(dtype).removeprefix("torch."): torch.ones(1, 2, dtype=dtype) for dtype in DTYPES}
    scalars = [None, True, -1, 2**70, 0.5, -0.0, 1e300, math.nan, math.inf, -math.inf, "é\n", (1, [2, ()]), {}]
    step = {"op": "step", "id": 7, "start": 6, "span": [0, 15]}
    return {
        "v1_empty": Message({}),
        "v1_step": Message(step, {"hidden": torch.arange(8.0, dtype=torch.bfloat16).view(1, 1, 8)}),
        "v1_dtypes": Message({"op": "echo"}, ones | {"0-dim": torch.tensor(3), "none": torch.empty(0, 2), "nan": NAN}),
        "v1_tree": Message(
            {"op": "forward", "scalars": scalars},
            {
                "steer": {12: axes(torch.arange(4.0), "hidden"), -1: None},
                "lora": {"q_proj": {"A": axes(torch.arange(8.0).view(1, 2, 4), "layer rank in"), "scale": 2.0}},
                "edit": [(torch.arange(3).flip(0), "resid")],
                "$key": torch.ones(2, 3).T,
            },
        ),
    }


def _golden_files() -> dict[str, bytes]:
    messages = _golden_messages()
    files = {f"{name}.safetensors": dumps(message) for name, message in messages.items()}
    step = files["v1_step.safetensors"]
    files["v1_stream.frames"] = frame(Kind.BEAT) + b"".join(frames(step)) + frame(Kind.DATA, b"a") + frame(Kind.LAST)
    return files


@pytest.mark.parametrize("name", _golden_messages())
def test_the_bytes_of_version_1_are_pinned(name):
    golden = (GOLDEN / f"{name}.safetensors").read_bytes()
    message = _golden_messages()[name]
    assert dumps(message) == golden
    read = loads(golden)
    assert_same(read.meta, message.meta)
    assert_same(read.tree, message.tree)


def test_the_frames_of_version_1_are_pinned():
    golden = (GOLDEN / "v1_stream.frames").read_bytes()
    assert _golden_files()["v1_stream.frames"] == golden
    step = (GOLDEN / "v1_step.safetensors").read_bytes()
    assert Frames().feed(golden) == [(Kind.BEAT, b""), (Kind.LAST, step), (Kind.LAST, b"a")]


def test_every_golden_file_is_tested():
    assert {path.name for path in GOLDEN.iterdir()} == {*_golden_files(), "v1_hello.json", "v1_records.json"}


def test_a_hello_is_read_and_written_as_before():
    golden = json.loads((GOLDEN / "v1_hello.json").read_text())
    hello = Hello.from_json(golden)
    assert json.dumps(hello.to_json()) == json.dumps(golden)  # the order of the keys too
    assert (hello.span, hello.limits.order, hello.fingerprint.threads) == ((1, 3), 4, 1)
    read = loads(dumps(Message({"hello": hello.to_json()}))).meta["hello"]
    assert Hello.from_json(read) == hello


def test_directory_records_are_read_and_written_as_before():
    golden = json.loads((GOLDEN / "v1_records.json").read_text())
    peer, value = golden["kwflow/tiny/1"]
    record = WorkerRecord.from_json(value, model="tiny", peer=peer)
    assert json.loads(json.dumps(records_of(record))) == golden
    (name, value) = golden["kwflow/models"]
    assert ModelRecord.from_json(value, model=name) == ModelRecord("tiny", 4, "ab" * 32)


def test_another_versions_hello_is_read():
    golden = json.loads((GOLDEN / "v1_hello.json").read_text())
    whole = Hello.from_json(golden)
    older = Hello.from_json({name: golden[name] for name in ("span", "dtype", "schema")})
    assert (older.features, older.limits, older.fingerprint) == ((), WorkerLimits(), Fingerprint())
    assert not [*older.fingerprint.differences(whole.fingerprint), *whole.fingerprint.differences(older.fingerprint)]
    newer = {**golden, "mood": [1], "fingerprint": {**golden["fingerprint"], "mkl": "2025", "nested": {"a": [1]}}}
    parts = Hello.from_json(newer).fingerprint
    assert [*parts.differences(replace(parts, more={"mkl": "2024"}))] == [("mkl", "2025", "2024")]
    assert "nested" not in parts.parts() and not [*parts.differences(whole.fingerprint)]


@pytest.mark.parametrize(
    ("where", "value"),
    [
        *(("span", span) for span in ([0, 10**9], [2, 2], [-1, 2], [0, True], [0, 1.0], [0, 1, 2], "01", None)),
        *(("dtype", dtype) for dtype in (None, 3, "f" * 10**6, ["float32"])),
        *(("features", features) for features in ("push", [["push"]], ["f"] * 10**5, {"push": 1})),
        *(("limits", limits) for limits in ({"batch_tokens": -1}, {"kv_bytes": 1e9}, {"order": 10**40}, [])),
        *(("fingerprint", parts) for parts in ({"threads": 10**9}, {"threads": True}, {"isa": {"a": [[]]}}, "x")),
        *(("schema", schema) for schema in ({}, None, {"kwargs": {"steer": 1}, "sizes": {}, "refused": {}})),
    ],
)
def test_a_lying_hello_is_refused_in_words(where: str, value: object):
    golden = json.loads((GOLDEN / "v1_hello.json").read_text())
    with pytest.raises(KwargError) as caught:
        Hello.from_json({**golden, where: value})
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 10**400, "fast", True, None])
def test_a_lying_record_is_refused(value: object):
    facts = {"addrs": ("a",), "start": 0, "stop": 2, "layers": 2}
    assert WorkerRecord.from_json(facts, model="m", peer="p").throughput == 0.0
    for lie in ({"throughput": value}, {"addrs": ["a"] * 33}, {"layers": 10**9}, {"start": 2}, {"stop": value}):
        with pytest.raises(KwargError):
            WorkerRecord.from_json({**facts, **lie}, model="m", peer="p")


# ---------------------------------------------------------------------------------------------------- hostile bytes

DOCUMENT: dict[str, Any] = {"v": 1, "meta": {}, "tree": [{"$": 0}, {"$": 1}]}
F32: dict[str, Any] = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
I8: dict[str, Any] = {"dtype": "I8", "shape": [4], "data_offsets": [8, 12]}


def _raw(header: str | bytes, body: bytes = bytes(12), *, size: int | None = None) -> bytes:
    header = header.encode() if isinstance(header, str) else header
    header += b" " * (-len(header) % 8)
    return (len(header) if size is None else size).to_bytes(8, "little") + header + body


def _doc(document: Any = DOCUMENT, body: bytes = bytes(12), entries: dict[str, Any] | None = None) -> bytes:
    text = document if isinstance(document, str) else json.dumps(document)
    return _raw(json.dumps({"__metadata__": {"kwflow": text}, "0": F32, "1": I8, **(entries or {})}), body)


def _one(body: bytes = bytes(12), **fields: Any) -> bytes:
    """The good document with some fields of tensor 1 changed."""
    return _doc(body=body, entries={"1": I8 | fields})


def _text(document: str) -> bytes:
    return _raw(json.dumps({"__metadata__": {"kwflow": document}}), b"")


GOOD = _doc()
VALID = json.dumps(F32)
META = json.dumps({"kwflow": json.dumps(DOCUMENT)})

HOSTILE: dict[str, bytes] = {
    # the header
    "nothing": b"",
    "7 bytes": bytes(7),
    "no header": bytes(8),
    "cut in the header": GOOD[:50],
    "cut in the tensors": GOOD[:-1],
    "bytes after the end": GOOD + b"x",
    "header of 2^64 - 1": _raw("{}", size=2**64 - 1),
    "header longer than the message": _raw("{}", b"", size=16),
    "header over the limit": _raw(b"{" + b" " * LIMITS.header_bytes + b"}"),
    "header not padded": (len(GOOD) - 19).to_bytes(8, "little") + GOOD[8:-12] + b" " + GOOD[-12:],
    "header not JSON": _raw("{nonsense"),
    "header not UTF-8": _raw(b'{"\xff": 1}'),
    "header UTF-16": _raw("{}".encode("utf-16-le")),
    "header a list": _raw("[]"),
    "header with bytes after": _raw("{} {}"),
    "header of open lists": _raw('{"__metadata__": ' + "[" * 1_000_000),
    "header of open objects": _raw('{"a":' * 1_000_000),
    "header with NaN": _raw('{"__metadata__": NaN}'),
    "header with an int of 5000 digits": _raw(f'{{"__metadata__": {META}, "0": [{"9" * 5000}]}}'),
    "name twice": _raw(f'{{"__metadata__": {META}, "0": {VALID}, "0": {VALID}, "1": {json.dumps(I8)}}}'),
    "field twice": _raw(f'{{"__metadata__": {META}, "0": {VALID[:-1]}, "dtype": "F32"}}, "1": {json.dumps(I8)}}}'),
    # the metadata
    "no metadata": _raw(json.dumps({"0": F32, "1": I8})),
    "metadata a text": _raw(json.dumps({"__metadata__": "kwflow"})),
    "metadata of another": _raw(json.dumps({"__metadata__": {"format": "pt"}})),
    "metadata with more": _raw(json.dumps({"__metadata__": {"kwflow": "{}", "format": "pt"}})),
    "metadata not a text": _raw(json.dumps({"__metadata__": {"kwflow": {}}})),
    "document not JSON": _text("pickle"),
    "document a list": _text("[]"),
    "document a number": _text("1"),
    "document of open lists": _text("[" * 1_000_000),
    "document a name twice": _text('{"v": 1, "v": 1, "meta": {}}'),
    "document a key twice": _text('{"v": 1, "meta": {"a": 1, "a": 2}}'),
    "document with NaN": _text('{"v": 1, "meta": {"a": NaN}}'),
    "document with 1e999": _text('{"v": 1, "meta": {"a": 1e999}}'),
    "document with Infinity": _text('{"v": 1, "meta": {"a": -Infinity}}'),
    "no meta": _text('{"v": 1}'),
    "meta a list": _text('{"v": 1, "meta": []}'),
    "meta with int keys": _text('{"v": 1, "meta": {"$items": [[1, 2]]}}'),
    "unknown field": _text('{"v": 1, "meta": {}, "code": "import os"}'),
    "tree too deep": _text('{"v": 1, "meta": {}, "tree": ' + "[" * 65 + "]" * 65 + "}"),
    "meta too deep": _text('{"v": 1, "meta": {"a": ' + "[" * 64 + "]" * 64 + "}}"),
    # the tensors
    "name not a number": _doc(entries={"x": I8 | {"data_offsets": [12, 16]}}, body=bytes(16)),
    "name not canonical": _raw(json.dumps({"__metadata__": {"kwflow": json.dumps(DOCUMENT)}, "0": F32, "01": I8})),
    "entry a list": _doc(entries={"1": []}),
    "entry lacks a field": _doc(entries={"1": {"dtype": "I8", "shape": [4]}}),
    "entry with more": _one(stride=[0]),
    "dtype unknown": _one(dtype="I4"),
    "dtype of torch not sent": _one(dtype="F8_E5M2"),
    "dtype in lower case": _one(dtype="i8"),
    "dtype a list": _one(dtype=["I8"]),
    "dtype wider than its bytes": _one(dtype="I16"),
    "shape negative": _one(shape=[-4]),
    "shape negative twice": _one(shape=[-2, -2]),
    "shape float": _one(shape=[4.0]),
    "shape bool": _one(shape=[4, True]),
    "shape null": _one(shape=None),
    "shape a number": _one(shape=4),
    "shape too large": _one(shape=[5]),
    "shape too small": _one(shape=[3]),
    "shape overflows to its size": _one(shape=[2**62 + 1, 4]),
    "shape overflows to 0": _one(bytes(8), shape=[2**32, 2**32], data_offsets=[8, 8]),
    "shape empty and huge": _one(bytes(8), shape=[0, 2**62, 2**62], data_offsets=[8, 8]),
    "shape of 2^64": _one(bytes(8), shape=[0, 2**64], data_offsets=[8, 8]),
    "shape of rank 65": _one(shape=[4] + [1] * 64),
    "offsets overlap": _one(data_offsets=[4, 8]),
    "offsets the same": _doc(entries={"0": I8 | {"data_offsets": [8, 12]}}),
    "offsets leave a hole": _one(bytes(13), data_offsets=[9, 13]),
    "offsets do not start at 0": _doc(entries={"0": F32 | {"data_offsets": [12, 20]}}, body=bytes(20)),
    "offsets reversed": _one(data_offsets=[12, 8]),
    "offsets negative": _one(data_offsets=[-4, 0]),
    "offsets beyond the end": _one(data_offsets=[2**40, 2**40 + 4]),
    "offsets of three": _one(data_offsets=[8, 10, 12]),
    "offsets float": _one(data_offsets=[8.0, 12.0]),
    "offsets not aligned": _doc(
        entries={"0": F32 | {"data_offsets": [1, 9]}, "1": I8 | {"shape": [1], "data_offsets": [0, 1]}}, body=bytes(9)
    ),
    "empty tensor inside another": _one(bytes(8), shape=[0], data_offsets=[4, 4]),
}


MISFITS: dict[str, bytes] = {
    "tensor not in the tree": _doc({"v": 1, "meta": {}, "tree": [{"$": 0}]}),
    "no tree": _doc({"v": 1, "meta": {}}),
    "tensor twice in the tree": _doc({"v": 1, "meta": {}, "tree": [{"$": 0}, {"$": 0}]}),
    "tensor missing": _doc({"v": 1, "meta": {}, "tree": [{"$": 0}, {"$": 1}, {"$": 2}]}),
    "tensor in meta": _doc({"v": 1, "meta": {"a": {"$": 0}}, "tree": [{"$": 0}, {"$": 1}]}),
}


def test_the_good_one_is_good():
    assert_same(loads(GOOD).tree, [torch.zeros(2), torch.zeros(4, dtype=torch.int8)])


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bytes_are_refused_before_a_tensor_is_made(name, monkeypatch):
    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a tensor was made")

    monkeypatch.setattr(torch, "frombuffer", never)
    monkeypatch.setattr(torch, "empty", never)
    with pytest.raises(ProtocolError):
        loads(HOSTILE[name])


@pytest.mark.parametrize("name", MISFITS)
def test_a_tree_and_tensors_that_do_not_fit_are_refused(name):
    with pytest.raises(ProtocolError):
        loads(MISFITS[name])


@pytest.mark.parametrize("version", [2, 0, "1", 1.0, True, None, 10**4000])
def test_another_version_is_an_error_that_names_both(version):
    with pytest.raises(ProtocolError, match=r"version 1 is spoken") as refused:
        loads(_doc({"v": version, "meta": {}, "future": 1}))
    assert f"version {version!r}"[:20] in str(refused.value)


def test_a_bool_is_0_or_1():
    assert loads(_one(bytes(8) + b"\0\1\1\0", dtype="BOOL")).tree[1].tolist() == [False, True, True, False]
    with pytest.raises(ProtocolError, match="tensor 1 is BOOL"):
        loads(_one(bytes(8) + b"\0\1\2\0", dtype="BOOL"))


@given(st.data())
def test_damaged_bytes_are_refused_or_are_a_message_that_safetensors_reads(data):
    good = bytearray(dumps(_golden_messages()[data.draw(st.sampled_from(["v1_tree", "v1_dtypes", "v1_step"]))]))
    end = 8 + int.from_bytes(good[:8], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, end - 1))
        cut = data.draw(st.integers(0, 3))
        good[at : at + cut] = data.draw(st.binary(max_size=3) | st.sampled_from([b"-", b"0", b"9", b'"', b"[", b"}"]))
    try:
        message = loads(bytes(good))
    except ProtocolError:
        return
    read = safetensors.torch.load(bytes(good))
    again = loads(dumps(message))
    assert_same(again.meta, message.meta)
    assert_same(again.tree, message.tree)
    assert sum(t.nbytes for t in read.values()) == len(good) - 8 - int.from_bytes(good[:8], "little")


@given(st.binary(max_size=64))
def test_random_bytes_are_refused(noise):
    with pytest.raises(ProtocolError):
        loads(noise)


# ---------------------------------------------------------------------------------------------------- frames


@given(
    st.lists(st.binary(max_size=40) | st.none(), max_size=5),
    st.integers(1, 9),
    st.lists(st.integers(1, 30), min_size=1),
)
def test_frames_may_be_cut_anywhere(events, payload, cuts):
    """``events`` are messages and heartbeats (None), each message framed by ``payload`` bytes, cut into ``cuts``."""
    stream = b""
    for event in events:
        if event is None:
            stream += frame(Kind.BEAT)
            continue
        *parts, last = [event[at : at + payload] for at in range(0, len(event), payload)] or [b""]
        for part in parts:
            stream += frame(Kind.DATA, part) + frame(Kind.BEAT)
        stream += frame(Kind.LAST, last)
    decoder, seen, at = Frames(), [], 0
    while at < len(stream):
        size = cuts[at % len(cuts)]
        seen += decoder.feed(stream[at : at + size])
        at += size
    assert [event for kind, event in seen if kind is Kind.LAST] == [event for event in events if event is not None]
    assert seen == Frames().feed(stream)


@pytest.mark.parametrize("size", [0, 1, FRAME_BYTES - 1, FRAME_BYTES, FRAME_BYTES + 1, 3 * FRAME_BYTES])
def test_a_message_is_cut_into_frames_of_at_most_a_mebibyte(size):
    data = bytes(range(251)) * (size // 251 + 1)
    parts = list(frames(data[:size]))
    assert all(len(part) <= 5 + FRAME_BYTES for part in parts)
    assert len(parts) == max(1, -(-size // FRAME_BYTES))
    decoder = Frames()
    assert [decoder.feed(part) for part in parts] == [[]] * (len(parts) - 1) + [[(Kind.LAST, data[:size])]]


@pytest.mark.parametrize(
    ("stream", "says"),
    [
        (b"\x03\0\0\0\0", "unknown kind 3"),
        (b"\xff\0\0\0\0", "unknown kind 255"),
        (b"\x00\x00\x10\x00\x01", "DATA frame of 1048577 bytes"),
        (b"\x01\xff\xff\xff\xff", "LAST frame of 4294967295 bytes"),
        (b"\x00\0\0\0\0", "DATA frame of 0 bytes"),
        (b"\x02\0\0\0\x01x", "BEAT frame of 1 bytes"),
        (frame(Kind.DATA, b"12345") + frame(Kind.LAST, b"6789"), "more than 8 bytes"),
        (frame(Kind.BEAT) + frame(Kind.LAST, b"123456789"), "more than 8 bytes"),
    ],
)
def test_a_bad_frame_is_refused_at_its_head_and_ever_after(stream, says):
    decoder = Frames(limit=8)
    with pytest.raises(ProtocolError, match=says):
        [decoder.feed(stream[at : at + 1]) for at in range(len(stream))]
    with pytest.raises(ProtocolError, match=says):
        decoder.feed(frame(Kind.LAST, b"good"))


def test_a_large_message_is_not_copied_more_than_it_must_be():
    """Peaks, not times: the frames one by one, one buffer in the decoder, and views of that buffer in ``loads``."""
    tensor = torch.zeros(16 << 20, dtype=torch.uint8)
    tracemalloc.start()
    try:
        data = dumps(Message({}, tensor))
        assert (
            tracemalloc.get_traced_memory()[1] < 1.1 * tensor.nbytes
        )  # Python's own; safetensors has one more for a while
        base = tracemalloc.get_traced_memory()[0]
        decoder, events = Frames(), []
        for part in frames(data):
            events += decoder.feed(part)
        [(_, received)] = events
        out = loads(received).tree
        assert tracemalloc.get_traced_memory()[1] - base < 1.3 * tensor.nbytes
    finally:
        tracemalloc.stop()
    assert torch.equal(out, tensor)


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for file_name, content in _golden_files().items():
        (GOLDEN / file_name).write_bytes(content)
