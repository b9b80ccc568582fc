"""Control vectors in files: safetensors, and the GGUF format of repeng and llama.cpp.

Both hold one tensor (hidden,) for each layer, named ``direction.N``. N is the layer's number as everywhere in kwflow,
from 0: the vector is added to the output of layer N. That is what readers of GGUF control vectors do, too:

- llama.cpp: ``llama_adapter_cvec::apply`` takes the data at (N - 1) * n_embd for its layer N (from 0), whose output
  ``build_cvec`` adds it to; ``common.cpp`` puts direction.N there. "There's never a tensor for layer 0", and a file
  with direction.0 is refused. Layers that a file lacks get zeros.
- repeng: ``directions[N]`` is read at, and added to, the output of ``model.layers[N]``; it makes 1 to the last.
- llama.cpp's cvector-generator writes what it measures at the output of layer N - 1 as direction.N (its il + 1). Such a
  file is read as it stands, as llama.cpp reads it.

In GGUF ``general.architecture`` is "controlvector", ``controlvector.model_hint`` the model type (repeng) or llama.cpp's
architecture, ``controlvector.layer_count`` the number of tensors. Needs the gguf package for GGUF. Never a pickle.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kwflow.errors import KwargError, ModelError

ARCHITECTURE = "controlvector"
FORMAT, VERSION = "kwflow.steering", "1"  # in a safetensors file's metadata
METADATA = ("point", "model", "model_type", "method")
_TENSOR_NAME = re.compile(r"direction\.(0|[1-9][0-9]{0,5})")

Contents = tuple[dict[int, Tensor], dict[str, str]]  # vectors by layer, and their metadata


def write(path: str | os.PathLike[str], by_layer: Mapping[int, Tensor], metadata: Mapping[str, str]) -> None:
    """Write vectors as the file's name says; ``metadata``: point, model, model_type, method. Raises KwargError."""
    writers: dict[str, Callable[..., None]] = {".safetensors": _write_safetensors, ".gguf": _write_gguf}
    writer = writers.get(Path(path).suffix)
    if writer is None:
        raise KwargError(f"{os.fspath(path)!r}: name a file .safetensors, or .gguf (repeng's and llama.cpp's format)")
    cpu_vectors = {layer: vector.detach().cpu().contiguous() for layer, vector in sorted(by_layer.items())}
    if bad := [layer for layer, vector in cpu_vectors.items() if not bool(vector.isfinite().all())]:
        raise KwargError(f"the vector of layer {bad[0]} has numbers that are not finite; it is not saved")
    writer(Path(path), cpu_vectors, metadata)


def read(path: str | os.PathLike[str]) -> Contents:
    """Read a file of either format, which its first bytes tell. Raises ModelError."""
    file = Path(path)
    try:
        with file.open("rb") as data:
            gguf = data.read(4) == b"GGUF"
    except OSError as error:
        raise ModelError(f"cannot read {file}: {error}") from error
    by_layer, metadata = (_read_gguf if gguf else _read_safetensors)(file)
    shapes = {tuple(vector.shape) for vector in by_layer.values()}
    if not by_layer or len(shapes) != 1:
        raise ModelError(f"{file} holds no vectors" if not by_layer else f"{file} holds vectors of sizes {shapes}")
    if bad := [layer for layer, vector in by_layer.items() if not bool(vector.isfinite().all())]:
        raise ModelError(f"{file}: direction.{bad[0]} has numbers that are not finite")
    return by_layer, metadata


def _layer(name: str, file: Path) -> int:
    matched = _TENSOR_NAME.fullmatch(name)
    if matched is None:
        raise ModelError(f"{file} holds {name!r:.60}; a file of vectors holds direction.N only")
    return int(matched[1])


# ---- safetensors -------------------------------------------------------------------------------------------------


def _write_safetensors(path: Path, by_layer: Mapping[int, Tensor], metadata: Mapping[str, str]) -> None:
    from safetensors.torch import save_file

    first = next(iter(by_layer.values()))
    hidden = {"hidden_size": str(first.shape[0])} if first.dim() == 1 else {}
    tensors = {f"direction.{layer}": vector.clone() for layer, vector in by_layer.items()}  # they may share memory
    save_file(tensors, path, metadata={"format": "pt", FORMAT: VERSION, **hidden, **metadata})


def _read_safetensors(file: Path) -> Contents:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as data:
            metadata = data.metadata() or {}
            if FORMAT not in metadata:
                raise ModelError(f"{file} is not a file of vectors that kwflow saved: its metadata lacks {FORMAT!r}")
            if metadata[FORMAT] != VERSION:
                raise ModelError(f"{file} is of version {metadata[FORMAT]!r:.20}; this kwflow reads {VERSION!r}")
            by_layer = {_layer(name, file): data.get_tensor(name) for name in data.keys()}
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} is neither a safetensors nor a GGUF file, or is cut short: {error}") from error
    size, length = (
        metadata.get("hidden_size"),
        next((str(v.shape[-1]) for v in by_layer.values() if v.dim() == 1), None),
    )
    if size is not None and length is not None and size != length:
        raise ModelError(f"{file} says hidden_size {size:.20}, its vectors have {length}")
    return by_layer, {name: metadata[name] for name in METADATA if name in metadata}


# ---- GGUF --------------------------------------------------------------------------------------------------------


def _gguf() -> Any:
    try:
        import gguf
    except ImportError as error:
        raise ModelError("GGUF control vectors need the gguf package:  pip install 'kwflow[embedded]'") from error
    return gguf


def _write_gguf(path: Path, by_layer: Mapping[int, Tensor], metadata: Mapping[str, str]) -> None:
    if metadata["point"] != "resid":
        raise KwargError(f"GGUF control vectors act at 'resid', not at {metadata['point']!r}; save as .safetensors")
    if 0 in by_layer:
        raise KwargError("llama.cpp reads no direction.0; leave layer 0 out (v[1:]), or save as .safetensors")
    if wide := [layer for layer, vector in by_layer.items() if vector.dtype == torch.float64]:
        raise KwargError(f"GGUF control vectors are float32, layer {wide[0]} is float64: v.to(torch.float32).save(…)")
    writer = _gguf().GGUFWriter(os.fspath(path), ARCHITECTURE)
    try:
        writer.add_string(f"{ARCHITECTURE}.model_hint", metadata["model_type"] or metadata["model"])
        writer.add_uint32(f"{ARCHITECTURE}.layer_count", len(by_layer))
        for name in ("model", "method"):
            if metadata[name]:
                writer.add_string(f"kwflow.{name}", metadata[name])
        for layer, vector in by_layer.items():
            writer.add_tensor(f"direction.{layer}", vector.float().numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def _read_gguf(file: Path) -> Contents:
    gguf = _gguf()

    class Strict(gguf.GGUFReader):  # type: ignore[misc, name-defined]
        def _get(self, offset: int, dtype: Any, count: Any = 1, *more: Any, **named: Any) -> Any:
            # NOTE [end of file] the reader slices past the end of a file, and goes on through an array that claims
            # 2^60 empty items. Each item must be there.
            items = super()._get(offset, dtype, count, *more, **named)
            if len(items) != int(count):
                raise ValueError(f"it ends before byte {offset} and {count} items more")
            return items

    try:
        reader = Strict(file)
        architecture = _text(reader, "general.architecture")
        if architecture != ARCHITECTURE:
            raise ModelError(f"{file} is a GGUF file of {architecture!r:.40}, not of a {ARCHITECTURE}")
        by_layer = {}
        for tensor in reader.tensors:
            layer = _layer(tensor.name, file)
            if layer == 0 or tensor.tensor_type != gguf.GGMLQuantizationType.F32 or tensor.data.ndim != 1:
                raise ModelError(f"{file}: {tensor.name} is not a float32 vector of a layer from 1 on")
            by_layer[layer] = torch.from_numpy(tensor.data.astype("float32"))  # a copy, in this machine's byte order
        hint = _text(reader, f"{ARCHITECTURE}.model_hint")
        metadata = {name: _text(reader, f"kwflow.{name}") for name in ("model", "method")}
    except (ValueError, KeyError, IndexError, OverflowError, TypeError, OSError, MemoryError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{file} is a broken GGUF file: {type(error).__name__}: {error}") from error
    return by_layer, {"point": "resid", "model_type": hint, **metadata}


def _text(reader: Any, key: str) -> str:
    """A field's text, empty where there is none."""
    field = reader.get_field(key)
    value = "" if field is None else field.contents()
    if not isinstance(value, str):
        raise ValueError(f"{key} is {value!r:.40}, not a text")
    return value
