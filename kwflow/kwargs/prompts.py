"""``prompts``: vectors added to each layer's input at token positions 0..prefix (deep prompts; Liu et al. 2021).

Cast to hidden's dtype where they act, so their gradients come back in the caller's.
"""

# B batch, S seq (columns of this call), P prefix, D hidden

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kwflow.errors import KwargError
from kwflow.kwargs.axes import Axed
from kwflow.kwargs.bound import Bound
from kwflow.kwargs.kwarg import Act, Features, LayerCall
from kwflow.kwargs.points import ENTERING
from kwflow.kwargs.schema import Spec

_UNSAID = "prompts act at token positions, which a 4-D attention_mask leaves unsaid; give a 2-D one"


def spec(_: Features) -> Spec:
    return Spec(forms=(("layer batch prefix hidden", ("float",)),))


def check_call(bound: Bound) -> None:
    """Raise KwargError beside a 4-D mask."""
    mask = bound.call().get("attention_mask")
    if mask is not None and len(mask.axes) == 4 and "prompts" in bound.names():
        raise KwargError(_UNSAID)


def at_points(prompts: Axed, call: LayerCall) -> Mapping[str, Act]:
    token_position = call.token_position
    if token_position is None:
        raise KwargError(_UNSAID)
    return {ENTERING[0]: lambda hidden: add_prompts(hidden, prompts, token_position)}  # before all else


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
