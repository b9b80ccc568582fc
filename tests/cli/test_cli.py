"""The command line: what it says when it is asked wrongly, and what ``status`` shows of a swarm."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from kwflow.cli.main import import_function, main, parse_span
from kwflow.cli.status import Seen, bar, show
from kwflow.client.routing import gaps
from kwflow.errors import KwargError, SpanError
from kwflow.kwargs.schema import Schema
from kwflow.swarm.directory import ModelRecord, WorkerRecord, announced
from kwflow.wire import loop
from kwflow.wire.hello import Fingerprint, Hello

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def kwflow(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command line in this process: exit status, stdout, stderr."""

    def run(*args: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kwflow", *args])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), *capsys.readouterr()

    return run


def refused(answer: tuple[int, str, str], *words: str) -> None:
    """Exit status 2, nothing on stdout, one message on stderr without a traceback."""
    status, out, err = answer
    assert (status, out) == (2, "")
    assert err.startswith("kwflow: ") and "Traceback" not in err
    for word in words:
        assert word in err


def test_help_names_the_commands(kwflow: Run) -> None:
    status, out, _ = kwflow("--help")
    assert status == 0
    for command in ("worker", "swarm", "status", "doctor", "demo"):
        assert command in out


def test_the_module_runs_as_the_package_does() -> None:
    run = subprocess.run([sys.executable, "-m", "kwflow.cli", "--help"], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0 and "doctor" in run.stdout


def test_an_unknown_command_is_refused(kwflow: Run) -> None:
    status, _, err = kwflow("wroker")
    assert status == 2 and "wroker" in err


@pytest.mark.parametrize("option", ["--threads=0", "--port=65536", "--port=-1", "--kv-mb=0", "--keep-mb=-1"])
def test_numbers_out_of_range_are_refused(kwflow: Run, option: str) -> None:
    status, _, err = kwflow("worker", "./nowhere", "--blocks=0:1", option)
    assert status == 2 and option.partition("=")[0] in err and "than or equal to" in " ".join(err.split())


@pytest.mark.parametrize("blocks", ["15", "5:3", "4:4", "a:b", ":", "-1:4", ""])
def test_bad_blocks(kwflow: Run, blocks: str) -> None:
    refused(kwflow("worker", "./nowhere", f"--blocks={blocks}"), "SpanError", "--blocks", repr(blocks))
    with pytest.raises(SpanError):
        parse_span(blocks)


def test_good_blocks() -> None:
    assert parse_span("0:15") == (0, 15)


@pytest.mark.parametrize(
    ("where", "why"),
    [
        ("json", "pkg.mod:fn"),
        (":dumps", "pkg.mod:fn"),
        ("no_such_module_of_mine:fn", "no_such_module_of_mine"),
        ("json:no_such_function", "no_such_function"),
    ],
)
def test_unknown_block_fn(kwflow: Run, where: str, why: str) -> None:
    refused(kwflow("worker", "./nowhere", "--blocks", "0:2", "--block-fn", where), "KwargError", "--block-fn", why)
    with pytest.raises(KwargError):
        import_function(where)


def test_block_fn_is_found() -> None:
    import json

    assert import_function("json:dumps") is json.dumps


def test_bad_model(kwflow: Run) -> None:
    refused(kwflow("worker", "./nowhere", "--blocks", "0:2"), "ModelError", "./nowhere")
    status, out, err = kwflow("demo", "./nowhere")
    assert status == 2 and "failed" in out and "ModelError" in err
    refused(kwflow("demo", "--tokens", "1"), "KwargError", "2 tokens")


# ---- status ----------------------------------------------------------------------------------------------------------


def test_status_needs_an_address(kwflow: Run) -> None:
    refused(kwflow("status"), "KwargError", "--join")
    refused(kwflow("status", "--join", "localhost:1"), "KwargError", "/ip4/", "localhost:1")


@contextmanager
def server() -> Iterator[object]:
    """A node of a swarm that serves no model."""
    from kwflow.swarm.hivemind import Node

    node = loop.run(Node.start(own_session=True), 30.0)
    try:
        yield node
    finally:
        loop.run(node.stop(), 10.0)


@pytest.mark.swarm
def test_status_of_a_swarm_that_is_gone(kwflow: Run) -> None:
    with server() as node:
        (addr,) = node.addrs  # type: ignore[attr-defined]
    refused(kwflow("status", "--join", addr), "NoRoute", "none of the given peers answers")


@pytest.mark.swarm
def test_status_with_nobody(kwflow: Run) -> None:
    with server() as node:
        status, out, err = kwflow("status", "--join", node.addrs[0])  # type: ignore[attr-defined]
    assert (status, err) == (0, "")
    assert "nobody serves a model" in out and "kwflow worker" in out


@pytest.mark.swarm
def test_status_shows_a_worker_that_does_not_answer(kwflow: Run) -> None:
    async def announce(node: object, entered: list[object]) -> None:
        record = WorkerRecord("toy", node.peer_id, tuple(node.addrs), 2, 5, 6, version="9.8")  # type: ignore[attr-defined]
        entered.append(context := announced(node, record))  # type: ignore[arg-type]
        await context.__aenter__()

    with server() as node:
        entered: list = []
        loop.run(announce(node, entered), 10.0)
        status, out, err = kwflow("status", "--join", node.addrs[0])  # type: ignore[attr-defined]
        loop.run(entered[0].__aexit__(None, None, None), 10.0)
    assert (status, err) == (0, "")
    assert "toy: 6 layers, 1 worker" in out and "2:5" in out and "9.8" in out and "no answer" in out
    assert "nobody serves layers 0:2, 5:6" in out


def drawn(seen: list[Seen], layers: int = 30, model: str = "toy", width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    show([(ModelRecord(model, layers), seen)], console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def record(peer: str, start: int, stop: int, checkpoint: str = "") -> WorkerRecord:
    return WorkerRecord("toy", f"12D3KooW{peer}", (), start, stop, 30, checkpoint, "0.1.0")


HELLO = Hello(
    version="0.1.0", span=(0, 30), dtype="bfloat16", schema=Schema({}, {}), fingerprint=Fingerprint(threads=2)
)


def test_a_whole_swarm_fits_80_columns() -> None:
    out = drawn([Seen(record("AAAAAAAA", 0, 15), HELLO), Seen(record("BBBBBBBB", 15, 30), HELLO)])
    assert all(len(line.rstrip()) <= 80 for line in out.splitlines()) and "…" not in out
    assert "AAAAAAAA" in out and "15:30" in out and "bfloat16" in out and "all" in out
    assert "nobody serves" not in out


def test_status_says_what_a_worker_computes_in() -> None:
    said = replace(HELLO, quantization="nf4", device="cpu")
    out = drawn([Seen(record("AAAAAAAA", 0, 30), said)])
    assert "nf4 bfloat16" in out and "…" not in out and all(len(line.rstrip()) <= 80 for line in out.splitlines())
    out = drawn([Seen(record("AAAAAAAA", 0, 30), replace(HELLO, device="cuda:1"))])
    assert "cuda:1" in out and "threads" not in out


def test_what_is_wrong_is_named() -> None:
    out = drawn([Seen(record("AAAAAAAA", 0, 10, "aaaa"), HELLO), Seen(record("BBBBBBBB", 12, 29, "bbbb"), None)])
    assert "nobody serves layers 10:12, 29:30" in out
    assert "no answer in 2 s from BBBBBBBB" in out
    assert "different weights" in out and "27 of 30" in out
    out = drawn([Seen(record("AAAAAAAA", 0, 30), None, answered=True)])
    assert "unreadable" in out and "does not read" in out and "no answer" not in out


def test_a_strangers_record_does_not_reach_the_terminal() -> None:
    hostile = replace(HELLO, version="\x1b[2J[red]9[/red]", dtype="\x1b]0;x\x07")
    out = drawn([Seen(record("AAAAAAAA", 0, 30), hostile)], model="\x1b]0;toy\x07[bold]")
    assert "\x1b" not in out and "\x07" not in out and "[bold]" in out


def test_bars_and_gaps() -> None:
    assert gaps([], 3) == [(0, 3)] and gaps([(0, 3)], 3) == [] and gaps([(1, 2)], 3) == [(0, 1), (2, 3)]
    assert bar([(0, 1)], 2, plain=True) == "#."
    assert bar([(0, 40)], 80, plain=True) == "#" * 10 + "." * 10
    assert bar([(0, 1)], 48, plain=True)[:2] == "+."


def test_a_block_fn_of_the_folder_one_stands_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kwflow.cli.main import import_function

    (tmp_path / "my_block_module.py").write_text("def fn(params, hidden, /, *, block, **kw): return hidden\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in __import__("sys").path if path])
    assert import_function("my_block_module:fn").__name__ == "fn"
