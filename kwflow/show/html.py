"""HTML for notebooks: small pieces that stay readable on a light and on a dark page. Imports nothing of kwflow.

Text keeps the page's own colour; what is coloured also says in words what its colour means, and no colour is red or
green.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

BLUE, ORANGE, GREY = "#3a87c8", "#d08a1e", "#808080"  # told apart by everybody, on white and on black
LEFT = "text-align:left;padding:0 1em 0 0"


@dataclass(frozen=True)
class Bar:
    """One worker on the map of a flow: its name, its layers, what it computes in, and what is wrong with it."""

    name: str
    start: int
    stop: int
    how: str
    wrong: str = ""
    gone: bool = False  # nobody computes there any more


def page(title: str, *parts: str, text: str = "", colour: str = "inherit") -> str:
    """A title in bold, a text after it, and parts below; parts are HTML already."""
    head = f"<b style='color:{colour}'>{html.escape(title)}</b>"
    return f"<div>{head}{f': {html.escape(text)}' if text else ''}{''.join(parts)}</div>"


def line(text: str, *, dim: bool = False) -> str:
    style = " style='opacity:.7'" if dim else ""
    return f"<div{style}>{html.escape(text)}</div>"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of texts."""

    def cells(row: Sequence[str], tag: str) -> str:
        return "".join(f"<{tag} style='{LEFT}'>{html.escape(cell)}</{tag}>" for cell in row)

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    return f"<table><tr>{cells(header, 'th')}</tr>{body}</table>"


def layers_map(layers: int, span: tuple[int, int], bars: Sequence[Bar], first: str = "this flow") -> str:
    """Workers below each other, each a bar over the layers that it serves; first those of the flow."""
    rows = [_bar(first, *span, f"{span[0]}:{span[1]}", GREY, layers), *(_worker(bar, layers) for bar in bars)]
    grid = "display:grid;grid-template-columns:max-content minmax(16em,34em) max-content;gap:3px 1em;font-size:90%"
    return f"<div style='{grid}'>{''.join(rows)}</div>"


def one_row(bar: Bar, layers: int) -> str:
    """One worker alone, in columns as wide as those of every other row."""
    grid = "display:grid;grid-template-columns:6em minmax(8em,1fr) 17em;gap:0 1em;font-size:90%;line-height:1.6"
    return f"<div style='{grid}'>{_worker(bar, layers)}</div>"


def _worker(bar: Bar, layers: int) -> str:
    colour = ORANGE if bar.wrong else BLUE
    note = bar.wrong or bar.how
    return _bar(bar.name, bar.start, bar.stop, f"{bar.start}:{bar.stop}", colour, layers, note, gone=bar.gone)


def _bar(
    name: str, start: int, stop: int, text: str, colour: str, layers: int, note: str = "", *, gone: bool = False
) -> str:
    left, width = 100 * start / layers, 100 * (stop - start) / layers
    look = f"outline:1px dashed {GREY};outline-offset:-1px" if gone else f"background:{colour};color:#fff"
    inner = f"margin-left:{left:.2f}%;width:{width:.2f}%;{look};text-align:center"
    bar = f"<div style='background:{GREY}33'><div style='{inner};overflow:hidden'>{html.escape(text)}</div></div>"
    return f"<div>{html.escape(name)}</div>{bar}<div>{html.escape(note)}</div>"
