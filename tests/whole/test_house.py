"""The house: which package may import which, and that no import runs back up or in a circle (ARCHITECTURE.md)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Each package, and what it may import of the others: always some that stand above it in this table. `door`: the
# modules of kwflow itself, which hand names on.
MAY = {
    "show": "",
    "version": "",
    "background": "",
    "errors": "show",
    "autograd": "errors",
    "kwargs": "show errors autograd",
    "wire": "version background errors kwargs",
    "blocks": "background errors kwargs",
    "models": "show errors autograd kwargs blocks",
    "worker": "version background errors autograd kwargs wire blocks",
    "client": "show background errors autograd kwargs wire",
    "research": "show errors autograd kwargs blocks models client",
    "faults": "background errors kwargs wire blocks worker client",
    "swarm": "show version background errors kwargs wire blocks models worker client faults",
    "huggingface": "errors kwargs models client swarm",
    "notebook": "show background errors kwargs models client research swarm huggingface",
    "cli": "errors wire models client research swarm huggingface",
    "door": "version research faults notebook cli errors",
}
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "kwflow").rglob("*.py"))
}
ONLY = {  # libraries, and the only places that import them
    "hivemind": ("kwflow.swarm.hivemind",),
    "transformers": ("kwflow.models", "kwflow.huggingface", "kwflow.research.reference"),
    "peft": (),  # only its file formats are used
}
NO_NN = ("show", "errors", "autograd", "kwargs", "wire", "client")  # words and calls know no layers


def package_of(module: str) -> str:
    name = module.split(".")[1] if "." in module else "door"
    return name if name in MAY else "door"


def imports(path: Path) -> Iterator[str]:
    """Every module imported anywhere in a file, at the top or in a function, but not for type checking only."""
    todo: list[ast.AST] = [ast.parse(path.read_text())]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            todo.extend(node.orelse)
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the arrows"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES or node.module == "torch" else str(node.module)
        todo.extend(ast.iter_child_nodes(node))


ARROWS = {module: sorted({name for name in imports(path) if name in MODULES}) for module, path in MODULES.items()}


def test_the_table_goes_from_the_ground_up() -> None:
    above: list[str] = []
    for package, may in MAY.items():
        assert set(may.split()) <= {*above}, f"{package} may import what does not stand above it"
        above.append(package)


@pytest.mark.parametrize("package", MAY)
def test_a_package_imports_what_it_may(package: str) -> None:
    for module, imported in ARROWS.items():
        for name in imported if package_of(module) == package else ():
            assert package_of(name) in {package, *MAY[package].split()}, f"{module} imports {name}"


def test_no_circle() -> None:
    """Files import each other in one direction only, also within a package."""
    done: set[str] = set()

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, " -> ".join([*way[way.index(module) :], module])
        if module not in done:
            for name in ARROWS[module]:
                if name != "kwflow":
                    visit(name, (*way, module))
            done.add(module)

    for module in MODULES:
        visit(module, ())


@pytest.mark.parametrize("library", ONLY)
def test_who_imports_a_library(library: str) -> None:
    for module, path in MODULES.items():
        if any(name.partition(".")[0] == library for name in imports(path)):
            assert module.startswith(ONLY[library]), f"{module} imports {library}"


def test_words_do_not_reach_into_torch_nn() -> None:
    for module, path in MODULES.items():
        nodes = ast.walk(ast.parse(path.read_text()))
        names = [*(ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)), *imports(path)]
        if package_of(module) in NO_NN:
            layers = [name for name in names if name.startswith("torch.nn") and name != "torch.nn.attention"]
            assert not layers, f"{module}: {layers}"


def test_no_submodule_hides_a_public_function_of_its_name() -> None:
    """Importing kwflow.x binds the name x in kwflow: a function of that name would be gone."""
    import kwflow

    for name in kwflow.__all__:
        value = getattr(kwflow, name)
        assert (f"kwflow.{name}" in MODULES) == (type(value).__name__ == "module"), name


def test_the_arrow_test_sees_imports(tmp_path: Path) -> None:
    file = tmp_path / "x.py"
    file.write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import never\nelse:\n    import a.b\n"
        "def f():\n    from kwflow.client import flow\n    from torch import nn\n    import hivemind as h\n"
    )
    assert set(imports(file)) == {"typing", "a.b", "kwflow.client.flow", "torch.nn", "hivemind"}
