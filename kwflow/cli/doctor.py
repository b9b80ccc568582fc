"""What is wrong with an installation, and how to mend it: the facts behind ``kwflow doctor``.

Imports errors and models.files, and nothing heavy: hivemind, torch and transformers are looked at as files, since
one of them may be what is broken.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

from kwflow.errors import ModelError
from kwflow.models.files.embedded import EMBEDDED, embedded_file, embedded_folder
from kwflow.models.files.gguf import cache_folder

GIB = 1 << 30
CHECKED = ("torch", "transformers", "hivemind", "safetensors", "einops")
MACHINES = {"x86_64": "x86-64", "amd64": "x86-64", "aarch64": "arm64", "arm64": "arm64"}
ELF_MACHINES = {0x3E: "x86-64", 0xB7: "arm64"}
MACHO_MACHINES = {0x0100_0007: "x86-64", 0x0100_000C: "arm64"}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at: what was found, and how to mend it when it is not ``ok``."""

    name: str
    ok: bool
    what: str
    mend: str = ""


def doctor() -> list[Finding]:
    """Look at everything kwflow needs on this machine; a few seconds, no network, nothing changed.

    >>> doctor()[0].name
    'python'
    """
    checks: tuple[Callable[[], Iterator[Finding]], ...] = (
        _python,
        _versions,
        _p2pd,
        _protobuf,
        _port,
        _machine,
        _embedded,
        _cache,
        _hub_cache,
        _accelerator,
        _quantized,
    )
    return [finding for check in checks for finding in check()]


def show(findings: Iterable[Finding]) -> None:
    """Print findings as a table in the terminal: what was found, and below it how to mend what is wrong."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False)
    for finding in findings:
        what = Text(finding.what)
        if finding.mend:
            what.append(f"\n{'note' if finding.ok else 'mend'}: {finding.mend}", style="yellow")
        mark = Text("ok", style="green") if finding.ok else Text("WRONG", style="bold red")
        table.add_row(mark, Text(finding.name, style="bold"), what)
    Console().print(table)


def _python() -> Iterator[Finding]:
    version, supported = platform.python_version(), ((3, 11), (3, 14))
    ok = supported[0] <= sys.version_info[:2] < supported[1]
    yield Finding("python", ok, f"{version} ({sys.executable})", "" if ok else "use Python 3.11, 3.12 or 3.13")


def _versions() -> Iterator[Finding]:
    try:
        declared = [Requirement(text) for text in importlib.metadata.requires("kwflow") or ()]
    except importlib.metadata.PackageNotFoundError:
        yield Finding(
            "kwflow", False, "runs from a folder and is not installed, so no versions are declared", _pip("-e .")
        )
        return
    for requirement in declared:
        if requirement.name not in CHECKED or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        name, mend = requirement.name, _pip(f"'{requirement.name}{requirement.specifier}'")
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, False, f"not installed; {requirement.specifier} is needed", mend)
            continue
        ok = requirement.specifier.contains(version, prereleases=True)
        yield Finding(name, ok, version if ok else f"{version}; {requirement.specifier} is needed", "" if ok else mend)


def _p2pd() -> Iterator[Finding]:
    folder = _package("hivemind")
    if folder is None:
        yield Finding("p2pd", False, "hivemind is not installed, so there is no libp2p daemon", _pip("hivemind"))
        return
    binary, again = folder / "hivemind_cli" / "p2pd", _pip("--force-reinstall --no-deps hivemind")
    if not binary.is_file():
        yield Finding("p2pd", False, f"hivemind's libp2p daemon is missing: {binary}", again)
        return
    with binary.open("rb") as file:
        made_for = executable_platforms(file.read(4096))
    here = f"{platform.system()} {MACHINES.get(platform.machine().lower(), platform.machine())}"
    if here not in made_for:
        built = " or ".join(sorted(made_for)) or "no known platform"
        yield Finding("p2pd", False, f"built for {built}, and this is {here}: {binary}", again)
    elif not os.access(binary, os.X_OK):
        yield Finding(
            "p2pd", False, f"may not be run: {binary}", f"chmod +x '{binary}'  (or leave a noexec file system)"
        )
    else:
        yield Finding("p2pd", True, f"{here}, {binary.stat().st_size / 1e6:.0f} MB")


def executable_platforms(head: bytes) -> set[str]:
    """Read from a binary's first bytes what it runs on, as ``{"Linux x86-64"}``; empty when it is no executable."""
    if head[:4] == b"\x7fELF" and len(head) >= 20:
        (machine,) = struct.unpack_from("<H" if head[5] == 1 else ">H", head, 18)
        return {f"Linux {ELF_MACHINES.get(machine, hex(machine))}"}
    if head[:4] == b"\xcf\xfa\xed\xfe" and len(head) >= 8:  # Mach-O, 64 bit, little endian
        cpus = struct.unpack_from("<I", head, 4)
    elif head[:4] == b"\xca\xfe\xba\xbe" and len(head) >= 8:  # several Mach-O in one file
        count = min(struct.unpack_from(">I", head, 4)[0], (len(head) - 8) // 20)
        cpus = tuple(struct.unpack_from(">I", head, 8 + 20 * i)[0] for i in range(count))
    else:
        return set()
    return {f"Darwin {MACHO_MACHINES.get(cpu, hex(cpu))}" for cpu in cpus}


def _protobuf() -> Iterator[Finding]:
    """Load one of hivemind's generated files, which needs only protobuf, in a process of its own."""
    folder = _package("hivemind")
    if folder is None:
        return  # said under p2pd
    code = "import runpy, sys; runpy.run_path(sys.argv[1])"
    command = [sys.executable, "-c", code, str(folder / "proto" / "p2pd_pb2.py")]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        wrong = run.stderr.strip().splitlines()[-1] if run.returncode else ""
    except subprocess.TimeoutExpired:
        wrong = "importing it took over 60 s"
    try:
        version = importlib.metadata.version("protobuf")
    except importlib.metadata.PackageNotFoundError:
        version = "not installed"
    yield Finding(
        "protobuf", not wrong, f"{version}: {wrong}" if wrong else version, _pip("'protobuf>=5.29'") if wrong else ""
    )


def _port() -> Iterator[Finding]:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            with socket.create_connection(server.getsockname(), timeout=5):
                port = server.getsockname()[1]
    except OSError as error:
        mend = "local swarms need TCP on 127.0.0.1: allow it in the firewall or the container"
        yield Finding("loopback", False, f"cannot listen on or reach 127.0.0.1: {error}", mend)
        return
    yield Finding("loopback", True, f"127.0.0.1 can be bound and reached (tried port {port})")


def _machine() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    mend = "" if cores >= 2 else "two workers share this core: values stay exact, speed suffers"
    yield Finding("cores", True, f"{cores}", mend)
    free = _free_memory()
    if free is not None:
        ok = free >= 3 * GIB
        mend = (
            ""
            if ok
            else "two workers with the embedded model need about 3 GiB: close something, or pass dtype=torch.bfloat16"
        )
        yield Finding("memory", ok, f"{free / GIB:.1f} GiB free", mend)


def _free_memory() -> int | None:
    """Bytes that new processes can use: the kernel's estimate on Linux, all of the memory elsewhere."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists() and (match := re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(), re.M)):
        return int(match[1]) * 1024
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # no such question on this system
        return None


def _embedded() -> Iterator[Finding]:
    for name, source in EMBEDDED.items():
        try:
            file, folder = embedded_file(name), embedded_folder(name)
        except ModelError as error:
            yield Finding(name, False, str(error).split(";")[0], source.install)
            continue
        absent = [module for module in ("gguf", "accelerate") if _package(module) is None]
        if folder.is_dir():
            yield Finding(name, True, f"ready: {folder}")
        elif absent:
            yield Finding(
                name, False, f"{file.name} is here, but not {' and '.join(absent)}", _pip("'kwflow[embedded]'")
            )
        else:
            yield Finding(name, True, f"{file.name}; its first use converts it (half a minute, 540 MB)")


def _cache() -> Iterator[Finding]:
    folder = cache_folder()
    existing = next(place for place in (folder, *folder.parents) if place.exists())
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) if folder.exists() else 0
    free = shutil.disk_usage(existing).free
    what = f"{folder}: {size / 1e6:.0f} MB used, {free / 1e9:.1f} GB free"
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        yield Finding("cache", False, f"{what}; not writable", "set KWFLOW_CACHE to a folder that you may write to")
    elif free < GIB and size == 0:
        yield Finding("cache", False, what, "free a gigabyte, or set KWFLOW_CACHE to a folder on another disk")
    else:
        yield Finding("cache", True, what)


def _hub_cache() -> Iterator[Finding]:
    home = Path(os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    folder = Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()
    files = [file for file in folder.glob("models--*/blobs/*") if file.is_file()]
    existing = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    size, free = sum(file.stat().st_size for file in files), shutil.disk_usage(existing).free
    off = (
        ", HF_HUB_OFFLINE is set" if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE") else ""
    )
    yield Finding("hub cache", True, f"{folder}: {size / 1e6:.0f} MB used, {free / 1e9:.1f} GB free{off}")


def _accelerator() -> Iterator[Finding]:
    """Whether there is an NVIDIA driver, and a torch that can use it, as far as files tell."""
    torch, driver = _package("torch"), Path("/proc/driver/nvidia/version").exists()
    file = torch / "version.py" if torch else None
    built = re.search(r"^cuda\b[^=]*= '([\d.]+)'", file.read_text(), re.M) if file and file.is_file() else None
    torch_text = f"torch is built for {f'CUDA {built[1]}' if built else 'no CUDA'}"
    mend = "the GPU is not used: install torch's CUDA build, see pytorch.org" if driver and not built else ""
    yield Finding("accelerator", True, f"{'an NVIDIA driver' if driver else 'no NVIDIA driver'}, {torch_text}", mend)


def _quantized() -> Iterator[Finding]:
    try:
        yield Finding("bitsandbytes", True, f"{importlib.metadata.version('bitsandbytes')}, for quantized workers")
    except importlib.metadata.PackageNotFoundError:
        yield Finding("bitsandbytes", True, "not installed: no quantized workers here", _pip("'kwflow[quantized]'"))


def _package(name: str) -> Path | None:
    """The folder of an installed top-level package, found without importing it."""
    spec = importlib.util.find_spec(name)
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]) if places else None


def _pip(what: str) -> str:
    return f"pip install {what}"
