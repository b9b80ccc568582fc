"""p2pd, libp2p's own process, as a child of ours: how it starts, how it ends, what a forked copy of us does with it.

It is told what to do by ``hivemind`` (the module beside this one), which attaches to its control socket. No torch, no
hivemind.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import stat
import subprocess
import tempfile
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from kwflow.background import blind, disown_in_forks
from kwflow.swarm.lifetime import SOCKETS, answers, sweep


class Daemon:
    """One p2pd of this process: ``control`` is the socket it listens on, ``handler`` the one on which we shall listen.

    It ends by itself as soon as our persistent connection to it closes (measured: < 1 s after ``kill -9`` of this
    process), and after ``idleTimeout`` if there never was one. ``own_session=False`` leaves it in this process's group.
    """

    def __init__(self, program: str, options: Mapping[str, Any], *, own_session: bool):
        sweep()
        name = f"{SOCKETS}{os.getpid()}-{secrets.token_hex(4)}"
        self.control, self.handler = f"{name}-p2pd.sock", f"{name}-kwflow.sock"
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed by finalize
        command = [program, f"-listen=/unix{self.control}", *(f"-{key}={value}" for key, value in options.items())]
        # NOTE [Popen] not asyncio.create_subprocess_exec: its child watchers depend on the thread that runs the loop,
        # and hivemind's own start leaves p2pd in the caller's group, where an interrupt in Jupyter kills it.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=own_session,
            env={"GOLOG_LOG_LEVEL": "error", **os.environ},
        )
        self.pid = self._process.pid
        self._end = weakref.finalize(self, _end, self._process, self._log, (self.control, self.handler))
        disown_in_forks(self)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    async def ready(self, timeout: float = 15.0) -> None:
        """Wait until the control socket answers. Raises OSError with p2pd's last words."""
        deadline = time.monotonic() + timeout
        while not answers(self.control):
            if not self.alive or time.monotonic() > deadline:
                self._log.seek(0)
                output = self._log.read()[-500:].decode(errors="replace").strip()
                code = self._process.poll()
                raise OSError(f"{f'no answer in {timeout:g} s' if code is None else f'exit code {code}'}: {output}")
            await asyncio.sleep(0.005)

    async def stop(self) -> None:
        """End p2pd, wait for it, remove its sockets; the event loop goes on meanwhile."""
        if self._end.alive and self.alive:
            self._process.terminate()
            deadline = time.monotonic() + 1.0
            while self.alive and time.monotonic() < deadline:
                await asyncio.sleep(0.005)
        self._end()

    def forked(self) -> None:
        self._end.detach()
        self._process.returncode = 0  # not ours to wait for
        blind(_fds_on({self.control, self.handler}))


def _end(process: subprocess.Popen[bytes], log: IO[bytes], sockets: Sequence[str]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait(timeout=5.0)
    log.close()
    for path in sockets:
        Path(path).unlink(missing_ok=True)


def _fds_on(paths: set[str]) -> list[int]:
    """This process's unix sockets that are bound or connected to one of ``paths``."""
    numbers = []
    for name in os.listdir("/dev/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            end = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # the listing's own descriptor
            continue
        with end:
            if end.family != socket.AF_UNIX:
                continue
            ends = {end.getsockname()}
            with suppress(OSError):  # a listening socket has no peer
                ends.add(end.getpeername())
            if ends & paths:
                numbers.append(int(name))
    return numbers
