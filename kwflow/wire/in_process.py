"""A transport to workers of this process, through the same bytes as the network."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from kwflow.errors import KwflowError, WorkerFailed, to_wire
from kwflow.wire import frames, message
from kwflow.wire.channel import DIAL_SECONDS, Accept, Channel, Connection, Cut
from kwflow.wire.message import Message

# ---- in-process --------------------------------------------------------------------------------------------------


class InProcess:
    """A transport to workers in this process, through the same bytes as the network."""

    def __init__(self, accept: Mapping[str, Accept]):
        self._accept = dict(accept)

    async def open(self, peer: str, *, timeout: float = DIAL_SECONDS) -> Channel:
        if peer not in self._accept:
            raise WorkerFailed(f"no worker {peer!r} in this process", peer=peer)
        try:
            return _InProcessChannel(peer, self._accept[peer]("in-process"))
        except WorkerFailed as error:
            error.peer = error.peer or peer
            raise


class _InProcessChannel:
    def __init__(self, peer: str, connection: Connection):
        self.peer, self._connection = peer, connection
        self.bytes_sent = self.bytes_received = 0
        self.closed = False
        self._turn = asyncio.Lock()

    async def __call__(self, request: Message) -> Message:
        async with self._turn:
            if self.closed:
                raise WorkerFailed("the channel is closed", peer=self.peer)
            data = message.dumps(request)
            self.bytes_sent += len(data)
            try:
                reply = await self._connection.handle(message.loads(data))
            except KwflowError as error:
                reply = Message({"error": to_wire(error)})
            except Cut as cut:
                await self.aclose()
                return self._rest_of(cut.sent)
            answer = message.dumps(reply)
            self.bytes_received += len(answer)
            return message.loads(answer)

    def _rest_of(self, sent: bytes) -> Message:
        """What is read of a reply that was cut. Raises WorkerFailed, as a stream's end does."""
        for kind, payload in frames.Frames().feed(sent):
            if kind is frames.Kind.LAST:
                return message.loads(payload)
        raise WorkerFailed(f"worker {self.peer} closed the stream (EOF)", peer=self.peer)

    async def aclose(self) -> None:
        if not self.closed:
            self.closed = True
            self._connection.close()
