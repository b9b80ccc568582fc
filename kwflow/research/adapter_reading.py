"""An adapter from a folder or a live model: PEFT's types, and the class of each. See ``kwflow.research.adapters``."""

from __future__ import annotations

import os
from typing import Any

from kwflow.errors import KwargError
from kwflow.research.adapter_kinds import BEFT, IA3, Adapter, Prefix, Prompt
from kwflow.research.adapter_low_rank import AdaLoRA, LoHa, LoKr, LoRA, VeRA
from kwflow.research.peft_files import check, read_folder, read_model

KINDS: dict[str, type[Adapter]] = {
    "LORA": LoRA,
    "IA3": IA3,
    "PREFIX_TUNING": Prefix,
    "PROMPT_TUNING": Prompt,
    "P_TUNING": Prompt,
    "CARTRIDGE": Prefix,
    "ADALORA": AdaLoRA,
    "VERA": VeRA,
    "LOHA": LoHa,
    "LOKR": LoKr,
    "BEFT": BEFT,
}


def read(source: Any, adapter: str | None = None) -> Adapter:
    """Read an adapter from a folder that PEFT's ``save_pretrained`` wrote, or copy it from a live model.

    ``adapter``: which one of a live model's; the active one. Raises ModelError for a folder that is broken or holds a
    pickle, UnsupportedError that names what is not carried, and why.
    """
    if isinstance(source, str | os.PathLike):
        if adapter is not None:
            raise KwargError("adapter= names one of a live model's; a folder holds one (others are in its subfolders)")
        saved = read_folder(source)
    elif hasattr(source, "peft_config") and hasattr(source, "state_dict"):
        saved = read_model(source, adapter)
    else:
        raise KwargError(f"kf.adapters.read got a {type(source).__name__}; it takes a folder, or a model with adapters")
    return KINDS[check(saved)](saved)
