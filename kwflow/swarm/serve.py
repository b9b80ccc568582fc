"""A worker process: loads its span, joins the swarm, announces itself, serves until it is told to stop.

Puts the parts together for ``kwflow worker``; nothing but the command line imports it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import signal
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from kwflow.blocks.span import SpanSpec, with_block_fn
from kwflow.faults.faulty import Faulty
from kwflow.models.spans import load_span
from kwflow.swarm.directory import RENEW_SECONDS, TTL_SECONDS, WorkerRecord, announced
from kwflow.swarm.hivemind import Node
from kwflow.swarm.lifetime import Parent, end_group
from kwflow.swarm.neighbours import Neighbours
from kwflow.version import __version__
from kwflow.worker.kept import DEFAULT_KEEP_BYTES, DEFAULT_KEEP_CLIENT_BYTES
from kwflow.worker.server import Served


def load(
    model: str,
    start: int,
    stop: int,
    dtype: str,
    fn: Callable[..., Any] | None,
    *,
    quantize: str | None = None,
    device: str | None = None,
) -> SpanSpec:
    """Read the span's weights onto the device; put the worker's own block_fn around each block."""
    spec = load_span(model, start, stop, dtype=dtype, quantize=quantize, device=device)
    return spec if fn is None else with_block_fn(spec, fn, function_id(fn))


def function_id(fn: Callable[..., Any]) -> str:
    """A name and a hash of a function's code: part of the fingerprint, since it is part of the values."""
    if isinstance(fn, functools.partial):
        return f"{function_id(fn.func)}:{fn.args!r}:{fn.keywords!r}"[:200]
    code, name = getattr(fn, "__code__", None), getattr(fn, "__qualname__", type(fn).__qualname__)
    if code is None:
        return f"{fn.__module__}:{name}"
    cells = [repr(cell.cell_contents) for cell in fn.__closure__ or ()]
    consts = [c for c in code.co_consts if not hasattr(c, "co_code")]
    code_text = repr((code.co_code.hex(), consts, code.co_names, fn.__defaults__, fn.__kwdefaults__, cells))
    return f"{fn.__module__}:{name}:{hashlib.sha256(code_text.encode()).hexdigest()[:12]}"


async def serve(
    spec: SpanSpec,
    name: str,
    *,
    join: Sequence[str],
    listen: str,
    port: int,
    public: bool,
    kv_bytes: int,
    keep_bytes: int = DEFAULT_KEEP_BYTES,
    keep_client_bytes: int = DEFAULT_KEEP_CLIENT_BYTES,
    parent: Parent | None,
) -> None:
    """Serve a span as part of the model ``name`` until SIGINT or SIGTERM; say so to the parent, or on the terminal.

    With a parent it also fails as the parent asks (``kf.faults``); nobody else can ask for it.
    """
    served = Served(spec, model=name, kv_bytes=kv_bytes, keep_bytes=keep_bytes, keep_client_bytes=keep_client_bytes)
    faulty = None if parent is None else Faulty(served, end=end_group)
    node = await Node.start(listen=listen, port=port, initial_peers=join, public=public, own_session=parent is None)
    neighbours = served.neighbours = Neighbours(node, name)
    try:
        if faulty is None:
            await node.serve(served.accept)
        else:
            await node.serve(faulty.accept, late=faulty.late)
        record = WorkerRecord(
            model=name,
            peer=node.peer_id,
            addrs=tuple(node.addrs),
            start=spec.start,
            stop=spec.stop,
            layers=spec.identity["model_layers"],
            checkpoint=spec.identity["checkpoint"],
            version=__version__,
        )

        def announce(before: int = 0) -> AbstractAsyncContextManager[None]:
            # NOTE [gone] of two records the one that expires later wins: the new one of a worker that comes again
            return announced(node, record, ttl=TTL_SECONDS + before * 2 * RENEW_SECONDS)

        async with announce() if faulty is None else faulty.announced(announce):
            if parent is not None and faulty is not None:
                parent.ready(peer=node.peer_id, addrs=node.addrs, span=[spec.start, spec.stop])
                parent.obey(faulty.command)
            else:
                runs = " ".join(filter(None, [spec.identity["quantization"], str(spec.dtype)[6:], f"on {spec.device}"]))
                where = f"layers {spec.start}:{spec.stop} of {name}, {runs},"
                print(f"serving {where} at {node.addrs[0]}", flush=True)
            stop, loop = asyncio.Event(), asyncio.get_running_loop()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, stop.set)
            with contextlib.suppress(asyncio.CancelledError):
                await stop.wait()
    finally:
        served.close()
        await neighbours.aclose()
        await node.stop()
