"""The network with real p2pd on loopback: streams, deaths, silence, processes and sockets left behind."""

from __future__ import annotations

import asyncio
import gc
import glob
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hivemind.utils.multiaddr import Multiaddr

from kwflow.errors import BudgetError, KwargError, NoRoute, WorkerFailed
from kwflow.swarm import hivemind, streams
from kwflow.swarm.directory import Directory, WorkerRecord, announced, models
from kwflow.swarm.hivemind import Node
from kwflow.swarm.local import LocalSwarm
from kwflow.wire.channel import call
from kwflow.wire.frames import Kind, frame
from kwflow.wire.loop import run
from kwflow.wire.message import Message, dumps
from tests.doubles.processes import living, until

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(120)]

ECHO = [sys.executable, str(Path(__file__).parents[1] / "doubles" / "echo_worker.py"), "echo"]
NOBODY = "/ip4/127.0.0.1/tcp/9/p2p/12D3KooWSpGxBTHJsv2cJC61QrZvKqL1VxED7v92GX1HtHudyZDJ"


def echo_swarm(spans: list[tuple[int, int]], function: bytes = b"") -> LocalSwarm:
    swarm = LocalSwarm("echo", ECHO, threads=1, function=function, timeout=60.0)
    swarm.start(spans)
    return swarm


def sockets(pid: int) -> set[str]:
    """Of a process; of ours, those of a swarm that other tests share too."""
    return set(glob.glob(f"/tmp/kwflow-{pid}-*"))


@pytest.fixture(scope="module")
def swarm() -> Iterator[LocalSwarm]:
    """Three echoing workers; tests that end one end the last."""
    with echo_swarm([(0, 10), (10, 20), (20, 30)]) as swarm:
        yield swarm


@pytest.fixture(scope="module")
def client(swarm: LocalSwarm) -> Iterator[Node]:
    node = run(Node.start(own_session=True, client=True, initial_peers=swarm.peers, silence=2.5), 20)
    yield node
    run(node.stop(), 10)
    assert not living(pid=node.daemon.pid) and node.daemon.control not in sockets(os.getpid())


async def counts(node: Node, peer: str) -> dict[str, int]:
    channel = await node.open(peer)
    try:
        return (await channel(Message({"do": "count"}))).meta
    finally:
        await channel.aclose()


# ---- messages --------------------------------------------------------------------------------------------------------


def test_round_trip(swarm: LocalSwarm, client: Node) -> None:
    async def work() -> None:
        channel = await client.open(swarm.workers[0].addrs[0])
        assert channel.peer == swarm.workers[0].peer
        tree = {
            "hidden": torch.randn(2, 3, 576),
            "mask": torch.ones(2, 3, dtype=torch.bool),
            "half": torch.ones(3).bfloat16(),
        }
        for step in range(3):
            reply = await call(channel, Message({"step": step}, tree))
            assert reply.meta == {"step": step}
            assert all(torch.equal(reply.tree[name], tree[name]) for name in tree)
        before = channel.bytes_sent, channel.bytes_received
        await channel(Message({"step": 3}, {"hidden": torch.zeros(1, 1, 576)}))
        for used, now in zip(before, (channel.bytes_sent, channel.bytes_received), strict=True):
            assert 4 * 576 < now - used <= 4 * 576 + 200
        await channel.aclose()
        assert channel.closed
        with pytest.raises(WorkerFailed, match="closed"):
            await channel(Message())

    run(work(), 20)


def test_64_megabytes_both_ways_do_not_hold_up_others(swarm: LocalSwarm, client: Node) -> None:
    async def work() -> None:
        large, small = await client.open(swarm.workers[0].peer), await client.open(swarm.workers[0].peer)
        sent = torch.randn(16 << 20)
        moving = asyncio.create_task(large(Message(tree=sent)))
        slowest = 0.0
        while not moving.done():
            began = time.monotonic()
            await small(Message())
            slowest = max(slowest, time.monotonic() - began)
        assert torch.equal((await moving).tree, sent)
        assert slowest < 2.5  # the client's silence: a beat would have come in time
        print(f"64 MB both ways; a small request beside it took {1000 * slowest:.0f} ms at most")
        await large.aclose()
        await small.aclose()

    run(work(), 60)


def test_requests_on_one_channel_take_turns(swarm: LocalSwarm, client: Node) -> None:
    async def work() -> None:
        channel = await client.open(swarm.workers[0].peer)
        replies = await asyncio.gather(*(channel(Message({"n": n})) for n in range(20)))
        assert [reply.meta["n"] for reply in replies] == list(range(20))
        await channel.aclose()

    run(work(), 20)


def test_errors_come_back_and_the_channel_stays(swarm: LocalSwarm, client: Node) -> None:
    async def work() -> None:
        channel = await client.open(swarm.workers[0].peer)
        with pytest.raises(KwargError, match="steer"):
            await call(channel, Message({"do": "refuse"}))
        with pytest.raises(WorkerFailed, match="RuntimeError: a bug of the worker's"):
            await call(channel, Message({"do": "crash"}))
        assert (await call(channel, Message({"still": True}))).meta == {"still": True}
        await channel.aclose()

    run(work(), 20)


def test_request_over_the_limit_is_refused_readably(swarm: LocalSwarm, client: Node) -> None:
    async def work() -> None:
        channel = await client.open(swarm.workers[0].peer)
        with pytest.raises(BudgetError, match="limit of 83886080 bytes"):
            await call(channel, Message(tree=torch.zeros(32 << 20)))
        assert channel.closed
        again = await client.open(swarm.workers[0].peer)
        assert (await call(again, Message({"ok": 1}))).meta == {"ok": 1}
        await again.aclose()

    run(work(), 30)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (frame(Kind.LAST, b"not a message at all"), "cut short"),
        (b"\x09\x00\x00\x00\x01x", "unknown kind 9"),
        (frame(Kind.LAST, b"{}") * 3, "before the reply"),
        (frame(Kind.LAST, dumps(Message())).replace(b'\\"v\\":1', b'\\"v\\":7'), "version 7; version 1 is spoken here"),
    ],
)
def test_broken_bytes_are_answered(
    swarm: LocalSwarm, client: Node, data: bytes, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        channel = await client.open(swarm.workers[0].peer)
        async with asyncio.timeout(5):
            with monkeypatch.context() as patched:
                patched.setattr(streams, "frames", lambda message: iter([data]))  # of this side
                answer = (await channel(Message())).meta["error"]
        assert answer["type"] == "ProtocolError" and said in answer["message"]
        if "kind" in said or "before" in said:  # the frames themselves are broken: nothing that comes after can be read
            async with asyncio.timeout(5):
                while not channel.closed:
                    await asyncio.sleep(0.005)
        await channel.aclose()

    run(work(), 20)
    assert run(counts(client, swarm.workers[0].peer), 10)["open"] >= 1  # it still serves


def test_unasked_reply_breaks_the_channel() -> None:
    async def work() -> None:
        def speak(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(frame(Kind.LAST, dumps(Message())))
            writer.close()

        async with await asyncio.start_server(speak, "127.0.0.1") as server:
            channel = streams.StreamChannel("peer", *await asyncio.open_connection(*server.sockets[0].getsockname()))
            async with asyncio.timeout(5):
                while not channel.closed:
                    await asyncio.sleep(0.005)
            with pytest.raises(WorkerFailed, match="no request"):
                await channel(Message())
            await channel.aclose()

    run(work(), 10)


# ---- who goes away ---------------------------------------------------------------------------------------------------


def test_cancelled_caller_closes_the_channel_and_the_work(swarm: LocalSwarm, client: Node) -> None:
    peer = swarm.workers[0].peer
    before = run(counts(client, peer), 10)

    async def work() -> None:
        channel = await client.open(peer)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await channel(Message({"do": "sleep", "seconds": 60}))
        assert channel.closed

    run(work(), 20)
    until(lambda: run(counts(client, peer), 10) == {"open": before["open"], "cancelled": before["cancelled"] + 1})


def test_abandoned_channel_closes_its_connection(swarm: LocalSwarm, client: Node) -> None:
    peer = swarm.workers[0].peer
    channel = run(client.open(peer), 10)
    assert run(counts(client, peer), 10)["open"] == 2
    del channel
    gc.collect()
    until(lambda: run(counts(client, peer), 10)["open"] == 1)


def test_own_lateness_does_not_count(swarm: LocalSwarm, client: Node) -> None:
    async def work() -> None:
        channel = await client.open(swarm.workers[0].peer)
        asking = asyncio.create_task(channel(Message({"do": "sleep", "seconds": 4.5})))
        await asyncio.sleep(0.3)
        time.sleep(3.5)  # longer than the silence that we take
        assert (await asking).meta["seconds"] == 4.5
        await channel.aclose()

    run(work(), 20)


def test_a_worker_whose_loop_stands_still_is_silent(swarm: LocalSwarm, client: Node) -> None:
    async def work() -> float:
        channel = await client.open(swarm.workers[0].peer)
        began = time.monotonic()
        with pytest.raises(WorkerFailed, match=r"silent for 2\.5 s"):
            await channel(Message({"do": "hold", "seconds": 6}))
        took = time.monotonic() - began
        assert channel.closed
        return took

    assert 2.4 < run(work(), 20) < 6
    until(lambda: run(counts(client, swarm.workers[0].peer), 10)["open"] == 1)  # and it serves again


def test_stopped_worker(swarm: LocalSwarm, client: Node) -> None:
    worker = swarm.workers[1]

    async def work() -> None:
        channel = await client.open(worker.peer)
        swarm.pause(1)
        began = time.monotonic()
        with pytest.raises(WorkerFailed, match="silent"):
            await channel(Message())
        assert 2.0 < time.monotonic() - began < 6
        began = time.monotonic()
        with pytest.raises(WorkerFailed, match=r"did not answer a dial in 1 s"):
            await client.open(worker.peer, timeout=1.0)
        assert time.monotonic() - began < 2.0
        large = await client.open(swarm.workers[0].peer)  # others are served meanwhile
        assert (await large(Message({"n": 1}))).meta == {"n": 1}
        await large.aclose()
        swarm.resume(1)
        channel = await client.open(worker.peer)
        assert (await channel(Message({"n": 2}))).meta == {"n": 2}
        await channel.aclose()

    assert worker.addrs[0] in swarm.peers
    run(work(), 30)


def test_killed_worker_is_found_out_at_once(swarm: LocalSwarm, client: Node) -> None:
    worker = swarm.workers[2]

    async def work() -> float:
        idle, channel = await client.open(worker.peer), await client.open(worker.peer)
        asking = asyncio.create_task(channel(Message({"do": "sleep", "seconds": 60})))
        await asyncio.sleep(0.2)
        os.killpg(worker.pid, signal.SIGKILL)
        killed = time.monotonic()
        with pytest.raises(WorkerFailed, match="EOF"):
            await asking
        took = time.monotonic() - killed
        while not idle.closed:  # an idle channel knows too
            await asyncio.sleep(0.005)
        began = time.monotonic()
        with pytest.raises(WorkerFailed, match="cannot be dialled"):
            await client.open(worker.peer)
        assert time.monotonic() - began < 1.0
        await idle.aclose()
        return took

    took = run(work(), 20)
    assert took < 1.0
    print(f"EOF {1000 * took:.0f} ms after kill -9")
    swarm.kill(2)
    until(lambda: not living(group=worker.pid))
    assert not sockets(worker.pid)


def test_a_dead_worker_is_found_out_beside_a_stopped_one(swarm: LocalSwarm, client: Node) -> None:
    """p2pd looks for a dead peer's other addresses through all that it knows, the stopped one too."""
    stopped, dead = swarm.workers[1:]
    swarm.kill(2)
    swarm.pause(1)

    async def work() -> float:
        began = time.monotonic()
        with pytest.raises(WorkerFailed, match="cannot be dialled: connection refused$") as caught:
            await client.open(dead.peer)
        assert caught.value.peer == dead.peer
        return time.monotonic() - began

    try:
        took = run(work(), 20)
    finally:
        swarm.resume(1)
    assert stopped.alive and took < 2.0


# ---- where to dial ---------------------------------------------------------------------------------------------------


def test_peers_that_are_not_there(client: Node) -> None:
    before = sockets(os.getpid())

    async def work() -> None:
        with pytest.raises(WorkerFailed, match="worker tHudyZDJ cannot be dialled: connection refused$") as caught:
            await client.open(NOBODY)
        assert "/ip4/" in str(caught.value.__cause__)
        with pytest.raises(KwargError, match="/ip4/ADDRESS"):
            await client.open("/ip4/127.0.0.1/tcp/9")
        with pytest.raises(KwargError, match="/ip4/ADDRESS"):
            await client.open("nonsense")
        with pytest.raises(NoRoute, match="refused"):
            await Node.start(own_session=True, client=True, initial_peers=[NOBODY])

    run(work(), 30)
    until(lambda: sockets(os.getpid()) == before)  # the failed start left none


@pytest.mark.parametrize("listens", [True, False])
def test_a_slow_dial_goes_on_while_we_look_who_listens(listens: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    dials = list[str]()

    async def connect(control: str, peer: str, addrs: Any) -> None:
        dials.append("begun")
        try:
            await asyncio.sleep(0.6 if listens else 60)
            dials.append("done")
        except asyncio.CancelledError:
            dials.append("cancelled")
            raise

    async def dial() -> None:
        async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1") as server:
            port = server.sockets[0].getsockname()[1]
            if not listens:
                server.close()
            await hivemind.dial("", "peer", [Multiaddr(f"/ip4/127.0.0.1/tcp/{port}")])

    monkeypatch.setattr(hivemind, "connect", connect)
    if listens:
        asyncio.run(dial())
    else:
        with pytest.raises(ConnectionRefusedError):
            asyncio.run(dial())
    assert dials == ["begun", "done" if listens else "cancelled"]


def test_one_live_peer_of_several_is_enough(swarm: LocalSwarm) -> None:
    async def work() -> None:
        node = await Node.start(own_session=True, client=True, initial_peers=[NOBODY, *swarm.peers[:1]])
        channel = await node.open(swarm.workers[1].peer)  # by its id alone: found through the other
        assert (await channel(Message({"n": 1}))).meta == {"n": 1}
        await channel.aclose()
        await node.stop()

    run(work(), 30)


def test_defaults_are_closed(swarm: LocalSwarm, client: Node) -> None:
    assert client.addrs == []
    assert all(addr.startswith("/ip4/127.0.0.1/tcp/") for worker in swarm.workers for addr in worker.addrs)


def test_a_stream_that_ends_before_it_begins_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    """As when p2pd ends first."""

    async def work() -> None:
        node = await Node.start(own_session=True)
        try:
            await node.serve(lambda peer: pytest.fail("nothing was asked"))
            _, writer = await asyncio.open_unix_connection(node.daemon.handler)
            writer.close()
            await asyncio.sleep(0.2)
        finally:
            await node.stop()

    run(work(), 20)
    assert not [record for record in caplog.records if record.name == "asyncio"]


def test_a_port_in_use_is_refused(swarm: LocalSwarm) -> None:
    port = int(swarm.workers[0].addrs[0].split("/")[4])
    before = sockets(os.getpid())
    for listen, said in (("127.0.0.1", f"port {port}"), ("not-an-address", "not-an-address")):
        with pytest.raises(KwargError, match=said):
            run(Node.start(own_session=True, listen=listen, port=port), 20)
    assert sockets(os.getpid()) == before


# ---- the directory ---------------------------------------------------------------------------------------------------


def test_directory(swarm: LocalSwarm, client: Node) -> None:
    async def work() -> None:
        node = await Node.start(own_session=True, initial_peers=swarm.peers)
        record = WorkerRecord("some/model", node.peer_id, tuple(node.addrs), 3, 6, 8, "id", "0.1", 12.5)
        directory = Directory(client, "some/model", 8, period=0.2)
        assert directory.view() == ()
        async with announced(node, record):
            await directory.start()
            assert directory.view() == (record,)
            forged = {"kwflow/some/model/2": ("liar", {"start": 0, "stop": 10**9}), "kwflow/some/model/4": ("x", [1])}
            await node.store(forged, 30)
            other = replace(record, peer="somebody", addrs=("nonsense",), start=0, stop=2)
            async with announced(node, other):
                async with asyncio.timeout(5):
                    while len(directory.view()) < 2:
                        await asyncio.sleep(0.05)
                assert directory.view() == (other, record)
            assert [model.model for model in await models(client)] == ["some/model"]
        async with asyncio.timeout(5):
            while directory.view():
                await asyncio.sleep(0.05)
        await directory.stop()
        await node.stop()

    run(work(), 30)


def test_records_expire_and_are_renewed(client: Node, swarm: LocalSwarm) -> None:
    async def work() -> None:
        node = await Node.start(own_session=True, initial_peers=swarm.peers)
        await node.store({"kwflow/short": ("a", {"n": 1})}, 1.0)
        assert await client.get(["kwflow/short", "kwflow/none"]) == {"kwflow/short": {"a": {"n": 1}}}
        record = WorkerRecord("renewed", node.peer_id, tuple(node.addrs), 0, 1, 1)
        async with announced(node, record, ttl=1.0, period=0.3):
            async with asyncio.timeout(5):
                while await client.get(["kwflow/short"]):
                    await asyncio.sleep(0.05)
            assert node.peer_id in (await client.get(["kwflow/renewed/0"]))["kwflow/renewed/0"]
        await node.stop()

    run(work(), 30)


# ---- processes -------------------------------------------------------------------------------------------------------

OWNER = """
    import asyncio, os, signal, sys, time
    from kwflow.swarm.hivemind import Node
    from kwflow.wire.loop import run
    from kwflow.wire.message import Message

    signal.signal(signal.SIGINT, lambda *_: print("interrupted", flush=True))
    node = run(Node.start(own_session=True, client=True, initial_peers=sys.argv[1:]), 20)
    channel = run(node.open(sys.argv[1]), 10)
    print(node.daemon.pid, flush=True)
    for line in sys.stdin:
        match line.strip():
            case "ask":
                again = run(node.open(sys.argv[1]), 10)
                print(run(channel(Message({"n": 1})), 10).meta["n"] + again.closed, flush=True)
            case "fork":
                if not (child := os.fork()):
                    sys.exit(0)  # everything is finalized in the copy
                print(os.waitpid(child, 0)[1], flush=True)
            case "linger":
                if not (child := os.fork()):
                    time.sleep(30)
                    os._exit(0)
                print(child, flush=True)
"""


def test_owner_of_a_client_node(swarm: LocalSwarm) -> None:
    """An interrupt and a forked copy leave p2pd alive; kill -9 of its owner ends it, whoever was forked."""
    owner = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(OWNER), *swarm.peers],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
        start_new_session=True,
    )
    copy, stdin, stdout = None, owner.stdin, owner.stdout
    assert stdin is not None and stdout is not None

    def say(word: str) -> str:
        stdin.write(word + "\n")
        return stdout.readline().strip()

    try:
        p2pd = int(stdout.readline())
        assert os.getsid(p2pd) == p2pd
        assert say("ask") == "1"
        os.killpg(owner.pid, signal.SIGINT)
        assert stdout.readline().strip() == "interrupted"
        assert say("ask") == "1"
        assert say("fork") == "0"
        assert say("ask") == "1"
        copy = int(say("linger"))
        assert say("ask") == "1"
        owner.kill()
        took = until(lambda: not living(pid=p2pd))
        print(f"p2pd ended {1000 * took:.0f} ms after kill -9 of its owner")
        assert living(pid=copy) and not sockets(owner.pid)
    finally:
        owner.kill()
        if copy is not None:
            os.kill(copy, signal.SIGKILL)
        owner.wait(timeout=5)
        stdin.close()
        stdout.close()


def test_a_dropped_p2pd_is_an_error_that_says_so(swarm: LocalSwarm) -> None:
    before = sockets(os.getpid())

    async def work() -> None:
        node = await Node.start(own_session=True, client=True, initial_peers=swarm.peers)
        os.kill(node.daemon.pid, signal.SIGKILL)
        async with asyncio.timeout(5):
            while node.alive:
                await asyncio.sleep(0.005)
        with pytest.raises(NoRoute, match="p2pd has ended"):
            await node.open(swarm.workers[0].peer)
        await node.stop()

    run(work(), 20)
    assert sockets(os.getpid()) == before


def test_beats_are_published() -> None:
    assert streams.BEAT_SECONDS * 3 < streams.SILENCE_SECONDS == 5.0


def test_a_node_that_the_dht_forgot_everybody_of_asks_again():
    """As after the only known worker was stopped for a while: hivemind drops who does not answer once."""

    async def isolated_and_back() -> tuple[dict[str, object], dict[str, object]]:
        server = await Node.start(own_session=True)
        client = await Node.start(own_session=True, client=True, initial_peers=server.addrs)
        try:
            await server.store({"key": ("subkey", 1)}, 30)
            before = await client.get(["key"])
            table = client.dht.protocol.routing_table
            for node in list(table.uid_to_peer_id):
                del table[node]
            return before, await client.get(["key"])
        finally:
            await client.stop()
            await server.stop()

    before, after = run(isolated_and_back(), 30)
    assert before == after == {"key": {"subkey": 1}}
