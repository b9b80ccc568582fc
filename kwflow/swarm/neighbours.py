"""Links of a worker to the others that serve the same model, of those only that the directory names."""

from __future__ import annotations

from typing import Protocol

from kwflow.errors import WorkerFailed
from kwflow.swarm.directory import Store, learn
from kwflow.wire import channel
from kwflow.wire.message import Message


class Node(channel.Transport, Store, Protocol):
    """A node that dials and reads the directory."""


class Neighbours:
    """Links of a worker to others that serve the same model."""

    def __init__(self, node: Node, model: str):
        self._node, self._model = node, model
        self._pool, self._known = channel.Pool(node), set[str]()

    async def __call__(self, peer: str, layer: int, message: Message) -> Message:
        """Send to a worker of a layer; its reply. Raises WorkerFailed."""
        if peer not in self._known:
            self._known |= await learn(self._node, self._model, layer)
        if peer not in self._known:
            raise WorkerFailed(f"the directory knows no worker {peer[-8:]} of layer {layer}", peer=peer)
        return await self._pool(peer, message)

    async def aclose(self) -> None:
        await self._pool.aclose()
