"""A folder of activations: whole shards of safetensors, and an index in JSON that says what they are of.

    activations.json           format, version, recipe, complete, shards: [{"rows": [0, 64], "tokens": 812, "bytes": …}]
    shard-000000.safetensors   row, position, token (tokens,) int64; digest (rows,) int64: a hash of each row's token
                               ids; each point's activations by layer, "resid.8" (tokens, hidden)

A row is the number of a text, a position that of a token in its text, from 0. Both files are written beside their place
and renamed, the shard first: a shard counts once the index has it, and what an interrupt left is written again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from kwflow.errors import KwargError, ModelError

INDEX = "activations.json"
FORMAT, VERSION = "kwflow.activations", 1
ABOUT = ("row", "position", "token")  # of every token, beside its activations
DIGEST = "digest"


@dataclass(frozen=True)
class Shard:
    """One whole shard: the texts ``[start, stop)``, how many tokens of them, and how long its file is."""

    rows: tuple[int, int]
    tokens: int
    bytes: int


@dataclass(frozen=True)
class Index:
    """What a folder holds. ``recipe``: what must be the same for another run to go on with it."""

    recipe: Mapping[str, Any]
    shards: tuple[Shard, ...] = ()
    complete: bool = False

    @property
    def rows(self) -> int:
        """How many texts its shards hold."""
        return self.shards[-1].rows[1] if self.shards else 0

    def write(self, folder: Path) -> None:
        text = json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)})
        _put(folder / INDEX, lambda beside: beside.write_text(text))

    def with_shard(self, folder: Path, rows: tuple[int, int], tensors: Mapping[str, Tensor]) -> Index:
        """Write one shard more, and then the index."""
        from safetensors.torch import save_file

        file = shard_file(folder, len(self.shards))
        _put(file, lambda beside: save_file(dict(tensors), beside, metadata={FORMAT: str(VERSION)}))
        shard = Shard(rows, len(tensors[ABOUT[0]]), file.stat().st_size)
        index = replace(self, shards=(*self.shards, shard), complete=False)
        index.write(folder)
        return index


def shard_file(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:06d}.safetensors"


def read_index(folder: Path) -> Index:
    """Read a folder's index, whose shards must all be there. Raises ModelError."""
    file = folder / INDEX
    try:
        said = json.loads(file.read_text())
        if said["format"] != FORMAT or said["version"] != VERSION:
            raise ModelError(f"{file} is of {said['format']!r:.40} {said['version']!r:.20}, not {FORMAT} {VERSION}")
        shards = tuple(Shard((int(s["rows"][0]), int(s["rows"][1])), int(s["tokens"]), int(s["bytes"]))
                       for s in said["shards"])  # fmt: skip
        index = Index(dict(said["recipe"]), shards, bool(said["complete"]))
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error}; flow.harvest makes such folders") from error
    except (ValueError, KeyError, IndexError, TypeError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{file} is no index of activations: {type(error).__name__}: {error}") from error
    for number, shard in enumerate(shards):
        path = shard_file(folder, number)
        size = path.stat().st_size if path.is_file() else None
        if size != shard.bytes:
            what = "missing" if size is None else f"{size} bytes long"
            raise ModelError(f"{path} is {what}, and the index says {shard.bytes} bytes: the folder is damaged")
    return index


def begin(folder: Path, recipe: Mapping[str, Any]) -> Index:
    """The index of a folder that is new, or that was begun by the same recipe. Raises KwargError or ModelError."""
    if (folder / INDEX).exists():
        index = read_index(folder)
        wanted: Mapping[str, Any] = json.loads(json.dumps(recipe))
        names = [*wanted, *(name for name in index.recipe if name not in wanted)]
        other = [name for name in names if wanted.get(name) != index.recipe.get(name)]
        # the same weights may stand in another folder; of weights that workers do not name, the model's name must do
        if other and (other != ["model"] or "" in wanted["checkpoint"]):
            differ = ", ".join(f"{n}: {index.recipe.get(n)!r:.200} there, {wanted.get(n)!r:.200} here" for n in other)
            raise KwargError(f"{folder} was begun otherwise; {differ}. Give the same to go on, or another folder")
        return index
    if folder.exists() and (not folder.is_dir() or any(path.suffix != ".tmp" for path in folder.iterdir())):
        raise KwargError(f"{folder} has no {INDEX}, and is not empty: give a new folder, or one that harvest began")
    folder.mkdir(parents=True, exist_ok=True)
    index = Index(recipe)
    index.write(folder)
    return index


def opened(file: Path) -> Any:
    """A shard, mapped into memory; tensors are read as they are asked for. Raises ModelError."""
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} is no safetensors file, or is cut short: {error}") from error


def read_tensors(file: Path, names: Iterable[str]) -> dict[str, Tensor]:
    with opened(file) as data:
        if missing := [name for name in names if name not in data.keys()]:
            raise ModelError(f"{file} has no {missing[0]!r}")
        return {name: data.get_tensor(name) for name in names}


def _put(file: Path, write: Any) -> None:
    """Write beside a file's place, and rename: it is there whole or not at all."""
    beside = file.with_name(f"{file.name}.tmp")
    write(beside)
    with beside.open("rb") as written:
        os.fsync(written.fileno())
    os.replace(beside, file)
