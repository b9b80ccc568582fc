"""Which tensors of a checkpoint make which tensors of a model, by transformers' own renamings and converters.

Files keep old names, or one tensor per expert where the model holds one for all: transformers converts when it loads.
The same rules are applied here to a few layers' tensors, and no other tensor is read.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from kwflow.errors import ModelError
from kwflow.models.files.checkpoint import Checkpoint


class Sources:
    """For each tensor of ``model`` (a skeleton), the checkpoint's tensors that it is made from."""

    def __init__(self, model: Any, checkpoint: Checkpoint, dtype: torch.dtype):
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )

        self.model, self.checkpoint, self.dtype = model, checkpoint, dtype
        self._meta = model.state_dict()
        kept = [name.replace("*", ".*") for name in model._get_dtype_plan(dtype)]
        self._float32 = re.compile("|".join(kept)) if kept else None
        rules = get_model_conversion_mapping(model)
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._converters = {pattern: rule for rule in converters for pattern in rule.source_patterns}
        self._of: dict[str, list[tuple[str, str | None]]] = {}  # target -> (source, the converter's pattern)
        for source in sorted(checkpoint.names(), key=dot_natural_key):
            prefix = model.base_model_prefix
            target, pattern = rename_source_key(source, renamings, converters, prefix, self._meta)
            if target not in self._meta and source in self._meta:
                target, pattern = source, None
            if target in self._meta:
                self._of.setdefault(target, []).append((source, pattern))

    def names(self, wanted: Callable[[str], bool]) -> list[str]:
        """The checkpoint's tensors that the model's ``wanted`` ones are made from."""
        return [source for target, sources in self._of.items() if wanted(target) for source, _ in sources]

    def read(self, wanted: Callable[[str], bool]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The model's tensors whose name is ``wanted``, and the checkpoint's tensors as they were read.

        A converter may make several tensors from one, which counts under the first of their names.
        """
        chosen = {target: sources for target, sources in self._of.items() if wanted(target)}
        raw = self.checkpoint.read(source for sources in chosen.values() for source, _ in sources)
        tensors: dict[str, Tensor] = {}
        for target, sources in chosen.items():
            cast = {source: raw[source].to(self._dtype(target)) for source, _ in sources}
            tensors.update(self._convert(target, sources, cast))
        return tensors, raw

    def _dtype(self, target: str) -> torch.dtype:
        """As from_pretrained: the skeleton's, and float32 for what transformers keeps in it; float64 is throughout."""
        if self.dtype is torch.float64 and self._meta[target].is_floating_point():
            return torch.float64
        return torch.float32 if self._float32 and self._float32.search(target) else self._meta[target].dtype

    def _convert(
        self, target: str, sources: list[tuple[str, str | None]], raw: Mapping[str, Tensor]
    ) -> Mapping[str, Tensor]:
        pattern = sources[0][1]
        if pattern is None:
            return {target: raw[sources[0][0]]}
        converter = copy.deepcopy(self._converters[pattern])
        for source, source_pattern in sources:
            assert source_pattern is not None
            future: Any = raw[source]  # transformers takes tensors that are still being read, and tensors
            converter.add_tensor(target, source, source_pattern, future)
        try:
            converted = converter.convert(target, model=self.model, config=self.model.config)
        except Exception as error:
            raise ModelError(
                f"{self.checkpoint.folder}: transformers cannot make {target!r} from {len(sources)} tensors, "
                f"the first {sources[0][0]!r}: {type(error).__name__}: {error}"
            ) from error
        return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}


def fill_buffers(model: Any, outer: Any, *, skip: Any = None) -> None:
    """Make the buffers of a skeleton's part that no checkpoint holds: rotary frequencies, local masks.

    Before weights are loaded: transformers' own initialization, which does nothing to what is on the meta device.
    """
    with torch.no_grad():
        skipped = set(() if skip is None else skip.modules())
        for module in (inner for inner in outer.modules() if inner not in skipped):
            buffers = dict(module.named_buffers(recurse=False))
            missing = [name for name in buffers if buffers[name].is_meta and name in module._non_persistent_buffers_set]
            for name in missing:
                empty = torch.empty_like(buffers[name], device="cpu")
                module._buffers[name] = empty.fill_(float("nan")) if empty.is_floating_point() else empty
            if missing:
                model._init_weights(module)
            for name in missing:
                if module._buffers[name].isnan().any():
                    raise ModelError(f"no checkpoint holds {type(module).__name__}.{name}, and transformers set it not")
