"""How processes of ours end: forked copies, sockets, a worker as its parent sees it and as it sees itself.

Three rules hold everything here. A process ends when the pipe or socket to its owner closes, however the owner dies;
each p2pd and each worker leads, or belongs to, a process session of its own, so an interrupt of a notebook does not
reach it; and a forked copy of this process (multiprocessing, a DataLoader) owns nothing of these (``background``). No
torch, no hivemind.
"""

from __future__ import annotations

import asyncio
import glob
import json
import os
import pickle
import queue
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from kwflow.background import blind, disown_in_forks
from kwflow.errors import to_wire

SOCKETS = "/tmp/kwflow-"  # a unix socket's path holds about 100 bytes: no TMPDIR
STALE_SECONDS = 60.0  # younger than this, a silent socket may be one that is just being made
_LENGTH = struct.Struct(">Q")

# ---- sockets -------------------------------------------------------------------------------------------------------


def sweep(pid: int | None = None) -> None:
    """Remove the sockets of process ``pid``, which is over; without one, every socket of ours that nobody answers."""
    for path in glob.glob(f"{SOCKETS}{'*' if pid is None else pid}-*.sock"):
        try:
            if pid is None:
                about = os.stat(path)
                if about.st_uid != os.getuid() or time.time() - about.st_mtime < STALE_SECONDS or answers(path):
                    continue
            os.unlink(path)
        except FileNotFoundError:
            continue


def answers(path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except BlockingIOError:  # a full backlog: somebody is there
            return True
    return True


# ---- a child, as its parent sees it --------------------------------------------------------------------------------


class ChildFailed(Exception):
    """A child that ended, or reported an error, before it was ready. ``report`` is its error, by ``errors.to_wire``."""

    def __init__(self, message: str, report: Mapping[str, Any] | None = None):
        super().__init__(message)
        self.report = report


class Child:
    """A process in its own session that lives no longer than this one: the end of its stdin is its end.

    Down the pipe go length-prefixed messages (``send``); back come lines of JSON (``report``, ``ask``); stderr, and
    whatever is printed, goes to a file without a name (``log``), so that no file is left either.
    """

    def __init__(self, command: Sequence[str], *, env: Mapping[str, str] | None = None):
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed by finalize
        weakref.finalize(self, self._log.close)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
            env={**os.environ, **(env or {})},
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self.pid, self._down, self._up = self._process.pid, self._process.stdin, self._process.stdout
        os.set_blocking(self._down.fileno(), False)
        self._line, self._requests, self._turn = bytearray(), 0, threading.Lock()
        self._guard: subprocess.Popen[bytes] | None = None
        disown_in_forks(self)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def paused(self) -> bool:
        return self._guard is not None

    def fileno(self) -> int:
        return self._up.fileno()

    def send(self, payload: bytes, deadline: float) -> None:
        """Send one message. Raises TimeoutError; a child that is gone is found out by ``report``."""
        rest = memoryview(_LENGTH.pack(len(payload)) + payload)
        while rest:
            if not select.select([], [self._down], [], max(0.0, deadline - time.monotonic()))[1]:
                raise TimeoutError(f"process {self.pid} does not read what it is sent")
            try:
                rest = rest[os.write(self._down.fileno(), rest) :]
            except BrokenPipeError:
                return

    def report(self) -> dict[str, Any] | None:
        """Read what the child has written: its report once the line is whole, else None. Raises ChildFailed."""
        if not select.select([self._up], [], [], 0)[0]:
            return None
        data = os.read(self._up.fileno(), 1 << 16)
        self._line += data
        if self._line.endswith(b"\n"):
            message = json.loads(self._line)
            self._line.clear()
            if "error" in message:
                raise ChildFailed(message["error"]["message"], message["error"])
            return message
        if not data:
            raise ChildFailed(f"process {self.pid} ended with exit code {self._process.wait(timeout=5.0)}")
        return None

    def ask(self, what: Mapping[str, Any], deadline: float) -> dict[str, Any]:
        """Ask a child that is ready for something and wait until it is done. Raises ChildFailed, TimeoutError."""
        with self._turn:
            self._requests += 1
            self.send(json.dumps({"number": self._requests, **what}).encode(), deadline)
            while (answer := self.report()) is None or answer["number"] != self._requests:
                if not select.select([self._up], [], [], max(0.0, deadline - time.monotonic()))[0]:
                    raise TimeoutError(f"process {self.pid} does not answer")
            return answer

    def log(self, size: int = 1 << 20) -> str:
        """The last ``size`` bytes of what the child has printed; also after its end."""
        # pread: the child writes at the same file's offset
        data = os.pread(self._log.fileno(), size, max(0, os.fstat(self._log.fileno()).st_size - size))
        return data.decode(errors="replace")

    def last_words(self, lines: int = 12) -> str:
        """The last lines that the child has printed."""
        return "\n".join(["--- the last lines of its log:", *self.log(16384).strip().splitlines()[-lines:]])

    def pause(self) -> None:
        """Stop the child and its p2pd (SIGSTOP). A stopped process sees no end of its pipe, so a shell waits for it."""
        if self.paused or not self.alive:
            return
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", f"read _ || {{ kill -KILL -{self.pid}; rm -f {SOCKETS}{self.pid}-*.sock; }}"],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        os.killpg(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused child go on."""
        if self.paused and self.alive:
            os.killpg(self.pid, signal.SIGCONT)
        self._release()

    def _release(self) -> None:
        if self._guard is not None:
            self._guard.communicate(b"\n", timeout=5.0)
            self._guard = None

    def end(self) -> None:
        """Kill the child and its p2pd (SIGKILL), wait for it, remove the sockets it had."""
        if self.alive:
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait(timeout=5.0)
        self._release()
        self._down.close()
        self._up.close()
        sweep(self.pid)

    def forked(self) -> None:
        self._process.returncode = 0
        pipes = [self._down, self._up]
        if self._guard is not None and self._guard.stdin is not None:
            self._guard.returncode = 0
            pipes.append(self._guard.stdin)
        blind([pipe.fileno() for pipe in pipes if not pipe.closed])


# ---- a child, as it sees itself ------------------------------------------------------------------------------------


class Parent:
    """The child's end of ``Child``: take it first thing in ``main``, before the imports that take seconds.

    From then on the process group ends when the parent does, what is printed goes to the log, and the parent's messages
    are read in order: ``receive_function``, then ``receive_peers``. ``ready`` or ``failed`` is the one answer to those;
    what comes after ``ready`` is for ``obey``.
    """

    def __init__(self) -> None:
        self._down, self._up = os.dup(0), os.dup(1)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        os.dup2(2, 1)
        self._messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._watch, name="kwflow-parent", daemon=True).start()

    def _watch(self) -> None:
        try:
            with os.fdopen(self._down, "rb") as pipe:
                while len(head := pipe.read(_LENGTH.size)) == _LENGTH.size:
                    (size,) = _LENGTH.unpack(head)
                    self._messages.put(pipe.read(size))
        finally:
            end_group()

    def receive_function(self) -> Callable[..., Any] | None:
        """The function that the parent sends with ``cloudpickle``, if any. Raises queue.Empty after a minute."""
        payload = self._messages.get(timeout=60.0)
        # NOTE [pickle] law 8: from the process that started this one, over the pipe that it made; never from a network.
        return pickle.loads(payload) if payload else None  # noqa: S301

    def receive_peers(self) -> list[str]:
        """The addresses to join the swarm at, told when the first worker is up; none: be the first. No deadline of its
        own: the parent has one, and its end is ours."""
        return json.loads(self._messages.get())

    def ready(self, **facts: Any) -> None:
        """Report that this worker serves: ``peer``, ``addrs``, ``span``."""
        self._report({"pid": os.getpid(), **facts})

    def obey(self, command: Callable[[Mapping[str, Any]], Coroutine[Any, Any, Mapping[str, Any]]]) -> None:
        """Carry out what the parent asks for from now on, in turn, in the running event loop, and answer each."""
        loop = asyncio.get_running_loop()

        def serve() -> None:
            while True:
                request = json.loads(self._messages.get())
                number = request.pop("number")
                try:
                    answer = asyncio.run_coroutine_threadsafe(command(request), loop).result()
                except Exception as error:  # noqa: BLE001  the parent hears of it
                    answer = {"error": to_wire(error)}
                self._report({"number": number, **answer})

        threading.Thread(target=serve, name="kwflow-obey", daemon=True).start()

    def failed(self, error: BaseException) -> None:
        """Report why this worker cannot serve; then exit."""
        self._report({"error": to_wire(error)})

    def _report(self, message: Mapping[str, Any]) -> None:
        try:
            os.write(self._up, json.dumps(message).encode() + b"\n")
        except BrokenPipeError:  # the parent is gone; the watcher ends us
            return


def end_group() -> None:
    """End this process and, where it leads its group, everything in it; a stopped p2pd too."""
    sweep(os.getpid())
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(1)


def same_imports() -> dict[str, str]:
    """The environment in which a child imports what this process can (a notebook's folder, a path added by hand)."""
    return {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
