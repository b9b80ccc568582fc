"""Tests do not reach into private names of the code: they use it as others do, or the code gets a small public way."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
OTHERS = {  # of other libraries, which have no public way
    "_replace": "namedtuple's, public by its documentation",
    "_exit": "os's",
    "_local_scalar_dense": "an aten operation",
    "_to_copy": "an aten operation",
    "_forward_hooks": "torch's: no public way to see that a module has hooks",
    "_forward_pre_hooks": "torch's",
    "_experts_implementation": "transformers': a model's experts, after it was loaded",
    "_from_config": "transformers': what people call, and we refuse",
    "_split_heads": "transformers': how falcon divides queries, keys and values",
    "_sample": "transformers': what a custom generate of the Hub calls",
}
LEFT = {  # how often a file does; a number may only become smaller
    "models/test_hub.py": {"_listed": 1},  # a cache that is cleared: each test has a hub of its own
    "whole/test_background.py": {"_again": 1, "_dropped": 1, "_ending": 1, "_task": 1},  # what only ends break
    "whole/test_demo.py": {"_run": 1},
    "whole/test_packaging.py": {"_package": 3},
    "worker/test_worker.py": {"_lock": 1},  # that a finalizer may take it shows only when one does, at some time
}


def private(name: object) -> bool:
    """``_name``; neither ``__dunder__`` nor the ``_repr_html_`` of Jupyter's protocols."""
    return isinstance(name, str) and name.startswith("_") and not name.endswith("_")


def reaches(source: str) -> Iterator[str]:
    """The private names that are read or patched, of everything but ``self``, in the order of the code."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            yield from [node.attr] * (private(node.attr) and not own)
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names if private(alias.name))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("setattr", "getattr", "delattr"):
            names = [
                part for arg in node.args[:2] if isinstance(arg, ast.Constant) for part in str(arg.value).split(".")
            ]
            yield from filter(private, names)


def test_no_test_reaches_into_a_private_name() -> None:
    found = {
        str(path.relative_to(TESTS)): Counter(name for name in reaches(path.read_text()) if name not in OTHERS)
        for path in sorted(TESTS.rglob("*.py"))
    }
    assert {path: dict(names) for path, names in found.items() if names} == LEFT


def test_a_name_of_others_is_listed_only_while_it_is_used() -> None:
    used = {name for path in TESTS.rglob("*.py") for name in reaches(path.read_text())}
    assert set(OTHERS) <= used


def test_the_test_sees_a_reach() -> None:
    code = """
from kwflow.swarm.local import _one
a._two.b._three()
self._own, x.__dict__, page._repr_html_(), [_ for _ in y]
monkeypatch.setattr(module, "_four", 1), monkeypatch.setattr("kwflow.a._five", 1), getattr(x, "_six")
"""
    assert sorted(reaches(code)) == ["_five", "_four", "_one", "_six", "_three", "_two"]
