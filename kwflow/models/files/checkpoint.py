"""A model's files: find the folder, and read from it only the tensors that are asked for.

Only safetensors and JSON are read, never a pickle (law 8). Imports errors, embedded, gguf, hub and shard; torch and
safetensors only inside the functions that need them; nothing of the swarm.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kwflow.errors import ModelError, did_you_mean
from kwflow.models.files import hub
from kwflow.models.files.embedded import EMBEDDED, embedded_model
from kwflow.models.files.gguf import converted, converted_name
from kwflow.models.files.shard import ByteRange, Entry, file_size, prefetch, read_header, read_parts

if TYPE_CHECKING:
    import torch

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
NAME_LENGTH = 200  # characters
HEAD_BYTES = 4096  # of each tensor, in a checkpoint id


# ---------------------------------------------------------------- from a name to a folder


def model_path(model: str | os.PathLike[str]) -> Path:
    """Find a model's folder in Hugging Face layout: the embedded model, a local folder, a GGUF file, or a hub id.

    >>> folder = model_path("smollm2-135m")  # converted once (half a minute) into kwflow's cache folder
    >>> model_path(folder) == folder  # a local folder is looked at and returned
    True

    A hub id may name a branch, tag or commit: ``"HuggingFaceTB/SmolLM2-135M@main"``. huggingface_hub's cache is used as
    it is, without asking the network for something newer; what is not there is downloaded, .bin files never.
    A GGUF file, or a folder with one, is converted once into kwflow's cache folder.
    Returns an absolute path. Raises ModelError, which says what to do.
    """
    folder = find_model(model)
    if hub.snapshot_of(folder):
        hub.fetch(folder, _files(folder))
    return check_folder(folder)


def find_model(model: str | os.PathLike[str]) -> Path:
    """As ``model_path``, but of a hub repository the weight files come when a Checkpoint reads from them."""
    name = as_text(model)
    if name in EMBEDDED:
        return embedded_model(name)
    path = Path(name).expanduser()
    if name and path.exists():
        return _local(path.absolute())
    repo = hub.parse(name)
    if repo is None:
        raise ModelError(
            f"no model folder at {name!r}, and it is no hub id (user/name or user/name@revision); "
            f"a model is a folder, a .gguf file, a hub id or {', '.join(EMBEDDED)}"
        )
    try:
        folder = hub.snapshot(repo)
        if not (folder / CONFIG).is_file():
            raise ModelError(f"{name} on the hub has no {CONFIG}; a model is a repository in Hugging Face layout")
        _files(folder)
    except ModelError as error:
        hint = did_you_mean(name, EMBEDDED)
        raise (ModelError(f"{error}.{hint}") if hint else error) from error.__cause__
    return folder


def as_text(model: str | os.PathLike[str]) -> str:
    """A model's name or path as it was given. Raises ModelError for anything else, such as a model that is loaded."""
    if isinstance(model, str | os.PathLike):
        return os.fspath(model)
    how = "; save_pretrained(folder) writes one" if hasattr(model, "save_pretrained") else ""
    how = "; kf.connect(swarm.model, peers=swarm.peers) takes a swarm apart" if hasattr(model, "peers") else how
    raise ModelError(f"a model is a folder, a .gguf file, a hub id or a name, not a {type(model).__name__}{how}")


def model_name(model: str | os.PathLike[str]) -> str:
    """What a swarm calls a model if nobody says otherwise: the last part of its path or hub id, without the user's.

    >>> model_name("HuggingFaceTB/SmolLM2-135M@main"), model_name("/models/tiny.gguf")
    ('SmolLM2-135M', 'tiny')
    """
    name = as_text(model)
    path = Path(os.path.normpath(Path(name).expanduser()))
    if snap := hub.snapshot_of(path):
        return snap.repo.rpartition("/")[2]
    if known := converted_name(path):
        return known
    repo = None if path.exists() else hub.parse(name)
    return repo.id.rpartition("/")[2] if repo else path.name.removesuffix(".gguf")


def swarm_name(model: str | os.PathLike[str], name: str | None = None) -> str:
    """The name that somebody chose for a model in a swarm, else ``model_name``. Raises ModelError."""
    chosen = model_name(model) if name is None else name
    if not (0 < len(chosen) <= NAME_LENGTH and chosen.isprintable() and chosen.strip() == chosen):
        raise ModelError(f"a swarm calls a model by 1 to {NAME_LENGTH} printable characters, not {chosen[:200]!r}")
    return chosen


def _local(path: Path) -> Path:
    """A folder here, as it is, or what a GGUF file here is converted to."""
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(
                f"{str(path)!r} is a file; a model is a folder with {CONFIG} and *.safetensors, or a .gguf"
            )
        return converted(path)
    ggufs = sorted(path.glob("*.gguf"))
    if ggufs and not (path / CONFIG).is_file():
        if len(ggufs) > 1:
            raise ModelError(f"{path} has several .gguf files; name one of: {', '.join(file.name for file in ggufs)}")
        return converted(ggufs[0])
    return path if hub.snapshot_of(path) else check_folder(path)


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
    folder = find_model(model)
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


# ---------------------------------------------------------------- tensors


class Checkpoint:
    """The tensors of a model folder, read one by one; opening it reads the index or one header, no data.

    >>> ckpt = Checkpoint(model_path("smollm2-135m"))
    >>> params = ckpt.read(name for name in ckpt.names() if name.startswith("model.layers.3."))
    >>> len(params), ckpt.bytes_read  # bytes of tensor data read so far; headers are not counted
    (9, 14160384)

    Shards that are not needed are not opened, so they need not be there; in the hub's cache those that are needed are
    downloaded. Raises ModelError for a missing or torn file.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self.folder = Path(folder)
        self.bytes_read = 0
        self._headers: dict[str, dict[str, Entry]] = {}
        self._mapped: dict[str, Any] = {}  # safetensors' handles
        files = _files(self.folder)
        if len(files) == 1 and hub.snapshot_of(self.folder):
            hub.fetch(self.folder, files)
        self._file_of = _index(self.folder) if len(files) > 1 else dict.fromkeys(self._header(files[0]), files[0])

    def names(self) -> tuple[str, ...]:
        """Every tensor's name, sorted."""
        return tuple(sorted(self._file_of))

    def fetch(self, names: Iterable[str]) -> None:
        """Download the files that hold these tensors, all at once, where the folder is of the hub's cache."""
        if hub.snapshot_of(self.folder):
            hub.fetch(self.folder, {self._file_of[name] for name in names if name in self._file_of})

    def read(self, names: Iterable[str], dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
        """Read these tensors, in this order; floating ones are cast to ``dtype``, others keep theirs.

        Those that keep theirs are mapped from the file: they take memory as they are used, which the system may take
        back; a cast one is a copy, and its source is unmapped.
        """
        from safetensors import SafetensorError, safe_open

        names = list(dict.fromkeys(names))
        self.fetch(names)
        by_file: dict[str, list[str]] = {}
        for name in names:
            by_file.setdefault(self._where(name)[0], []).append(name)
        found: dict[str, torch.Tensor] = {}
        for file, wanted in by_file.items():
            prefetch(self.folder / file, [self._where(name)[1][2:] for name in wanted])
            try:
                handle = self._mapped.get(file) or safe_open(self.folder / file, framework="pt")
                for name in wanted:
                    entry, tensor = self._where(name)[1], handle.get_tensor(name)
                    self.bytes_read += entry.stop - entry.start
                    found[name] = tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
                    if found[name] is tensor:
                        self._mapped[file] = handle  # one mapping for all that stays in it
            except (OSError, SafetensorError) as error:
                raise ModelError(f"cannot read {self.folder / file}: {error}") from error
        return {name: found[name] for name in names}

    def checkpoint_id(self) -> str:
        """Hash every tensor's name, dtype, shape and first 4 KiB, sorted by name; sharding does not change it.

        Of shards that only the hub has, these parts alone are fetched, once for each commit.
        """
        absent = any(not (self.folder / file).is_file() for file in set(self._file_of.values()))
        if absent and hub.snapshot_of(self.folder) and (known := hub.remembered_id(self.folder)):
            return known
        by_file: dict[str, list[str]] = {}
        for name in self.names():
            by_file.setdefault(self._file_of[name], []).append(name)
        heads: dict[str, bytes] = {}
        for file, names in sorted(by_file.items()):
            entries = [self._where(name)[1] for name in names]
            spans = [(entry.start, min(entry.start + HEAD_BYTES, entry.stop)) for entry in entries]
            heads.update(zip(names, self._parts(file, spans), strict=True))
        self.bytes_read += sum(map(len, heads.values()))
        digest = hashlib.sha256()
        for name in self.names():
            entry = self._where(name)[1]
            digest.update(json.dumps([name, entry.dtype, entry.shape]).encode() + b"\n" + heads[name])
        if absent:
            hub.remember_id(self.folder, digest.hexdigest())
        return digest.hexdigest()

    def _where(self, name: str) -> tuple[str, Entry]:
        file = self._file_of.get(name)
        entry = self._header(file).get(name) if file else None
        if file is None or entry is None:
            raise ModelError(f"{self.folder} has no tensor {name!r}.{did_you_mean(name, self._file_of)}")
        return file, entry

    def _header(self, file: str) -> dict[str, Entry]:
        if file not in self._headers:
            path, snap = self.folder / file, hub.snapshot_of(self.folder)
            size = hub.list_files(snap).get(file, 0) if snap and not path.is_file() else file_size(path)
            self._headers[file] = read_header(path, size, lambda span: self._parts(file, [span])[0])
        return self._headers[file]

    def _parts(self, file: str, spans: Sequence[ByteRange]) -> list[bytes]:
        """Parts of a file, from the disk or, where it has not been downloaded, from the hub."""
        path = self.folder / file
        return read_parts(path, spans) if path.is_file() else hub.read_parts(self.folder, file, spans)


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
    there = [file.name for file in folder.iterdir()] if folder.is_dir() else []
    snap = hub.snapshot_of(folder)
    if snap and not any(name.endswith(".safetensors") for name in there):
        there = list(hub.list_files(snap))
    weights = sorted(name for name in there if name.endswith(".safetensors"))
    if WEIGHTS in weights or len(weights) == 1:
        return [WEIGHTS] if WEIGHTS in weights else weights
    found = "several .safetensors files without an index" if weights else "no .safetensors file"
    if any(name.endswith(".bin") for name in there):
        found += " (.bin files are pickles and are never read; save the model again with save_pretrained)"
    elif any(name.endswith(".gguf") for name in there):
        found += " (download one of its .gguf files, and give its path)"
    raise ModelError(f"{f'{snap.repo} on the hub' if snap else folder} has {found}; {WEIGHTS} or {INDEX} was expected")


def _index(folder: Path) -> dict[str, str]:
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{folder / INDEX} has no weight_map")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise ModelError(f"{folder / INDEX}: {name!r} lies in {file!r}, not in a .safetensors file here")
    return weight_map
