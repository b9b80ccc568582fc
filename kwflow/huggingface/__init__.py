"""Hugging Face's classes over a flow: one for each that transformers has for the families that are served.

from kwflow.huggingface import DistributedLlamaForCausalLM
model = DistributedLlamaForCausalLM.from_pretrained("smollm2-135m", initial_peers=swarm.peers)

``Distributed`` and transformers' name of a base model, a causal language model (gpt2's is GPT2LMHeadModel) or a
sequence classification; ``dir()`` lists them. They are made when first asked for: nothing heavy is imported before.
"""

from __future__ import annotations

import difflib
import os
from typing import Any


def __getattr__(name: str) -> Any:
    if not name.startswith(("AutoDistributed", "Distributed")):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kwflow.huggingface import auto

    if name in auto.__all__:
        return getattr(auto, name)
    names = auto.class_names()
    if name in names:
        return auto.family_class(name)

    def like(other: str) -> tuple[int, float]:
        """Of the same family first: it is how a name begins."""
        return len(os.path.commonprefix([other, name])), difflib.SequenceMatcher(None, other, name).ratio()

    near = ", ".join(sorted(names, key=like, reverse=True)[:3])
    raise AttributeError(f"{__name__} has no {name!r}: {_why_not(name.partition('Distributed')[2])}. Nearest: {near}.")


def __dir__() -> list[str]:
    from kwflow.huggingface import auto

    return sorted([*auto.__all__, *auto.class_names()])


def _why_not(name: str) -> str:
    """Why there is no class for ``name``, a name of transformers or none."""
    import transformers
    from huggingface_hub.errors import StrictDataclassError

    from kwflow.models.families import FAMILIES, why_not
    from kwflow.models.spans import quiet

    if name.endswith("Config"):
        return "a config is transformers' own, from AutoDistributedConfig.from_pretrained(model)"
    hf = getattr(transformers, name, None)
    kind = hf.config_class if isinstance(hf, type) and issubclass(hf, transformers.PreTrainedModel) else None
    if kind is None:
        return f"transformers has no model class {name!r}"
    if kind.model_type in FAMILIES:
        return f"of {kind.model_type}, a base model, a causal language model and a sequence classification are served"
    try:
        with quiet():
            reason = why_not(kind())
    except (StrictDataclassError, TypeError, ValueError):  # some configs have no defaults
        reason = ""
    return f"model_type {kind.model_type!r} is not supported{f': {reason}' if reason else ' yet'}"
