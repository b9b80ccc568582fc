"""libp2p and the DHT, by hivemind: a ``Node`` opens channels to workers, serves them, and keeps records.

The only module that imports hivemind. Of it, ``P2P`` attached to a p2pd of ours and ``DHTNode`` run in the caller's
event loop; messages go over binary streams with kwflow's own frames (``streams``). No torch.nn, no models.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.resources import files
from typing import Any, Self

from hivemind.dht.node import DHTNode
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError, read_pbmsg_safe, write_pbmsg
from hivemind.proto import p2pd_pb2 as _p2pd_pb2
from hivemind.utils.multiaddr import Multiaddr
from hivemind.utils.multiaddr.exceptions import Error as MultiaddrError

from kwflow.errors import KwargError, KwflowError, NoRoute, WorkerFailed
from kwflow.swarm.p2pd import Daemon
from kwflow.swarm.streams import BUFFER_BYTES, SILENCE_SECONDS, StreamChannel, answer_stream
from kwflow.wire.channel import DIAL_SECONDS, Accept
from kwflow.wire.message import LIMITS, Limits

PROTOCOL = "kwflow/1"
MAX_ASKED = 32  # nodes asked at once to get back into the DHT
LOOK_SECONDS = 0.25  # of a dial, until we look ourselves whether anybody listens
p2pd_pb2: Any = _p2pd_pb2  # its names are made at import: no checker sees them

log = logging.getLogger(__name__)
Record = tuple[str, Any]  # subkey, value
Late = Callable[[asyncio.StreamReader, asyncio.StreamWriter], tuple[Any, Any]]


class Node:
    """One libp2p host with its p2pd, and one DHT node, in the running event loop.

        node = await Node.start(own_session=True, client=True, initial_peers=swarm.peers)
        channel = await node.open(peer)                     # a kwflow.wire.channel.Channel

    It is a ``kwflow.wire.channel.Transport`` and a ``kwflow.swarm.directory.Store``.
    """

    def __init__(self, daemon: Daemon, p2p: Any, dht: DHTNode, addrs: Sequence[str], silence: float):
        self.peer_id, self.addrs = p2p.peer_id.to_base58(), list(addrs)
        self.daemon, self._p2p, self.dht, self._silence = daemon, p2p, dht, silence
        self._book: dict[str, tuple[Multiaddr, ...]] = {}
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[Any]] = set()
        self._opened: weakref.WeakSet[StreamChannel] = weakref.WeakSet()

    @classmethod
    async def start(
        cls,
        *,
        listen: str | None = "127.0.0.1",
        port: int = 0,
        initial_peers: Sequence[str] = (),
        client: bool = False,
        public: bool = False,
        own_session: bool,
        dial_timeout: float = DIAL_SECONDS,
        silence: float = SILENCE_SECONDS,
    ) -> Self:
        """Start p2pd and join the DHT (measured: 0.4 s).

        A client listens nowhere and stores nothing for others. Only ``public`` asks for UPnP, relays and auto-NAT.
        Raises NoRoute when peers are given and none answers, KwargError when it cannot listen as told, KwflowError when
        p2pd does not start.
        """
        contacts = [parse_peer(peer) for peer in initial_peers]
        options = {name: int(public) for name in ("natPortMap", "autonat", "relay", "autoRelay")}
        options |= {"dhtClient": 1} if client else {"dhtServer": 1}
        options |= {"b": 0, "tls": 1, "relayHopLimit": 0, "idleTimeout": "20s"}
        if client or listen is None:
            options["noListenAddrs"] = 1
        else:
            options["hostAddrs"] = f"/ip{6 if ':' in listen else 4}/{listen}/tcp/{port}"
            _check_free(listen, port)
        daemon = Daemon(str(files("hivemind.hivemind_cli") / "p2pd"), options, own_session=own_session)
        p2p = None
        try:
            await daemon.ready()
            p2p = await P2P.replicate(Multiaddr(f"/unix{daemon.control}"))
            addrs = [str(addr) for addr in await p2p.get_visible_maddrs()] if "hostAddrs" in options else []
            reached = await _reach(daemon, contacts, dial_timeout)
            dht = await _join(p2p, reached, client)
        except BaseException as error:
            if p2p is not None:
                await p2p.shutdown()
            await daemon.stop()
            if isinstance(error, OSError | P2PDaemonError):
                raise KwflowError(f"cannot start p2pd: {error}") from error
            raise
        node = cls(daemon, p2p, dht, addrs, silence)
        node._book.update({peer: (addr,) for peer, addr in contacts})
        return node

    @property
    def alive(self) -> bool:
        """Whether this node's own p2pd runs."""
        return self.daemon.alive

    def learn(self, peer: str, addrs: Iterable[str]) -> None:
        """Remember where a peer says it listens; ``open`` then needs its id only. What does not read is left out."""
        parsed = []
        for addr in addrs:
            with suppress(KwargError):
                parsed.append(parse_peer(addr))
        self._book[peer] = tuple(where for owner, where in parsed if owner == peer)

    async def open(self, peer: str, *, timeout: float = DIAL_SECONDS, limits: Limits = LIMITS) -> StreamChannel:
        """Open a channel to a peer, named by its id or by a full multiaddr; done when it has said its first byte.

        Raises WorkerFailed when it cannot be dialled, does not serve, or says nothing within ``timeout`` seconds.
        """
        if peer.startswith("/"):
            peer, addr = parse_peer(peer)
            self._book.setdefault(peer, (addr,))
        if not self.alive:
            raise NoRoute("this process's own p2pd has ended; connect again")
        try:
            known = _id_bytes(peer)
        except ValueError as error:
            raise KwargError(f"a peer is its id or /ip4/ADDRESS/tcp/PORT/p2p/ID, got {peer!r}") from error
        channel = None
        try:
            async with asyncio.timeout(timeout):
                if addrs := self._book.get(peer):
                    await dial(self.daemon.control, peer, addrs)
                ask = p2pd_pb2.StreamOpenRequest(peer=known, proto=[PROTOCOL])
                reader, writer = await _ask(self.daemon.control, type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=ask)
                channel = StreamChannel(peer, reader, writer, limits=limits, silence=self._silence)
                await channel.heard()
            self._opened.add(channel)
            return channel
        except BaseException as error:
            if channel is not None:
                await channel.aclose()
            if isinstance(error, TimeoutError):
                raise WorkerFailed(f"worker {peer[-8:]} did not answer a dial in {timeout:g} s", peer=peer) from None
            if isinstance(error, OSError | EOFError):
                raise WorkerFailed(f"worker {peer[-8:]} cannot be dialled: {_reason(error)}", peer=peer) from error
            raise

    async def serve(self, accept: Accept, *, limits: Limits = LIMITS, late: Late | None = None) -> None:
        """Answer streams from now on: ``accept(remote peer id)`` gives each its connection, closed when it ends.

        ``late``: wraps a stream's reader and writer, for faults.
        """

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._serving.add(task)
            try:
                await read_pbmsg_safe(reader, about := p2pd_pb2.StreamInfo())
                writer.transport.set_write_buffer_limits(high=BUFFER_BYTES)
                ends = (reader, writer) if late is None else late(reader, writer)
                await answer_stream(accept(PeerID(about.peer).to_base58()), *ends, limits)
            except asyncio.CancelledError:  # by stop(); asyncio takes a handler that ends as cancelled for an error
                return
            except asyncio.IncompleteReadError:  # p2pd ended before it said whose stream this is
                return
            finally:
                writer.transport.abort()
                self._serving.discard(task)

        # NOTE [own listener] P2P.add_binary_stream_handler would do, but it reads in pieces of 64 KiB, keeps its
        # handlers running after shutdown, and puts its socket where a kill -9 leaves it for ever.
        self._server = await asyncio.start_unix_server(answer, self.daemon.handler, limit=BUFFER_BYTES)
        here = Multiaddr(f"/unix{self.daemon.handler}").to_bytes()
        ask = p2pd_pb2.StreamHandlerRequest(addr=here, proto=[PROTOCOL], balanced=False)
        _, writer = await _ask(self.daemon.control, type=p2pd_pb2.Request.STREAM_HANDLER, streamHandler=ask)
        writer.close()

    async def store(self, records: Mapping[str, Record], ttl: float) -> None:
        """Store ``{key: (subkey, value)}`` in the DHT for ``ttl`` seconds. Raises NoRoute if nobody took any."""
        keys = list(records)
        subkeys, values = [records[key][0] for key in keys], [records[key][1] for key in keys]
        done = await self.dht.store_many(keys, values, time.time() + ttl, subkeys=subkeys)
        if keys and not any(done.values()):
            raise NoRoute(f"no node of the DHT took the records {keys[0]!r} …")

    async def get(self, keys: Iterable[str]) -> dict[str, dict[str, Any]]:
        """Read the latest ``{key: {subkey: value}}`` from the DHT, without what has expired."""
        await self._rejoin()
        entries: dict[str, Any] = await self.dht.get_many(list(keys), sufficient_expiration_time=float("inf"))
        now = time.time()
        return {
            key: {
                subkey: item.value
                for subkey, item in entry.value.items()
                if isinstance(subkey, str) and item.expiration_time > now
            }
            for key, entry in entries.items()
            if entry is not None and isinstance(entry.value, dict)
        }

    async def _rejoin(self) -> None:
        """Ask again everybody we know of, when the DHT has no node left to ask.

        NOTE [isolation] hivemind forgets a node that does not answer once; one that was stopped for a while, and the
        last one to be known, would never be asked again, and the directory would stay empty for good.
        """
        protocol = self.dht.protocol
        if protocol.routing_table.uid_to_peer_id:
            return

        async def ask(peer: str, addrs: Iterable[Multiaddr]) -> None:
            with contextlib.suppress(OSError, EOFError):  # OSError: TimeoutError too
                async with asyncio.timeout(2.0):
                    await connect(self.daemon.control, peer, addrs)
                    await protocol.call_ping(PeerID.from_base58(peer))

        await asyncio.gather(*(ask(peer, addrs) for peer, addrs in list(self._book.items())[:MAX_ASKED]))
        self.dht.blacklist.clear()
        await asyncio.sleep(0.01)  # call_ping fills the table in a task of its own

    async def stop(self) -> None:
        """Close every stream, leave the DHT, end p2pd and remove its sockets."""
        for channel in tuple(self._opened):
            await channel.aclose()
        if self._server is not None:
            self._server.close()
        if serving := tuple(self._serving):
            for task in serving:
                task.cancel()
            await asyncio.wait(serving)
        if self.alive:
            try:
                async with asyncio.timeout(2.0):
                    await self.dht.shutdown()
            except TimeoutError:
                log.warning("the DHT did not let go in 2 s")
        await self._p2p.shutdown()
        await self.daemon.stop()


def _check_free(host: str, port: int) -> None:
    """libp2p shares a port that is in use (SO_REUSEPORT), and each of the two then gets some of the other's clients."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        raise KwargError(f"cannot listen on {host}, port {port}: {error}") from error


def parse_peer(peer: str) -> tuple[str, Multiaddr]:
    """Split a full multiaddr, ``/ip4/127.0.0.1/tcp/4001/p2p/12D3…``, into the peer's id and where it listens."""
    where, _, peer_id = peer.rpartition("/p2p/")
    try:
        _id_bytes(peer_id)
        return peer_id, Multiaddr(where)
    except (ValueError, MultiaddrError) as error:
        raise KwargError(f"a peer is given as /ip4/ADDRESS/tcp/PORT/p2p/ID, got {peer!r} ({error})") from error


def _id_bytes(peer_id: str) -> bytes:
    """A peer's id is the base58 of a multihash: a small public key itself, or the sha256 of a large one."""
    data = PeerID.from_base58(peer_id).to_bytes()
    if data[:2] not in (b"\x00\x24", b"\x12\x20"):
        raise ValueError(f"{peer_id!r} is not the id of a peer")
    return data


async def _ask(control: str, **request: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Ask our p2pd; the connection it was asked on becomes the stream, if one was opened. Raises OSError."""
    # NOTE [own request] hivemind's own stream_open and connect leave the socket open when they fail or are cancelled.
    reader, writer = await asyncio.open_unix_connection(control, limit=BUFFER_BYTES)
    try:
        writer.transport.set_write_buffer_limits(high=BUFFER_BYTES)
        await write_pbmsg(writer, p2pd_pb2.Request(**request))
        await read_pbmsg_safe(reader, response := p2pd_pb2.Response())
        if response.type == p2pd_pb2.Response.ERROR:
            raise ConnectionError(response.error.msg)
    except BaseException:
        writer.transport.abort()
        raise
    return reader, writer


async def connect(control: str, peer: str, addrs: Iterable[Multiaddr]) -> None:
    where = p2pd_pb2.ConnectRequest(peer=_id_bytes(peer), addrs=[addr.to_bytes() for addr in addrs])
    _, writer = await _ask(control, type=p2pd_pb2.Request.CONNECT, connect=where)
    writer.close()


async def dial(control: str, peer: str, addrs: Sequence[Multiaddr]) -> None:
    """Connect to a peer, or find out soon that nobody listens where it was. Raises OSError.

    NOTE [lookup] when a dial is refused, p2pd asks its own DHT for other addresses before it says so: 2 ms, but 5 s and
    more where one of those that it asks is stopped (measured). A worker that has moved is in the directory anyway.
    """
    dialling = asyncio.create_task(connect(control, peer, addrs))
    try:
        await asyncio.wait({dialling}, timeout=LOOK_SECONDS)
        if not dialling.done() and all(await asyncio.gather(*(_refused(addr) for addr in addrs))):
            raise ConnectionRefusedError("connection refused")
        await dialling
    finally:
        dialling.cancel()
        await asyncio.gather(dialling, return_exceptions=True)


async def _refused(addr: Multiaddr) -> bool:
    """Whether a TCP connection there is refused at once; False where it cannot be known."""
    match str(addr).strip("/").split("/"):
        case ["ip4" | "ip6", host, "tcp", port]:
            try:
                async with asyncio.timeout(LOOK_SECONDS):
                    _, writer = await asyncio.open_connection(host, int(port))
                writer.transport.abort()
            except ConnectionRefusedError:
                return True
            except OSError:  # TimeoutError too
                return False
    return False


def _reason(error: Exception) -> str:
    """Why a dial failed, without the addresses that p2pd lists: they stay with the cause."""
    last = str(error).strip().rpartition("\n")[2]
    return last.rpartition("] ")[2].rpartition(": ")[2] or type(error).__name__


async def _reach(daemon: Daemon, contacts: Sequence[tuple[str, Multiaddr]], timeout: float) -> list[Multiaddr]:
    """Dial all contacts at once; return those that answered. Raises NoRoute if none did."""

    async def dial(peer: str, addr: Multiaddr) -> str | None:
        try:
            async with asyncio.timeout(timeout):
                await connect(daemon.control, peer, [addr])
        except TimeoutError:
            return f"{addr}: no answer in {timeout:g} s"
        except (OSError, EOFError) as error:
            return f"{addr}: {error}"

    failures = await asyncio.gather(*(dial(peer, addr) for peer, addr in contacts))
    if contacts and all(failures):
        raise NoRoute("none of the given peers answers:\n  " + "\n  ".join(filter(None, failures)))
    return [
        Multiaddr(f"{addr}/p2p/{peer}")
        for (peer, addr), failure in zip(contacts, failures, strict=True)
        if failure is None
    ]


async def _join(p2p: P2P, reached: Sequence[Multiaddr], client: bool) -> DHTNode:
    try:
        return await DHTNode.create(
            p2p,
            initial_peers=reached,
            client_mode=client,
            bootstrap_timeout=1.0,
            cache_locally=False,
            cache_nearest=0,
            cache_on_store=False,
        )
    except RuntimeError as error:
        raise NoRoute(f"the peers given take no part in the directory: {error}") from error
