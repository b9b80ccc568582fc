"""Trained prompts, heads and embeddings: values, gradients and whole runs as Hugging Face's with plain hooks."""

# B batch, S seq, P prefix, D hidden

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kwflow as kf
from kwflow.errors import KwargError, ModelError, UnsupportedError
from tests.oracle import assert_bits, assert_close, cache_name, layers_of
from tests.tiny import FAMILIES, HIDDEN, LAYERS, MAX_LENGTH, TWO, folder, huggingface, ids, left_padded, make_flow, random

every_family = pytest.mark.parametrize("family", FAMILIES)
every_mode = pytest.mark.parametrize("mode", ["ptune", "deep_ptune"])
CausalLM, Classifier = kf.AutoDistributedModelForCausalLM, kf.AutoDistributedModelForSequenceClassification
P, D = 3, HIDDEN


def tuned(family: str, mode: str = "deep_ptune", auto: Any = CausalLM, **given: Any) -> Any:
    """A model over two workers with random prompts."""
    flow = make_flow(family, TWO, given.pop("dtype", torch.float32), own_ends=True)
    made = auto.from_pretrained(folder(family), flow=flow, tuning_mode=mode, pre_seq_len=P, **given)
    with torch.no_grad():
        for seed, (name, tensor) in enumerate(made.named_parameters()):
            if "prompt" in name:
                tensor.copy_(random(*tensor.shape, seed=seed, dtype=tensor.dtype))
    return made


@contextmanager
def hooked(local: nn.Module, prompts: Tensor, deep: Tensor | None) -> Iterator[None]:
    """Within, the plain model stands behind the prompts: hooks before and after its base model, and at each layer."""
    base: Any = getattr(local, local.base_model_prefix)  # type: ignore[arg-type]
    past = cache_name(base)
    length = len(prompts)

    def before(_: nn.Module, args: tuple[Any, ...], call: dict[str, Any]) -> Any:
        ids = args[0] if args else call.pop("input_ids", None)
        embeds = call["inputs_embeds"] if ids is None else base.get_input_embeddings()(ids)
        first = call.get(past) is None or call[past].get_seq_length() == 0
        batch, more = len(embeds), torch.arange(length)
        call["inputs_embeds"] = torch.cat([prompts.expand(batch, -1, -1), embeds], 1) if first else embeds
        if call.get("attention_mask") is not None:
            call["attention_mask"] = torch.cat([torch.ones(batch, length).long(), call["attention_mask"]], 1)
        if call.get("position_ids") is not None:
            at = call["position_ids"] + length
            call["position_ids"] = torch.cat([more.expand(len(at), -1), at], 1) if first else at
        base.first = first
        return (), call

    def after(_: nn.Module, __: Any, out: Any) -> Any:
        if base.first and isinstance(out, tuple):
            return (out[0][:, length:], *out[1:])
        if base.first:
            out.last_hidden_state = out.last_hidden_state[:, length:]
        return out

    def at_layer(number: int) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> Any:
            hidden = args[0]
            if deep is not None and base.first:
                hidden = torch.cat([hidden[:, :length] + deep[number], hidden[:, length:]], 1)
            return (hidden, *args[1:])

        return hook

    hooks = [base.register_forward_pre_hook(before, with_kwargs=True), base.register_forward_hook(after)]
    hooks += [layer.register_forward_pre_hook(at_layer(n)) for n, layer in enumerate(layers_of(local))]
    try:
        yield
    finally:
        for one in hooks:
            one.remove()


def prompts_of(model: Any) -> tuple[Tensor, Tensor | None]:
    """Copies of a model's prompts, with gradients of their own."""
    deep = getattr(model, "deep_prompt_embeddings", None)
    return model.prompt_embeddings.detach().clone().requires_grad_(), (
        None if deep is None else deep.detach().clone().requires_grad_()
    )


def given(batch: int, padded: bool) -> dict[str, Tensor]:
    inputs = {"input_ids": ids(batch, 6)}
    return {**inputs, "attention_mask": left_padded((2, 0)[:batch], 6)} if padded else inputs


@every_family
@every_mode
@pytest.mark.parametrize("padded", [False, True])
def test_values_and_gradients_are_those_of_plain_hooks(family: str, mode: str, padded: bool) -> None:
    model, local = tuned(family, mode), huggingface(family)
    prompts, deep = prompts_of(model)
    for batch in (1, 2):
        x = given(batch, padded)
        ours = model(**x, labels=x["input_ids"])
        with hooked(local, prompts, deep):
            theirs = local(**x, labels=x["input_ids"])
        assert type(ours) is type(theirs) and ours.logits.shape == (batch, 6, 64)
        assert_bits(ours.logits, theirs.logits)
        assert_bits(ours.loss, theirs.loss)
        ours.loss.backward()
        theirs.loss.backward()
    assert_close(model.prompt_embeddings.grad, prompts.grad)
    if deep is not None:
        assert_close(model.deep_prompt_embeddings.grad, deep.grad)
    assert [n for n, p in model.named_parameters() if p.requires_grad] == (
        ["prompt_embeddings"] if deep is None else ["prompt_embeddings", "deep_prompt_embeddings"]
    )


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "chunked": {"prefill_chunk_size": 2},
    "lookup": {"prompt_lookup_num_tokens": 2},
}


@every_family
@every_mode
@pytest.mark.parametrize("way", WAYS)
def test_generate_goes_on_behind_the_prompts(family: str, mode: str, way: str) -> None:
    model, local = tuned(family, mode), huggingface(family)
    prompts, deep = (None if p is None else p.detach() for p in prompts_of(model))
    for padded in (False, True):
        x = given(1 if way == "lookup" else 2, padded)
        made = []
        for one in (model, local):
            torch.manual_seed(3)
            how = {"max_new_tokens": 6, "do_sample": False, **WAYS[way]}
            if one is model:
                made.append(one.generate(**x, **how))
            else:
                with hooked(local, prompts, deep):
                    made.append(one.generate(**x, **how))
        assert torch.equal(*made)
        assert not torch.equal(made[0], local.generate(**x, **how)), "the prompts changed nothing"
