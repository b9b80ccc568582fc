"""Mixed in before a Hugging Face CausalLM: its own generate, over a session on the workers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import StoppingCriteriaList

from kwflow.client.session import Session
from kwflow.errors import KwargError, SessionError, UnsupportedError
from kwflow.huggingface.beams import AtEachStep, returning_beams
from kwflow.huggingface.distributed import EXTRAS, NOT_SENT, Distributed, GenerateCall, columns_of, generate_call
from kwflow.huggingface.remote_cache import RemoteCache
from kwflow.kwargs.axes import Axed
from kwflow.kwargs.capture import Capture
from kwflow.kwargs.positions import is_mask
from kwflow.models.prepare import CACHE_NAMES, arguments, cache_argument
from kwflow.models.spans import quiet

_CACHE = "keys and values live on the workers, in a session"
_DRAFTS = "it drafts with this model's own layers, which are on the workers; give an assistant_model"
_REFUSED = {
    "cache_implementation": _CACHE,
    "compile_config": "there is nothing here to compile: the layers are on the workers",
    "assistant_early_exit": _DRAFTS,
    "use_mtp": _DRAFTS,
    "output_hidden_states": NOT_SENT,
    "output_attentions": NOT_SENT,
}


class Generates(Distributed):
    """A Distributed model with ``generate``."""

    @torch.no_grad()
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Hugging Face's own generate; kwargs of the blocks act at every step, expanded over beams by their axes.

        A Capture is new, and holds each final sequence's own tokens: none after its end, however it came about.
        Every mode that transformers runs without code from the hub: greedy, sampled, beams, assisted, prompt lookup.
        The cache argument takes a session of the model's flow, which stays the caller's and goes on in the next call:
        ``model.generate(…, cache=session)``. With ``return_dict_in_generate=True`` the output's cache is the session,
        and may be given likewise. A next call has the whole history or, with a mask of all columns, the new tokens
        alone. Raises, before anything is sent,
        UnsupportedError for what a session on workers cannot do, SessionError where the history is not the cache's.
        """
        block_kwargs, hf_kwargs = self._take_kwargs(kwargs, EXTRAS | _generate_names(type(self)))
        call = arguments(super().generate, args, hf_kwargs)  # type: ignore[misc]
        settings, wanted = self._settings(call), block_kwargs.get("capture")
        self._refuse(block_kwargs, call, settings)
        repeats = max(settings.num_beams or 1, settings.num_return_sequences or 1)
        cache, prefix_columns, kept = self._session_of(call, settings, columns_of(block_kwargs), repeats)
        prompt = self._prompt(call, settings)
        call["use_cache"] = True  # whatever the model's config says (mpt's: no): the session is the cache
        beams = AtEachStep(wanted) if isinstance(wanted, Capture) and (settings.num_beams or 1) > 1 else None
        if beams is not None:
            block_kwargs, call = {**block_kwargs, "capture": beams}, returning_beams(call)
        ending = Ending(cache.session)
        token = generate_call.set(GenerateCall(block_kwargs, *prompt, cache, prefix_columns, repeats, ending))
        try:
            out = super().generate(**call)  # type: ignore[misc]
            if beams is None:
                return out
            beams.give(out.beam_indices, prompt[0])
            return out if settings.return_dict_in_generate else out.sequences
        finally:
            generate_call.reset(token)
            if isinstance(wanted, Capture) and beams is None:
                ending.trim(wanted)
            if not kept:
                cache.session.close()

    def _session_of(
        self, call: dict[str, Any], settings: Any, prefix_columns: int, repeats: int
    ) -> tuple[RemoteCache, int, bool]:
        """The call's cache, put into its arguments; columns of the prefix_kv before it; whether the caller has it."""
        name = cache_argument(self.forward)
        older = call.pop("past_key_values", None) if name != "past_key_values" else None  # its name before 5.x
        cache = self._ours(older if call.get(name) is None else call[name], name)
        if cache is not None:
            self._check_cache(cache, name)
            call[name] = cache
            if cache.session.position and prefix_columns:
                raise SessionError(f"generate: prefix_kv stands before column 0, and the cache holds {cache!r}")
            if cache.get_seq_length():
                _check_goes_on(call, settings, cache, repeats)
            return cache, cache.session.prefix if cache.session.position else prefix_columns, True
        kept = bool(settings.return_dict_in_generate)  # the caller gets the cache, and may go on from it
        session = self.flow.session(None if kept else prefix_columns + self.tuning.length + _columns(call, settings))
        call[name] = RemoteCache(session, self.tuning.length)
        return call[name], prefix_columns, kept

    def _prompt(self, call: Mapping[str, Any], settings: Any) -> tuple[int, Tensor | None]:
        """How many columns are the prompt's, those of trained prompts included, and each row's tokens of them."""
        ids, mask, before = _inputs(call), call.get("attention_mask"), self.tuning.length
        if mask is None:
            mask = _mask_of_pads(call.get("input_ids", call.get("inputs")), settings)
        if mask is None:
            columns = before + _width(ids)
            return columns, torch.tensor([columns])
        if not isinstance(mask, Tensor) or mask.dim() != 2:
            return before + _width(ids), None  # the session counts them
        # of a cache that goes on, the ids may be the new ones alone; the mask has all columns
        return before + mask.shape[1], (before + mask.sum(1)).long().cpu()

    def _get_stopping_criteria(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' own; those of this call note where its rows end."""
        criteria, ending = super()._get_stopping_criteria(*args, **kwargs), generate_call.get().ending  # type: ignore[misc]
        if ending is None:
            return criteria
        ending.extend(criteria)
        return ending

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As the Hugging Face class's. Where that drops the cache on the way, and takes all columns again, so does the
        session: phi3's does where longrope's scale changes. Raises SessionError where the prefix_kv is not given again.
        """
        inputs = super().prepare_inputs_for_generation(*args, **kwargs)  # type: ignore[misc]
        name, cache = next(((n, kwargs[n]) for n in CACHE_NAMES if kwargs.get(n) is not None), ("", None))
        if isinstance(cache, RemoteCache) and inputs.get(name) is None:
            if cache.session.prefix and not columns_of(generate_call.get().kwargs):
                raise SessionError(
                    f"{type(self).__name__} takes all columns again from here on, and the prefix_kv before them came "
                    f"with an earlier call: give it again, with all tokens and no cache"
                )
            cache.reset()
            inputs[name] = cache
        return inputs

    def _prepare_position_ids_for_generation(self, *args: Any) -> Tensor:
        """transformers counts tokens; those of this call stand behind its prefix."""
        return super()._prepare_position_ids_for_generation(*args) + generate_call.get().prefix_columns  # type: ignore[misc]

    def generate_batch(self, *_: Any, **__: Any) -> Any:
        """Refused: transformers' continuous batching keeps paged keys and values in this process."""
        raise UnsupportedError(f"generate_batch: {_CACHE}; use generate")

    def _settings(self, call: Mapping[str, Any]) -> Any:
        """The GenerationConfig that holds for a call: its arguments, then its config, the model's, the defaults."""
        named = inspect.signature(super().generate).parameters  # type: ignore[misc]
        others = {name: value for name, value in call.items() if name not in named}
        with quiet():
            return self._prepare_generation_config(call.get("generation_config"), **others)[0]  # type: ignore[attr-defined]

    def _refuse(self, block_kwargs: Mapping[str, Any], call: Mapping[str, Any], settings: Any) -> None:
        from transformers.generation.utils import GENERATION_MODES_MAPPING

        for name in call.keys() & self.flow.kwargs().keys():
            raise KwargError(f"both generate and a block_fn take {name!r}; give the block_fn's kwarg another name")
        if call.get("use_cache", getattr(call.get("generation_config"), "use_cache", None)) is False:
            raise UnsupportedError(
                "generate(use_cache=False): a session on the workers is the cache, and is always used"
            )
        for name, why in _REFUSED.items():
            if getattr(settings, name, None) not in (None, False):
                raise UnsupportedError(f"generate({name}=…): {why}")
        if getattr(settings, "speculation_type", None) == "dflash":
            raise UnsupportedError(f"generate(speculation_type='dflash'): {NOT_SENT}")
        if isinstance(call.get("custom_generate"), str):
            raise UnsupportedError("generate(custom_generate=…): it runs code from the hub; a function is taken")
        with quiet():
            mode = settings.get_generation_mode(call.get("assistant_model"))
        if "/" in GENERATION_MODES_MAPPING[mode] and call.get("custom_generate") is None:
            raise UnsupportedError(
                f"{str(mode.value).replace('_', ' ')}: transformers keeps it at {GENERATION_MODES_MAPPING[mode]}, "
                f"and would run that code from the hub"
            )
        if settings.guidance_scale not in (None, 1) and (named := _phases(block_kwargs)):
            raise KwargError(
                f"generate(guidance_scale=…): at={named[0]} names a phase, and guidance runs a second sequence, "
                f"which has a prompt of its own: give at='all' or a list of token positions, which act on both"
            )
        if settings.prefill_chunk_size and any(map(is_mask, _positioned(block_kwargs))):
            raise KwargError(
                "generate(prefill_chunk_size=…): at= is a bool mask, of a prompt that comes as one: give "
                "each row's token positions, a tensor of ints (batch, pos)"
            )
        if isinstance(wanted := block_kwargs.get("capture"), Capture) and not wanted.empty:
            raise SessionError("this Capture holds what another session or call captured; make a new one")
        for name, value in block_kwargs.items():
            for leaf in value.values() if isinstance(value, Mapping) else [value]:
                if isinstance(leaf, Axed) and (leaf.size("seq") or 1) != 1:
                    raise KwargError(
                        f"{name} has a 'seq' axis of {leaf.size('seq')} columns; generate's steps have one column each"
                    )


class Ending(StoppingCriteriaList):
    """transformers' stopping criteria, which also note how many columns each row had when it ended.

    What comes after is fill: transformers goes on with all rows until the last has ended.
    """

    def __init__(self, session: Session):
        super().__init__()
        self.session = session
        self.columns: Tensor | None = None  # (rows,) of the session

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        done = super().__call__(input_ids, scores, **kwargs)
        if len(done) != self.session.batch:  # of a beam search: candidates
            return done
        now = torch.where(done.cpu(), self.session.position, torch.iinfo(torch.long).max)
        self.columns = now if self.columns is None else torch.minimum(self.columns, now)
        return done

    def trim(self, capture: Capture) -> None:
        """Leave a capture only what is before its rows' ends; the session's later calls do not touch it."""
        if self.columns is not None:
            capture.rollback(self.columns[:, None])
        self.session.release(capture)


def _phases(block_kwargs: Mapping[str, Any]) -> list[str]:
    """What names a part of the prompt, or what is generated, among the ``at=`` of edits and captures."""
    positioned = _positioned(block_kwargs)
    masks = ["a bool mask" for at in positioned if is_mask(at)]
    return [*(repr(at) for at in positioned if isinstance(at, str) and at != "all"), *masks]


def _positioned(block_kwargs: Mapping[str, Any]) -> list[Any]:
    """Every ``at=`` of edits and captures."""
    edits = block_kwargs.get("edit")
    values = [*(edits if isinstance(edits, Sequence) else [edits]), block_kwargs.get("capture")]
    return [value.at for value in values if hasattr(value, "at")]


def _inputs(call: Mapping[str, Any]) -> Any:
    ids = call.get("inputs_embeds")
    return call.get("input_ids", call.get("inputs")) if ids is None else ids


def _width(ids: Any) -> int:
    """Columns of what generate is given; of nothing it makes a bos token."""
    return ids.shape[1] if isinstance(ids, Tensor) else 1


def _mask_of_pads(ids: Any, settings: Any) -> Tensor | None:
    """The mask that transformers makes where none is given: none but for pads that are not eos too."""
    pad, eos = settings.pad_token_id, settings.eos_token_id
    if not isinstance(ids, Tensor) or ids.dim() != 2 or pad is None or pad in (eos if isinstance(eos, list) else [eos]):
        return None
    return ids.ne(pad) if bool((ids == pad).any()) else None


def _check_goes_on(call: Mapping[str, Any], settings: Any, cache: RemoteCache, repeats: int) -> None:
    """Raise SessionError unless a call goes on from what a cache holds.

    transformers takes input_ids for the whole history where the mask is as wide, cuts off as many columns as the cache
    has, and looks at none of them; of a history that is no longer than the cache it runs what it should not.
    """
    if call.get("assistant_model") is not None or settings.prompt_lookup_num_tokens:
        raise UnsupportedError(
            f"drafting on a cache that holds tokens: transformers {transformers.__version__} runs the whole history "
            f"again behind them; give no cache, or generate without drafts"
        )
    ids, mask, past = _inputs(call), call.get("attention_mask"), cache.get_seq_length()
    name, width = "inputs_embeds" if call.get("inputs_embeds") is not None else "input_ids", _width(ids)
    if name == "input_ids" and isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[1] != width:
        if mask.shape[1] != past + width:
            raise SessionError(
                f"attention_mask has {mask.shape[1]} columns and input_ids {width}, and the cache holds {past}: the "
                f"mask covers the whole history, and input_ids are that or the new tokens alone"
            )
    elif width <= past:
        raise SessionError(
            f"{name} has {width} columns, and the cache holds {past}: give the whole history with one token more at "
            f"least, or new input_ids alone with an attention_mask of all columns; or crop what is too much, here "
            f"cache.crop({width - 1 - past})"
        )
    elif name == "input_ids":
        cache.check_begins(ids.repeat_interleave(repeats, 0))


def _columns(call: Mapping[str, Any], settings: Any) -> int:
    """The most columns that a generate call fills, drafts included."""
    ids = _inputs(call)
    prompt = ids.shape[1] if isinstance(ids, Tensor) else 1
    new = settings.max_new_tokens
    total = prompt + new if new is not None else max(settings.max_length or 0, prompt + 20)
    return total + 1 + (settings.prompt_lookup_num_tokens or 0)


@functools.cache
def _generate_names(cls: type) -> frozenset[str]:
    """What generate takes: its own arguments and whatever a GenerationConfig has."""
    from transformers import GenerationConfig

    parameters = inspect.signature(super(Distributed, cls).generate).parameters  # type: ignore[misc]
    popped = {"tokenizer", "assistant_tokenizer", "trust_remote_code"}  # read from **kwargs by generate
    return frozenset(parameters) | popped | frozenset(vars(GenerationConfig())) - {"self", "kwargs"}
