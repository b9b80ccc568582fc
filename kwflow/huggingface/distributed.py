"""Mixed in before a Hugging Face class: its own forward, with the layers on workers and the kwargs of their blocks.

transformers' code runs unchanged. What the blocks take is split off first, since transformers drops it or repeats it;
the mask goes to the flow too, and the one stand-in layer hands hidden to the flow or to a session.
"""

# B batch, S seq, D hidden

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence, Set
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kwflow.client.flow import Flow
from kwflow.client.session import Session
from kwflow.errors import KwargError, SessionError, UnknownKwarg, UnsupportedError, did_you_mean
from kwflow.huggingface.remote_cache import RemoteCache
from kwflow.huggingface.tuning import NONE, Tuning, load_tuned, prefixing, save_tuned, saved_names
from kwflow.kwargs import prefix_kv as prefix
from kwflow.kwargs.bind import PerLayer
from kwflow.kwargs.capture import Capture
from kwflow.kwargs.edit import Edit
from kwflow.kwargs.positions import token_position, without_masks
from kwflow.kwargs.tree import flatten
from kwflow.models.ends import bridged, layer_dropouts
from kwflow.models.prepare import arguments, cache_argument


@dataclass(frozen=True)
class GenerateCall:
    """What holds at every step of a generate call."""

    kwargs: Mapping[str, Any]
    prompt: int | None = None  # columns of the prompt
    prompt_tokens: Tensor | None = None  # tokens of each row's prompt
    cache: Any = None  # whose prompt it is: guidance runs another sequence beside it
    prefix_columns: int = 0  # columns of the prefix_kv before it
    repeats: int = 1  # its rows are that many copies of each row that the kwargs are given for
    ending: Any = None  # the stopping criteria, which note where its rows end


NO_CALL = GenerateCall({})
generate_call: ContextVar[GenerateCall] = ContextVar("kwflow_generate_call", default=NO_CALL)

HOME = "kwflow.huggingface"  # where the families' classes can be imported from, by name

# what transformers' forwards read from their **kwargs, and what its generate leaves there
EXTRAS = frozenset(
    {"return_dict", "output_attentions", "output_hidden_states", "past_key_values", "use_cache", "num_items_in_batch"}
    | {"tokenizer", "assistant_tokenizer"}
)
NOT_SENT = (
    "the layers are on the workers, which send back the last hidden only; the residual after any layer is "
    "flow[:layer + 1](**flow.inputs(…))"
)


SIGNED = ("forward", "prepare_inputs_for_generation")  # whose signatures transformers reads


class Distributed:
    """A Hugging Face model whose layers are a flow. Mixed in by ``distributed``; made by from_pretrained.

    Blocks are in eval mode whatever ``train()`` says. ``named_parameters`` and ``state_dict`` are the client's part.
    """

    flow: Flow
    tuning: Tuning = NONE
    added: Set[str] = frozenset()  # names of the parameters that are not the checkpoint's

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the Hugging Face class's, and any kwarg that the blocks take.

        A plain differentiable call; with ``use_cache=True``, and nothing that requires grad, a session, which the
        output's cache stands for. The cache argument takes that, or a session of the model's flow. Raises SessionError
        for a closed session, and for one of another model or of other layers.
        """
        block_kwargs, hf_kwargs = self._take_kwargs(kwargs, EXTRAS)
        call = arguments(super().forward, args, hf_kwargs)  # type: ignore[misc]
        for name in ("output_attentions", "output_hidden_states"):
            if call.get(name) or getattr(self.config, name, False):  # type: ignore[attr-defined]
                raise UnsupportedError(f"{name}=True: {NOT_SENT}")
        cache_name = cache_argument(super().forward)  # type: ignore[misc]
        cache = self._cache(call, cache_name, block_kwargs)
        mask = call.pop("attention_mask", None)
        if isinstance(mask, Tensor) and mask.dim() == 2 and mask.is_floating_point():
            mask = mask.long()  # as transformers takes it; what is not 0 or 1 is refused further on
        begins = cache is None or cache.session.position == 0
        shared = {n: value for n, value in generate_call.get().kwargs.items() if begins or n != prefix.NAME}
        block_kwargs = {**shared, **block_kwargs}
        self.tuning.check(block_kwargs, mask)
        prefix_columns = columns_of(block_kwargs) if cache is None or begins else cache.session.prefix
        self._place(call, mask, cache, prefix_columns)
        if cache is not None:
            call[cache_name] = cache
        ids = call.get("input_ids") if call.get("inputs_embeds") is None else None
        if _covers(mask, call, cache):  # some families derive positions from it
            call["attention_mask"] = mask
        with (
            bridged(functools.partial(self._run_layers, block_kwargs, mask, cache, ids)),
            prefixing(self.tuning, prefix_columns),
        ):
            return super().forward(**call, use_cache=cache is not None)  # type: ignore[misc]

    def _place(self, call: dict[str, Any], mask: Any, cache: RemoteCache | None, prefix_columns: int) -> None:
        """Say the positions behind ``prefix_columns`` where nobody did: transformers does not see the prefix_kv."""
        if (
            not prefix_columns
            or call.get("position_ids") is not None
            or "position_ids" not in _forward_names(type(self))
        ):
            return
        inputs = call.get("input_ids") if call.get("inputs_embeds") is None else call["inputs_embeds"]
        if isinstance(inputs, Tensor) and inputs.dim() > 1:
            past, seq = 0 if cache is None else cache.get_seq_length(), inputs.shape[1]
            counted = getattr(self.flow.ends, "counts_mask", False) and isinstance(mask, Tensor) and mask.dim() == 2
            positions = token_position(mask, seq) if counted else torch.arange(past, past + seq)[None]
            call["position_ids"] = positions.clamp(min=0).to(inputs.device) + prefix_columns

    def _run_layers(
        self,
        block_kwargs: Mapping[str, Any],
        mask: Tensor | None,
        cache: RemoteCache | None,
        ids: Tensor | None,
        hidden: Tensor,
        layer_kwargs: Mapping[str, Any],
    ) -> Tensor:
        """What the stand-in layer does: one call of the flow, or one step of the session."""
        begins = cache is None or cache.session.position == 0
        step = {**block_kwargs, **(self.tuning.kwargs() if begins else {}), "attention_mask": self.tuning.mask(mask)}
        if self.flow.ends.takes_positions and layer_kwargs.get("position_ids") is not None:
            step["position_ids"] = layer_kwargs["position_ids"]
        if cache is None:
            return self.flow(hidden, **step)
        settings = generate_call.get()
        settings = settings if cache is settings.cache else NO_CALL
        if settings.prompt is not None and cache.session.position >= settings.prompt:
            step = without_masks(step)
        return cache.session.step_expanded(
            hidden,
            step,
            repeats=settings.repeats,
            prompt=settings.prompt,
            prompt_length=settings.prompt_tokens,
            ids=ids,
        )

    def _cache(self, call: dict[str, Any], name: str, block_kwargs: Mapping[str, Any]) -> RemoteCache | None:
        """Take the cache out of a forward's arguments; a new session where one is wanted."""
        older = call.pop("past_key_values", None) if name != "past_key_values" else None  # its name before 5.x
        cache = call.pop(name, None)
        cache, wanted = self._ours(older if cache is None else cache, name), call.pop("use_cache", None)
        if cache is not None:
            self._check_cache(cache, name)
        if cache is None and wanted and not self._differentiates([*block_kwargs.values(), call.get("inputs_embeds")]):
            return RemoteCache(self.flow.session(), prefix=self.tuning.length)
        return cache

    def _ours(self, cache: Any, name: str) -> RemoteCache | None:
        """What was given for the cache: None, one that this model returned, or a session of its flow."""
        if isinstance(cache, Session):
            return RemoteCache(cache, self.tuning.length)
        if cache is not None and not isinstance(cache, RemoteCache):
            raise KwargError(
                f"{name} is a {type(cache).__name__}; give a session, model.flow.session(), or the cache that this "
                f"model returned"
            )
        return cache

    def _check_cache(self, cache: RemoteCache, name: str) -> None:
        """Raise SessionError unless a cache's session is open, of this model and its layers, and behind its prompts."""
        session, flow = cache.session, self.flow
        session.check_open()
        theirs, ours = (getattr(ends, "folder", ends) for ends in (session.ends, flow.ends))
        if str(theirs) != str(ours) or session.span != flow.span:
            start, stop = flow.span
            raise SessionError(
                f"{name} is {session!r}, and this model's layers are {start}:{stop} of {flow.ends.name}: give a "
                f"session of its own flow, model.flow.session()"
            )
        length, held = self.tuning.length, session.token_ids
        if session.position and length and (session.position < length or _any_token(held, length)):
            raise SessionError(
                f"{name} is {session!r}, which began without this model's {length} trained prompts: give a session "
                f"that this model began, or a new one, model.flow.session()"
            )

    def _differentiates(self, values: Sequence[Any]) -> bool:
        if not torch.is_grad_enabled():
            return False
        leaves = [leaf for value in values for leaf in flatten(_tensors_of(value))[0]]
        tensors = [leaf if isinstance(leaf, Tensor) else leaf.tensor for leaf in leaves]
        return any(t.requires_grad for t in (*tensors, *self.parameters()))  # type: ignore[attr-defined]

    def _take_kwargs(self, kwargs: Mapping[str, Any], known: Set[str]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Split off what the blocks take: it must not reach transformers, which drops or repeats it.

        Raises UnknownKwarg for what neither side takes: a family's ``**kwargs`` would swallow it without a word.
        """
        kwargs, hf_names = prefix.named(kwargs, len(self.flow)), known | _forward_names(type(self))
        if kwargs.keys() <= hf_names:
            return {}, dict(kwargs)
        block_names = self.flow.kwargs()
        block_kwargs = {name: value for name, value in kwargs.items() if name in block_names}
        hf_kwargs = {name: value for name, value in kwargs.items() if name not in block_kwargs}
        for name in hf_kwargs.keys() - hf_names:
            hint = did_you_mean(name, [*block_names, *hf_names])
            raise UnknownKwarg(f"the model got {name!r}; its blocks take {', '.join(sorted(block_names))}.{hint}")
        return block_kwargs, hf_kwargs

    # ---- training

    def train(self, mode: bool = True) -> Any:
        """As nn.Module's, for the client's part. Raises UnsupportedError where the layers would drop out."""
        if mode and (dropped := layer_dropouts(self.config)):  # type: ignore[attr-defined]
            raise UnsupportedError(
                f"train(): a layer of this model would drop out ({', '.join(dropped)}), and workers' blocks never do; "
                f"set these to 0 in model.config, or train in eval mode"
            )
        return super().train(mode)  # type: ignore[misc]

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        *,
        is_main_process: bool = True,
        state_dict: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Save what is trainable or was added here, and what it belongs to; ``tuned=`` or load_tuned reads it again.

        Raises UnsupportedError when there is nothing: the layers are on the workers.
        """
        if is_main_process:
            save_tuned(self, save_directory, state_dict)

    def load_tuned(self, folder: str | os.PathLike[str]) -> None:
        """Take over what save_pretrained saved. Raises ModelError for another model's, naming what differs."""
        load_tuned(self, folder)

    @property
    def _keys_to_ignore_on_save(self) -> set[str]:
        """transformers' Trainer does not miss these when it resumes."""
        return set(self.state_dict()) - saved_names(self)  # type: ignore[attr-defined]


def _any_token(held: Tensor | None, columns: int) -> bool:
    return held is not None and bool((held[:, :columns] >= 0).any())


def columns_of(block_kwargs: Mapping[str, Any]) -> int:
    """How many columns the kwargs' prefix has; what is wrong with it is said further on."""
    leaves = flatten(_tensors_of(block_kwargs.get(prefix.NAME)))[0]
    tensors = [leaf if isinstance(leaf, Tensor) else leaf.tensor for leaf in leaves]
    return tensors[0].shape[-2] if tensors and tensors[0].dim() > 1 else 0


def _tensors_of(value: Any) -> Any:
    """A kwarg as a tree of what may require grad."""
    if isinstance(value, PerLayer):
        return dict(value.values)
    if isinstance(value, Edit):
        return [list(value.values.values()), value.strength, value.basis]
    if isinstance(value, Capture):
        return None
    return [_tensors_of(one) for one in value] if isinstance(value, list | tuple) else value


def distributed(hf: type, *mixins: type) -> type:
    """``hf`` with mixins before it, with hf's signatures: generate and Trainer decide by them what to pass."""
    name = f"Distributed{hf.__name__}"
    doc = f"""transformers' {hf.__name__}, its layers on a swarm's workers.

    model = kf.{name}.from_pretrained(folder, initial_peers=swarm.peers)

    What it runs before and after the layers is transformers' own. Its methods take the kwargs of the blocks too.
    from_pretrained makes it, and a subclass, without ``__init__``.
    """
    ours = {method: getattr(mixin, method) for mixin in reversed(mixins) for method in SIGNED if hasattr(mixin, method)}
    methods = {named: _signed(method, getattr(hf, named), name) for named, method in ours.items()}
    return type(name, (*mixins, hf), {"__module__": HOME, "__doc__": doc, **methods})


def _signed(method: Callable[..., Any], like: Callable[..., Any], owner: str) -> Callable[..., Any]:
    """A method of ours with the signature of the Hugging Face method that it is ``like``."""

    def forwarding(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(self, *args, **kwargs)

    forwarding.__name__, forwarding.__doc__ = method.__name__, method.__doc__
    forwarding.__module__, forwarding.__qualname__ = HOME, f"{owner}.{method.__name__}"
    forwarding.__signature__ = inspect.signature(like)  # type: ignore[attr-defined]
    return forwarding


@functools.cache
def _forward_names(cls: type) -> frozenset[str]:
    forward: Callable[..., Any] = cls.forward  # type: ignore[attr-defined]
    return frozenset(inspect.signature(forward).parameters) - {"self", "kwargs"}


def _covers(mask: Any, call: Mapping[str, Any], cache: RemoteCache | None) -> bool:
    """Whether a mask masks something and has the columns that it must have; else the flow says what is wrong."""
    inputs = call.get("input_ids") if call.get("inputs_embeds") is None else call["inputs_embeds"]
    if not isinstance(mask, Tensor) or mask.dim() != 2 or not isinstance(inputs, Tensor) or inputs.dim() < 2:
        return False
    past = 0 if cache is None else cache.get_seq_length()
    return tuple(mask.shape) == (inputs.shape[0], past + inputs.shape[1]) and not bool(mask.all())
