"""What a notebook shows of an error: the caller's lines, one function of kwflow, and the message, last."""

from __future__ import annotations

from types import SimpleNamespace

import IPython
import pytest
from IPython.core.ultratb import FormattedTB

from kwflow import errors
from kwflow.show.traces import PACKAGE
from tests.oracle import tiny
from tests.oracle.tiny import HIDDEN, random


@pytest.fixture(autouse=True)
def _in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = SimpleNamespace(InteractiveTB=FormattedTB(mode="Context", theme_name="nocolor", tb_offset=0))
    monkeypatch.setattr(IPython, "get_ipython", lambda: shell)


def shown(raised: pytest.ExceptionInfo[errors.KwflowError]) -> list[str]:
    return "\n".join(raised.value._render_traceback_()).rstrip().splitlines()


def test_a_misspelt_kwarg_is_short_and_the_message_is_last() -> None:
    flow = tiny.flow("llama")
    with pytest.raises(errors.UnknownKwarg) as raised:
        flow(random(1, 3, HIDDEN), stear={1: random(HIDDEN)})
    lines = shown(raised)
    assert len(lines) < 40 and lines[-1].endswith("Did you mean 'steer'?") and "UnknownKwarg" in lines[-1]
    assert sum(line.startswith("File ") for line in lines) == 2, "the caller's and Flow.__call__"
    assert any(PACKAGE in line and "Flow.__call__" in line for line in lines)
    assert any("frames left out" in line for line in lines)


def test_the_caller_s_own_function_within_is_shown() -> None:
    flow = tiny.flow("llama")

    def score(out: object) -> object:
        return flow.head(random(1, 3, 5))  # a mistake

    with pytest.raises(errors.ShapeError) as raised:
        flow_of = flow[0:2]
        score(flow_of(random(1, 3, HIDDEN)))
    assert any("# a mistake" in line and line.lstrip().startswith("-") for line in shown(raised))


def test_what_it_came_from_is_left_out() -> None:
    with pytest.raises(errors.NoRoute) as raised:
        try:
            raise errors.WorkerFailed("refused", peer="p")
        except errors.WorkerFailed as error:
            raise errors.NoRoute("no route; tried: refused") from error
    lines = shown(raised)
    assert lines[-1] == "NoRoute: no route; tried: refused" and not any(
        line.startswith("WorkerFailed") for line in lines
    )
    assert isinstance(raised.value.__cause__, errors.WorkerFailed)


def test_elsewhere_it_is_python_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(IPython, "get_ipython", lambda: None)
    with pytest.raises(errors.NoRoute) as raised:
        raise errors.NoRoute("none")
    assert shown(raised)[0] == "Traceback (most recent call last):"
