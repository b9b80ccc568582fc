"""Hugging Face's own cached decoding, step by step: what a session is compared with."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import DynamicCache

from tests.oracle import residual
from tests.oracle.tiny import huggingface


class Local:
    """Hugging Face's own cache, step by step."""

    def __init__(self, family: str):
        self.model, self.cache = huggingface(family), DynamicCache(config=huggingface(family).config)

    def step(self, hidden: Tensor, **local: Any) -> Tensor:
        return residual(self.model, hidden, cache=self.cache, **local)


def positions(family: str, value: Tensor) -> dict[str, Tensor]:
    return {"position_ids": value} if family == "llama" else {}
