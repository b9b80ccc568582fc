"""Hugging Face's own classes with the layers elsewhere: forward and generate run unchanged over a flow or session."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Mapping, Sequence, Set
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from kwflow.errors import KwargError, UnknownKwarg, UnsupportedError, did_you_mean
from kwflow.flow import Flow
from kwflow.kwargs import PerLayer
from kwflow.models.checkpoint import model_path
from kwflow.models.ends import ModelEnds, bridged
from kwflow.models.prepare import cache_argument
from kwflow.models.spans import model_name
from kwflow.plan import Options
from kwflow.session import Session
from kwflow.tree import flatten

_kwargs: ContextVar[Mapping[str, Any] | None] = ContextVar("kwflow_kwargs", default=None)


# ---- the cache that is a session ---------------------------------------------------------------------------------


class RemoteLayer(CacheLayerMixin):
    """What transformers sees as the cache of the one layer: a session on the workers."""

    is_croppable = True
    is_sliding = False

    def __init__(self, session: Session, repeats: int = 1):
        super().__init__()
        self.session, self.repeats = session, repeats

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise AssertionError("keys and values live on the workers")

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        raise AssertionError("keys and values live on the workers")

    def get_seq_length(self) -> int:
        return self.session.position

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.session.position + query_length, 0

    def get_max_length(self) -> int:
        return self.session.max_length

    def crop(self, tokens_to_remove: int) -> None:
        self.session.rollback(self.session.position - abs(tokens_to_remove))

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.session.reorder(beam_idx)

    def reset(self) -> None:
        self.session.rollback(0)


class RemoteCache(Cache):
    """A session in the place of a Hugging Face cache: ``generate`` and ``forward`` go on from it."""

    is_compileable = False  # type: ignore[assignment]

    def __init__(self, session: Session, repeats: int = 1):
        super().__init__(layers=[RemoteLayer(session, repeats)])
        self.session = session

    @property
    def repeats(self) -> int:
        return self.layers[0].repeats  # type: ignore[union-attr]

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise UnsupportedError("a session's rows cannot be repeated after its first step; repeat the inputs instead")

    def batch_select_indices(self, indices: Tensor) -> None:
        raise UnsupportedError("a session keeps its rows; reorder(ids) changes their order only")

    @property
    def batch_size(self) -> int:
        return self.session.batch or -1


# ---- the model class ---------------------------------------------------------------------------------------------


class Distributed:
    """Mixed in before a Hugging Face CausalLM: forward and generate with remote layers and kwflow's kwargs."""

    flow: Flow

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the Hugging Face class's, and any kwarg that the blocks take.

        A plain differentiable call; with ``use_cache=True``, and nothing that requires grad, a session, which the
        output's cache stands for.
        """
        own, given = self._take_kwargs(kwargs, _EXTRAS)
        bound = inspect.signature(super().forward).bind(*args, **given)  # type: ignore[misc]
        call = bound.arguments
        call.update(call.pop("kwargs", {}))
        for name in ("output_attentions", "output_hidden_states"):
            if call.get(name) or getattr(self.config, name, False):  # type: ignore[attr-defined]
                raise UnsupportedError(f"{name}=True: the layers are on the workers, which do not send these")
        cache_name = cache_argument(super().forward)  # type: ignore[misc]
        older = call.pop("past_key_values", None) if cache_name != "past_key_values" else None  # its name before 5.x
        cache = call.pop(cache_name, None)
        cache = older if cache is None else cache
        mask, wants_cache = call.pop("attention_mask", None), call.pop("use_cache", None)
        if isinstance(mask, Tensor) and mask.dim() == 2 and mask.is_floating_point():
            mask = mask.long()  # as transformers takes it; what is not 0 or 1 is refused further on
        if cache is not None and not isinstance(cache, RemoteCache):
            raise KwargError(f"{cache_name} is a {type(cache).__name__}; give the cache that this model returned")
        if cache is None and wants_cache and not self._differentiates([*own.values(), call.get("inputs_embeds")]):
            cache = RemoteCache(self.flow.session(self._room()))
        own = {**(_kwargs.get() or {}), **own}

        def remote(hidden: Tensor, layer_kwargs: Mapping[str, Any]) -> Tensor:
            step = {**own, "attention_mask": mask}
            if self.flow.ends.takes_positions and layer_kwargs.get("position_ids") is not None:
                step["position_ids"] = layer_kwargs["position_ids"]
            if cache is None:
                return self.flow(hidden, **step)
            return cache.session._step(hidden, step, repeats=cache.repeats)

        ends: Any = self.flow.ends
        if ends.counts_mask and isinstance(mask, Tensor) and mask.dim() == 2 and call.get("position_ids") is None:
            shown = next(call[name] for name in ("input_ids", "inputs_embeds") if call.get(name) is not None)
            call["position_ids"] = (mask.long().cumsum(-1) * mask.long() - 1)[:, -shown.shape[1] :]  # as hf's forward
        if cache is not None:
            call[cache_name] = cache
        with bridged(remote):
            out = super().forward(**call, use_cache=False)  # type: ignore[misc]
        if cache is not None and hasattr(out, "logits"):
            out[cache_name] = cache
        return out

    @torch.no_grad()
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Hugging Face's own generate; kwargs of the blocks act at every step, expanded over beams by their axes."""
        own, given = self._take_kwargs(kwargs, _EXTRAS | _generate_names(type(self)))
        self._refuse(own, given)
        cache_name = cache_argument(super().forward)  # type: ignore[misc]
        given["use_cache"] = True  # whatever the config says (mpt's: no): the session is the cache
        mine: Session | None = None
        if given.get(cache_name) is None and given.get("past_key_values") is None:
            config = given.get("generation_config") or self.generation_config  # type: ignore[attr-defined]

            def setting(name: str, default: Any) -> Any:
                value = given.get(name)
                value = getattr(config, name, None) if value is None else value
                return default if value is None else value

            ids = given.get("inputs_embeds")
            ids = args[0] if args else given.get("input_ids", given.get("inputs")) if ids is None else ids
            prompt = ids.shape[1] if isinstance(ids, Tensor) else 1
            new = setting("max_new_tokens", None)
            total = prompt + new if new is not None else max(setting("max_length", 0), prompt + 20)
            repeats = max(setting("num_beams", 1), setting("num_return_sequences", 1))
            if setting("return_dict_in_generate", False):  # the caller gets the cache, and may go on from it
                session = self.flow.session(max(total + 1, self._room()))
            else:
                session = mine = self.flow.session(total + 1)
            given[cache_name] = RemoteCache(session, repeats)
        token = _kwargs.set(own)
        try:
            return super().generate(*args, **given)  # type: ignore[misc]
        finally:
            _kwargs.reset(token)
            if mine is not None:
                mine.close()

    def _room(self) -> int:
        """Columns of a session whose length nobody said."""
        return min(getattr(self.config, "max_position_embeddings", None) or 2048, 2048)  # type: ignore[attr-defined]

    def _differentiates(self, values: Sequence[Any]) -> bool:
        if not torch.is_grad_enabled():
            return False
        inner = [v.values if isinstance(v, PerLayer) else v for v in values]
        leaves = [leaf for value in inner for leaf in flatten(value)[0]]
        tensors = [leaf if isinstance(leaf, Tensor) else leaf.tensor for leaf in leaves]
        return any(t.requires_grad for t in (*tensors, *self.parameters()))  # type: ignore[attr-defined]

    def _take_kwargs(self, kwargs: Mapping[str, Any], known: Set[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Split off what the blocks take: it must not reach transformers, which drops or repeats it.

        Raises UnknownKwarg for what neither side takes: a family's ``**kwargs`` would swallow it without a word.
        """
        theirs = known | _forward_names(type(self))
        if kwargs.keys() <= theirs:
            return {}, dict(kwargs)
        taken = self.flow.kwargs()
        own = {name: value for name, value in kwargs.items() if name in taken}
        given = {name: value for name, value in kwargs.items() if name not in own}
        for name in given.keys() - theirs:
            hint = did_you_mean(name, [*taken, *theirs])
            raise UnknownKwarg(f"the model got {name!r}; its blocks take {', '.join(sorted(taken))}.{hint}")
        return own, given

    def save_pretrained(self, *_: Any, **__: Any) -> None:
        raise UnsupportedError(
            "the layers are on the workers: this model has nothing but its embeddings and head to save"
        )

    def _refuse(self, own: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        for name in given.keys() & self.flow.kwargs().keys():
            raise KwargError(f"both generate and a block_fn take {name!r}; give the block_fn's kwarg another name")
        if given.get("use_cache") is False:
            raise UnsupportedError(
                "generate(use_cache=False): a session on the workers is the cache, and is always used"
            )
        for name, why in _NOT_HERE.items():
            if given.get(name) is not None and given.get(name) is not False:
                raise UnsupportedError(f"generate({name}=…): {why}")
        from kwflow.axes import Axed

        for name, value in own.items():
            for leaf in value.values() if isinstance(value, Mapping) else [value]:
                if isinstance(leaf, Axed) and (leaf.size("seq") or 1) != 1:
                    raise KwargError(
                        f"{name} has a 'seq' axis of {leaf.size('seq')} columns; generate's steps have one column each"
                    )


def distributed(hf: type) -> type:
    """``hf`` with Distributed before it; forward keeps hf's signature, by which generate decides what to pass."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return Distributed.forward(self, *args, **kwargs)

    forward.__signature__ = inspect.signature(hf.forward)  # type: ignore[attr-defined]
    forward.__doc__ = Distributed.forward.__doc__
    return type(f"Distributed{hf.__name__}", (Distributed, hf), {"forward": forward})


@functools.cache
def _forward_names(cls: type) -> frozenset[str]:
    return frozenset(inspect.signature(cls.forward).parameters) - {"self", "kwargs"}  # type: ignore[attr-defined]


@functools.cache
def _generate_names(cls: type) -> frozenset[str]:
    """What generate takes: its own arguments and whatever a GenerationConfig has."""
    from transformers import GenerationConfig

    own = inspect.signature(super(Distributed, cls).generate).parameters  # type: ignore[misc]
    popped = {"tokenizer", "assistant_tokenizer", "trust_remote_code"}  # read from **kwargs by generate
    return frozenset(own) | popped | frozenset(vars(GenerationConfig())) - {"self", "kwargs"}


# what transformers' forwards read from their **kwargs
_EXTRAS = frozenset(
    {"return_dict", "output_attentions", "output_hidden_states", "past_key_values", "use_cache", "num_items_in_batch"}
)
_NOT_HERE = {
    "assistant_model": "assisted decoding is not supported yet",
    "prompt_lookup_num_tokens": "prompt lookup decoding is not supported yet",
    "custom_generate": "it runs code from the hub",
    "cache_implementation": "keys and values live on the workers",
}


class AutoDistributedModelForCausalLM:
    """Hugging Face's own CausalLM class of the model's family, its layers on a swarm's workers.

    model = kf.AutoDistributedModelForCausalLM.from_pretrained("smollm2-135m", initial_peers=swarm.peers)
    model.generate(**inputs, steer={12: v}, max_new_tokens=40)
    """

    def __init__(self) -> None:
        raise TypeError("use AutoDistributedModelForCausalLM.from_pretrained(model, initial_peers=…)")

    @classmethod
    def from_pretrained(
        cls,
        model: str | os.PathLike[str],
        *,
        initial_peers: Sequence[str] | None = None,
        flow: Flow | None = None,
        dtype: torch.dtype | str | None = None,
        **options: Any,
    ) -> Any:
        """Load the client's part and connect; without peers the blocks run in this process.

        ``options``: as ``flow.options``. Weights are frozen: set ``requires_grad_`` on what is to be trained.
        """
        unknown = set(options) - set(Options.__dataclass_fields__)
        if unknown:
            name = sorted(unknown)[0]
            hint = did_you_mean(name, [*Options.__dataclass_fields__, "initial_peers", "dtype"])
            raise UnknownKwarg(f"from_pretrained got {name!r}.{hint}")
        from kwflow.connect import connect

        if flow is None:
            flow = connect(model, peers=initial_peers, dtype=dtype)
        elif initial_peers is not None or dtype is not None:
            raise KwargError("flow= is connected already: initial_peers and dtype belong to kf.connect")
        ends = flow.ends
        if not isinstance(ends, ModelEnds):
            raise KwargError("flow= takes what kf.connect returns")
        if str(model_path(model)) != str(ends.folder):
            raise KwargError(f"flow= serves {ends.name}, not {model_name(model)}")
        shell: Any = ends.shell
        if not isinstance(shell, Distributed):
            hf = type(shell)
            shell.__class__ = distributed(hf)
        from transformers import GenerationConfig

        if os.path.exists(os.path.join(ends.folder, "generation_config.json")):
            setattr(shell, "generation_config", GenerationConfig.from_pretrained(ends.folder))  # noqa: B010
        shell.flow = flow.options(**options) if options else flow
        return shell
