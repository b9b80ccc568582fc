"""The built-in kwargs: one table, a row each. A new one is a file beside this, a row here, and a row of the tests.

Rows stand in the order in which they act at one point.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from kwflow.errors import KwargError
from kwflow.kwargs import capture, columns, edit, head_mask, lora, prefix_kv, prompts, steer
from kwflow.kwargs.kwarg import Act, Features, Kwarg, LayerCall
from kwflow.kwargs.points import EDITED, PATTERN
from kwflow.kwargs.schema import Scaling, Schema, Spec

_ROWS = (
    Kwarg("attention_mask", columns.mask_spec, check=columns.check_mask, joined="columns"),
    Kwarg("position_ids", columns.positions_spec, joined="columns"),
    Kwarg("prefix_kv", prefix_kv.spec, bind=prefix_kv.bind, check=prefix_kv.check_call, joined="first"),
    Kwarg("lora", lora.lora_spec, bind=lora.bind_lora),
    Kwarg("ia3", lora.ia3_spec, bind=lora.bind_ia3),
    Kwarg("prompts", prompts.spec, check=prompts.check_call, at_points=prompts.at_points),
    Kwarg("head_mask", head_mask.spec, at_points=head_mask.at_points),
    Kwarg("steer", steer.spec, at_points=steer.at_points, folds=True),
    Kwarg("edit", edit.spec, lower=edit.lower, bind=edit.bind, at_points=edit.at_points, folds=True),
    Kwarg("capture", capture.spec, lower=capture.lower, bind=capture.bind, at_points=capture.at_points, joined="not"),
)
BUILTIN: Mapping[str, Kwarg] = {row.name: row for row in _ROWS}
FOLDS = frozenset(row.name for row in _ROWS if row.folds)

_SPECS = {
    row.name: spec
    for row in _ROWS
    if (spec := row.spec(Features(EDITED, projections=True, positions=True))) is not None
}
# what a block does itself; the rest is around it: masks, positions, keys and values
INSIDE = {name: spec for name, spec in _SPECS.items() if spec.group == "layers" and not spec.prefix}
CHOSEN = frozenset(name for name, spec in INSIDE.items() if spec.kind != "values")  # their whole numbers say where


def row_of(name: str, spec: Spec) -> Kwarg | None:
    """The row of a kwarg; None where a worker's own block_fn declares one of that name itself."""
    return BUILTIN[name] if name in _SPECS and _SPECS[name].kind == spec.kind else None


def joined_by(how: str) -> tuple[str, ...]:
    """The kwargs that a merged replay joins so."""
    return tuple(row.name for row in _ROWS if row.joined == how)


def schema(
    sizes: dict[str, int],
    *,
    positions: bool,
    refused: dict[str, str],
    points: tuple[str, ...] = (),
    captured_only: tuple[str, ...] = (),
    projections: Mapping[str, tuple[int, int]] | None = None,
    scaling: Scaling | None = None,
) -> Schema:
    """The built-in kwargs of a family; ``positions``: its blocks take position_ids; ``points``: where edits and
    captures act; ``captured_only``: where captures alone do; ``projections``: where adapters do; ``scaling``: rotary.
    """
    features = Features(points, captured_only, bool(projections), positions)
    specs = {row.name: row.spec(features) for row in _ROWS}
    kwargs = {name: spec for name, spec in specs.items() if spec is not None}
    return Schema(kwargs, sizes, refused, projections or {}, scaling or Scaling())


def at_points(kwargs: Mapping[str, Any], call: LayerCall) -> dict[str, Act]:
    """What one layer's kwargs do at each of its points, in the order of the table."""
    by_point: dict[str, list[Act]] = {}
    for row in _ROWS:
        if row.at_points is not None and kwargs.get(row.name) is not None:
            for point, act in row.at_points(kwargs[row.name], call).items():
                by_point.setdefault(point, []).append(act)
    return {point: _composed(acts, point, call) for point, acts in by_point.items()}


def _composed(acts: Sequence[Act], point: str, call: LayerCall) -> Act:
    def composed(activation: Tensor) -> Tensor:
        out = activation
        if point != PATTERN:
            (batch, seq), features = call.batch_seq, activation.shape[-1]
            if activation.numel() != batch * seq * features:  # an expert's, whose tokens are picked out
                raise KwargError(f"{point!r} of layer {call.layer} sees other tokens than the call's {batch} x {seq}")
            out = activation.reshape(batch, seq, features)  # opt flattens rows before its feed-forward
        for act in acts:
            out = act(out)
        return out.reshape(activation.shape)

    return composed
