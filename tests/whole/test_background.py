"""Tasks that are begun again whatever ended them, the end of a process in order, and forked children."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from kwflow import background
from kwflow.background import Background
from kwflow.errors import CallerError, SessionError, WorkerFailed
from kwflow.swarm import streams
from kwflow.swarm.directory import Directory, WorkerRecord, announced
from kwflow.wire import loop
from kwflow.wire.frames import Kind
from tests.doubles.processes import until
from tests.oracle import tiny

X = tiny.random(2, 3, tiny.HIDDEN)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "AGAIN_SECONDS", 0.01)


class Breaks:
    """Raises once, at its second call, what nobody expects."""

    def __init__(self, error: BaseException | None = None):
        self.calls, self._error = 0, error or ZeroDivisionError("nobody expects this")

    def __call__(self, *_: Any, **__: Any) -> None:
        self.calls += 1
        if self.calls == 2:
            raise self._error


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if "begun again" in record.message]


# ---- tasks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["an exception", "a cancellation by somebody else", "a cancellation from within"])
def test_a_task_that_was_ended_is_begun_again_until_it_is_stopped(
    how: str, soon: None, caplog: pytest.LogCaptureFixture
) -> None:
    async def work() -> None:
        breaks = Breaks(asyncio.CancelledError() if how.endswith("within") else None)

        async def forever() -> None:
            while True:
                if how.endswith("else"):
                    breaks.calls += 1
                else:
                    breaks()
                await asyncio.sleep(0.001)

        task = Background(forever, "a test's task")
        if how.endswith("else"):
            await asyncio.sleep(0.01)
            task._task.cancel()
        while not said(caplog):
            await asyncio.sleep(0.001)
        before = breaks.calls
        async with asyncio.timeout(5):
            while breaks.calls < before + 2:
                await asyncio.sleep(0.001)
        await task.stop()
        calls = breaks.calls
        await asyncio.sleep(0.05)
        assert breaks.calls == calls, "a stopped one is not revived"

    asyncio.run(work())
    assert len(said(caplog)) == 1 and said(caplog)[0].startswith("a test's task ended unexpectedly")


def test_a_task_that_is_stopped_in_the_pause_or_that_returns_is_not_begun_again(caplog: Any, soon: None) -> None:
    async def work() -> None:
        async def breaks() -> None:
            raise ZeroDivisionError

        async def returns() -> None:
            counted.append(1)

        counted: list[int] = []
        broken = Background(breaks, "a task")
        Background(returns, "another")
        while not said(caplog):
            await asyncio.sleep(0)
        await broken.stop()
        await asyncio.sleep(0.05)
        assert counted == [1]

    asyncio.run(work())
    assert len(said(caplog)) == 1


class Records:
    """A DHT in which nothing but what is told of here happens."""

    def __init__(self) -> None:
        self.reading, self.storing = Breaks(), Breaks()

    async def get(self, keys: Iterable[str]) -> dict[str, dict[str, Any]]:
        self.reading()
        return {}

    async def store(self, records: dict[str, tuple[str, Any]], ttl: float) -> None:
        self.storing()

    def learn(self, peer: str, addrs: Iterable[str]) -> None: ...


def test_the_directory_is_read_and_written_again_after_any_error(caplog: Any, soon: None) -> None:
    async def work() -> None:
        records = Records()
        directory = await Directory(records, "tiny", 4, period=0.01).start()
        async with announced(records, WorkerRecord("tiny", "me", (), 0, 4, 4), period=0.01), asyncio.timeout(5):
            while min(records.reading.calls, records.storing.calls) < 5:
                await asyncio.sleep(0.01)
        await directory.stop()

    asyncio.run(work())
    assert {one.partition(" ended")[0] for one in said(caplog)} == {
        "reading who serves 'tiny'",
        "renewing this worker's records",
    }


class Writer:
    """What a stream's other side would be sent."""

    def __init__(self, write: Callable[..., None] = lambda *_: None):
        self.sent, self.transport, self._write = list[bytes](), self, write

    def write(self, data: bytes) -> None:
        self._write()
        self.sent.append(data)

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None: ...


def test_a_stream_goes_on_beating(caplog: Any, soon: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "BEAT_SECONDS", 0.01)

    class Connection:
        def close(self) -> None: ...

    async def work() -> None:
        reader, writer = asyncio.StreamReader(), Writer(Breaks())
        serving = asyncio.create_task(streams.answer_stream(Connection(), reader, writer, streams.LIMITS))  # type: ignore[arg-type]
        async with asyncio.timeout(5):
            while len(writer.sent) < 3:
                await asyncio.sleep(0.01)
        assert {data[0] for data in writer.sent} == {Kind.BEAT}
        reader.feed_eof()
        await serving

    asyncio.run(work())
    assert said(caplog)


def test_a_channel_whose_reading_breaks_is_over_at_once() -> None:
    async def work() -> None:
        reader = asyncio.StreamReader()
        channel = streams.StreamChannel("a-peer", reader, Writer())  # type: ignore[arg-type]
        reader.set_exception(ZeroDivisionError("nobody expects this"))
        with pytest.raises(WorkerFailed, match="nobody expects this"):
            async with asyncio.timeout(1):
                await channel.heard()
        channel._dropped.detach()

    asyncio.run(work())


def test_the_network_thread_goes_on_whatever_a_task_raises(caplog: Any) -> None:
    async def leave() -> None:
        raise SystemExit(3)

    async def five() -> int:
        return 5

    network = loop.network_loop()
    with pytest.raises(SystemExit):
        loop.run(leave(), 5)
    network.call_soon_threadsafe(network.stop)
    until(lambda: sum("the network thread was ended" in record.message for record in caplog.records) == 2)
    assert loop.run(five(), 5) == 5 and loop.network_loop() is network


# ---- the end of the process ----------------------------------------------------------------------------------------

ENDS = """
    import os, signal, sys, threading
    import torch
    import kwflow as kf
    from tests.oracle import tiny

    def endless(params, hidden, /, *, block, **kwargs):
        while True:
            hidden = hidden @ hidden.mT @ hidden

    folder, how = sys.argv[1:]
    swarm = kf.local_swarm(folder, workers=2) if how in ("killed", "stopped") else None
    flow = kf.connect(folder, peers=swarm and swarm.peers, block_fn=endless if how == "interrupt" else None)
    hidden = torch.randn(256, 8, tiny.HIDDEN)

    def session():
        one = flow.session(320)
        with torch.no_grad():
            for _ in range(40):
                one.step(hidden)
        return one

    match how:
        case "error":  # its links are closed, as with a swarm, before its session is freed
            kept = session()
            flow.close()
            kept.step(hidden)
        case "interrupt":  # in the middle of a long computation
            threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT]).start()
            flow(hidden)
        case "killed":
            kept = session()
            swarm.kill(1)
            flow.options(timeout=1)(hidden)
        case "stopped":
            kept = session()
            swarm.pause(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "status", "last"),
    [
        ("error", 1, "SessionError"),
        ("interrupt", -signal.SIGINT, "KeyboardInterrupt"),
        pytest.param("killed", 1, "NoRoute", marks=[pytest.mark.swarm, pytest.mark.rest]),
        pytest.param("stopped", 0, "", marks=[pytest.mark.swarm, pytest.mark.rest]),
    ],
)
def test_a_script_ends_with_its_own_status(how: str, status: int, last: str) -> None:
    """Not with 134: a thread that Python ends in the middle of an operation on a tensor aborts the process."""
    command = [sys.executable, "-c", textwrap.dedent(ENDS), str(tiny.folder("llama")), how]
    run = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert run.returncode == status, run.stderr
    assert last in run.stderr and "terminate" not in run.stderr
    assert bool(last) or not run.stderr.replace("starting workers", "").strip(), run.stderr


def test_at_the_end_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_ending", True)
    with pytest.raises(CallerError, match="Python is ending"):
        loop.run(asyncio.sleep(0))


# ---- forked children -----------------------------------------------------------------------------------------------

fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
quiet = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # from Python 3.12 on


def forked(work: Callable[[], object], seconds: int = 20) -> int:
    """The status of a forked child that does some work."""
    if not (child := os.fork()):
        signal.alarm(seconds)  # a deadlock
        try:
            work()
        except BaseException:  # noqa: BLE001  what it prints is shown with the failure
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@fork
@quiet
def test_a_flow_of_this_process_survives_a_fork() -> None:
    """Whatever other threads do at that moment: they compute here without a pause."""
    flow = tiny.make_flow("llama", tiny.TWO)
    expected, over = flow(X), threading.Event()
    with torch.no_grad(), flow.session(8) as session:
        step = session.step(X)

        def child() -> None:
            assert torch.equal(flow(X), expected) and torch.equal(flow[1:3](X), flow[1:3](X))
            for use in (lambda: session.step(X), lambda: session.rollback(0), lambda: session.reorder([0, 1])):
                with pytest.raises(SessionError, match="before this process was forked"):
                    use()
            session.close()
            with torch.no_grad(), flow.session(8) as another:
                assert torch.equal(another.step(X), step)
            assert not forked(lambda: torch.testing.assert_close(flow(X), expected, rtol=0, atol=0))
            flow.close()

        def busy() -> None:
            while not over.is_set():
                assert torch.equal(flow.options(dtype="float64")(X), precise)

        precise = flow.options(dtype="float64")(X)
        others = [threading.Thread(target=busy) for _ in range(2)]
        for thread in others:
            thread.start()
        try:
            for _ in range(4):
                assert forked(child) == 0
        finally:
            over.set()
            for thread in others:
                thread.join()
        session.step(X)
        assert torch.equal(flow(X), expected)
    flow.close()
    assert not forked(lambda: pytest.raises(CallerError, flow, X).match("closed"))


@fork
@quiet
def test_links_that_cannot_be_made_anew_are_refused_in_a_child() -> None:
    flow = tiny.make_flow("llama")
    flow.peers._again = None  # type: ignore[attr-defined]
    assert not forked(lambda: pytest.raises(CallerError, flow, X).match("before the process was forked"))
    flow.close()


FORKS = """
    import gc, os, signal, sys
    import torch
    import kwflow as kf

    folder = sys.argv[1]
    X = torch.arange(6 * 32).view(2, 3, 32) / 100
    torch.set_grad_enabled(False)
    with kf.local_swarm(folder, workers=2) as swarm, kf.connect(folder, peers=swarm.peers) as flow:
        expected, session = flow(X), flow.session(8)
        step, daemon = session.step(X), flow.peers.pool.transport.daemon
        for ending in (sys.exit, os._exit):
            if not (child := os.fork()):
                signal.alarm(60)
                assert torch.equal(flow(X), expected)
                assert flow.peers.pool.transport.daemon.pid != daemon.pid
                with flow.session(8) as another:
                    assert torch.equal(another.step(X), step)
                del session
                gc.collect()
                ending(7)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
            assert daemon.alive and os.path.exists(daemon.control)
            assert torch.equal(flow(X), expected)
        session.step(X)
        assert not session.replays and all(worker.alive for worker in swarm.workers)
        print("unharmed")
"""


@fork
@pytest.mark.swarm
@pytest.mark.rest
def test_a_flow_of_a_swarm_survives_a_fork_and_so_do_its_parents_links() -> None:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", textwrap.dedent(FORKS)]
    run = subprocess.run(
        [*command, str(tiny.folder("llama"))], capture_output=True, text=True, timeout=200, check=False
    )
    assert run.stdout.strip() == "unharmed", run.stderr
    assert "Error" not in run.stderr and "destroyed" not in run.stderr
