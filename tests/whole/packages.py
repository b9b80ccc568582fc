"""The picture in ARCHITECTURE.md, drawn from tests/whole/test_house.py's table; ``python -m tests.whole.packages``.

A package stands above all that it imports. Its box says what it is, by its own docstring, and every package that it
may import; a line goes to those that it does not also reach through another.
"""

from __future__ import annotations

import ast
import functools
import itertools
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from html import escape

from tests.whole.test_house import MAY, ROOT

PICTURE = ROOT / "docs" / "packages.svg"
BOX, LANE, GAP, RISE = (
    236,
    20,
    22,
    34,
)  # pixels: width of a box, of a line that passes boxes, between them, between rows
LINE, SMALL = 15, 13
Node = tuple[str, int]  # a package and its level; or "a>b", where a line from a to b passes a level


def imports(package: str) -> list[str]:
    return MAY[package].split()


@functools.cache
def level(package: str) -> int:
    return 1 + max(map(level, imports(package)), default=-1)


@functools.cache
def below(package: str) -> frozenset[str]:
    """All that a package reaches."""
    return frozenset(imports(package)).union(*map(below, imports(package)))


def lines() -> Iterator[tuple[str, str]]:
    for package in MAY:
        own = imports(package)
        yield from ((package, other) for other in own if not any(other in below(via) for via in own))


def way(upper: str, lower: str) -> list[Node]:
    """The nodes of a line, from above."""
    passed = [(f"{upper}>{lower}", n) for n in range(level(upper) - 1, level(lower), -1)]
    return [(upper, level(upper)), *passed, (lower, level(lower))]


def rows() -> list[list[Node]]:
    """The nodes of each level from left to right: near to those that they are joined to, so that few lines cross."""
    ways = [way(*line) for line in lines()]
    joined = [pair for nodes in ways for pair in zip(nodes, nodes[1:], strict=False)]
    nodes = dict.fromkeys([*((name, level(name)) for name in MAY), *(node for pair in joined for node in pair)])
    found = [[node for node in nodes if node[1] == n] for n in range(max(map(level, MAY)) + 1)]

    def cost(n: int, order: Sequence[Node]) -> float:
        return bends(
            joined, {node: x for row in [*found[:n], order, *found[n + 1 :]] for node, x in places(row).items()}
        )

    for n in [*range(len(found)), *reversed(range(len(found)))] * 2:
        found[n] = list(min(itertools.permutations(found[n]), key=functools.partial(cost, n)))
    return found


def bends(joined: Sequence[tuple[Node, Node]], place: Mapping[Node, float]) -> float:
    """How hard lines are to follow: those that cross, then how far they go aside."""
    pairs = itertools.combinations(joined, 2)
    crossed = sum((place[a] - place[c]) * (place[b] - place[d]) < 0 for (a, b), (c, d) in pairs if a[1] == c[1])
    return 1000 * crossed + sum(abs(place[a] - place[b]) for a, b in joined)


def width(node: Node) -> int:
    return LANE if ">" in node[0] else BOX


def places(row: Sequence[Node]) -> dict[Node, float]:
    """The middle of each node; 0 is the middle of the picture."""
    x, found = -(sum(map(width, row)) + GAP * (len(row) - 1)) / 2, {}
    for node in row:
        found[node] = x + width(node) / 2
        x += width(node) + GAP
    return found


def says(package: str) -> list[str]:
    """The first sentence of its docstring."""
    folder = ROOT / "kwflow" / ("" if package == "door" else package)
    file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    first = (ast.get_docstring(ast.parse(file.read_text())) or "").split("\n\n")[0]
    return textwrap.wrap(" ".join(first.replace("`", "").split()).split(". ")[0].rstrip("."), 36)


def box(package: str, x: float, y: float, height: float) -> Iterator[str]:
    yield f'<rect x="{x - BOX / 2:.0f}" y="{y:.0f}" width="{BOX}" height="{height:.0f}" rx="5"/>'
    texts = [("name", LINE, "kwflow" if package == "door" else package), *(("", LINE, line) for line in says(package))]
    texts += [("may", SMALL, line) for line in textwrap.wrap(f"imports {MAY[package] or 'none of them'}", 40)]
    for kind, rise, text in texts:
        y += rise
        yield f'<text x="{x - BOX / 2 + 9:.0f}" y="{y + 3:.0f}" class="{kind}">{escape(text)}</text>'


def height(package: str) -> int:
    """Of a box with its lines."""
    small = len(textwrap.wrap(f"imports {MAY[package] or 'none of them'}", 40))
    return LINE * (1 + len(says(package))) + SMALL * small + 12


def picture() -> str:
    """The whole as SVG."""
    drawn, top, middle = rows(), 10.0, dict[Node, tuple[float, float, float]]()
    wide = max(sum(map(width, row)) + GAP * (len(row) - 1) for row in drawn) + 20
    for row in reversed(drawn):
        tall = max(height(node[0]) for node in row if ">" not in node[0])
        middle |= {node: (x + wide / 2, top, tall) for node, x in places(row).items()}
        top += tall + RISE
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:.0f} {top - RISE + 10:.0f}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="12">',
        "<style>rect{fill:#f4f7fb;stroke:#4a6785}path{fill:none;stroke:#8aa0b6;stroke-width:1.3}"
        ".name{font-weight:bold;font-size:13px}.may{fill:#5a6b7d;font-size:10.5px}text{fill:#1d2733}</style>",
        f'<path style="fill:#fff;stroke:none" d="M0 0H{wide:.0f}V{top:.0f}H0Z"/>',
    ]
    for line in lines():
        points = []
        for node in way(*line):
            x, y, tall = middle[node]
            points += [(x, y), (x, y + tall)]
        steps = " L".join(f"{x:.0f} {y:.0f}" for x, y in points[1:-1])
        parts.append(f'<path d="M{steps}"/>')
    for package in MAY:
        parts += box(package, *middle[package, level(package)])
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(picture())
