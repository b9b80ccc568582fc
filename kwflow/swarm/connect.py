"""Puts a Flow together: the client's part of a model, workers in this process or on a swarm, links and routes."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

import torch

from kwflow.client.flow import Flow
from kwflow.client.peers import KnownPeers, Links
from kwflow.client.routing import Serves
from kwflow.errors import (
    DeadlineError,
    KwargError,
)
from kwflow.swarm.local import end_with_swarm
from kwflow.wire import channel, loop
from kwflow.wire.in_process import InProcess
from kwflow.wire.message import Message
from kwflow.worker.server import Served

log = logging.getLogger(__name__)


class _Here:
    """A worker in this process, as routing sees it."""

    checkpoint = ""  # it is asked

    def __init__(self, peer: str, served: Served):
        self.peer, self.start, self.stop = peer, served.spec.start, served.spec.stop


def in_process(
    served: Sequence[Served],
    *,
    checkpoint: str = "",
    transport: Callable[[Mapping[str, channel.Accept]], channel.Transport] = InProcess,
    view: Callable[[], Sequence[Serves]] | None = None,
) -> KnownPeers:
    """Peers for workers of this process, through the same bytes as the network.

    ``transport``: what brings requests to them, made of what each accepts channels with. ``view``: whom routes know of;
    None: all of them.
    """

    async def again() -> Links:
        return _links_here(served, transport, view)

    return _known(_links_here(served, transport, view), checkpoint, again)


def _known(links: Links, checkpoint: str, again: Callable[[], Awaitable[Links]]) -> KnownPeers:
    return KnownPeers(
        links.transport,
        links.view,
        checkpoint=checkpoint,
        refreshed_at=links.refreshed_at,
        others=links.others,
        stop=links.stop,
        again=again,
    )


def _links_here(
    served: Sequence[Served],
    transport: Callable[[Mapping[str, channel.Accept]], channel.Transport],
    view: Callable[[], Sequence[Serves]] | None,
) -> Links:
    names = [f"here-{number:03d}" for number in range(len(served))]  # as long as what is shown of a peer id
    workers = [_Here(name, worker) for name, worker in zip(names, served, strict=True)]
    reach = transport({name: worker.accept for name, worker in zip(names, served, strict=True)})
    pool = channel.Pool(reach)

    async def neighbours(peer: str, layer: int, message: Message) -> Message:
        return await pool(peer, message)

    for worker in served:
        worker.neighbours = neighbours

    async def stop() -> None:
        await pool.aclose()
        for worker in served:
            worker.close()

    return Links(reach, view or (lambda: workers), stop=stop)


def connect(
    model: str | os.PathLike[str],
    peers: Sequence[str] | None = None,
    *,
    dtype: torch.dtype | str | None = None,
    quantize: str | None = None,
    device: torch.device | str | None = None,
    block_fn: Callable[..., torch.Tensor] | None = None,
    name: str | None = None,
    timeout: float = 30.0,
) -> Flow:
    """Connect to the workers of a model: a Flow over all its layers.

        flow = kf.connect(swarm.model, peers=swarm.peers)
        flow = kf.connect("smollm2-135m")                   # no peers: the same Flow in this process

    ``peers``: multiaddresses of some members of the swarm. ``dtype``: of this client's embeddings and head, and of the
    blocks in this process; workers have their own, and answer in the caller's. ``quantize`` (int8 or nf4), ``device``
    and ``block_fn``: in this process only. ``name``: what the swarm calls the model (``kwflow worker --name``), if not
    the last part of its path or id; of workers with that name, those with this client's weights are used.
    ``timeout``: seconds to join the swarm. A flow of a ``kf.local_swarm`` is closed with it.

    In a forked child (a web server's worker) the flow connects anew at its first call, and opens sessions of its own.
    Where the parent computed with several threads, torch itself hangs in the child until it is told
    ``torch.set_num_threads(1)`` there.

    Raises ModelError, KwargError, NoRoute, WorkerFailed, DeadlineError.
    """
    if peers is not None:
        for option, value in {"quantize": quantize, "device": device, "block_fn": block_fn}.items():
            if value is not None:
                raise KwargError(f"{option} belongs to the workers: start them with it (kf.local_swarm(…, {option}=…))")
    from kwflow.models.ends import ModelEnds
    from kwflow.models.files.checkpoint import Checkpoint, swarm_name

    ends = ModelEnds(model, dtype)
    if peers is None:
        from kwflow.models.spans import load_span

        spec = load_span(model, dtype=dtype, quantize=quantize, device=device)
        if block_fn is not None:
            from kwflow.blocks.span import with_block_fn

            spec = with_block_fn(spec, block_fn, getattr(block_fn, "__name__", repr(block_fn)))
        known = in_process([Served(spec, model=ends.name)])
    else:
        peers = [peers] if isinstance(peers, str) else list(peers)
        if not peers:
            raise KwargError("peers=[] names nobody; give addresses of the swarm, or None for blocks here")
        checkpoint = Checkpoint(ends.folder).checkpoint_id()
        join = functools.partial(_join, swarm_name(model, name), ends.layers, peers, timeout)

        async def joined() -> KnownPeers:
            return _known(await join(), checkpoint, join)

        known = loop.run(joined(), timeout + 5.0)
        end_with_swarm(known, peers)
    return Flow(ends, known, (0, ends.layers))


@contextlib.asynccontextmanager
async def _within(seconds: float, name: str) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise DeadlineError(f"the swarm of {name!r} could not be joined in {seconds:g} s (timeout=)") from error


async def _join(name: str, layers: int, peers: list[str], timeout: float) -> Links:
    from kwflow.swarm.directory import Directory, models
    from kwflow.swarm.hivemind import Node

    async with _within(timeout, name):
        node = await Node.start(initial_peers=peers, client=True, own_session=True)
        try:
            directory = Directory(node, name, layers)
            await directory.start()
        except BaseException:
            await node.stop()
            raise

    async def others() -> str:
        served = ", ".join(repr(model.model) for model in await models(node))
        return (
            f"nobody serves {name!r} in this swarm, which serves {served or 'no model'}; name= says what the swarm "
            f"calls a model, and peers which swarm it is"
        )

    async def stop() -> None:
        await directory.stop()
        await node.stop()

    return Links(node, directory.view, directory.refreshed_at, others, stop)
