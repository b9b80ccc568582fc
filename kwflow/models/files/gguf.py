"""A GGUF file as a Hugging Face folder: transformers reads it, once, and kwflow keeps what it read as safetensors.

Imports errors and progress only; filelock, gguf and transformers inside the functions that need them.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kwflow.errors import ModelError

CONVERSION = 1  # raise it when the converted folders must be made anew
BASE_SECONDS, SECONDS_PER_GB = 900.0, 120.0  # deadline of one conversion, and for waiting on another process's
SAMPLES, SAMPLE_BYTES = 256, 4096  # of a file, for its name
STAGES = ("importing", "dequantizing", "reading the tokenizer", "saving")


def cache_folder() -> Path:
    """Where kwflow keeps converted models: ``$KWFLOW_CACHE``, ``$XDG_CACHE_HOME/kwflow`` or ``~/.cache/kwflow``."""
    if chosen := os.environ.get("KWFLOW_CACHE"):
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base and os.path.isabs(base) else Path.home() / ".cache") / "kwflow"


def converted_folder(file: Path, name: str) -> Path:
    """Where a GGUF file's conversion lies, or will lie."""
    return cache_folder() / "models" / f"{name}-{_file_id(file)[:12]}-v{CONVERSION}"


def converted_name(folder: Path) -> str | None:
    """The name of a model whose conversion lies in this folder of kwflow's cache; None for any other folder."""
    match = re.fullmatch(r"(.+)-[0-9a-f]{12}-v\d+", folder.name)
    return match[1] if match and folder.parent == cache_folder() / "models" else None


def converted(file: Path, name: str | None = None) -> Path:
    """A GGUF file as a folder of float32 safetensors with its tokenizer, made by the first call; ``name``: its stem.

    It takes memory and disk for 4 bytes per weight, and half a minute for 135M weights. Raises ModelError.
    """
    name = name or file.stem
    folder = converted_folder(file, name)
    if _is_whole(folder):
        return folder
    from filelock import FileLock, Timeout

    absent = [module for module in ("gguf", "accelerate") if importlib.util.find_spec(module) is None]
    if absent:
        raise ModelError(f"converting {name!r} needs {' and '.join(absent)}:  pip install 'kwflow[embedded]'")
    seconds = BASE_SECONDS + SECONDS_PER_GB * file.stat().st_size / 1e9
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_suffix(".lock"), timeout=seconds):
            if not _is_whole(folder):  # another process may have made it while this one waited
                _convert(file, name, folder, seconds)
    except Timeout as error:
        raise ModelError(f"another process has held {error.lock_file} for {seconds:.0f} s") from error
    except OSError as error:
        raise ModelError(f"cannot write {folder}: {error}; KWFLOW_CACHE names another cache folder") from error
    return folder


def _file_id(file: Path) -> str:
    """Hash a file's size and parts from all over it: a megabyte, however large the file is.

    NOTE [sampled] a worker of two layers must not read 40 GB to find a folder's name. Other weights differ everywhere.
    """
    try:
        with file.open("rb", buffering=0) as data:
            size = os.fstat(data.fileno()).st_size
            digest = hashlib.sha256(str(size).encode())
            for index in range(SAMPLES):
                data.seek(max(0, size - SAMPLE_BYTES) * index // (SAMPLES - 1))
                digest.update(data.read(SAMPLE_BYTES))
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error}") from error
    return digest.hexdigest()


def _is_whole(folder: Path) -> bool:
    """A folder appears by one rename, so only somebody's deleting can make it less than whole."""
    return all((folder / file).is_file() for file in ("config.json", "model.safetensors", "tokenizer.json"))


def _convert(file: Path, name: str, folder: Path, seconds: float) -> None:
    """Convert in a child process, so that neither its memory nor its messages stay here, and rename when whole."""
    for stale in folder.parent.glob(f".{folder.name}-*"):  # of a process that was killed: the lock is ours now
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary:
        model_folder, log_file, stages_file = (Path(temporary, name) for name in ("model", "log", "stages"))
        code = "import sys; from kwflow.models.files.gguf import dequantize; dequantize(*sys.argv[1:])"
        quiet = {"TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
        with log_file.open("wb") as output:
            child = subprocess.Popen(
                [sys.executable, "-c", code, str(file.absolute()), str(model_folder), str(stages_file)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **quiet, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            )
            try:
                _watch(child, name, stages_file, seconds)
            finally:
                child.kill()
                status = child.wait()
        if status != 0:
            last = "\n".join(log_file.read_text(errors="replace").strip().splitlines()[-5:])
            raise ModelError(f"converting {name!r} failed (exit status {status}):\n{last}")
        if not _is_whole(model_folder):
            raise ModelError(f"{file} holds no tokenizer that transformers reads; kwflow needs one")
        shutil.rmtree(folder, ignore_errors=True)
        model_folder.rename(folder)


def _watch(child: subprocess.Popen[bytes], name: str, stages_file: Path, seconds: float) -> None:
    """Show a bar until the child ends or its deadline passes; the child writes one line per finished stage."""
    from kwflow.show.progress import bar

    deadline, form = time.monotonic() + seconds, "{desc}: {bar} {n_fmt}/{total_fmt} [{elapsed}]"
    with bar(name, len(STAGES), bar_format=form, delay=0) as shown:
        while time.monotonic() < deadline:
            done = stages_file.read_text().count("\n") if stages_file.exists() else 0
            shown.set_description_str(f"{name}, once: {STAGES[min(done, len(STAGES) - 1)]}", refresh=False)
            shown.update(done - shown.n)
            shown.refresh()
            try:
                child.wait(timeout=1.0)
                shown.update(len(STAGES) - shown.n)
                return
            except subprocess.TimeoutExpired:
                pass


def dequantize(gguf_file: str, out: str, stages_file: str) -> None:
    """Write a GGUF file as a folder of float32 safetensors with its tokenizer. Wants a process of its own."""
    import functools

    import gguf
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    def done() -> None:
        with open(stages_file, "a") as file:
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
    size, free = sum(weight.nbytes for weight in model.state_dict().values()), shutil.disk_usage(Path(out).parent).free
    if size > free:
        raise OSError(f"{size / 1e9:.1f} GB of float32 weights do not fit: {free / 1e9:.1f} GB are free for {out}")
    model.save_pretrained(out, max_shard_size="1TB")
    tokenizer.save_pretrained(out)
    with open(Path(out, "model.safetensors"), "rb") as file:
        os.fsync(file.fileno())
    done()
