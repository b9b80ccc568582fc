"""What live panels share: ipywidgets, imported when one is made, and what is shown where no kernel runs.

A panel is shown as a widget where a notebook is live, and as plain HTML in a viewer that has none (a saved notebook).
"""

from __future__ import annotations

import html
from typing import Any

from kwflow.errors import UnsupportedError
from kwflow.show.html import ORANGE

WIDE = "62em"  # a laptop's notebook


def widgets_for(what: str) -> Any:
    """The ipywidgets package. Raises UnsupportedError where it is missing."""
    try:
        import ipywidgets
    except ImportError as error:
        raise UnsupportedError(f"{what} is a panel of ipywidgets:  pip install 'kwflow[notebook]'") from error
    return ipywidgets


def mimebundle(box: Any, text: str, page: str, **kwargs: Any) -> dict[str, Any]:
    """What a panel shows itself as: its widget, a page for where that cannot be shown, and a line."""
    live = {} if box.comm is None else box._repr_mimebundle_(**kwargs)  # None: closed
    return {**live, "text/plain": text, "text/html": page}


def status_line(text: str, *, wrong: bool = False) -> str:
    """A line below a panel's buttons; what went wrong says so, and is coloured."""
    if not wrong:
        return f"<span style='opacity:.8;line-height:1.4'>{html.escape(text)}</span>"
    return f"<span style='color:{ORANGE};line-height:1.4'><b>failed</b>: {html.escape(text)}</span>"


def descendants(box: Any) -> list[Any]:
    """Every widget in a box, the innermost first."""
    return [descendant for widget in getattr(box, "children", ()) for descendant in (*descendants(widget), widget)]


def at_once(box: Any) -> None:
    """Let what is clicked and set in a box act at once, also while a cell runs, where the front end can.

    NOTE [subshells] JupyterLab 4.4 sends a widget's messages to a subshell of the kernel, a thread beside that of the
    cells (ipykernel 7). ipykernel 7.4 hands them to whoever wrote to the widget last instead, here a cell, and there
    they wait for its end.
    """
    for widget in descendants(box):
        if hasattr(widget.comm, "_reply_subshell_for"):
            widget.comm._reply_subshell_for = _where_it_was_sent


def _where_it_was_sent(_: Any, subshell: str | None) -> str | None:
    return subshell
