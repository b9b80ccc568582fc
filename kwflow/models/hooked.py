"""Edits on a plain local Hugging Face model: the entries of ``edit=`` as hooks, in its forward and in its generate.

Each forward of the module that runs the layers looks its columns up (mask and cache), puts ``kwflow.models.hooks`` on
the layers, and takes them away again. ``generate`` of this one model says how long its prompt is, which chunked prefill
and drafts hide from a forward. Imports no transformers: the caller has the model.
"""

# B batch, S seq (columns of this forward)

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from kwflow.blocks.projections import common, find
from kwflow.errors import KwargError, UnsupportedError
from kwflow.kwargs.bound import Bound
from kwflow.kwargs.edit import Edit, check, lower
from kwflow.kwargs.kwarg import Place
from kwflow.kwargs.points import edited_in
from kwflow.kwargs.positions import Columns, token_position, without_masks
from kwflow.kwargs.schema import Spec
from kwflow.models.families import family_of
from kwflow.models.hooks import edit_hooks
from kwflow.models.layout import layer_list, model_sizes, span_sizes
from kwflow.models.prepare import arguments, cache_argument


@contextmanager
def edited(model: Any, edits: Any) -> Iterator[Any]:
    """Within, every forward of ``model`` does ``edits``. Raises KwargError or UnsupportedError for other models."""
    hooks = _Edited(model, [edits] if isinstance(edits, Edit) else list(edits))
    handles = [
        hooks.base.register_forward_pre_hook(hooks.before, with_kwargs=True),
        hooks.base.register_forward_hook(hooks.after, always_call=True),
    ]
    before = vars(model).get("generate")
    if hasattr(model, "generate"):
        model.generate = hooks.generating(model.generate)
    try:
        yield model
    finally:
        vars(model).pop("generate", None)
        if before is not None:
            model.generate = before
        for handle in (*handles, *hooks.handles):
            handle.remove()


class _Edited:
    """What stands between a forward and its layers."""

    def __init__(self, model: Any, edits: list[Any]):
        if not isinstance(model, nn.Module) or not hasattr(model, "config"):
            raise KwargError(f"as_hooks takes a Hugging Face model, not a {type(model).__name__}")
        for edit in edits:
            if not isinstance(edit, Edit):
                raise KwargError(f"as_hooks takes edits (kf.add, …, v.edits()), not a {type(edit).__name__}")
        self.model, self.edits = model, edits
        self.config: Any = model.config
        self.family = family_of(self.config)
        base: Any = getattr(model, str(model.base_model_prefix), model)
        try:
            self.layers = layer_list(base, self.family)
        except AttributeError as error:
            raise KwargError(f"{type(model).__name__} has no {self.family.layers!r}: {error}") from error
        # the module that runs the layers: OPTForCausalLM calls its decoder, past its base model
        self.base: Any = base.get_submodule(self.family.layers.rpartition(".")[0])
        self.span = (0, int(self.config.num_hidden_layers))
        if len(self.layers) != self.span[1]:
            raise KwargError(f"{type(model).__name__} has its layers elsewhere: give it edit=… itself")
        self.points, self.projections = edited_in(self.family.points_in(self.layers)), common(map(find, self.layers))
        self.handles: list[Any] = []
        self.first_columns_of: WeakKeyDictionary[Any, int] = WeakKeyDictionary()  # columns of each cache's first step
        self.first_columns = 0  # columns of the step that runs now, if it begins a cache
        self.prompt_columns: int | None = None  # columns of the prompt of the generate call that runs now
        self.prompt_tokens: Tensor | None = None  # tokens of each of its rows' prompts, if its mask says so
        self.rows: int | None = None  # of its batch, without beams

    def generating(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        """The model's generate, with its prompt known to the forwards in it."""

        @functools.wraps(generate)
        def with_prompt(*args: Any, **kwargs: Any) -> Any:
            call = arguments(generate, args, kwargs)
            embeds, mask = call.get("inputs_embeds"), call.get("attention_mask")
            ids = call.get("input_ids", call.get("inputs")) if embeds is None else embeds
            self.prompt_columns = ids.shape[1] if isinstance(ids, Tensor) else 1
            self.rows = ids.shape[0] if isinstance(ids, Tensor) else 1
            self.prompt_tokens = mask.long().sum(1).cpu() if isinstance(mask, Tensor) and mask.dim() == 2 else None
            try:
                return generate(*args, **kwargs)
            finally:
                self.prompt_columns = self.prompt_tokens = self.rows = None

        return with_prompt

    def before(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Put this forward's edits on the layers."""
        self._remove()
        if self.model.training and getattr(self.model, "is_activation_checkpointing", False):
            raise UnsupportedError("as_hooks with gradient checkpointing: layers run again later, without the edits")
        call = arguments(self.base.forward, args, kwargs)
        inputs = call.get("input_ids") if call.get("inputs_embeds") is None else call["inputs_embeds"]
        if not isinstance(inputs, Tensor):
            raise KwargError("as_hooks: the model got neither input_ids nor inputs_embeds")
        columns = self._columns(call, *inputs.shape[:2])
        bound = self._bound(columns, *inputs.shape[:2])
        shape = torch.Size(inputs.shape[:2])
        self.handles = edit_hooks(self.layers, self.family, model_sizes(self.config), bound, None, shape)

    def after(self, _: nn.Module, __: Any, out: Any) -> None:
        """Take the edits away, also after an error; remember a cache that begins here."""
        self._remove()
        outputs = out.values() if isinstance(out, Mapping) else out if isinstance(out, tuple) else ()
        for cache in (value for value in outputs if hasattr(value, "get_seq_length")):
            if self.first_columns:
                self.first_columns_of[cache] = self.first_columns

    def _remove(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles = []

    def _columns(self, call: Mapping[str, Any], batch: int, seq: int) -> Columns:
        """This forward's columns in token positions: of a plain call, or of a step where there is a cache."""
        cache = call.get(cache_argument(self.base.forward))
        mask = call.get("attention_mask")
        if mask is not None and not (isinstance(mask, Tensor) and mask.dim() in (2, 4)):
            raise UnsupportedError(f"as_hooks: attention_mask is a {type(mask).__name__}; a 2-D one says the positions")
        past = 0 if cache is None else int(cache.get_seq_length())
        self.first_columns = 0 if past else seq
        mask = mask.cpu() if isinstance(mask, Tensor) else None
        if cache is None and not call.get("use_cache") and self.prompt_columns is None:
            return Columns.of_call(mask, seq)
        number, counted = torch.arange(past, past + seq), mask is None or mask.dim() == 2
        if mask is None or not counted:
            position_BS, mask = number[None], None
        elif mask.shape[1] != past + seq:
            what = f"attention_mask has {mask.shape[1]} columns, the cache and the inputs {past + seq}"
            raise UnsupportedError(f"as_hooks: {what}")
        else:
            position_BS = token_position(mask, seq)
        prompt = self._prompt_columns(cache, past, seq) if self.prompt_columns is None else self.prompt_columns
        tokens = self._prompt_tokens(mask, prompt, batch)
        return Columns(position_BS, number < prompt, tokens, start=past, session=True, counted=counted)

    def _prompt_columns(self, cache: Any, past: int, seq: int) -> int:
        """Columns of a cache's first step, its prompt. Raises UnsupportedError where an edit asks and none can tell."""
        known = self.first_columns_of.get(cache) if past else seq
        if known is not None and (not past or seq == 1):
            return known
        if phases := [edit.at for edit in self.edits if isinstance(edit.at, str) and edit.at != "all"]:
            why = "a cache begun outside of as_hooks" if known is None else "several columns after a cache's first step"
            raise UnsupportedError(
                f"as_hooks: at={phases[0]!r} with {why}: where the prompt ends cannot be told; model.generate says it"
            )
        return past + seq

    def _prompt_tokens(self, mask: Tensor | None, prompt: int, batch: int) -> Tensor | None:
        """Tokens of each row's prompt; None: not known."""
        if self.prompt_tokens is not None:  # of generate's own mask; its rows are repeated for beams and samples
            return self.prompt_tokens.repeat_interleave(batch // len(self.prompt_tokens))
        if mask is None:
            return torch.full((1,), prompt)
        return mask[:, :prompt].long().sum(1) if mask.shape[1] >= prompt else None

    def _bound(self, columns: Columns, batch: int, seq: int) -> Bound:
        """The edits of this forward, checked as a worker checks them."""
        sizes = span_sizes(self.config, self.family, self.layers)
        if self.rows not in (None, batch) and any(edit.seed is not None for edit in self.edits):
            raise UnsupportedError("as_hooks: kf.edits.noise goes by rows, which beams and several sequences repeat")
        sizes = {**sizes, "batch": batch, "seq": seq, "key": columns.start + seq}
        sections: list[Any] = []
        generated = self.prompt_columns is not None and columns.start >= self.prompt_columns
        edits = without_masks({"edit": self.edits})["edit"] if generated else self.edits
        for number, (layers, entry) in enumerate(lower(edits, self.span, columns)):
            place = Place(f"edit[{number}]", Spec(points=self.points), sizes, self.projections, single_layer=True)
            sections.append((layers, {"edit": [check(entry, place)]}))
        return Bound.of(self.span, sections)
