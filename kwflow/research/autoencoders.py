"""A sparse autoencoder of activations: its arithmetic, by architecture. What reads the files: ``research.features``.

Architectures: standard (Bricken et al. 2023), gated (Rajamanoharan et al. 2024, arXiv:2404.16014), jumprelu
(Rajamanoharan et al. 2024, arXiv:2407.14435), topk (Gao et al. 2024). Tensors by SAELens' names.
"""

# D d_in, F d_sae: features

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kwflow.errors import KwargError, ShapeError
from kwflow.kwargs.axes import describe
from kwflow.kwargs.points import HEAD
from kwflow.kwargs.tree import as_int

_EPSILON = 1e-5
SCALING = "finetuning_scaling_factor"

Undo = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False, repr=False)
class Features:
    """A sparse autoencoder of the activations at ``point`` of ``layer``: ``f = encode(x)``, ``x ≈ decode(f)``.

    Differentiable with respect to what encode and decode are given. ``to``: in another dtype, on another device.
    ``weights``: its tensors by the layout's names. ``model``: the name that the file gives.
    """

    point: str
    layer: int
    weights: Mapping[str, Tensor]
    _: KW_ONLY
    architecture: str = "standard"
    normalize: str = "none"
    k: int = 0  # of topk
    by_decoder_norm: bool = False  # of topk: what is compared is weighed by the decoder's norms
    subtract_b_dec: bool = True
    center: bool = False
    model: str = ""

    def __len__(self) -> int:
        """How many features."""
        return self.weights["W_dec"].shape[0]

    @property
    def d_in(self) -> int:
        """The size of an activation."""
        return self.weights["W_dec"].shape[1]

    def __repr__(self) -> str:
        of = f" of {self.model}" if self.model else ""
        size = f"{len(self)} of {describe(self.weights['b_dec'])}"
        return f"Features({self.architecture}, {size} at {self.point} of layer {self.layer}{of})"

    def encode(self, x: Tensor) -> Tensor:
        """Features (…, d_sae) of activations (…, d_in), at the point ``head`` also (…, head, head_dim)."""
        w = self.weights
        x, _ = NORMS[self.normalize](self._flat(x))
        entering = x - w["b_dec"] if self.subtract_b_dec else x
        return ARCHITECTURES[self.architecture].encode(self, entering)

    def decode(self, f: Tensor, x: Tensor | None = None) -> Tensor:
        """Activations (…, d_in) of features (…, d_sae). ``x``: the activations that they are of, where those were
        normalized, which only they can undo; else it is not looked at."""
        w = self.weights
        if self.normalize != "none" and x is None:
            raise KwargError(f"{self!r} normalizes by {self.normalize}: decode(f, x) takes the x that encode was given")
        if f.shape[-1:] != (len(self),):
            raise ShapeError(f"{self!r}: features are {describe(f)}; the last axis is {len(self)}")
        undo: Undo = _same if x is None else NORMS[self.normalize](self._flat(x))[1]
        f = f.to(w["W_dec"].dtype)
        f = f * w[SCALING] if SCALING in w else f
        f = f / w["W_dec"].norm(dim=-1) if self.by_decoder_norm else f
        return undo(f @ w["W_dec"] + w["b_dec"])

    def direction(self, feature: int) -> Tensor:
        """The vector (d_in,) that a feature adds for each unit of its activation, for edits: a row of W_dec.

        At the point ``head`` it is ``direction(i).unflatten(0, (heads, -1))`` that an edit takes.
        """
        number = as_int(feature)
        if number is None or not 0 <= number < len(self):
            raise KwargError(f"{self!r} has no feature {feature!r:.40}; give a number from 0 to {len(self) - 1}")
        return self.weights["W_dec"][number]

    def to(self, *args: Any, **kwargs: Any) -> Features:
        """In another dtype or on another device; arguments as ``Tensor.to``'s."""
        return replace(self, weights={name: tensor.to(*args, **kwargs) for name, tensor in self.weights.items()})

    def _flat(self, x: Tensor) -> Tensor:
        """Activations as (…, d_in), in the weights' dtype."""
        if self.point == HEAD and x.dim() > 1 and x.shape[-1] * x.shape[-2] == self.d_in != x.shape[-1]:
            x = x.flatten(-2)
        if x.shape[-1:] != (self.d_in,):
            raise ShapeError(f"{self!r}: activations are {describe(x)}; the last axis is {self.d_in}")
        x = x.to(self.weights["W_enc"].dtype)
        return x - x.mean(-1, keepdim=True) if self.center else x


# ---- architectures and normalizations ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Architecture:
    """``sized``: names of its tensors (d_sae,). ``encode``: of what enters (…, d_in), b_dec off."""

    sized: tuple[str, ...]
    encode: Callable[[Features, Tensor], Tensor]


def _standard(sae: Features, x: Tensor) -> Tensor:
    return (x @ sae.weights["W_enc"] + sae.weights["b_enc"]).relu()


def _gated(sae: Features, x: Tensor) -> Tensor:
    w = sae.weights
    magnitude = x @ (w["W_enc"] * w["r_mag"].exp()) + w["b_mag"]
    return magnitude.relu() * (x @ w["W_enc"] + w["b_gate"] > 0)


def _jumprelu(sae: Features, x: Tensor) -> Tensor:
    before = x @ sae.weights["W_enc"] + sae.weights["b_enc"]
    return before.relu() * (before > sae.weights["threshold"])


def _topk(sae: Features, x: Tensor) -> Tensor:
    before = x @ sae.weights["W_enc"] + sae.weights["b_enc"]
    before = before * sae.weights["W_dec"].norm(dim=-1) if sae.by_decoder_norm else before
    values, places = before.topk(sae.k, dim=-1)
    return torch.zeros_like(before).scatter(-1, places, values.relu())


ARCHITECTURES = {
    "standard": Architecture(("b_enc",), _standard),
    "gated": Architecture(("b_gate", "r_mag", "b_mag"), _gated),
    "jumprelu": Architecture(("b_enc", "threshold"), _jumprelu),
    "topk": Architecture(("b_enc",), _topk),
}


def _same(x: Tensor) -> Tensor:
    return x


def _norm_rescaled(x: Tensor) -> tuple[Tensor, Undo]:
    factor = x.shape[-1] ** 0.5 / x.norm(dim=-1, keepdim=True)
    return x * factor, lambda y: y / factor


def _layer_normed(x: Tensor) -> tuple[Tensor, Undo]:
    mean = x.mean(-1, keepdim=True)
    deviation = (x - mean).std(-1, keepdim=True)
    return (x - mean) / (deviation + _EPSILON), lambda y: y * deviation + mean


NORMS: dict[str, Callable[[Tensor], tuple[Tensor, Undo]]] = {
    "none": lambda x: (x, _same),
    "constant_norm_rescale": _norm_rescaled,
    "layer_norm": _layer_normed,
}
