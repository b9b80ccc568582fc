"""Prompt tuning: trainable vectors before the first token, and what is trained saved and read again.

``ptune`` (Lester et al. 2021, P-tuning): ``prompt_embeddings`` stand before each row's columns, pads included, as if
they were the embeddings of as many tokens; the model returns its own columns only. ``deep_ptune`` (Li & Liang 2021,
P-tuning v2) also adds ``deep_prompt_embeddings`` to every layer's input there: the blocks' ``prompts``.
"""

# B batch, S seq, P prefix, D hidden

from __future__ import annotations

import functools
import inspect
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kwflow.errors import KwargError, ModelError, UnsupportedError, did_you_mean
from kwflow.kwargs.axes import describe
from kwflow.models.files.checkpoint import Checkpoint, read_json
from kwflow.models.prepare import arguments, cache_argument

MODES = ("ptune", "deep_ptune")
WEIGHTS, SAYS = "model.safetensors", "tuned.json"  # the first is where transformers' Trainer looks when it resumes


@dataclass(frozen=True, eq=False)
class Tuning:
    """The trained prompts of a model: ``prompts`` (prefix, hidden), ``deep`` (layers, prefix, hidden)."""

    mode: str | None = None
    prompts: Tensor | None = None
    deep: Tensor | None = None
    prefix_columns: int = 0  # columns of the prefix_kv that stands before the prompts

    @property
    def length(self) -> int:
        return 0 if self.prompts is None else len(self.prompts)

    def check(self, block_kwargs: Mapping[str, Any], mask: Tensor | None) -> None:
        """Raise where the caller's kwargs leave no room for the prompts."""
        if self.deep is not None and block_kwargs.get("prompts") is not None:
            raise KwargError(
                "prompts act where deep_ptune's own do; give them to a model without it, or tuning_mode='ptune'"
            )
        if self.length and isinstance(mask, Tensor) and mask.dim() != 2:
            raise UnsupportedError(
                f"attention_mask is {describe(mask)}; with tuning_mode give one (batch, key), which the prompts extend"
            )

    def mask(self, mask: Tensor | None) -> Tensor | None:
        """The mask with the prompts' columns."""
        return mask if mask is None or not self.length else torch.cat([mask.new_ones(len(mask), self.length), mask], 1)

    def kwargs(self) -> dict[str, Tensor]:
        """What the blocks are given at the first columns."""
        return {} if self.deep is None else {"prompts": self.deep[:, None]}


NONE = Tuning()
_tuning: ContextVar[Tuning] = ContextVar("kwflow_tuning", default=NONE)


@contextmanager
def prefixing(tuning: Tuning, prefix_columns: int = 0) -> Iterator[None]:
    """Within, base models stand behind the trained prompts, and these behind a prefix_kv."""
    token = _tuning.set(replace(tuning, prefix_columns=prefix_columns))
    try:
        yield
    finally:
        _tuning.reset(token)


class Prefixed:
    """Mixed in before a Hugging Face base model: puts the prompts before the embeddings, and drops their columns.

    Whatever stands on the base model (a head, pooling by input_ids, a loss) sees the columns that it was given.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        tuning = _tuning.get()
        if tuning.prompts is None:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        call = arguments(super().forward, args, kwargs)  # type: ignore[misc]
        if call.get("token_type_ids") is not None:
            raise UnsupportedError("token_type_ids with tuning_mode: the prompts have none")
        cache = call.get(cache_argument(super().forward))  # type: ignore[misc]
        first = cache is None or cache.session.position == 0
        ids, embeds = call.pop("input_ids", None), call.pop("inputs_embeds", None)
        embeds = self.get_input_embeddings()(ids) if embeds is None else embeds  # type: ignore[attr-defined]
        call["inputs_embeds"] = embeds
        if first:
            before = tuning.prompts.to(embeds.dtype).expand(len(embeds), -1, -1)
            call["inputs_embeds"] = torch.cat([before, embeds], 1)
        call["attention_mask"] = tuning.mask(call.get("attention_mask"))
        if call.get("position_ids") is not None:  # tokens' own: they stand behind the prompts
            call["position_ids"] = _behind(call["position_ids"], tuning, first)
        with nullcontext() if cache is None else cache.whole():
            out = super().forward(**call)  # type: ignore[misc]
        if first and isinstance(out, tuple):
            return (out[0][:, tuning.length :], *out[1:])
        if first:
            out.last_hidden_state = out.last_hidden_state[:, tuning.length :]
        return out


def _behind(positions: Tensor, tuning: Tuning, first: bool) -> Tensor:
    behind = positions + tuning.length
    prompts = torch.arange(tuning.prefix_columns, tuning.prefix_columns + tuning.length).expand(len(positions), -1)
    return torch.cat([prompts, behind], 1) if first else behind


@functools.cache
def prefixed(hf: type) -> type:
    """The base model class ``hf`` with Prefixed before it, under its own name and signature."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return Prefixed.forward(self, *args, **kwargs)

    forward.__signature__ = inspect.signature(hf.forward)  # type: ignore[attr-defined]
    return type(hf.__name__, (Prefixed, hf), {"forward": forward})


# ---- what is trained


def add_prompts(model: Any, mode: str | None, length: int | None) -> None:
    """Give a model trainable prompts: random ones before the tokens, zeros at the layers."""
    if mode is None and length is None:
        return
    if mode not in MODES:
        raise KwargError(f"tuning_mode is {mode!r}; give one of {', '.join(MODES)}.{did_you_mean(str(mode), MODES)}")
    if type(length) is not int or length < 1:
        raise KwargError(f"tuning_mode={mode!r} with pre_seq_len={length!r}; give the number of prompts, 1 or more")
    embeddings = model.get_input_embeddings().weight
    # half precision is too coarse for an optimizer's steps
    dtype = torch.promote_types(embeddings.dtype, torch.float32)
    scale = getattr(model.config, "initializer_range", 0.02)
    model.prompt_embeddings = nn.Parameter(torch.randn(length, embeddings.shape[1], dtype=dtype) * scale)
    deep = None
    if mode == "deep_ptune":
        sizes = len(model.flow), length, model.flow.ends.hidden_size
        deep = model.deep_prompt_embeddings = nn.Parameter(torch.zeros(*sizes, dtype=dtype))
    model.tuning = Tuning(mode, model.prompt_embeddings, deep)
    model.added |= {name for name in ("prompt_embeddings", "deep_prompt_embeddings") if hasattr(model, name)}


def saved_names(model: Any) -> set[str]:
    """The parameters that save_pretrained saves."""
    return {name for name, tensor in model.named_parameters() if tensor.requires_grad or name in model.added}


def save_tuned(model: Any, folder: str | os.PathLike[str], state_dict: Mapping[str, Tensor] | None = None) -> None:
    """Write what is trained as safetensors, and a JSON file that says what it belongs to."""
    from safetensors.torch import save_file

    found = dict(model.named_parameters()) if state_dict is None else state_dict
    tensors = {name: found[name].detach().contiguous() for name in sorted(saved_names(model))}
    if not tensors:
        raise UnsupportedError(
            "nothing to save: the layers are on the workers, and no parameter here is trainable (requires_grad_)"
        )
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    says = {**_belongs(model), "model": model.flow.ends.name, "labels": _labels(model)}
    save_file(tensors, target / WEIGHTS, metadata={"format": "pt"})
    (target / SAYS).write_text(json.dumps(says, indent=2) + "\n")


def load_tuned(model: Any, folder: str | os.PathLike[str]) -> None:
    """Read what :func:`save_tuned` wrote into the model's parameters."""
    says, mine = read_tuned(folder), _belongs(model)
    for name, value in mine.items():
        if says.get(name) != value:
            raise ModelError(f"{folder} was tuned with {name} {says.get(name)!r:.60}; this model has {value!r:.60}")
    saved, parameters = Checkpoint(folder), dict(model.named_parameters())
    for name in saved.names():
        if name not in parameters:
            hint = did_you_mean(name, parameters)
            raise ModelError(f"{folder} holds {name!r}, which {type(model).__name__} does not have.{hint}")
    tensors = saved.read(saved.names())
    for name, tensor in tensors.items():
        if tensor.shape != parameters[name].shape:
            raise ModelError(f"{folder}: {name} is {describe(tensor)}, this model's {describe(parameters[name])}")
    with torch.no_grad():
        for name, tensor in tensors.items():
            parameters[name].copy_(tensor)
    model.added |= set(tensors)


def read_tuned(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """What a folder says of what was tuned. Raises ModelError where nothing is said."""
    path = Path(folder) / SAYS
    if not path.is_file():
        raise ModelError(f"{os.fspath(folder)!r} has no {SAYS}: it is not what save_pretrained of a tuned model wrote")
    return read_json(path)


def _belongs(model: Any) -> dict[str, Any]:
    """What must be equal where tuned parameters are read again."""
    hf_class = next(one.__name__ for one in type(model).__mro__ if one.__module__.startswith("transformers."))
    return {
        "class": hf_class,  # transformers' own: a user's subclass of ours takes it over too
        "checkpoint": Checkpoint(model.flow.ends.folder).checkpoint_id(),
        "tuning_mode": model.tuning.mode,
        "pre_seq_len": model.tuning.length or None,
    }


def _labels(model: Any) -> dict[str, Any]:
    """The config's names for what a classifier returns."""
    config = model.config
    return {"id2label": config.id2label, "label2id": config.label2id, "problem_type": config.problem_type}
