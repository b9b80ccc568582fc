"""How the built-in kwargs act on a block's input and output. Pure functions; no network, no transformers.

    prompts   added at the layer's input, at token positions 0..prefix       (Petals' deep prompts; Liu et al. 2021)
    steer     added to the layer's output, the residual stream               (activation addition; Turner et al. 2023)

A kwarg is cast to the hidden's dtype where it acts, so its gradient comes back in the caller's dtype.
"""

# B batch, S seq (columns of this call), P prefix, D hidden

from __future__ import annotations

import torch
from torch import Tensor

from kwflow.axes import Axed, spread
from kwflow.kwargs import Schema, Spec

STEER = Spec(forms=(("[layer] [batch] [seq] hidden", ("float",)),), bare=False, by_layer=True)
PROMPTS = Spec(forms=(("layer batch prefix hidden", ("float",)),))
ATTENTION_MASK = Spec(forms=(("batch key", ("int", "bool")), ("batch head seq key", ("bool", "float"))), group="call")
POSITION_IDS = Spec(forms=(("batch seq", ("int",)),), group="call")

EVERYWHERE = {"attention_mask": ATTENTION_MASK, "prompts": PROMPTS, "steer": STEER}


def schema(sizes: dict[str, int], *, positions: bool, refused: dict[str, str]) -> Schema:
    """The built-in kwargs of a family; ``positions``: its blocks take position_ids."""
    kwargs = {**EVERYWHERE, "position_ids": POSITION_IDS} if positions else dict(EVERYWHERE)
    return Schema(kwargs, sizes, refused)


def add_steer(hidden_BSD: Tensor, steer: Axed) -> Tensor:
    """Add a vector to the residual stream: axes any of ``[batch] [seq] hidden``."""
    return hidden_BSD + spread(steer, ("batch", "seq", "hidden")).to(hidden_BSD.dtype)


def add_prompts(hidden_BSD: Tensor, prompts: Axed, token_position_BS: Tensor) -> Tensor:
    """Add prompt ``p`` of (batch, prefix, hidden) where the token position is ``p``; pads and later tokens stay."""
    prompts_BPD = prompts.tensor.to(hidden_BSD.dtype)
    if prompts_BPD.shape[1] == 0:
        return hidden_BSD
    inside_BS = (token_position_BS >= 0) & (token_position_BS < prompts_BPD.shape[1])
    index_BS = torch.where(inside_BS, token_position_BS, 0)
    # torch.where, not + 0: adding 0.0 would turn -0.0 into 0.0 where no prompt acts
    rows = max(index_BS.shape[0], prompts_BPD.shape[0])
    index_BSD = index_BS.expand(rows, -1)[..., None].expand(-1, -1, prompts_BPD.shape[2])
    chosen_BSD = torch.gather(prompts_BPD.expand(rows, -1, -1), 1, index_BSD)
    return torch.where(inside_BS[..., None], hidden_BSD + chosen_BSD, hidden_BSD)


def token_positions(attention_mask: Tensor | None, past: int, seq: int, device: torch.device) -> Tensor | None:
    """(batch, seq) token positions of this call's columns, -1 at pads; None when a 4-D mask leaves them unsaid."""
    if attention_mask is None:
        return torch.arange(past, past + seq, device=device)[None]
    if attention_mask.dim() != 2:
        return None
    counted = attention_mask.long()
    positions = torch.where(counted.bool(), counted.cumsum(-1) - 1, -1)
    return positions[:, positions.shape[1] - seq :]
