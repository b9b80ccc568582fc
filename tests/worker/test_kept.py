"""What a worker takes of what clients want kept: as its hash says, within its room, of each client its own."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
from torch import Tensor

from kwflow.kwargs.axes import axes
from kwflow.wire import loop
from kwflow.wire.message import Message, dumps, loads
from kwflow.wire.uploads import name_of
from kwflow.worker.server import Served
from tests.oracle import assert_bits
from tests.oracle.tiny import HIDDEN, random, span

D = HIDDEN
LORA = random(2, 8, D)


def served(**limits: int) -> Any:
    return Served(span("llama", 0, 2), **limits)


def ask(connection: Any, op: str, tree: Any = None, **meta: Any) -> Message:
    return loop.run(connection.handle(loads(dumps(Message({"op": op, **meta}, tree)))))


def keep(connection: Any, tensor: Tensor, chunk: int = 100, scope: str = "mine", **changed: Any) -> list[Message]:
    meta = {"scope": scope, "name": name_of(tensor), "shape": [*tensor.shape], "idle": 60.0, **changed}
    flat = tensor.reshape(-1)
    return [ask(connection, "keep", flat[at : at + chunk], at=at, **meta) for at in range(0, len(flat), chunk)]


def run(connection: Any, at: list[Any], scope: str = "mine", A: Any = None) -> Message:
    A = torch.empty(0, 0, 0) if A is None else A
    lora = {
        "self_attn.q_proj": {
            "A": axes(A, "layer rank in"),
            "B": axes(LORA.mT.contiguous(), "layer out rank"),
            "scale": 1.0,
        }
    }
    tree = {"hidden": random(1, 3, D), "kwargs": [["layers", {"lora": lora}]]}
    return ask(connection, "run", tree, span=[0, 2], kept={"scope": scope, "at": at})


def error(reply: Message) -> Any:
    return reply.meta.get("error", {})


def test_a_request_takes_what_is_kept_and_its_parts() -> None:
    connection = served().accept("")
    assert [reply.meta for reply in keep(connection, LORA)] == [{"kept": False}] * 5 + [{"kept": True}]
    want = run(connection, [], A=LORA)
    assert_bits(run(connection, [[1, name_of(LORA)]]).tree[0], want.tree[0])
    whole = torch.cat([random(2, 3, D), LORA, LORA], 1)
    keep(connection, whole)
    part = [[0, 2], [3, 8], [0, D]]
    assert_bits(run(connection, [[1, name_of(whole), part]]).tree[0], want.tree[0])


def test_a_name_is_the_hash() -> None:
    content = b"bfloat16 6 [2, 3]\n" + bytes(12)
    assert name_of(torch.zeros(2, 3, dtype=torch.bfloat16)) == hashlib.sha256(content).hexdigest()
    assert len({name_of(t) for t in (torch.zeros(6), torch.zeros(2, 3), torch.zeros(6, dtype=torch.int32))}) == 3


def test_a_liar_stores_nothing() -> None:
    worker = served()
    connection = worker.accept("")
    *_, last = keep(connection, LORA, name=name_of(random(2, 8, D, seed=5)))
    assert "another hash" in error(last)["message"] and worker.kept.bytes() == 0
    connection.close()


def test_others_cannot_name_it() -> None:
    worker = served()
    mine, theirs = worker.accept(""), worker.accept("")
    keep(mine, LORA)
    assert error(run(theirs, [[1, name_of(LORA)]], scope="theirs"))["type"] == "NotKept"
    ask(theirs, "drop", scope="theirs", names=[name_of(LORA)])
    assert not error(run(mine, [[1, name_of(LORA)]]))
    ask(theirs, "drop", scope="mine", names=[name_of(LORA), 3])
    assert error(run(mine, [[1, name_of(LORA)]]))["type"] == "NotKept" and worker.kept.bytes() == 0


def test_room_is_taken_before_anything_comes_and_given_back() -> None:
    size = LORA.nbytes
    worker = served(keep_bytes=2 * size, keep_client_bytes=size)
    one, two, three = (worker.accept("") for _ in range(3))
    meta = {"name": name_of(LORA), "shape": [2, 8, D], "idle": 60.0, "at": 0}
    for connection, scope in ((one, "a"), (two, "b")):
        assert not error(ask(connection, "keep", LORA.reshape(-1)[:1], scope=scope, **meta))
    assert worker.kept.bytes() == 2 * size
    for scope in ("a", "c"):
        assert error(ask(three, "keep", LORA.reshape(-1)[:1], scope=scope, **meta))["type"] == "WorkerFull"
    one.close()
    assert worker.kept.bytes() == size
    assert not error(ask(three, "keep", LORA.reshape(-1)[:1], scope="c", **meta))
    huge = {**meta, "shape": [1 << 40], "scope": "d"}
    assert error(ask(one, "keep", LORA.reshape(-1)[:1], **huge))["type"] == "WorkerFull"


@pytest.mark.parametrize(
    "changed",
    [{"scope": ""}, {"scope": "x" * 65}, {"name": "abc"}, {"shape": [-1]}, {"shape": 3}, {"shape": [2.0]}]
    + [{"idle": 0}, {"idle": "long"}, {"idle": float("nan")}, {"name": None}],
)
def test_what_is_malformed_is_refused(changed: dict[str, Any]) -> None:
    worker = served()
    first, *_ = keep(worker.accept(""), LORA, **changed)
    assert error(first)["kind"] == "caller" and worker.kept.bytes() == 0


def test_chunks_follow_one_another() -> None:
    worker = served()
    meta = {"scope": "mine", "name": name_of(LORA), "shape": [2, 8, D], "idle": 60.0}
    flat = LORA.reshape(-1)
    for wrong in (flat[:5], flat.double()[5:], flat[1:], torch.ones(5, 5)):
        connection = worker.accept("")
        assert not error(ask(connection, "keep", flat[:5], at=0, **meta))
        at = 5 if wrong.dtype is torch.float64 or len(wrong) > 5 or wrong.dim() == 2 else 6
        assert error(ask(connection, "keep", wrong, at=at, **meta))["kind"] == "caller"
        connection.close()
    assert worker.kept.bytes() == 0


@pytest.mark.parametrize(
    "at",
    [3, [[1]], [["1", "x"]], [[9, "x" * 64]], [[-1, "x" * 64]], [[1, "NAME", 3]], [[1, "NAME", [[0, 2]]]]]
    + [[[1, "NAME", [[0, 2], [0, 9], [0, 1]]]], [[1, "NAME", [[0, 2], [-1, 2], [0, 1]]]]],
)
def test_malformed_names_in_a_request_are_refused(at: Any) -> None:
    connection = served().accept("")
    keep(connection, LORA)
    named = [[name_of(LORA) if one == "NAME" else one for one in entry] for entry in at] if at != 3 else at
    assert error(run(connection, named))["kind"] == "caller"
