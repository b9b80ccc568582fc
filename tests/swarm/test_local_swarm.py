"""Local swarms: workers that start together, report why not, are stopped and killed, and leave nothing behind."""

from __future__ import annotations

import contextlib
import glob
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import cloudpickle
import pytest
import torch

from kwflow.errors import KwargError, ModelError, SpanError, WorkerFailed
from kwflow.swarm.hivemind import Node
from kwflow.swarm.local import LocalSwarm, end_with_swarm, local_swarm, spans_of
from kwflow.wire.loop import run
from kwflow.wire.message import Message
from tests.doubles.processes import living, until

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(120)]

SCRIPT = str(Path(__file__).parents[1] / "doubles" / "echo_worker.py")


def make(model: str = "echo", function: bytes = b"", timeout: float = 60.0) -> LocalSwarm:
    """A swarm of echoing workers, none of them started."""
    return LocalSwarm(model, [sys.executable, SCRIPT, model], threads=1, function=function, timeout=timeout)


def sockets(pid: int) -> list[str]:
    return glob.glob(f"/tmp/kwflow-{pid}-*")


def ask(swarm: LocalSwarm, index: int, request: Message) -> Message:
    async def work() -> Message:
        node = await Node.start(own_session=True, client=True, initial_peers=swarm.peers)
        try:
            channel = await node.open(swarm.workers[index].peer)
            return await channel(request)
        finally:
            await node.stop()

    return run(work(), 30)


@pytest.fixture(scope="module")
def swarm() -> Iterator[LocalSwarm]:
    gain = 3.0
    with make(function=cloudpickle.dumps(lambda tree: tree * gain)) as swarm:
        swarm.start([(0, 2), (2, 4)])
        yield swarm
        pids = [worker.pid for worker in swarm.workers]
    for pid in pids:
        until(lambda pid=pid: not living(group=pid))
        assert not sockets(pid)


class Client:
    """A flow's peers, as a swarm sees them."""

    def __init__(self, *peers: str):
        self.peers, self.closed = peers, False

    def known(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(peer=peer) for peer in self.peers]

    def close(self) -> None:
        self.closed = True


def test_who_knows_no_others_is_closed_with_the_swarm() -> None:
    with make() as swarm:
        swarm.start([(0, 2)])
        peer = swarm.workers[0].peer
        only, more, elsewhere = Client(peer), Client(peer, "another"), Client(peer)
        for client, peers in ((only, swarm.peers), (more, swarm.peers), (elsewhere, ["/of/another"])):
            end_with_swarm(client, peers)
    assert (only.closed, more.closed, elsewhere.closed) == (True, False, False)


def test_the_bar_comes_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    class Shown:
        n = 0

        def update(self, more: int) -> None:
            self.n += more

    shown = Shown()
    monkeypatch.setattr("kwflow.swarm.local.bar", lambda *_, **__: contextlib.nullcontext(shown))
    with make() as swarm:
        swarm.start([(0, 2), (2, 4)])
    assert shown.n == 2, "a notebook keeps a bar that fell short"


def test_workers_start_together_and_know_each_other(swarm: LocalSwarm) -> None:
    first, second = swarm.workers
    assert (first.span, second.span) == ((0, 2), (2, 4))
    assert first.alive and second.alive and len(swarm.peers) == 2
    assert first.peer in swarm.peers[0] and second.peer in swarm.peers[1]
    for worker in swarm.workers:  # each leads a session of its own, which holds its p2pd
        assert os.getsid(worker.pid) == worker.pid
        assert len(living(group=worker.pid)) == 2
    assert "layers 0:2" in repr(swarm)


def test_a_function_of_ours_reaches_the_worker(swarm: LocalSwarm) -> None:
    reply = ask(swarm, 1, Message({"do": "call"}, torch.ones(2)))
    assert torch.equal(reply.tree, torch.full((2,), 3.0))


def test_pause_and_resume(swarm: LocalSwarm) -> None:
    swarm.pause(1)
    swarm.pause(1)
    assert swarm.workers[1].alive and swarm.workers[1].paused and len(swarm.peers) == 1
    swarm.resume(1)
    swarm.resume(1)
    assert not swarm.workers[1].paused and len(swarm.peers) == 2
    assert ask(swarm, 1, Message({"n": 1})).meta == {"n": 1}


def test_kill_and_add(swarm: LocalSwarm) -> None:
    victim = swarm.workers[0]
    swarm.kill(0)
    assert not victim.alive and len(swarm.peers) == 1
    until(lambda: not living(group=victim.pid))
    assert not sockets(victim.pid)
    swarm.kill(0)  # again does nothing
    for act in (swarm.kill, swarm.pause, swarm.resume):
        for wrong in (2, -3, (0, 2), victim):
            with pytest.raises(KwargError, match="numbered 0 to 1"):
                act(wrong)  # type: ignore[arg-type]
    added = swarm.add(0, 3)
    assert added is swarm.workers[2] and added.span == (0, 3) and len(swarm.peers) == 2
    assert ask(swarm, 2, Message({"n": 2})).meta == {"n": 2}


# ---- starts that fail ------------------------------------------------------------------------------------------------


def test_a_worker_that_cannot_serve_says_why() -> None:
    with make("broken") as swarm, pytest.raises(ModelError, match="no model folder at 'broken'") as caught:
        swarm.start([(0, 2)])
    assert "layers 0:2" in str(caught.value) and "its log" in str(caught.value)
    assert swarm.workers == []


def test_a_worker_that_dies_is_reported_with_its_last_words() -> None:
    with make("dies") as swarm, pytest.raises(WorkerFailed, match=r"(?s)exit code 3.*the last words"):
        swarm.start([(0, 2), (2, 4)])


def test_a_start_has_a_deadline() -> None:
    began = time.monotonic()
    with make("hangs", timeout=1.0) as swarm, pytest.raises(WorkerFailed, match="not ready in 1 s"):
        swarm.start([(0, 2)])
    assert time.monotonic() - began < 5.0


def test_what_is_asked_for_is_checked_first(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 5}')
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert spans_of(str(tmp_path), 2) == [(0, 2), (2, 5)]
    assert spans_of(str(tmp_path), 5) == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]
    assert spans_of(str(tmp_path), [(3, 5), (0, 3)]) == [(3, 5), (0, 3)]
    for workers in (0, 6, [], [(2, 2)], [(-1, 2)], 2.5, True, "2", [3, 5]):
        with pytest.raises(SpanError):
            local_swarm(tmp_path, workers)  # type: ignore[arg-type]
    with pytest.raises(KwargError, match="block_fn"):
        local_swarm(tmp_path, 1, block_fn=3)  # type: ignore[arg-type]


# ---- the end of the parent -------------------------------------------------------------------------------------------

PARENT = """
    import os, signal, sys, time
    from kwflow.swarm.local import LocalSwarm

    signal.signal(signal.SIGINT, lambda *_: print("interrupted", flush=True))
    swarm = LocalSwarm("echo", [sys.executable, sys.argv[1], "echo"], threads=1, function=b"", timeout=60.0)
    swarm.start([(0, 1), (1, 2)])
    print(*(worker.pid for worker in swarm.workers), flush=True)
    for line in sys.stdin:
        match line.strip():
            case "pause":
                swarm.pause(1)
                print(flush=True)
            case "alive":
                print(*(int(worker.alive) for worker in swarm.workers), flush=True)
            case "fork":
                if not (child := os.fork()):
                    sys.exit(0)  # the copy runs its exit handlers
                print(os.waitpid(child, 0)[1], flush=True)
            case "linger":
                if not (child := os.fork()):
                    time.sleep(30)
                    os._exit(0)
                print(child, flush=True)
            case "exit":
                break
"""


@pytest.mark.parametrize("ending", ["kill -9", "exit"])
def test_nothing_is_left_when_the_parent_ends(ending: str) -> None:
    """Neither an interrupt nor a fork ends the workers; the parent's end does, also of a paused one."""
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PARENT), SCRIPT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
        start_new_session=True,
    )
    copy, stdin, stdout = None, parent.stdin, parent.stdout
    assert stdin is not None and stdout is not None

    def say(word: str) -> str:
        stdin.write(word + "\n")
        return stdout.readline().strip()

    try:
        pids = [int(pid) for pid in stdout.readline().split()]
        assert all(len(living(group=pid)) == 2 for pid in pids)
        os.killpg(parent.pid, signal.SIGINT)
        assert stdout.readline().strip() == "interrupted"
        assert say("alive") == "1 1"
        assert say("fork") == "0"
        assert say("alive") == "1 1" and all(len(sockets(pid)) == 2 for pid in pids)
        say("pause")
        if ending == "exit":
            stdin.write("exit\n")
            assert parent.wait(timeout=10) == 0
        else:
            copy = int(say("linger"))
            parent.kill()
        for pid in pids:
            until(lambda pid=pid: not living(group=pid))
            until(lambda pid=pid: not sockets(pid))
    finally:
        parent.kill()
        if copy is not None:
            os.kill(copy, signal.SIGKILL)
        parent.wait(timeout=5)
        stdin.close()
        stdout.close()
