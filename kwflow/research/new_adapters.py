"""Adapters made from nothing, with PEFT's initial values: see ``kwflow.research.adapters``."""

# R rank, I in, O out

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, overload

import torch
from torch import Tensor, nn

from kwflow.client.flow import Flow
from kwflow.errors import KwargError, did_you_mean
from kwflow.kwargs.points import numbers, resolve
from kwflow.kwargs.tree import as_int
from kwflow.research.adapter_kinds import IA3, Adapter
from kwflow.research.adapter_low_rank import LoRA
from kwflow.research.adapter_rows import Rows
from kwflow.research.peft_files import Saved

ALL_LINEAR = "all-linear"  # PEFT's word for every projection
Sizes = Mapping[str, tuple[int, int]]  # of modules: features in and out


@overload
def new(kind: str, flow: Flow, *, targets: str | Iterable[str], tasks: int, **options: Any) -> Rows: ...
@overload
def new(kind: str, flow: Flow, *, targets: str | Iterable[str], tasks: None = None, **options: Any) -> Adapter: ...
def new(
    kind: str,
    flow: Flow,
    *,
    targets: str | Iterable[str],
    layers: Any = None,
    tasks: int | None = None,
    dtype: torch.dtype | None = None,
    seed: int | torch.Generator | None = None,
    **options: Any,
) -> Adapter | Rows:
    """Make a LoRA or an IA3 adapter that leaves the model as it is, to be trained.

        adapter = kf.adapters.new("lora", flow, targets=["q_proj", "v_proj"], rank=4, alpha=8, seed=0)
        optimizer = torch.optim.AdamW(adapter.parameters())
        loss(flow(**x, **adapter)).backward()

    ``kind``: "lora" takes ``rank`` (8), ``alpha`` (8; the scale is alpha / rank) and ``rslora`` (False; alpha /
    sqrt(rank)); A is drawn as PEFT draws it (Hu et al. 2021), B is zeros. "ia3" takes ``feedforward``: those of the
    targets whose input is multiplied, not their output (Liu et al. 2022); all are ones. ``targets``: projections by
    name or its end, or "all-linear"; ``layers``: absolute numbers, all of the flow's (a call says which layer lacks a
    target, in models whose layers differ). ``tasks``: so many adapters, as rows: ``flow(**x, **tasks.take([0, 2,
    None]))``. ``dtype``: as PEFT's, float32, or float64 for a float64 model. ``seed``: a number, a generator, or None
    for torch's own.

    The tensors are leaves that require grad. With the same seed they are PEFT's to the bit, ``get_peft_model`` after
    ``torch.manual_seed(seed)``, on a CPU; several tasks, ``add_adapter`` for each. Raises KwargError and UnknownKwarg,
    which say what there is.
    """
    if kind not in _MAKERS:
        kinds = " and ".join(map(repr, _MAKERS))
        raise KwargError(f"kf.adapters.new makes {kinds}, not {kind!r:.40}.{did_you_mean(str(kind), _MAKERS)}")
    what = f"kf.adapters.new({kind!r})"
    if tasks is not None and (as_int(tasks) is None or tasks < 1):
        raise KwargError(f"{what}: tasks={tasks!r:.40}; give a number from 1 on, or None for one adapter")
    takes, maker = _MAKERS[kind]
    if unknown := options.keys() - set(takes):
        name = min(unknown)
        raise KwargError(f"{what} takes no {name!r}; it takes {', '.join(takes)}.{did_you_mean(name, takes)}")
    chosen = _layers(flow, layers, what)
    generator = _generator(seed, what)
    make = partial(maker, _modules(flow, targets, chosen, what), what, flow, generator, **options)
    adapters = [_trained(make(), flow, dtype, what) for _ in range(tasks or 1)]
    return adapters[0] if tasks is None else Rows(adapters)


def base_config(ends: Any) -> dict[str, Any]:
    """What an adapter's config says of its model. gpt2 holds weights the other way round, which PEFT must be told."""
    turned = {"fan_in_fan_out": ends.config.model_type == "gpt2"}
    name = os.fspath(ends.folder)
    return {"base_model_name_or_path": name, "task_type": "CAUSAL_LM", "inference_mode": True, **turned}


# ---- which modules -----------------------------------------------------------------------------------------------


def _layers(flow: Flow, layers: Any, what: str) -> list[int]:
    if layers is None:
        return list(range(flow.start, flow.stop))
    chosen = sorted(numbers(layers, "layers", what))
    if outside := [layer for layer in chosen if not flow.start <= layer < flow.stop]:
        raise KwargError(f"{what}: layers names layer {outside[0]}; this flow has layers {flow.start}:{flow.stop}")
    return chosen


def _modules(flow: Flow, targets: Any, layers: Sequence[int], what: str) -> dict[str, tuple[int, int]]:
    """The sizes of the modules by PEFT's names, in the order in which the model has them, and PEFT draws them."""
    projections = flow.projections()
    if not isinstance(targets, Iterable):
        raise KwargError(f"{what}: targets={targets!r:.40}; give names of {', '.join(projections)}, or {ALL_LINEAR!r}")
    names = [targets] if isinstance(targets, str) else list(targets)
    full = set(
        projections if names == [ALL_LINEAR] else (resolve(name, projections, f"{what}: targets") for name in names)
    )
    if not full:
        raise KwargError(f"{what}: targets is empty; these layers have {', '.join(projections)}")
    ends: Any = flow.ends
    ordered = [name for name in projections if name in full]
    return {f"{ends.layers_name}.{layer}.{name}": projections[name] for layer in layers for name in ordered}


# ---- their tensors -----------------------------------------------------------------------------------------------


def _lora(
    modules: Sizes,
    what: str,
    flow: Flow,
    generator: torch.Generator | None,
    *,
    rank: int = 8,
    alpha: float = 8,
    rslora: bool = False,
) -> Adapter:
    if (count := as_int(rank)) is None or count < 1:
        raise KwargError(f"{what}: rank={rank!r:.40}; give a number from 1 on")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise KwargError(f"{what}: alpha={alpha!r:.40}; give a number")
    tensors = dict[str, Tensor]()
    for module, (features, given) in modules.items():
        for shape in ((count, features), (given, count)):  # nn.Linear draws both before PEFT draws A
            _drawn(shape, generator)
        tensors[f"{module}.lora_A.weight"] = _drawn((count, features), generator)
        tensors[f"{module}.lora_B.weight"] = torch.zeros(given, count)
    config = {"peft_type": "LORA", "target_modules": list(modules), "r": count, "lora_alpha": alpha}
    config |= {"use_rslora": bool(rslora), "init_lora_weights": True, "lora_dropout": 0.0, "bias": "none"}
    return LoRA(Saved("kf.adapters.new", {**base_config(flow.ends), **config}, tensors))


def _ia3(
    modules: Sizes,
    what: str,
    flow: Flow,
    generator: torch.Generator | None,
    *,
    feedforward: str | Iterable[str] = (),
) -> Adapter:
    ends: Any = flow.ends
    targets = dict.fromkeys(_projections(modules, ends.layers_name), (0, 0))
    names = [feedforward] if isinstance(feedforward, str) else feedforward
    inner = {resolve(name, targets, f"{what}: feedforward, of the targets") for name in names}
    tensors, fed = dict[str, Tensor](), list[str]()
    for (module, (features, given)), name in zip(modules.items(), _projections(modules, ends.layers_name), strict=True):
        if name in inner:
            fed.append(module)
        tensors[f"{module}.ia3_l"] = torch.ones(1, features) if name in inner else torch.ones(given, 1)
    config = {"peft_type": "IA3", "target_modules": list(modules), "feedforward_modules": fed, "init_ia3_weights": True}
    return IA3(Saved("kf.adapters.new", {**base_config(flow.ends), **config}, tensors))


_MAKERS: dict[str, tuple[tuple[str, ...], Callable[..., Adapter]]] = {
    "lora": (("rank", "alpha", "rslora"), _lora),
    "ia3": (("feedforward",), _ia3),
}


def _projections(modules: Sizes, layers_name: str) -> Iterator[str]:
    return (module.removeprefix(f"{layers_name}.").partition(".")[2] for module in modules)


def _drawn(shape: tuple[int, int], generator: torch.Generator | None) -> Tensor:
    """As nn.Linear's weight and PEFT's A."""
    return nn.init.kaiming_uniform_(torch.empty(shape), a=math.sqrt(5), generator=generator)


def _generator(seed: Any, what: str) -> torch.Generator | None:
    if seed is None or isinstance(seed, torch.Generator):
        return seed
    if (number := as_int(seed)) is None:
        raise KwargError(f"{what}: seed={seed!r:.40}; give a number, a torch.Generator, or None for torch's own")
    return torch.Generator().manual_seed(number)


def _trained(adapter: Adapter, flow: Flow, dtype: torch.dtype | None, what: str) -> Adapter:
    """In its dtype, rounded to the model's before, as PEFT's are."""
    ends: Any = flow.ends
    dtype = torch.promote_types(ends.dtype, torch.float32) if dtype is None else dtype
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise KwargError(f"{what}: dtype={dtype!r:.40}; give one of floating point")
    adapter.tensors = {name: tensor.to(ends.dtype).to(dtype) for name, tensor in adapter.tensors.items()}
    return adapter.requires_grad_()
