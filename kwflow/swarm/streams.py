"""One open stream, from both sides: the client's channel and the worker's answer. Reads and writes asyncio streams.

Both ways go frames of at most 1 MiB. The worker's side beats once a second for as long as the stream is open, also
while it computes; a client that waits takes ``silence`` seconds without any byte as death, and EOF at once.
No torch.nn, no network library.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Iterator
from contextlib import suppress

from kwflow.background import Background
from kwflow.errors import BudgetError, KwflowError, ProtocolError, WorkerFailed, to_wire
from kwflow.wire.channel import Connection, Cut
from kwflow.wire.frames import FRAME_BYTES, Frames, Kind, frame, frames
from kwflow.wire.message import LIMITS, Limits, Message, dumps, loads

SILENCE_SECONDS = 5.0
BEAT_SECONDS = 1.0
REFUSED_SECONDS = 2.0  # for a client to read why its request is refused, and to close the stream
STALLED_SECONDS = 60.0  # a client that takes no byte of its reply for so long is gone
TICK_SECONDS = 0.25
BUFFER_BYTES = 1 << 18  # read at once, and written before a sender waits

log = logging.getLogger(__name__)


# ---- the client's side -----------------------------------------------------------------------------------


class _ReplyReader:
    """What has come from a worker: bytes, the reply that is awaited, and why no more will come."""

    def __init__(self, peer: str, limits: Limits):
        self.peer, self.received, self.quiet = peer, 0, 0.0
        self.over: WorkerFailed | None = None
        self.reply: asyncio.Future[bytearray] | None = None
        self.heard = asyncio.Event()  # the first byte: somebody serves this stream
        self._frames = Frames(limits.message_bytes)

    async def fill(self, reader: asyncio.StreamReader) -> None:
        try:
            while data := await reader.read(BUFFER_BYTES):
                self.received += len(data)
                self.quiet = 0.0
                self.heard.set()
                for kind, payload in self._frames.feed(data):
                    if kind is Kind.LAST:
                        self._deliver(payload)
            self.end(WorkerFailed(f"worker {self.peer[-8:]} closed the stream (EOF)", peer=self.peer))
        except ProtocolError as error:
            self.end(error)
        except OSError as error:
            self.end(WorkerFailed(f"the stream to worker {self.peer[-8:]} broke: {error}", peer=self.peer))
        except Exception as error:  # nobody reads this stream any more, whatever it was
            log.exception("reading from worker %s", self.peer[-8:])
            self.end(WorkerFailed(f"the stream to worker {self.peer[-8:]} broke: {error!r}", peer=self.peer))

    def _deliver(self, payload: bytearray) -> None:
        if self.reply is None or self.reply.done():
            raise ProtocolError(f"worker {self.peer[-8:]} sent a reply to no request", peer=self.peer)
        self.reply.set_result(payload)

    def end(self, why: WorkerFailed) -> None:
        self.over = self.over or why
        self.heard.set()
        if self.reply is not None and not self.reply.done():
            self.reply.set_exception(self.over)
            self.reply.exception()  # seen: the caller may be gone


class StreamChannel:
    """A channel on one open stream (a ``Channel``). Dropped without ``aclose``, it closes its stream too."""

    def __init__(
        self,
        peer: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        limits: Limits = LIMITS,
        silence: float = SILENCE_SECONDS,
    ):
        self.peer, self.bytes_sent = peer, 0
        self._replies, self._writer, self._limits, self._silence = _ReplyReader(peer, limits), writer, limits, silence
        self._turn = asyncio.Lock()
        # The task holds the reader, not the channel: a channel that nobody holds is collected, and its stream closed.
        self._filling = asyncio.create_task(self._replies.fill(reader), name=f"kwflow stream to {peer[-8:]}")
        loop = asyncio.get_running_loop()
        self._dropped = weakref.finalize(self, _drop, loop, writer, self._filling)
        self._dropped.atexit = False

    @property
    def bytes_received(self) -> int:
        return self._replies.received

    @property
    def closed(self) -> bool:
        return self._replies.over is not None

    async def heard(self) -> None:
        """Wait for the first byte. Raises WorkerFailed on EOF."""
        await self._replies.heard.wait()
        if self._replies.over is not None:
            raise self._replies.over

    async def __call__(self, request: Message) -> Message:
        async with self._turn:
            if self._replies.over is not None:
                raise WorkerFailed(str(self._replies.over), peer=self.peer) from self._replies.over
            parts = frames(dumps(request, self._limits))
            loop = asyncio.get_running_loop()
            reply = self._replies.reply = loop.create_future()
            self._replies.quiet = 0.0
            self._watch(loop.time())
            sending = self._send(parts)
            try:
                answer = loads(await reply, self._limits)
            except BaseException as error:  # a cancelled caller's too: what comes next would be the old reply
                self._close(f"its last request ended with {type(error).__name__}: {error}")
                raise
            finally:
                self._replies.reply = None
                self._watching.cancel()
                if sending is not None:
                    sending.cancel()
            if sending is not None and not sending.done():
                self._close("the worker refused its last request before it was all sent")
            return answer

    def _send(self, parts: Iterator[bytes]) -> asyncio.Task[None] | None:
        """Write one frame at once, more in a task that waits for the worker to take them."""
        first = next(parts)
        self._writer.write(first)
        self.bytes_sent += len(first)
        return None if first[0] == Kind.LAST else asyncio.create_task(self._send_rest(parts))

    async def _send_rest(self, parts: Iterator[bytes]) -> None:
        try:
            for part in parts:
                await self._writer.drain()
                self._writer.write(part)
                self.bytes_sent += len(part)
        except Exception as error:  # an OSError, or whatever else leaves the request without its end
            if not isinstance(error, OSError):
                log.exception("writing to worker %s", self.peer[-8:])
            self._replies.end(WorkerFailed(f"the stream to worker {self.peer[-8:]} broke: {error}", peer=self.peer))

    def _watch(self, before: float) -> None:
        """Count the silence in ticks; one that our own loop comes to late counts as two at most."""
        loop = asyncio.get_running_loop()
        self._replies.quiet += min(loop.time() - before, 2 * TICK_SECONDS)
        if self._replies.quiet > self._silence:
            why = f"worker {self.peer[-8:]} has been silent for {self._silence:g} s"
            self._replies.end(WorkerFailed(why, peer=self.peer))
        self._watching = loop.call_later(TICK_SECONDS, self._watch, loop.time())

    def _close(self, why: str) -> None:
        self._replies.end(WorkerFailed(f"the channel to worker {self.peer[-8:]} is closed: {why}", peer=self.peer))
        self._filling.cancel()
        self._dropped.detach()
        self._writer.transport.abort()  # what is still unsent is of no use to anyone

    async def aclose(self) -> None:
        self._close("by this side")
        await asyncio.wait({self._filling})


def _drop(loop: asyncio.AbstractEventLoop, writer: asyncio.StreamWriter, filling: asyncio.Task[None]) -> None:
    def close() -> None:
        filling.cancel()
        writer.transport.abort()

    if not loop.is_closed():
        loop.call_soon_threadsafe(close)


# ---- the worker's side -----------------------------------------------------------------------------------------------


async def answer_stream(
    connection: Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limits: Limits
) -> None:
    """Serve one stream until it ends; then cancel what still runs for it and close the connection."""
    requests: asyncio.Queue[bytearray] = asyncio.Queue(maxsize=1)

    async def send(data: bytes) -> None:
        for part in frames(data):
            writer.write(part)
            async with asyncio.timeout(STALLED_SECONDS):
                await writer.drain()

    async def answer() -> None:
        try:
            while True:
                await send(await _reply(connection, await requests.get(), limits))
        except Cut as cut:
            writer.write(cut.sent)
            writer.close()
        except OSError:  # TimeoutError too: the client is gone, or takes nothing
            writer.transport.abort()
        except Exception:  # beats alone would have the client wait until its deadline
            log.exception("answering a stream")
            writer.transport.abort()

    async def beat() -> None:
        while True:
            if not writer.transport.get_write_buffer_size():  # else bytes are on their way already
                writer.write(frame(Kind.BEAT))
            await asyncio.sleep(BEAT_SECONDS)

    answering, beating = asyncio.create_task(answer()), Background(beat, "the beats of a stream")

    async def stop() -> None:
        answering.cancel()
        await beating.stop()
        await asyncio.wait({answering})

    try:
        refused = await _receive(reader, requests, limits)
        if refused is not None:
            await stop()
            await send(dumps(Message({"error": to_wire(refused)})))
            # an end before the client has read would break its sending, and what it has not read would be lost
            with suppress(TimeoutError):
                async with asyncio.timeout(REFUSED_SECONDS):
                    await _drain(reader)
            writer.write_eof()
            async with asyncio.timeout(STALLED_SECONDS):  # what is not drained would reset the stream, reply and all
                await _drain(reader)
    except OSError:
        pass  # the client is gone: that is how streams end
    finally:
        await stop()
        connection.close()
        writer.transport.abort()


async def _drain(reader: asyncio.StreamReader) -> None:
    while await reader.read(BUFFER_BYTES):
        pass


async def _receive(
    reader: asyncio.StreamReader, requests: asyncio.Queue[bytearray], limits: Limits
) -> KwflowError | None:
    """Drain the stream into ``requests`` until EOF; return why not, if it has to be refused."""
    decoder, buffered = Frames(limits.message_bytes), 0
    while data := await reader.read(BUFFER_BYTES):
        buffered += len(data)
        try:
            for kind, payload in decoder.feed(data):
                if kind is Kind.LAST:
                    buffered = 0
                    requests.put_nowait(payload)
        except ProtocolError as error:
            if buffered + FRAME_BYTES > limits.message_bytes:
                return BudgetError(f"a request over this worker's limit of {limits.message_bytes} bytes")
            return error
        except asyncio.QueueFull:
            return ProtocolError("requests sent before the reply to the one before them")
    return None


async def _reply(connection: Connection, request: bytearray, limits: Limits) -> bytes:
    try:
        return dumps(await connection.handle(loads(request, limits)), limits)
    except Cut:
        raise
    except KwflowError as error:
        return dumps(Message({"error": to_wire(error)}))
    except Exception as error:  # a bug of ours, or of a user's block_fn: the client hears of it, and so does the log
        log.exception("a request failed")
        return dumps(Message({"error": to_wire(error)}))
