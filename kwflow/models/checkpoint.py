"""A model's files: find the folder, and read from it only the tensors that are asked for.

Only safetensors and JSON are read, never a pickle (law 8). Imports errors and embedded; torch, safetensors and
huggingface_hub only inside the functions that need them; nothing of the network or the swarm.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kwflow.errors import ModelError, did_you_mean
from kwflow.models.embedded import EMBEDDED, embedded_model

if TYPE_CHECKING:
    import torch

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
HEAD_BYTES = 4096  # of each tensor, in a checkpoint id
HEADER_LIMIT = 100_000_000  # bytes; safetensors' own limit


# ---------------------------------------------------------------- from a name to a folder


def model_path(model: str | os.PathLike[str]) -> Path:
    """Find a model's folder in Hugging Face layout: the embedded model, a local folder, or a hub id.

    >>> folder = model_path("smollm2-135m")  # converted once (half a minute) into kwflow's cache folder
    >>> model_path(folder) == folder  # a local folder is looked at and returned
    True

    A hub id such as ``"HuggingFaceTB/SmolLM2-135M"`` is looked up in huggingface_hub's cache, which is used as it is,
    without asking the network for something newer; what is not there is downloaded, .bin files never.
    Returns an absolute path. Raises ModelError, which says what to do.
    """
    name = os.fspath(model)
    if name in EMBEDDED:
        return embedded_model(name)
    folder = Path(name).expanduser()
    if name and folder.is_dir():
        return check_folder(folder.absolute())
    if name and folder.exists():
        raise ModelError(f"{name!r} is a file; a model is a folder with {CONFIG} and *.safetensors")
    if re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", name):
        return _hub_folder(name)
    raise ModelError(f"no model folder at {name!r}")


def check_folder(folder: Path) -> Path:
    """Return ``folder`` if it holds a config and safetensors that belong together; else raise ModelError."""
    if not (folder / CONFIG).is_file():
        raise ModelError(f"{folder} has no {CONFIG}; a model is a folder in Hugging Face layout")
    missing = sorted({file for file in _files(folder) if not (folder / file).is_file()})
    if missing:
        raise ModelError(f"{folder / INDEX} names files that are not there: {', '.join(missing)}")
    return folder


def layer_count(model: str | os.PathLike[str]) -> int:
    """Count the decoder layers that a model's config declares, without reading weights.

    >>> layer_count("smollm2-135m")
    30
    """
    folder = model_path(model)
    config = read_json(folder / CONFIG)
    for key in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
        count = config.get(key)
        if isinstance(count, int) and count > 0:
            return count
    nested = (
        "; its decoder is nested, and only models that are one decoder are served" if "text_config" in config else ""
    )
    raise ModelError(
        f"{folder / CONFIG} (model_type {config.get('model_type')!r}) declares no number of layers{nested}"
    )


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a model folder; ModelError when it is not one."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a {type(value).__name__}, not a JSON object")
    return value


def _hub_folder(repo: str) -> Path:
    """A hub repository's snapshot: JSON and tokenizer files first, then the weight files that its index names."""
    from huggingface_hub import snapshot_download

    small = ["*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt"]

    def fetch(patterns: list[str], **kwargs: Any) -> Path:
        return Path(snapshot_download(repo, allow_patterns=patterns, ignore_patterns=["*/*"], **kwargs))

    try:
        return check_folder(fetch(small, local_files_only=True))
    except (OSError, ModelError):  # not in the cache, or not all of it
        pass
    try:
        folder = fetch(small)
        if (folder / CONFIG).is_file():
            files = {WEIGHTS} if not (folder / INDEX).is_file() else set(_index(folder).values())
            folder = fetch(small + sorted(files))
        return check_folder(folder)
    except Exception as error:  # huggingface_hub raises its own, httpx's and the system's: for the caller they are one
        why = (str(error).splitlines() or ["no reason given"])[0]
        raise ModelError(
            f"no model {repo!r}: not a folder here, not whole in the hub's cache, and the hub gave none "
            f"({type(error).__name__}: {why}).{did_you_mean(repo, EMBEDDED)}"
        ) from error


# ---------------------------------------------------------------- tensors


class _Entry(NamedTuple):
    dtype: str  # as safetensors writes it: "F32", "BF16", …
    shape: tuple[int, ...]
    start: int  # byte offsets in the file
    stop: int


class Checkpoint:
    """The tensors of a model folder, read one by one; opening it reads the index or one header, no data.

    >>> ckpt = Checkpoint(model_path("smollm2-135m"))
    >>> params = ckpt.read(name for name in ckpt.names() if name.startswith("model.layers.3."))
    >>> len(params), ckpt.bytes_read  # bytes of tensor data read so far; headers are not counted
    (9, 14160384)

    Shards that are not needed are not opened, so they need not be there. Raises ModelError for a missing or torn file.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder = Path(folder)
        self.bytes_read = 0
        self._headers: dict[str, dict[str, _Entry]] = {}
        files = _files(self.folder)
        self._file_of = _index(self.folder) if len(files) > 1 else dict.fromkeys(self._header(files[0]), files[0])

    def names(self) -> tuple[str, ...]:
        """Every tensor's name, sorted."""
        return tuple(sorted(self._file_of))

    def read(self, names: Iterable[str], dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        """Read these tensors, in this order; floating ones are cast to ``dtype``, others keep theirs."""
        from safetensors import SafetensorError, safe_open

        names = list(dict.fromkeys(names))
        by_file: dict[str, list[str]] = {}
        for name in names:
            by_file.setdefault(self._where(name)[0], []).append(name)
        found: dict[str, torch.Tensor] = {}
        for file, wanted in by_file.items():
            try:
                with safe_open(self.folder / file, framework="pt") as handle:
                    for name in wanted:
                        entry, tensor = self._where(name)[1], handle.get_tensor(name)
                        self.bytes_read += entry.stop - entry.start
                        found[name] = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
            except (OSError, SafetensorError) as error:
                raise ModelError(f"cannot read {self.folder / file}: {error}") from error
        return {name: found[name] for name in names}

    def checkpoint_id(self) -> str:
        """Hash every tensor's name, dtype, shape and first 4 KiB, sorted by name; sharding does not change it."""
        digest = hashlib.sha256()
        entries = {name: self._where(name) for name in self.names()}
        files = {file: (self.folder / file).open("rb") for file in sorted({file for file, _ in entries.values()})}
        try:
            for name, (file, entry) in entries.items():
                files[file].seek(entry.start)
                head = files[file].read(min(HEAD_BYTES, entry.stop - entry.start))
                self.bytes_read += len(head)
                digest.update(json.dumps([name, entry.dtype, entry.shape]).encode() + b"\n" + head)
        finally:
            for handle in files.values():
                handle.close()
        return digest.hexdigest()

    def _where(self, name: str) -> tuple[str, _Entry]:
        file = self._file_of.get(name)
        entry = self._header(file).get(name) if file else None
        if file is None or entry is None:
            raise ModelError(f"{self.folder} has no tensor {name!r}.{did_you_mean(name, self._file_of)}")
        return file, entry

    def _header(self, file: str) -> dict[str, _Entry]:
        if file not in self._headers:
            self._headers[file] = _read_header(self.folder / file)
        return self._headers[file]


def layer_hash(tensors: Mapping[str, torch.Tensor]) -> str:
    """Hash tensors whole: names, dtypes, shapes and every byte, sorted by name; about a second for a gigabyte."""
    import torch

    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        digest.update(json.dumps([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]).encode() + b"\n")
        digest.update(tensor.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _files(folder: Path) -> list[str]:
    """The weight files of a folder: the one, or those that the index names. The one wins, as in transformers."""
    if (folder / WEIGHTS).is_file():
        return [WEIGHTS]
    if (folder / INDEX).is_file():
        return sorted(set(_index(folder).values()))
    others = sorted(file.name for file in folder.glob("*.safetensors"))
    if len(others) == 1:
        return others
    found = "several .safetensors files without an index" if others else "no .safetensors file"
    if any(folder.glob("*.bin")):
        found += " (.bin files are pickles and are never read; save the model again with save_pretrained)"
    raise ModelError(f"{folder} has {found}; {WEIGHTS} or {INDEX} was expected")


def _index(folder: Path) -> dict[str, str]:
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{folder / INDEX} has no weight_map")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise ModelError(f"{folder / INDEX}: {name!r} lies in {file!r}, not in a .safetensors file here")
    return weight_map


def _read_header(path: Path) -> dict[str, _Entry]:
    """A safetensors header, checked against the file's size. Format: 8 bytes length, JSON, data."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, HEADER_LIMIT):
                raise ModelError(f"{path} is cut short or is not a safetensors file: {size} bytes, header {length}")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        base = 8 + length
        entries = {
            name: _Entry(said["dtype"], tuple(said["shape"]), *(base + offset for offset in said["data_offsets"]))
            for name, said in header.items()
        }
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error}") from error
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise ModelError(f"{path} has a broken safetensors header: {type(error).__name__}: {error}") from error
    torn = [name for name, entry in entries.items() if not base <= entry.start <= entry.stop <= size]
    if torn:
        raise ModelError(f"{path} is cut short: {torn[0]!r} should end at byte {entries[torn[0]].stop} of {size}")
    return entries
