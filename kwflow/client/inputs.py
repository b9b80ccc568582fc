"""What a call is given: hidden, token ids, and the client's own part of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from kwflow.errors import KwargError, ShapeError
from kwflow.kwargs.axes import describe


class Ends(Protocol):
    """The client's own part of the model: tokenizer, embeddings, final norm and head."""

    name: str
    layers: int
    hidden_size: int
    dtype: torch.dtype
    takes_positions: bool  # the family's blocks take position_ids

    @property
    def config(self) -> Any: ...
    @property
    def tokenizer(self) -> Any: ...
    def tokenize(self, texts: Sequence[str]) -> Mapping[str, Tensor]: ...
    def embed(self, input_ids: Tensor, position_ids: Tensor | None, *, before: Tensor | None = None) -> Tensor: ...
    def head(self, hidden: Tensor) -> Tensor: ...


def _no_capture(kwargs: Mapping[str, Any]) -> None:
    if kwargs.get("capture") is not None:
        raise KwargError("a call returns hidden alone; out, acts = flow.capture({'resid': [3]}, **x) captures")


def token_ids(ends: Ends, texts: str | Sequence[str] | Mapping[str, Tensor] | Tensor) -> tuple[Tensor, Tensor]:
    """Token ids and mask (batch, seq) of texts, of ids, or of a tokenizer's output."""
    if isinstance(texts, str):
        texts = [texts]
    elif isinstance(texts, Mapping) or hasattr(texts, "input_ids"):  # a tokenizer may give lists
        texts = {name: torch.as_tensor(texts[name]) for name in ("input_ids", "attention_mask") if name in texts}  # type: ignore[index, operator]
    if isinstance(texts, Tensor):
        ids, mask = texts, torch.ones_like(texts)
    elif isinstance(texts, Mapping) or hasattr(texts, "input_ids"):
        ids = texts["input_ids"]  # type: ignore[call-overload]
        mask = texts["attention_mask"] if "attention_mask" in texts else torch.ones_like(ids)  # type: ignore[call-overload]
    elif isinstance(texts, Sequence) and texts and all(isinstance(text, str) for text in texts):
        made = ends.tokenize(list(texts))
        ids, mask = made["input_ids"], made["attention_mask"]
    else:
        raise KwargError("flow.inputs takes a text, a list of texts, token ids (batch, seq) or a tokenizer's output")
    if ids.dim() != 2 or ids.is_floating_point() or mask.shape != ids.shape:
        raise ShapeError(f"token ids are {describe(ids)} and the mask {describe(mask)}; both are int (batch, seq)")
    if ids.shape[1] == 0:
        raise KwargError("there is not one token: the text is empty")
    return ids, mask
