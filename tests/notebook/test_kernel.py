"""A real Jupyter kernel, without a browser: interrupted in the middle of a cell, restarted and shut down."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.doubles.processes import lives, until
from tests.oracle import tiny

pytestmark = [pytest.mark.swarm, pytest.mark.slow, pytest.mark.timeout(600)]

CELL_SECONDS = 280.0

START = """
import torch
import kwflow as kf
from tests.oracle import tiny

torch.set_num_threads(1)
swarm = kf.local_swarm({folder!r}, workers=2)
flow = kf.connect(swarm.model, peers=swarm.peers)
model = kf.AutoDistributedModelForCausalLM.from_pretrained(swarm.model, flow=flow)
x = dict(hidden=tiny.random(1, 5, tiny.HIDDEN))
session = flow.session(max_length=300)
out = session.step(**x)
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
        self.manager.start_kernel(cwd=str(Path(__file__).parents[2]))
        self._connect()

    def _connect(self) -> None:
        self.client: Any = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    def restart(self) -> None:
        self.client.stop_channels()
        self.manager.restart_kernel()
        self._connect()

    def run(self, cell: str, interrupt: bool = False, meanwhile: Callable[[], None] | None = None) -> str:
        """Run a cell: what it printed; or interrupt it once it prints, and give its error's name."""
        said: list[str] = []
        meanwhile = self.manager.interrupt_kernel if interrupt else meanwhile

        def hook(message: Any) -> None:
            content = message["content"]
            if message["msg_type"] == "stream" and content["name"] == "stdout":
                said.append(content["text"])
                if meanwhile is not None and "begun" in content["text"]:
                    time.sleep(0.3)  # somewhere in the middle, wherever that is
                    meanwhile()

        reply = self.client.execute_interactive(cell, timeout=CELL_SECONDS, output_hook=hook)["content"]
        if reply["status"] != "ok":
            return reply["ename"] if interrupt else pytest.fail("\n".join(reply["traceback"]))
        return "".join(said)

    def click(self, button: str) -> None:
        """Click on a button of a panel, by the id of its comm, as JupyterLab does: in a subshell."""
        session = self.client.session
        self.client.control_channel.send(session.msg("create_subshell_request"))
        subshell = self.client.get_control_msg(timeout=10)["content"]["subshell_id"]
        click = {"method": "custom", "content": {"event": "click"}}
        message = session.msg("comm_msg", {"comm_id": button, "data": click})
        message["header"]["subshell_id"] = subshell
        self.client.shell_channel.send(message)


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    kernel = Kernel()
    yield kernel
    kernel.client.stop_channels()
    if kernel.manager.has_kernel:
        kernel.manager.shutdown_kernel(now=True)


def family(kernel: Kernel) -> list[psutil.Process]:
    """The processes that a kernel has started: two workers, their p2pd and its own."""
    return psutil.Process(kernel.manager.provisioner.pid).children(recursive=True)


def listening(processes: Iterable[psutil.Process] | None = None) -> set[int]:
    """The TCP ports of these processes, or of all, that somebody listens on."""
    of = [psutil.net_connections("tcp")] if processes is None else [one.net_connections("tcp") for one in processes]
    return {one.laddr.port for some in of for one in some if one.status == psutil.CONN_LISTEN}


def test_the_next_cell_goes_on_after_an_interrupt(kernel: Kernel) -> None:
    kernel.run(START.format(folder=str(tiny.folder("llama"))))
    said = kernel.run(USE)
    for what, cell in FOREVER.items():
        assert kernel.run(f"print('begun', flush=True)\n{cell}", interrupt=True) == "KeyboardInterrupt", what
        assert kernel.run(USE) == said, f"after an interrupted {what}"


@pytest.mark.rest
def test_a_panel_s_button_acts_while_a_cell_runs(kernel: Kernel) -> None:
    kernel.run(START.format(folder=str(tiny.folder("llama"))))
    button = kernel.run("view = kf.notebook.swarm_view(swarm); print(view.rows[1].kill.comm.comm_id)").strip()
    busy = "import time; begun = time.monotonic(); print('begun', flush=True)\n"
    busy += "while swarm.workers[1].alive and time.monotonic() < begun + 20: time.sleep(0.05)\n"
    assert "False" in kernel.run(busy + "print(swarm.workers[1].alive)", meanwhile=lambda: kernel.click(button))
    assert "dead" in kernel.run("view.look(); print(view.rows[1].map.value); view.close()")


def test_a_restart_and_an_end_leave_no_process_and_no_port(kernel: Kernel) -> None:
    def gone(started: list[psutil.Process], ports: set[int]) -> None:
        until(lambda: not any(map(lives, started)))
        assert not ports & listening()

    start = START.format(folder=str(tiny.folder("llama")))
    kernel.run(start)
    said = kernel.run(USE)
    first = family(kernel)
    ports = listening(first)
    assert ports and len(first) == 5
    kernel.restart()
    gone(first, ports)
    kernel.run(start)
    assert kernel.run(USE) == said
    kernel.run(f"shown_before = flow\n{start}")  # all cells again: what IPython keeps of them keeps no process
    assert kernel.run(USE) == said
    until(lambda: len(family(kernel)) == 5)
    second = family(kernel)
    ports = listening(second)
    kernel.manager.shutdown_kernel(now=True)
    gone(second, ports)
