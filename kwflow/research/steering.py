"""Control vectors: made from contrasting texts, combined, added or ablated, kept in files, run anywhere.

    love = kf.steering.contrast(flow, ["I love you"], ["I hate you"], layers=[12])      # one vector for each layer
    v = love.normalized() * 20
    flow(**x, edit=v.edits())                                  # added; also in sessions and in model.generate
    flow(**x, edit=v.ablate(at="prompt[-1]"))                  # its direction projected out
    v.save("love.gguf")                                        # which repeng and llama.cpp read
    with v.as_hooks(local_model): ...                          # the same on a plain Hugging Face model

Papers: Turner et al. 2023 (activation addition), Rimsky et al. 2024 (contrastive activation addition), Zou et al. 2023
(representation engineering), Arditi et al. 2024 (ablation of a direction).
"""

# N texts or pairs, D features of a vector

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from kwflow.client.flow import Flow
from kwflow.errors import KwargError, SpanError, did_you_mean
from kwflow.kwargs.points import numbers
from kwflow.kwargs.tree import as_int
from kwflow.research.vectors import Vectors as Vectors

METHODS = ("mean", "pca")


def load(path: str | os.PathLike[str]) -> Vectors:
    """Read what :meth:`Vectors.save`, repeng or llama.cpp's cvector-generator wrote.

    Raises ModelError for a file that is broken or something else, naming what is wrong with it.
    """
    from kwflow.research.vector_files import read

    by_layer, metadata = read(path)
    return Vectors(by_layer, **metadata)


def as_hooks(model: Any, edits: Any) -> AbstractContextManager[Any]:
    """Within, a plain Hugging Face model does the entries of ``edit=`` in its own forward and generate.

        with kf.steering.as_hooks(model, [*v.edits(2.0, at="generated"), kf.scale(0.0, 3, point="attn")]):
            model.generate(**inputs, max_new_tokens=40)

    Token positions come from the attention mask and the cache, so ``at=`` means what it means in a flow. generate's
    prompt is what it is given; where the caller carries a cache, its first step is the prompt; without one all is.
    Where that cannot be told (a cache begun elsewhere, later steps of several columns) UnsupportedError is raised, as
    for gradient checkpointing. Differentiable. The model is as before afterwards; use it in one thread at a time.
    """
    from kwflow.models.hooked import edited

    return edited(model, edits)


# ---- from texts --------------------------------------------------------------------------------------------------


def contrast(
    flow: Flow,
    positive: str | Sequence[str],
    negative: str | Sequence[str],
    *,
    layers: Any = None,
    point: str = "resid",
    at: Any = "prompt[-1]",
    method: str = "mean",
    batch_size: int = 32,
) -> Vectors:
    """Vectors that point from the negative texts' activations to the positive ones', for each of ``layers`` (all).

        v = kf.steering.contrast(flow, ["I love you", "So kind"], ["I hate you", "So cruel"], layers=range(8, 20))

    An activation is that at ``at`` of a text, or the mean over the positions that ``at`` selects, made on the workers;
    nothing else travels. ``method``:

    - ``mean``: mean of the positives less mean of the negatives (Turner et al. 2023, Rimsky et al. 2024); any numbers
      of texts; its length says how far apart they are.
    - ``pca``: the first right singular vector of the paired differences positive[i] - negative[i], not centred, at
      length 1, its sign such that the mean difference projects on it positively (Zou et al. 2023; repeng's
      "pca_center", llama.cpp's generator; repeng's "pca_diff" takes the mean difference out first, which this keeps).

    Computed in float64, returned in float32 (float64 where hidden is). No gradients. Raises KwargError, SpanError.
    """
    texts = {side: _texts(side_texts, side) for side, side_texts in (("positive", positive), ("negative", negative))}
    counts = [len(side_texts) for side_texts in texts.values()]
    if method not in METHODS:
        raise KwargError(f"method is {method!r}; give {' or '.join(METHODS)}.{did_you_mean(str(method), METHODS)}")
    if method == "pca" and counts[0] != counts[1]:
        raise KwargError(f"method='pca' takes pairs: {counts[0]} positive texts, {counts[1]} negative ones")
    if (as_int(batch_size) or 0) < 1:
        raise KwargError(f"batch_size is {batch_size!r}; give a number of texts, 1 or more")
    if not isinstance(at, str | int | Sequence | range) or isinstance(at, bool):
        raise KwargError(f"at is a {type(at).__name__}; contrast takes what is the same for every text, 'prompt[-1]'")
    if flow.start != 0:
        raise SpanError(f"contrast runs texts from layer 0; this flow has layers {flow.start}:{flow.stop}")
    all_layers = (0,) if point == "embed" else range(flow.stop)
    chosen = sorted(numbers(all_layers if layers is None else layers, "layers", "contrast"))
    if outside := [n for n in chosen if not 0 <= n < flow.stop]:
        raise SpanError(f"contrast: no layer {outside[0]}; this flow has layers 0:{flow.stop}")
    ends: Any = flow.ends
    with torch.no_grad():
        batches = _batches(flow[: chosen[-1] + 1], texts, {point: chosen}, at, batch_size)
        directions = _mean(batches, counts) if method == "mean" else _pca(batches)
    dtype = torch.promote_types(ends.dtype, torch.float32)
    by_layer = {layer: vector.to(dtype) for layer, vector in directions.items()}
    kind = getattr(getattr(ends, "config", None), "model_type", "")
    return Vectors(by_layer, point, model=ends.name, model_type=kind, method=method)


Batch = tuple[str, dict[int, Tensor]]  # positive or negative; by layer (N, D or head head_dim)


def _batches(
    flow: Flow, texts: Mapping[str, Sequence[str]], points: Mapping[str, Any], at: Any, size: int
) -> Iterator[Batch]:
    """Activations of the texts, a batch at a time."""
    from kwflow.show.progress import progress

    cuts = [(side, i) for side, side_texts in texts.items() for i in range(0, len(side_texts), size)]
    for side, start in progress(cuts, "contrasting texts", len(cuts), unit="batch"):
        batch = list(texts[side][start : start + size])
        tokens = flow.ends.tokenize(batch)
        if empty := (tokens["attention_mask"].sum(1) == 0).nonzero().flatten().tolist():
            raise KwargError(f"{side}[{start + empty[0]}]: {batch[empty[0]]!r:.40} is not one token")
        try:
            _, acts = flow.capture(points, at=at, mean=True, **flow.inputs(tokens))
        except KwargError as error:
            raise KwargError(f"{side}[{start}:{start + len(batch)}]: {error}") from error
        yield side, {layer: acts[point, layer][:, 0] for point, layer in acts}


def _mean(batches: Iterator[Batch], counts: Sequence[int]) -> dict[int, Tensor]:
    """Mean of the positives less mean of the negatives."""
    shares = {"positive": 1 / counts[0], "negative": -1 / counts[1]}
    total: dict[int, Tensor] = {}
    for side, acts in batches:
        for layer, rows in acts.items():
            total[layer] = total.get(layer, 0) + shares[side] * rows.double().sum(0)
    return total


def _pca(batches: Iterator[Batch]) -> dict[int, Tensor]:
    """The first right singular vector of the pairs' differences, towards the positives."""
    activations: dict[str, dict[int, list[Tensor]]] = {side: {} for side in ("positive", "negative")}
    for side, acts in batches:
        for layer, rows in acts.items():
            activations[side].setdefault(layer, []).append(rows)
    directions = {}
    for layer, positive in activations["positive"].items():
        difference = torch.cat(positive).double() - torch.cat(activations["negative"][layer]).double()
        flat_ND = difference.flatten(1)
        if not bool(flat_ND.any()):
            raise KwargError(f"method='pca': positive and negative texts are the same at layer {layer}")
        # the smaller of D Dᵀ and Dᵀ D has the same first singular vector as an SVD of D, in a fraction of the time
        wide = flat_ND.shape[0] <= flat_ND.shape[1]
        first = torch.linalg.eigh(flat_ND @ flat_ND.T if wide else flat_ND.T @ flat_ND).eigenvectors[:, -1]
        first = flat_ND.T @ first if wide else first
        sign = -1.0 if float(flat_ND.mean(0) @ first) < 0 else 1.0
        directions[layer] = (sign * first / first.norm()).view(difference.shape[1:])
    return directions


def _texts(value: Any, name: str) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, Sequence) or not texts or not all(isinstance(text, str) for text in texts):
        raise KwargError(f"{name} is {value!r:.60}; give texts, at least one")
    return list(texts)
