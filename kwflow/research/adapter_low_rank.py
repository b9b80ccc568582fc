"""Adapters that add B(A(x)) at projections: LoRA, and what comes to it exactly (AdaLoRA, VeRA, LoHa, LoKr).

Each keeps PEFT's own tensors and makes A and B of them anew for every call, so that a loss trains those.
"""

# R rank, I in, O out

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from kwflow.errors import KwargError, ModelError, UnsupportedError
from kwflow.kwargs.axes import describe
from kwflow.research.adapter_kinds import Projected
from kwflow.research.peft_files import Saved


class LowRank(Projected):
    """What adds ``scale * B(A(x))``: the kwarg ``lora``."""

    kwarg = "lora"

    def part(self, module: str) -> dict[str, Any]:
        """``A`` (rank, in), ``B`` (out, rank), ``scale``."""
        raise NotImplementedError

    def delta_weights(self) -> dict[str, Tensor]:
        """What PEFT's merge adds to the base model's weights, by their names there: ``scale * B @ A``, (out, in).

        As those are held: (in, out) where the family has Conv1D (gpt2). Workers never merge: a flow called without the
        adapter is the base model.
        """
        turned, deltas = bool(self.config.get("fan_in_fan_out")), dict[str, Tensor]()
        for module in self.modules:
            part = self.part(module)
            delta_OI = (part["B"] @ part["A"]).detach() * part["scale"]
            deltas[f"{module}.weight"] = delta_OI.T if turned else delta_OI
        return deltas

    def pattern_value(self, patterns: str, module: str, default: str) -> Any:
        """What the config says for a module: by the first pattern that fits the end of its name, as PEFT finds it.

        Else what it says for all, under ``default``.
        """
        try:
            for end, value in (self.config.get(patterns) or {}).items():
                if re.match(rf"(.*\.)?({end})$", module):
                    return value
        except (AttributeError, re.error) as error:
            raise ModelError(f"{self.where}: {patterns} is not a dict of regular expressions: {error}") from error
        return self.config.get(default)

    def number(self, value: Any, name: str) -> float:
        """A number that the config must say; of ranks, one above 0."""
        if not isinstance(value, int | float) or (name in ("r", "init_r") and value <= 0):
            raise ModelError(f"{self.where}: the config's {name} is {value!r:.40}")
        return value

    def matrix(self, name: str) -> Tensor:
        """A tensor of two dimensions."""
        if self.tensors[name].dim() != 2:
            raise ModelError(f"{self.where}: {name} is {describe(self.tensors[name])}; expected a matrix")
        return self.tensors[name]


class LoRA(LowRank):
    """Low-rank adapters (Hu et al. 2021): the kwarg ``lora``. Its dropout is left out, as it is in PEFT's eval mode."""

    suffixes = (".lora_A.weight", ".lora_B.weight")

    def __init__(self, saved: Saved):
        super().__init__(saved)
        self.scales = {module: self._scale(module) for module in self.modules}
        if any(saved.scales.get(module, scale) != scale for module, scale in self.scales.items()):
            self._rescale({module: saved.scales.get(module, scale) for module, scale in self.scales.items()})

    @property
    def scale(self) -> float:
        """The factor of all modules, alpha / rank; set, it is every module's. Raises KwargError where they differ."""
        scales = set(self.scales.values())
        if len(scales) > 1:
            raise KwargError(
                f"{self.where} has scales {', '.join(f'{s:g}' for s in sorted(scales))}; see adapter.scales"
            )
        return scales.pop()

    @scale.setter
    def scale(self, scale: float) -> None:
        self._rescale(dict.fromkeys(self.modules, float(scale)))

    def _rescale(self, scales: dict[str, float]) -> None:
        self.scales = scales
        ranks = {module: len(self._sides(module)[0]) for module in self.modules}
        self.config = {**self.config, **scaling(ranks, scales)}

    def _sides(self, module: str) -> tuple[Tensor, Tensor]:
        return self.tensors[f"{module}.lora_A.weight"], self.tensors[f"{module}.lora_B.weight"]

    def _scale(self, module: str) -> float:
        """alpha / rank, or alpha / sqrt(rank) (rsLoRA, Kalajdzievski 2023), of the module's own pattern or of all."""
        A_RI, B_OR = self._sides(module)
        rank, alpha = (
            self.pattern_value("rank_pattern", module, "r"),
            self.pattern_value("alpha_pattern", module, "lora_alpha"),
        )
        if A_RI.dim() != 2 or B_OR.dim() != 2 or not 0 < A_RI.shape[0] == B_OR.shape[1] == rank:
            raise ModelError(
                f"{self.where}: {module} has A {describe(A_RI)} and B {describe(B_OR)}; its config says rank {rank}"
            )
        return self.number(alpha, "lora_alpha") / (math.sqrt(rank) if self.config.get("use_rslora") else rank)

    def part(self, module: str) -> dict[str, Any]:
        A_RI, B_OR = self._sides(module)
        return {"A": A_RI, "B": B_OR, "scale": self.scales[module]}

    def _summary(self) -> str:
        ranks = sorted({len(self._sides(module)[0]) for module in self.modules})
        scales = sorted(set(self.scales.values()))
        dropout = self.config.get("lora_dropout")
        dropout_note = f", lora_dropout {dropout} left out as in eval mode" if dropout else ""
        scale = ", ".join(f"{scale:g}" for scale in scales)
        return f"{super()._summary()}, rank {', '.join(map(str, ranks))}, scale {scale}{dropout_note}"


def scaling(ranks: Mapping[str, int], scales: Mapping[str, float]) -> dict[str, Any]:
    """What a LoRA's config says of its modules' ranks and scales."""
    alphas = {module: _alpha(scales[module], rank) for module, rank in ranks.items()}
    rank, alpha = (Counter(values.values()).most_common(1)[0][0] for values in (ranks, alphas))
    return {
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {re.escape(module): value for module, value in ranks.items() if value != rank},
        "alpha_pattern": {re.escape(module): value for module, value in alphas.items() if value != alpha},
        "use_rslora": False,
    }


def _alpha(scale: float, rank: int) -> float:
    """The alpha that gives the scale; PEFT's are whole numbers where they can be."""
    whole = round(scale * rank) if math.isfinite(scale) else scale
    return whole if whole / rank == scale else scale * rank


class AdaLoRA(LowRank):
    """AdaLoRA (Zhang et al. 2023): ``B(E * A(x))``, a factor E for each rank, of which training leaves some.

    Its loss has a term for orthogonality that a flow's caller adds, or does without; ranks are allotted by PEFT alone.
    """

    suffixes = (".lora_A", ".lora_B", ".lora_E")

    def __init__(self, saved: Saved):
        super().__init__(saved)
        alpha = self.number(self.config.get("lora_alpha"), "lora_alpha")
        rank = self.number(self.config.get("init_r"), "init_r")
        self.scale = (alpha if alpha > 0 else rank) / (rank + 1e-5)  # as PEFT divides
        if any(not math.isclose(scale, self.scale, rel_tol=1e-6) for scale in saved.scales.values()):
            raise UnsupportedError(
                f"{self.where} has scales or ranknum of its own, for which PEFT's folders have no place"
            )
        if all(len(self.tensors[f"{module}.lora_E"]) == rank for module in self.modules):
            self.config = {**self.config, "rank_pattern": None}  # a live model's ranks that went are still there, as 0

    def part(self, module: str) -> dict[str, Any]:
        A_RI, B_OR, E_R1 = (self.matrix(module + end) for end in self.suffixes)
        if E_R1.shape != (len(A_RI), 1) or B_OR.shape[1] != len(A_RI):
            raise ModelError(f"{self.where}: {module} has A {describe(A_RI)}, B {describe(B_OR)}, E {describe(E_R1)}")
        return {"A": E_R1 * A_RI, "B": B_OR, "scale": self.scale}

    def by_layer(self) -> dict[int, dict[str, Any]]:
        whole = super().by_layer()  # a module may be left without a rank
        return {layer: {p: part for p, part in parts.items() if len(part["A"])} for layer, parts in whole.items()}


class VeRA(LowRank):
    """VeRA (Kopiczko et al. 2024): one random A and B for all modules, and two vectors of each module's own, trained.

    PEFT cuts A to the width of a module's input, and its folders do not say that width: adapters of modules with inputs
    of several widths are refused by the flow, as a wrong shape.
    """

    suffixes = (".vera_lambda_b", ".vera_lambda_d")
    fixed: ClassVar[tuple[str, ...]] = ("base_model.vera_A", "base_model.vera_B")

    def __init__(self, saved: Saved):
        super().__init__(saved)
        if missing := [name for name in self.fixed if name not in self.tensors]:
            raise UnsupportedError(
                f"{self.where} has no {missing[0]}: PEFT draws it when it loads it; save it with save_projection=True"
            )

    def part(self, module: str) -> dict[str, Any]:
        b_O, d_R = (self.tensors[module + end] for end in self.suffixes)
        A_RI, B_OR = (self.matrix(name) for name in self.fixed)
        if b_O.dim() != 1 or d_R.dim() != 1 or len(d_R) != len(A_RI) or len(b_O) > len(B_OR):
            raise ModelError(f"{self.where}: {module} has b {describe(b_O)}, d {describe(d_R)}, A {describe(A_RI)}")
        return {"A": d_R[:, None] * A_RI, "B": b_O[:, None] * B_OR[: len(b_O)], "scale": 1.0}


class Lycoris(LowRank):
    """What LoHa and LoKr have in common (Yeh et al. 2024): alpha / rank, by patterns."""

    def __init__(self, saved: Saved):
        super().__init__(saved)
        self.scales, live = dict[str, float](), dict[str, float]()
        for module in self.modules:
            rank = self.number(self.pattern_value("rank_pattern", module, "r"), "r")
            scale = self.number(self.pattern_value("alpha_pattern", module, "alpha"), "alpha") / rank
            self.scales[module] = saved.scales.get(module, scale)
            if self.scales[module] != scale:
                live[re.escape(module)] = self.scales[module] * rank
        if live:  # the first pattern that fits counts
            self.config = {**self.config, "alpha_pattern": {**live, **(self.config.get("alpha_pattern") or {})}}


class LoHa(Lycoris):
    """LoHa (Hyeon-Woo et al. 2022): the Hadamard product of two low-rank matrices, ``(w1_a w1_b) * (w2_a w2_b)``.

    It is a matrix of rank r²: B's columns are the products of a column of w1_a and one of w2_a, A's rows likewise.
    """

    suffixes = (".hada_w1_a", ".hada_w1_b", ".hada_w2_a", ".hada_w2_b")

    def part(self, module: str) -> dict[str, Any]:
        w1_a, w1_b, w2_a, w2_b = (self.matrix(module + end) for end in self.suffixes)
        if not (w1_a.shape == w2_a.shape and w1_b.shape == w2_b.shape and w1_a.shape[1] == len(w1_b)):
            raise ModelError(f"{self.where}: {module} has w1_a {describe(w1_a)}, w1_b {describe(w1_b)}: not a pair")
        A_RI = (w1_b[:, None] * w2_b[None]).flatten(0, 1)
        B_OR = (w1_a[:, :, None] * w2_a[:, None]).flatten(1)
        # PEFT rounds this one to float32
        return {"A": A_RI, "B": B_OR, "scale": torch.tensor(self.scales[module], dtype=torch.float32).item()}


class LoKr(Lycoris):
    """LoKr (Edalati et al. 2022; Yeh et al. 2024): a Kronecker product, ``kron(w1, w2)``; each may be of two factors.

    ``kron(a b, c d)`` is ``kron(a, c) @ kron(b, d)``; of a factor that is whole, the other half is the identity.
    """

    suffixes = (".lokr_w1", ".lokr_w1_a", ".lokr_w1_b", ".lokr_w2", ".lokr_w2_a", ".lokr_w2_b")

    def missing(self, module: str) -> str | None:
        for whole in (".lokr_w1", ".lokr_w2"):
            ends = [end for end in (f"{whole}_a", f"{whole}_b") if module + end not in self.tensors]
            if module + whole not in self.tensors and ends:
                return ends[0] if len(ends) == 1 else whole
        return None

    def _halves(self, name: str) -> tuple[Tensor, Tensor]:
        if name in self.tensors:
            whole = self.matrix(name)
            return whole, torch.eye(whole.shape[1], dtype=whole.dtype, device=whole.device)
        return self.matrix(f"{name}_a"), self.matrix(f"{name}_b")

    def part(self, module: str) -> dict[str, Any]:
        (a1, b1), (a2, b2) = self._halves(f"{module}.lokr_w1"), self._halves(f"{module}.lokr_w2")
        if a1.shape[1] != len(b1) or a2.shape[1] != len(b2):
            raise ModelError(f"{self.where}: {module} has factors {describe(a1)} and {describe(b1)}: not a pair")
        return {"A": torch.kron(b1, b2), "B": torch.kron(a1, a2), "scale": self.scales[module]}
