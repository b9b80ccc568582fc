"""The bar for what takes long: for people, after a while, and not in a log file."""

from __future__ import annotations

import io
import sys
import time

import pytest

from kwflow.show import progress as module
from kwflow.show.progress import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(monkeypatch: pytest.MonkeyPatch, stderr: io.StringIO, after: float = 0.01) -> str:
    monkeypatch.setattr(module, "AFTER_SECONDS", after)
    monkeypatch.setattr(sys, "stderr", stderr)
    assert [time.sleep(0.05) or item for item in progress(range(3, 7), "reading layers 3:7", 4)] == [3, 4, 5, 6]
    return stderr.getvalue()


def test_a_bar_shows_in_a_terminal_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "reading layers 3:7" in shown(monkeypatch, Terminal())
    assert shown(monkeypatch, Terminal(), after=60) == ""


def test_no_bar_in_a_log_or_where_it_is_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, io.StringIO()) == ""
    monkeypatch.setenv("TQDM_DISABLE", "1")
    assert shown(monkeypatch, Terminal()) == ""


def test_what_is_waited_for_shows_without_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AFTER_SECONDS", 0.2)
    monkeypatch.setattr(sys, "stderr", Terminal())
    with module.bar("starting workers", 2, unit="worker", mininterval=0) as shown:
        shown.update(0)
        assert sys.stderr.getvalue() == ""
        time.sleep(0.25)
        shown.update(0)
        assert "starting workers:   0%" in sys.stderr.getvalue() and "0/2" in sys.stderr.getvalue()


def test_what_is_short_imports_no_tqdm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    assert list(progress([1, 2], "nothing", 2)) == [1, 2]
