"""``steer`` and ``prompts``: what is added to the residual stream, at every column or at token positions."""

from __future__ import annotations

import torch
from torch import Tensor

from kwflow.kwargs.axes import Axed, spread
from kwflow.kwargs.positions import token_position
from kwflow.kwargs.schema import Spec


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
    return token_position(attention_mask, seq) if attention_mask.dim() == 2 else None


# ---- the built-in kwargs -----------------------------------------------------------------------------------------

STEER = Spec(forms=(("[layer] [batch] [seq] hidden", ("float",)),), bare=False, by_layer=True)
PROMPTS = Spec(forms=(("layer batch prefix hidden", ("float",)),))
