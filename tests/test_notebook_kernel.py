"""A real Jupyter kernel, without a browser: interrupted in the middle of a cell, restarted and shut down."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import tiny

pytestmark = [pytest.mark.swarm, pytest.mark.slow, pytest.mark.timeout(600)]

CELL_SECONDS = 280.0

START = """
import json, os, psutil, torch
import kwflow as kf
from tests import tiny

torch.set_num_threads(1)
swarm = kf.local_swarm({folder!r}, workers=2)
flow = kf.connect(swarm.model, peers=swarm.peers)
model = kf.AutoDistributedModelForCausalLM.from_pretrained(swarm.model, flow=flow)
x = dict(hidden=tiny.random(1, 5, tiny.HIDDEN))
session = flow.session(max_length=300)
out = session.step(**x)
"""

PROCESSES = """
def ports(process):
    return [one.laddr.port for one in process.net_connections("tcp") if one.status == psutil.CONN_LISTEN]

family = psutil.Process().children(recursive=True)
print(json.dumps([[one.pid, one.create_time(), one.name(), ports(one)] for one in family]))
"""

USE = """
assert torch.equal(flow(**x), out)
session.rollback(0)
assert torch.equal(session.step(**x), out)
ids = model.generate(torch.tensor([[3, 5]]), max_new_tokens=5, do_sample=False, pad_token_id=0)
assert all(worker.alive for worker in swarm.workers)
print(ids.tolist())
"""

FOREVER = {
    "flow": "while True: flow.options(batch_tokens=1 << 16)(tiny.random(256, 64, tiny.HIDDEN))",
    "session": "while True: session.step(**x); session.rollback(5)",
    "generate": "while True: model.generate(torch.tensor([[3, 5]]), max_new_tokens=200, pad_token_id=0)",
}


class Kernel:
    """One kernel of a notebook server."""

    def __init__(self) -> None:
        from jupyter_client.manager import KernelManager

        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(cwd=str(Path(__file__).parents[1]))
        self._connect()

    def _connect(self) -> None:
        self.client: Any = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    def restart(self) -> None:
        self.client.stop_channels()
        self.manager.restart_kernel()
        self._connect()

    def run(self, cell: str, interrupt: bool = False) -> str:
        """Run a cell: what it printed; or interrupt it once it prints, and give its error's name."""
        said: list[str] = []

        def hook(message: Any) -> None:
            content = message["content"]
            if message["msg_type"] == "stream" and content["name"] == "stdout":
                said.append(content["text"])
                if interrupt and "begun" in content["text"]:
                    time.sleep(0.3)  # somewhere in the middle, wherever that is
                    self.manager.interrupt_kernel()

        reply = self.client.execute_interactive(cell, timeout=CELL_SECONDS, output_hook=hook)["content"]
        if reply["status"] != "ok":
            return reply["ename"] if interrupt else pytest.fail("\n".join(reply["traceback"]))
        return "".join(said)


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    kernel = Kernel()
    yield kernel
    kernel.client.stop_channels()
    if kernel.manager.has_kernel:
        kernel.manager.shutdown_kernel(now=True)


def is_left(pid: int, created: float) -> bool:
    try:
        process = psutil.Process(pid)
        return process.create_time() == created and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def answers(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def gone(family: list[Any]) -> None:
    """Wait until the processes are over; then nobody may listen where they did."""
    deadline = time.monotonic() + 20
    while left := [name for pid, created, name, _ in family if is_left(pid, created)]:
        assert time.monotonic() < deadline, f"left: {left}"
        time.sleep(0.05)
    assert not [port for *_, ports in family for port in ports if answers(port)]


def test_the_next_cell_goes_on_after_an_interrupt(kernel: Kernel) -> None:
    kernel.run(START.format(folder=str(tiny.folder("llama"))))
    said = kernel.run(USE)
    for what, cell in FOREVER.items():
        assert kernel.run(f"print('begun', flush=True)\n{cell}", interrupt=True) == "KeyboardInterrupt", what
        assert kernel.run(USE) == said, f"after an interrupted {what}"


def test_a_restart_and_an_end_leave_no_process_and_no_port(kernel: Kernel) -> None:
    start = START.format(folder=str(tiny.folder("llama")))
    kernel.run(start)
    said = kernel.run(USE)
    family = json.loads(kernel.run(PROCESSES))
    assert sum("p2pd" in name for _, _, name, _ in family) == 3, "two workers' and the client's"
    assert [port for *_, ports in family for port in ports]
    kernel.restart()
    gone(family)
    kernel.run(start)
    assert kernel.run(USE) == said
    family = json.loads(kernel.run(PROCESSES))
    kernel.manager.shutdown_kernel(now=True)
    gone(family)
