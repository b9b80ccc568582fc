"""The built-in kwargs: which of them a family's blocks take."""

from __future__ import annotations

from collections.abc import Mapping

from kwflow.kwargs.lora import HEAD_MASK, IA3, LORA
from kwflow.kwargs.prefix_kv import PREFIX_KV
from kwflow.kwargs.schema import Scaling, Schema, Spec
from kwflow.kwargs.steer import PROMPTS, STEER

ATTENTION_MASK = Spec(forms=(("batch key", ("int", "bool")), ("batch head seq key", ("bool", "float"))), group="call")
POSITION_IDS = Spec(forms=(("batch seq", ("int",)),), group="call")


def schema(
    sizes: dict[str, int],
    *,
    positions: bool,
    refused: dict[str, str],
    points: tuple[str, ...] = (),
    looked_at: tuple[str, ...] = (),
    projections: Mapping[str, tuple[int, int]] | None = None,
    scaling: Scaling | None = None,
) -> Schema:
    """The built-in kwargs of a family; ``positions``: its blocks take position_ids; ``points``: where edits and
    captures act; ``looked_at``: where captures alone do; ``projections``: where adapters do; ``scaling``: rotary."""
    at_points = {"edit": Spec(points=points), "capture": Spec(points=(*points, *looked_at))}
    kwargs = {"attention_mask": ATTENTION_MASK, "prompts": PROMPTS, "steer": STEER, "prefix_kv": PREFIX_KV, **at_points}
    if projections:
        kwargs |= {"lora": LORA, "ia3": IA3}
    if "head" in points:
        kwargs["head_mask"] = HEAD_MASK
    if positions:
        kwargs["position_ids"] = POSITION_IDS
    return Schema(kwargs, sizes, refused, projections or {}, scaling or Scaling())
