"""The classes that people know: a Hugging Face model of any family, its layers on a swarm's workers.

model = kf.AutoDistributedModelForCausalLM.from_pretrained("smollm2-135m", initial_peers=swarm.peers)
model.generate(**inputs, steer={12: v}, max_new_tokens=40)

An Auto class finds the class of the model's family, as transformers' do; each family's can be imported from
``kwflow.huggingface``.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kwflow.client.flow import Flow
from kwflow.client.options import Options
from kwflow.errors import KwargError, ModelError, UnknownKwarg, UnsupportedError, did_you_mean
from kwflow.huggingface.distributed import Distributed, distributed
from kwflow.huggingface.generation import Generates
from kwflow.huggingface.tuning import Prefixed, add_prompts, load_tuned, prefixed, read_tuned
from kwflow.models.ends import ModelEnds, classifier, shared
from kwflow.models.families import FAMILIES
from kwflow.models.files.checkpoint import find_model
from kwflow.models.spans import ModelSpec, model_name, model_spec, read_config

# NOTE [head] SmolLM2's head on such a CPU (AVX2, one thread, torch 2.13), bfloat16 against float32: one token forward
# 0.4 to 0.8 of the time, 64 tokens 2.5 to 3.7 times, 64 tokens with their gradient 42 times (22 s against 0.5 s). Such
# a head, upcast in chunks, would change the bits just as a float32 client does, and save memory only.

_OWN = ("initial_peers", "flow", "dtype", "tuning_mode", "pre_seq_len", "tuned")
_LABELS = ("num_labels", "id2label", "label2id", "problem_type", "pad_token_id")  # of the config, and a classifier's

_CONNECT = "Give it to kf.connect, and what that returns as flow=."
_ELSEWHERE = {
    "revision": "It is part of the model's id: user/name@revision.",
    "token": "huggingface_hub reads it from HF_TOKEN, or after `hf auth login`.",
    "cache_dir": "huggingface_hub reads it from HF_HUB_CACHE.",
    "torch_dtype": "Its name is dtype.",
    "peers": "Its name is initial_peers.",
    "dht_prefix": f"It is called name. {_CONNECT}",
    **dict.fromkeys(("quantize", "device", "block_fn", "name"), _CONNECT),
    **dict.fromkeys(_LABELS, "AutoDistributedModelForSequenceClassification takes it."),
}


class AutoDistributedConfig:
    """transformers' own config of a model; ``spec``: what clients and workers need of it besides.

    config = kf.AutoDistributedConfig.from_pretrained("smollm2-135m")  # a LlamaConfig, as AutoConfig's
    spec = kf.AutoDistributedConfig.spec("smollm2-135m")
    spec.name, spec.layers, spec.hidden_size  # ('smollm2-135m', 30, 576)
    """

    # no attributes of the config: transformers writes all of them into its JSON; and no subclass of its class, by the
    # name of which transformers finds model and tokenizer

    def __init__(self, *_: Any, **__: Any) -> None:
        raise TypeError("use AutoDistributedConfig.from_pretrained(model)")

    @classmethod
    def from_pretrained(cls, model: str | os.PathLike[str]) -> Any:
        """Read a model's config, without reading weights. ``model``: a folder, a hub id or an embedded model."""
        return read_config(model)[0]

    @classmethod
    def spec(cls, model: str | os.PathLike[str]) -> ModelSpec:
        """Say what clients and workers need of a model, without reading weights, as a ``ModelSpec``.

        Raises ModelError, UnsupportedError.
        """
        return model_spec(model)


class _Auto:
    """from_pretrained of the model classes; a class says what stands on the base model.

    A family's class is a subclass: transformers' own from_pretrained and ``__init__``, which make every layer, are out
    of reach there.
    """

    _what: str
    _table: str  # transformers' own, in models.auto.modeling_auto: from model_type to the name of the class
    _mixin: type[Distributed] = Distributed
    _config_names: tuple[str, ...] = ()  # which from_pretrained takes for the config

    def __init__(self, *_: Any, **__: Any) -> None:
        raise TypeError(f"use {type(self).__name__}.from_pretrained(model, initial_peers=…)")

    @classmethod
    def from_pretrained(
        cls,
        model: str | os.PathLike[str],
        *,
        initial_peers: Sequence[str] | None = None,
        flow: Flow | None = None,
        dtype: torch.dtype | str | None = None,
        tuning_mode: str | None = None,
        pre_seq_len: int | None = None,
        tuned: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> Any:
        """Load the client's part and connect; without peers the blocks run in this process.

        ``flow``: one that is connected already; models over one flow share its embeddings. ``tuning_mode``: "ptune" or
        "deep_ptune", with ``pre_seq_len`` trainable prompts. ``tuned``: a folder of save_pretrained, which says the
        mode too. ``options``: as ``flow.options``. ``dtype``: of the client's part; over bfloat16 workers, on a CPU
        that has no bfloat16 arithmetic, "float32" gives a fast head (NOTE [head]). What the checkpoint holds is frozen:
        set ``requires_grad_`` on what is to be trained; prompts, and a head that the checkpoint lacks, are trainable.
        Raises ModelError where the class is not that of the model's family.
        """
        changes = {name: options.pop(name) for name in cls._config_names if name in options}
        _known(cls, options)
        kind = cls._class_for(model)
        if tuned is not None:
            if tuning_mode is not None or pre_seq_len is not None:
                raise KwargError("tuned= says its own tuning_mode and pre_seq_len")
            saved = read_tuned(tuned)
            tuning_mode, pre_seq_len = saved.get("tuning_mode"), saved.get("pre_seq_len")
            changes = {**{k: v for k, v in saved.get("labels", {}).items() if k in cls._config_names}, **changes}
        flow = _connected(model, flow, initial_peers, dtype)
        module, added = cls._make(flow.ends, changes)  # type: ignore[arg-type]
        made = shared(module, kind)
        made.flow = flow.options(**options) if options else flow
        made.added = set(added)
        add_prompts(made, tuning_mode, pre_seq_len)
        if tuned is not None:
            load_tuned(made, tuned)
        elif added:
            warnings.warn(
                f"{flow.ends.name} has no {', '.join(added)} for {kind.__name__.removeprefix('Distributed')}: "
                f"initialised as transformers does, and trainable; train before use",
                stacklevel=2,
            )
        return made

    @classmethod
    def _class_for(cls, model: str | os.PathLike[str]) -> type:
        """The class of the model's family, or this one if it is that, or a subclass of it."""
        model_type = read_config(model)[0].model_type
        wanted = cls._of(model_type)
        if not issubclass(cls, Distributed):  # an Auto class
            return wanted
        if not issubclass(cls, wanted):
            auto = next(one for one in AUTOS if issubclass(cls, one))
            raise ModelError(
                f"{cls.__name__}.from_pretrained: {model_name(model)} is a {model_type}; use {wanted.__name__}, or "
                f"{auto.__name__}, which takes every family"
            )
        return cls

    @classmethod
    def _of(cls, model_type: str) -> type:
        """A family's class. Raises UnsupportedError where transformers has none."""
        name = _names(cls._table).get(model_type)
        if name is None:
            raise UnsupportedError(f"transformers has no {cls._what} for model_type {model_type!r}")
        return family_class(f"Distributed{name}")

    @classmethod
    def _make(cls, ends: ModelEnds, changes: Mapping[str, Any]) -> tuple[Any, list[str]]:
        """The parts of the model, without flow and prompts, and the names of parameters that the checkpoint has not."""
        raise NotImplementedError


class AutoDistributedModel(_Auto):
    """Hugging Face's own base model of the family: ``last_hidden_state`` is behind the final norm."""

    _what, _table = "base model", "MODEL_MAPPING_NAMES"

    @classmethod
    def _make(cls, ends: ModelEnds, changes: Mapping[str, Any]) -> tuple[Any, list[str]]:
        return ends.base, []


class AutoDistributedModelForCausalLM(_Auto):
    """Hugging Face's own CausalLM class of the model's family, its layers on a swarm's workers.

    model = kf.AutoDistributedModelForCausalLM.from_pretrained("smollm2-135m", initial_peers=swarm.peers)
    model.generate(**inputs, steer={12: v}, max_new_tokens=40)
    """

    _what, _table, _mixin = "causal language model", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", Generates

    @classmethod
    def _make(cls, ends: ModelEnds, changes: Mapping[str, Any]) -> tuple[Any, list[str]]:
        from transformers import GenerationConfig

        ends.check_head()
        made = shared(ends.shell, type(ends.shell))
        if os.path.exists(os.path.join(ends.folder, "generation_config.json")):
            made.generation_config = GenerationConfig.from_pretrained(ends.folder)
        return made, []


class AutoDistributedModelForSequenceClassification(_Auto):
    """Hugging Face's own ForSequenceClassification of the family; takes ``num_labels`` and the like, as theirs does.

    model = kf.AutoDistributedModelForSequenceClassification.from_pretrained(
        "smollm2-135m", initial_peers=swarm.peers, num_labels=3, tuning_mode="deep_ptune", pre_seq_len=8)
    model(**inputs, labels=labels).loss.backward()
    """

    _what, _table = "sequence classification", "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES"
    _config_names = _LABELS

    @classmethod
    def _make(cls, ends: ModelEnds, changes: Mapping[str, Any]) -> tuple[Any, list[str]]:
        return classifier(ends, changes)


# ---- one class for each of transformers'

AUTOS = (AutoDistributedModel, AutoDistributedModelForCausalLM, AutoDistributedModelForSequenceClassification)


def _names(table: str) -> Mapping[str, str]:
    return getattr(importlib.import_module("transformers.models.auto.modeling_auto"), table)


@functools.cache
def class_names() -> Mapping[str, tuple[type[_Auto], str]]:
    """Every family's classes by name: the Auto class that makes one, and the name of transformers' own."""
    by_auto = {auto: [_names(auto._table).get(family) for family in sorted(FAMILIES)] for auto in AUTOS}
    return {f"Distributed{name}": (auto, name) for auto, names in by_auto.items() for name in names if name}


@functools.cache
def family_class(name: str) -> type:
    """The class of one of ``class_names``, made when it is first asked for."""
    auto, hf_name = class_names()[name]
    hf = getattr(importlib.import_module("transformers"), hf_name)
    logging.getLogger("transformers.pipelines.base").addFilter(_unless_known_to_pipelines)
    # a base model is the one that others stand on, which puts trained prompts before its columns
    return distributed(prefixed(hf) if auto is AutoDistributedModel else hf, auto, auto._mixin)


def _unless_known_to_pipelines(record: logging.LogRecord) -> bool:
    """Whether to log a record of transformers' pipelines: not that it lists no class of ours whose own class it lists.

    It goes by the class's name alone, says so with the names of all others (14 kB), and then runs it.
    """
    matched = re.match(r"The model 'Distributed(\w+)' is not supported for", message := record.getMessage())
    return matched is None or f"'{matched[1]}'" not in message


def _connected(
    model: str | os.PathLike[str], flow: Flow | None, peers: Sequence[str] | None, dtype: torch.dtype | str | None
) -> Flow:
    """The flow of a model, connected now or given, its base model ready for prompts."""
    from kwflow.swarm.connect import connect

    if flow is None:
        flow = connect(model, peers=peers, dtype=dtype)
    elif peers is not None or dtype is not None:
        raise KwargError("flow= is connected already: initial_peers and dtype belong to kf.connect")
    ends = flow.ends
    if not isinstance(ends, ModelEnds):
        raise KwargError("flow= takes what kf.connect returns")
    if str(find_model(model)) != str(ends.folder):
        raise KwargError(f"flow= serves {ends.name}, not {model_name(model)}")
    if not isinstance(ends.base, Prefixed):
        ends.base.__class__ = prefixed(type(ends.base))
    return flow


def _known(cls: type[_Auto], options: Mapping[str, Any]) -> None:
    """Raise UnknownKwarg for what no from_pretrained here takes, and say where it belongs if that is known."""
    known = [*_OWN, *cls._config_names, *Options.__dataclass_fields__]
    for name in options:
        if name not in known:
            where = _ELSEWHERE.get(name) or did_you_mean(name, known).strip() or f"It takes {', '.join(known)}."
            raise UnknownKwarg(f"{cls.__name__}.from_pretrained got {name!r}. {where}")


__all__ = [
    "AutoDistributedConfig",
    "AutoDistributedModel",
    "AutoDistributedModelForCausalLM",
    "AutoDistributedModelForSequenceClassification",
    "Distributed",
]
