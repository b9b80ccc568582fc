"""``at=``: which token positions an edit or a capture means; one language for calls, sessions and generate.

    all                            every token (pads are never selected)
    prompt   generated             the tokens of a phase; a plain call is all prompt
    prompt[-1]   prompt[2:5]       counted within each row's prompt; prompt[-1] predicts the first generated token
    [3, 5]                         token positions: a row's count of unmasked tokens, from 0
    tensor "batch pos"             token positions of each row
    bool tensor "batch seq"        columns of this call; in generate those of the prompt

A row means the same alone, padded, chunked or decoding. Imports no network and no torch.nn.
"""

# B batch (or 1), S seq (columns of this call), P pos

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kwflow.autograd.transforms import is_mapped
from kwflow.errors import AxesError, KwargError, SessionError, ShapeError
from kwflow.kwargs.axes import Axed, describe

_FORMS = "'all', 'prompt', 'generated', 'prompt[-1]', 'prompt[2:5]', a list of positions, or a tensor"
_MAX_POSITIONS = 1 << 17  # positions in a list
_PROMPT = re.compile(r"prompt\[\s*(-?\d{1,9})\s*\]|prompt\[\s*(-?\d{1,9})?\s*:\s*(-?\d{1,9})?\s*\]")


@dataclass(frozen=True)
class Columns:
    """The columns of one call or step, in token positions."""

    position_BS: Tensor  # int; -1 at pads
    prompt_S: Tensor | None  # bool: which columns are of the prompt; None: nobody said
    prompt_tokens_B: Tensor | None  # int: tokens of each row's prompt; None: not known
    start: int = 0  # columns that stand before these
    session: bool = False  # more columns may come: a position that is not here may be elsewhere
    counted: bool = True  # False after a 4-D mask, which leaves token positions unsaid

    @classmethod
    def of_call(cls, attention_mask: Tensor | None, seq: int) -> Columns:
        """A plain call: everything is prompt. Raises KwargError where vmap hides the mask's values."""
        if attention_mask is not None and is_mapped(attention_mask):
            raise KwargError("attention_mask is mapped over by torch.func.vmap, which hides the tokens that at= counts")
        if attention_mask is not None and attention_mask.dim() == 4:
            position_BS = torch.arange(seq)[None]
            return cls(position_BS, torch.ones(seq, dtype=torch.bool), None, counted=False)
        position_BS = token_position(attention_mask, seq)
        return cls(position_BS, torch.ones(seq, dtype=torch.bool), (position_BS >= 0).sum(1))


def from_the_end(at: Any) -> bool:
    """Whether ``at`` is counted from the prompt's end, so that the whole prompt must be known."""
    return isinstance(at, str) and "-" in at


def is_mask(at: Any) -> bool:
    """Whether ``at`` is a bool mask of columns, which numbers them anew in each step."""
    values = at.tensor if isinstance(at, Axed) else at
    return str(getattr(values, "dtype", "")).endswith("bool")


def token_position(attention_mask: Tensor | None, seq: int) -> Tensor:
    """(batch, seq) token positions of the last ``seq`` columns of a 2-D mask, -1 at pads."""
    if attention_mask is None:
        return torch.arange(seq)[None]
    counted = attention_mask.long()
    return torch.where(counted.bool(), counted.cumsum(-1) - 1, -1)[:, counted.shape[1] - seq :]


def token_positions(attention_mask: Tensor | None, past: int, seq: int, device: torch.device) -> Tensor | None:
    """(batch, seq) token positions of this call's columns, -1 at pads; None when a 4-D mask leaves them unsaid."""
    if attention_mask is None:
        return torch.arange(past, past + seq, device=device)[None]
    return token_position(attention_mask, seq) if attention_mask.dim() == 2 else None


def select(at: Any, columns: Columns, *, what: str) -> Tensor | None:
    """Which columns ``at`` selects: (batch or 1, seq) int, -1 where not, else the number along ``pos``.

    None: every column, pads included where there are none. Raises KwargError, ShapeError or SessionError that names
    ``what``.
    """
    position = columns.position_BS
    if isinstance(at, str) and at == "all":
        return None if bool((position >= 0).all()) else position
    if not columns.counted:
        raise KwargError(
            f"{what}: at={at!r} counts tokens, which a 4-D attention_mask leaves unsaid; at='all' is taken"
        )
    if isinstance(at, Axed | Tensor) or hasattr(at, "__array__"):  # an array of numpy too
        return _tensor(at, columns, what)
    if isinstance(at, str):
        return _phase(at, columns, what)
    return _listed(at, columns, what)


def _phase(at: str, columns: Columns, what: str) -> Tensor:
    position, there = columns.position_BS, columns.position_BS >= 0
    matched = _PROMPT.fullmatch(at)
    if at not in ("prompt", "generated") and matched is None:
        raise KwargError(f"{what}: at={at!r} is none of {_FORMS}")
    if at == "generated" and not columns.session:
        raise KwargError(f"{what}: at='generated' in a plain call, where everything is prompt")
    if columns.prompt_S is None:
        raise SessionError(f"{what}: at={at!r} names a phase; say it: step(…, phase='prompt' or 'generated')")
    if at == "generated":
        return torch.where(there & ~columns.prompt_S, position - _tokens(at, columns, what)[:, None], -1)
    inside = there & columns.prompt_S
    if matched is None:
        return torch.where(inside, position, -1)
    index, first, last = (None if text is None else int(text) for text in matched.groups())
    if index is not None:
        target_B = torch.full((1,), index) if index >= 0 else _tokens(at, columns, what) + index
        if not columns.session or index < 0:
            _require(target_B, columns, at, what)
        return torch.where(inside & (position == target_B[:, None]), 0, -1)
    bounds = [torch.zeros(1, dtype=torch.long) if first is None else torch.full((1,), first)]
    bounds.append(torch.full((1,), torch.iinfo(torch.long).max) if last is None else torch.full((1,), last))
    for number, bound in enumerate((first, last)):
        if bound is not None and bound < 0:
            bounds[number] = (_tokens(at, columns, what) + bound).clamp(min=0)
    start, stop = (bound[:, None] for bound in bounds)
    return torch.where(inside & (position >= start) & (position < stop), position - start, -1)


def _tokens(at: str, columns: Columns, what: str) -> Tensor:
    """Tokens of each row's prompt (batch or 1)."""
    if columns.prompt_tokens_B is None:
        raise SessionError(
            f"{what}: at={at!r} is counted from the prompt's end, which is not known yet; say step(…, prompt_length=n)"
        )
    return columns.prompt_tokens_B


def _require(target_B: Tensor, columns: Columns, at: Any, what: str) -> None:
    """Raise unless every row has the position."""
    tokens_B = columns.prompt_tokens_B
    if tokens_B is None:
        return
    lacking = ((target_B < 0) | (target_B >= tokens_B)).nonzero()
    if len(lacking):
        row = int(lacking[0])
        raise KwargError(f"{what}: at={at!r}: row {row} has {int(tokens_B[min(row, len(tokens_B) - 1)])} tokens")


def _listed(at: Any, columns: Columns, what: str) -> Tensor:
    items = at if isinstance(at, Sequence) else [at]
    if len(items) > _MAX_POSITIONS or any(isinstance(item, bool) for item in items):
        raise KwargError(
            f"{what}: at={at!r:.80}: give at most {_MAX_POSITIONS} token positions; "
            f"bools are a tensor of each row's columns"
        )
    try:
        targets = [operator.index(item) for item in items]
    except TypeError:
        raise KwargError(f"{what}: at={at!r:.80} is none of {_FORMS}") from None
    if not targets or min(targets) < 0 or max(targets) >> 62 or len(set(targets)) != len(targets):
        raise KwargError(f"{what}: at={at!r:.80}: give token positions from 0 on, each once ('prompt[-1]' is the last)")
    return _numbered(torch.tensor([targets]), columns, at, what)


def _numbered(target_BP: Tensor, columns: Columns, at: Any, what: str) -> Tensor:
    """Number each column by its place among the target positions."""
    if not columns.session:
        for target_B in target_BP.unbind(1):
            _require(target_B, columns, at, what)
    equal_BSP = columns.position_BS[:, :, None] == target_BP[:, None, :]
    return torch.where(equal_BSP.any(2), equal_BSP.int().argmax(2), -1)


def _of_prompt(mask: Tensor, columns: Columns) -> Tensor:
    """A mask of the prompt's columns, in a step that goes on behind them, without these."""
    seq = columns.position_BS.shape[1]
    prompt = 0 if columns.prompt_S is None else int(columns.prompt_S.sum())
    return torch.constant_pad_nd(mask, (0, seq - prompt)) if mask.dim() == 2 and mask.shape[1] == prompt < seq else mask


def without_masks(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The kwargs of a step of generate behind the prompt, whose columns the bool masks among ``at=`` are of."""
    edits, capture = kwargs.get("edit"), kwargs.get("capture")
    listed = edits if isinstance(edits, Sequence) else [edits]
    kept = {
        name: value for name, value in kwargs.items() if name != "capture" or not is_mask(getattr(capture, "at", 0))
    }
    others = [edit for edit in listed if not is_mask(getattr(edit, "at", None))]
    return kept if len(others) == len(listed) else {**kept, "edit": others}


def _tensor(at: Any, columns: Columns, what: str) -> Tensor:
    values = at.tensor if isinstance(at, Axed) else at
    if isinstance(values, Tensor) and is_mapped(values):
        raise KwargError(f"{what}: at= is mapped over by torch.func.vmap, which hides the positions")
    try:
        tensor = torch.as_tensor(values, device=columns.position_BS.device)
    except (TypeError, ValueError):
        raise KwargError(f"{what}: at={at!r:.80} is none of {_FORMS}") from None
    forms = (("batch", "seq"),) if tensor.dtype is torch.bool else (("pos",), ("batch", "pos"))
    if isinstance(at, Axed) and at.axes not in forms:
        raise AxesError(f"{what}: at={at!r}; positions have the axes 'pos' or 'batch pos', a bool mask 'batch seq'")
    rows, (batch, seq) = (1, columns.position_BS.shape[0]), columns.position_BS.shape
    if tensor.dtype is torch.bool:
        tensor = _of_prompt(tensor, columns)
        if tensor.dim() != 2 or tensor.shape[1] != seq or (tensor.shape[0] != 1 and batch not in (1, tensor.shape[0])):
            raise ShapeError(f"{what}: at={describe(tensor)}; a bool mask is (batch, seq), here {(batch, seq)}")
        inside = tensor & (columns.position_BS >= 0)
        return torch.where(inside, inside.long().cumsum(1) - 1, -1)
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dim() > 2:
        raise KwargError(f"{what}: at={describe(tensor)}; give positions (int, 'batch pos' or 'pos') or a bool mask")
    target_BP = tensor.long() if tensor.dim() == 2 else tensor.long().reshape(1, -1)
    if target_BP.shape[0] not in rows and batch != 1:
        raise ShapeError(f"{what}: at={describe(tensor)} has {target_BP.shape[0]} rows, the call {batch}")
    if target_BP.numel() == 0 or bool((target_BP < 0).any()):
        raise KwargError(f"{what}: at={describe(tensor)} holds a negative position, or none")
    ordered = target_BP.sort(1).values
    if bool((ordered[:, 1:] == ordered[:, :-1]).any()):
        raise KwargError(f"{what}: at={describe(tensor)} names a position twice in a row")
    return _numbered(target_BP, columns, at, what)
