"""A worker without a model, as a process of its own: what the network's tests talk to.

    python echo_worker.py MODEL --blocks 0:15 --supervised

It answers each request with the request; ``meta["do"]`` asks for more. MODEL says how the start goes wrong.
"""

import asyncio
import os
import sys
import time

from kwflow.swarm.lifetime import Parent

parent = Parent()
model, span = sys.argv[1], [int(bound) for bound in sys.argv[3].split(":")]

from kwflow.errors import KwargError, ModelError  # noqa: E402 - the parent first: the rest takes seconds
from kwflow.swarm.hivemind import Node  # noqa: E402
from kwflow.wire.message import Limits, Message  # noqa: E402

LIMITS = Limits(message_bytes=80 << 20)
counts = {"open": 0, "cancelled": 0}
function = parent.receive_function()


class Echo:
    def __init__(self) -> None:
        counts["open"] += 1

    async def handle(self, request: Message) -> Message:
        match request.meta.get("do"):
            case "sleep":
                try:
                    await asyncio.sleep(request.meta["seconds"])
                except asyncio.CancelledError:
                    counts["cancelled"] += 1
                    raise
            case "refuse":
                raise KwargError("flow got 'stear'; did you mean 'steer'?")
            case "crash":
                raise RuntimeError("a bug of the worker's")
            case "count":
                return Message(dict(counts))
            case "call":
                assert function is not None
                return Message(tree=function(request.tree))
            case "hold":
                time.sleep(request.meta["seconds"])  # on the loop: the worker itself falls silent
        return request

    def close(self) -> None:
        counts["open"] -= 1


async def main() -> None:
    node = await Node.start(own_session=False, initial_peers=parent.receive_peers())
    await node.serve(lambda remote: Echo(), limits=LIMITS)
    parent.ready(peer=node.peer_id, addrs=node.addrs, span=span)
    await asyncio.Event().wait()


try:
    if model == "broken":
        raise ModelError("no model folder at 'broken'")
    if model == "dies":
        print("the last words", file=sys.stderr, flush=True)
        os._exit(3)
    if model == "hangs":
        time.sleep(60)
    asyncio.run(main())
except ModelError as error:
    parent.failed(error)
