"""Hugging Face's own generate and forward with the layers on workers: tokens, types and gradients as locally."""

# B batch, S seq, D hidden

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kwflow as kf
from kwflow.client.stages import Stages
from kwflow.errors import KwargError, SessionError, ShapeError, SpanError, UnknownKwarg, UnsupportedError
from tests.families.marks import quickly
from tests.oracle import assert_bits, assert_close, cache_name, layers_of, with_prompts
from tests.oracle import hooked as having
from tests.oracle.tiny import (
    HIDDEN,
    LAYERS,
    TWO,
    VOCAB,
    Requests,
    folder,
    huggingface,
    ids,
    left_padded,
    make_flow,
    random,
    settle,
)

D, NEW = HIDDEN, 6


def gained(params, hidden, /, *, block, gain: kf.Axes["[layer] [batch] hidden"] = None, **kw):
    """A worker's own block_fn: what the block adds is multiplied."""
    out = block(params, hidden, **kw)
    if gain is None:
        return out
    return hidden + (gain if gain.dim() == 1 else gain[:, None]) * (out - hidden)


@pytest.fixture(scope="module", params=["llama", *(pytest.param(f, marks=pytest.mark.slow) for f in ("gpt2", "bloom"))])
def pair(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """The model over two workers, and the local one."""
    family = request.param
    remote = make_flow(family, TWO, block_fn=gained, own_ends=True)
    return kf.AutoDistributedModelForCausalLM.from_pretrained(folder(family), flow=remote), huggingface(family)


def prompt(batch: int = 2, pads: tuple[int, ...] = (0, 3)) -> dict[str, Tensor]:
    return {"input_ids": ids(batch, 7), "attention_mask": left_padded(pads[:batch], 7)}


@contextmanager
def hooked(model: nn.Module, edit: Callable[[int, Tensor, Tensor], Tensor]) -> Iterator[None]:
    """Within, each layer's output is ``edit(layer, its input, its output)``."""

    def hook(number: int) -> Any:
        def after(_: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
            tensor = out[0] if isinstance(out, tuple) else out
            changed = edit(number, args[0], tensor)
            return (changed, *out[1:]) if isinstance(out, tuple) else changed

        return after

    hooks = [layer.register_forward_hook(hook(n)) for n, layer in enumerate(layers_of(model))]
    try:
        yield
    finally:
        for one in hooks:
            one.remove()


def adding(by_layer: Mapping[int, Tensor]) -> Callable[[int, Tensor, Tensor], Tensor]:
    """Add (batch or 1, 1, hidden); beams have copies of each row, one after the other."""

    def edit(layer: int, _: Tensor, out: Tensor) -> Tensor:
        if layer not in by_layer:
            return out
        value = by_layer[layer]
        return out + (value.repeat_interleave(len(out) // len(value), 0) if len(value) > 1 else value)

    return edit


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 1.3, "top_k": 20},
    "beams": {"num_beams": 3},
    "beams, several returned": {"num_beams": 4, "num_return_sequences": 2},
    "sampled, several returned": {"do_sample": True, "num_return_sequences": 3},
    "beams, sampled": {"num_beams": 2, "do_sample": True},
    "ending early": {"num_beams": 3, "eos_token_id": list(range(0, VOCAB, 5)), "early_stopping": True},
    "greedy, ending early": {"eos_token_id": list(range(0, VOCAB, 4))},
    "no repeats": {"num_beams": 2, "no_repeat_ngram_size": 2, "repetition_penalty": 1.2},
    "prefilled in chunks": {"prefill_chunk_size": 3},
    "allowed tokens": {"num_beams": 2, "prefix_allowed_tokens_fn": lambda row, _: list(range(5 + row, 30))},
    "a loop of the caller's": {"custom_generate": lambda model, *a, **k: type(model)._sample(model, *a, **k)},
}
QUICK = ("sampled", "beams, several returned", "ending early", "prefilled in chunks", "a loop of the caller's")


def generated(model: Any, way: Mapping[str, Any], given: Mapping[str, Any], **kwargs: Any) -> Tensor:
    torch.manual_seed(5)
    return model.generate(**given, **{"max_new_tokens": NEW, "do_sample": False, **way}, **kwargs)


@pytest.mark.parametrize("way", quickly(QUICK, WAYS))
def test_the_tokens_are_the_local_ones(pair: tuple[Any, Any], way: str) -> None:
    model, local = pair
    for given in (prompt(), prompt(1), {"input_ids": ids(2, 4)}):
        ours, theirs = generated(model, WAYS[way], given), generated(local, WAYS[way], given)
        assert type(ours) is type(theirs) and torch.equal(ours, theirs)


V = random(D, seed=1, scale=3.0)
VB = random(2, D, seed=2, scale=3.0)
VL = random(LAYERS, D, seed=3, scale=1.5)
VLB = random(LAYERS, 2, D, seed=4, scale=1.5)
FORMS: dict[str, tuple[Any, dict[int, Tensor]]] = {
    "layer: vector": ({2: V}, {2: V[None, None]}),
    "layer: batch hidden": ({1: kf.axes(VB, "batch hidden"), 3: V}, {1: VB[:, None], 3: V[None, None]}),
    "hidden": (kf.axes(V, "hidden"), dict.fromkeys(range(LAYERS), V[None, None])),
    "batch hidden": (kf.axes(VB, "batch hidden"), dict.fromkeys(range(LAYERS), VB[:, None])),
    "batch hidden of one": (kf.axes(VB[:1], "batch hidden"), dict.fromkeys(range(LAYERS), VB[:1, None])),
    "layer hidden": (kf.axes(VL, "layer hidden"), {n: VL[n][None, None] for n in range(LAYERS)}),
    "layer batch hidden": (kf.axes(VLB, "layer batch hidden"), {n: VLB[n][:, None] for n in range(LAYERS)}),
    "seq hidden of one": (kf.axes(V[None], "seq hidden"), dict.fromkeys(range(LAYERS), V[None, None])),
    "batch seq hidden": (kf.axes(VB[:, None], "batch seq hidden"), dict.fromkeys(range(LAYERS), VB[:, None])),
    "layer seq hidden": (kf.axes(VL[:, None], "layer seq hidden"), {n: VL[n][None, None] for n in range(LAYERS)}),
    "layer batch seq hidden": (
        kf.axes(VLB[:, :, None], "layer batch seq hidden"),
        {n: VLB[n][:, None] for n in range(LAYERS)},
    ),
}


@pytest.mark.parametrize("form", quickly(("layer: batch hidden", "hidden", "layer batch seq hidden"), FORMS))
@pytest.mark.parametrize(
    "way",
    [
        "beams, several returned",
        pytest.param("greedy", marks=pytest.mark.slow),
        pytest.param("sampled, several returned", marks=pytest.mark.slow),
    ],
)
def test_steer_of_every_form_is_expanded_over_beams(pair: tuple[Any, Any], form: str, way: str) -> None:
    model, local = pair
    steer, by_layer = FORMS[form]
    ours = generated(model, WAYS[way], prompt(), steer=steer)
    with hooked(local, adding(by_layer)):
        theirs = generated(local, WAYS[way], prompt())
    assert torch.equal(ours, theirs)
    assert not torch.equal(ours, generated(local, WAYS[way], prompt())), "the vector changed nothing"


@pytest.mark.parametrize("way", ["greedy", "beams", "sampled, several returned"])
def test_prompts_and_own_kwargs(pair: tuple[Any, Any], way: str) -> None:
    model, local = pair
    given, p, g = prompt(), random(LAYERS, 2, 3, D, seed=5), random(2, D, seed=6) + 1

    def before(number: int) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> Any:
            if args[0].shape[1] == 1:  # decoding: the prefix lies behind
                return args
            copies = len(args[0]) // 2
            mask = given["attention_mask"].repeat_interleave(copies, 0)
            return (with_prompts(args[0], p[number].repeat_interleave(copies, 0), mask), *args[1:])

        return hook

    ours = generated(model, WAYS[way], given, prompts=p)
    hooks = [layer.register_forward_pre_hook(before(n)) for n, layer in enumerate(layers_of(local))]
    theirs = generated(local, WAYS[way], given)
    for one in hooks:
        one.remove()
    assert torch.equal(ours, theirs) and not torch.equal(ours, generated(local, WAYS[way], given))

    ours = generated(model, WAYS[way], given, gain=kf.axes(g, "batch hidden"))
    multiply = lambda layer, inside, out: inside + g.repeat_interleave(len(out) // 2, 0)[:, None] * (out - inside)  # noqa: E731
    with hooked(local, multiply):
        theirs = generated(local, WAYS[way], given)
    assert torch.equal(ours, theirs)
    ours = generated(model, WAYS[way], given, **kf.per_layer({2: {"steer": V}}))
    assert torch.equal(ours, generated(model, WAYS[way], given, steer={2: V}))


@pytest.mark.parametrize("way", ["greedy", "beams"])
def test_the_scores_are_the_local_ones_to_the_bit(pair: tuple[Any, Any], way: str) -> None:
    model, local = pair
    more = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    ours, theirs = (generated(m, {**WAYS[way], **more}, prompt()) for m in pair)
    assert type(ours) is type(theirs) and torch.equal(ours.sequences, theirs.sequences)
    for a, b in zip((*ours.scores, *ours.logits), (*theirs.scores, *theirs.logits), strict=True):
        assert_bits(a, b)


def test_two_in_a_row_and_after_an_error(pair: tuple[Any, Any]) -> None:
    model, local = pair
    baseline = generated(local, {}, prompt())
    steered = generated(model, {}, prompt(), steer={1: 5 * V})
    assert_bits(model(ids(2, 4)).logits, local(ids(2, 4)).logits)  # a call of its own sees no kwargs of generate's
    assert torch.equal(generated(model, {}, prompt()), baseline)
    for bad, error in (
        ({"stear": {1: V}}, (UnknownKwarg, ValueError)),
        ({"steer": {9: V}}, SpanError),
        ({"steer": {1: V[:3]}}, ValueError),
        ({"steer": kf.axes(random(3, D), "seq hidden")}, KwargError),
        ({"prompts": random(LAYERS, 3, 2, D)}, ValueError),
        ({"cache_implementation": "static"}, UnsupportedError),
        ({"assistant_model": local}, ValueError),  # transformers' own: one row only
    ):
        with pytest.raises(error):
            generated(model, {}, prompt(), **bad)
        assert torch.equal(generated(model, {}, prompt()), baseline)
    assert torch.equal(generated(model, {}, prompt(), steer={1: 5 * V}), steered)
    assert_bits(model(**prompt()).logits, local(**prompt()).logits, "a plain forward afterwards")
    assert not torch.equal(steered, baseline)
    settle(model.flow, [0, 0])  # no keys and values are left behind


def test_other_ways_in(pair: tuple[Any, Any]) -> None:
    """Positional ids, embeddings, a generation config, and a length in all."""
    model, local = pair
    given = prompt()
    assert torch.equal(model.generate(ids(1, 4), max_new_tokens=3), local.generate(ids(1, 4), max_new_tokens=3))
    assert torch.equal(
        generated(model, {"max_new_tokens": None, "max_length": 10}, given),
        generated(local, {"max_new_tokens": None, "max_length": 10}, given),
    )
    tokenizer = {"tokenizer": model.flow.tokenizer}  # for stop strings; generate hands it to forward as well
    assert torch.equal(generated(model, {}, given, **tokenizer), generated(local, {}, given))
    from transformers import GenerationConfig

    config = {"generation_config": GenerationConfig(max_new_tokens=4, num_beams=2, pad_token_id=0)}
    ours, theirs = (m.generate(**given, **config) for m in (model, local))
    assert torch.equal(ours, theirs)
    embeds = {
        "inputs_embeds": local.get_input_embeddings()(given["input_ids"]),
        "attention_mask": given["attention_mask"],
    }
    assert torch.equal(generated(model, {}, embeds), generated(local, {}, embeds))
    assert torch.equal(generated(model, {}, embeds, steer={1: 0 * V}), generated(local, {}, embeds))


def test_a_session_is_resumed(pair: tuple[Any, Any]) -> None:
    model, local = pair
    both, name = [], cache_name(local)
    for one in pair:
        first = generated(one, {"return_dict_in_generate": True}, {"input_ids": ids(2, 4)})
        longer = torch.cat([first.sequences, ids(2, 2, seed=9)], 1)
        both.append(one.generate(longer, max_new_tokens=3, do_sample=False, **{name: first[name]}))
    assert torch.equal(*both)
    whole = local.generate(longer, max_new_tokens=3, do_sample=False)
    assert torch.equal(both[0], whole)


def test_a_resumed_session_adds_no_token(pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, local = pair
    name, given = cache_name(local), prompt()
    whole = local.generate(**given, max_new_tokens=9, do_sample=False)
    first = model.generate(**given, max_new_tokens=5, do_sample=False, return_dict_in_generate=True)
    assert first[name].get_seq_length() == 7 + 5 - 1  # the last token has not been through the layers
    mask = torch.cat([given["attention_mask"], torch.ones(2, 5).long()], 1)
    more = {"input_ids": first.sequences, "attention_mask": mask, "max_new_tokens": 4, "do_sample": False}
    step, columns = Stages.step, []
    monkeypatch.setattr(
        Stages, "step", lambda self, one, *a: columns.append(one.hidden.shape[1]) or step(self, one, *a)
    )
    assert torch.equal(model.generate(**more, **{name: first[name]}), whole)
    with pytest.raises(UnsupportedError, match="cannot be copied"):
        copy.deepcopy(first[name])
    assert columns == [1] * 4  # one for each token, and the first is the one that was due


def test_a_second_turn_after_several_sequences_acts_at_each_rows_own_positions(pair: tuple[Any, Any]) -> None:
    model, local = pair
    several = {"do_sample": True, "num_return_sequences": 2, "return_dict_in_generate": True, "max_new_tokens": 4}
    first = generated(model, several, {"input_ids": ids(1, 5, seed=6)})
    more = torch.cat([first.sequences, ids(2, 4, seed=9)], 1)
    mask = torch.cat([torch.ones(2, 9).long(), left_padded((2, 0), 4)], 1)
    acts, edit = kf.Capture(resid=[2], at="prompt[-1]"), kf.add(kf.axes(VB, "batch hidden"), 1, at=[10])
    cache = {cache_name(local): first[cache_name(local)]}
    ours = generated(model, {}, {"input_ids": more, "attention_mask": mask}, edit=edit, capture=acts, **cache)
    for row, n in enumerate((11, 13)):
        alone, seen = more[row : row + 1][:, mask[row].bool()], []

        def at_10(layer: int, _: Tensor, out: Tensor, row: int = row, seen: list[Tensor] = seen) -> Tensor:
            there = torch.arange(out.shape[1])[:, None] == 10 if out.shape[1] > 1 else torch.zeros(1, 1)
            out = out + there * VB[row] if layer == 1 else out
            seen.extend([out] if layer == 2 else [])
            return out

        with hooked(local, at_10):
            theirs = generated(local, {}, {"input_ids": alone, "attention_mask": torch.ones_like(alone)})
        assert torch.equal(ours[row, 13:], theirs[0, n:])
        assert_close(acts["resid", 2][row, 0], seen[0][0, -1])


KINDS: dict[str, dict[str, Any]] = {  # two rows each
    "beams": {"num_beams": 2, "num_return_sequences": 2},
    "several": {"do_sample": True, "num_return_sequences": 2},
    "plain": {},
    "captured": {"capture": True},
    "forward": {},
}


@pytest.mark.parametrize(
    "order", ["beams several plain forward captured beams", "captured forward several beams plain"]
)
def test_a_call_leaves_nothing_on_a_cache_that_acts_in_the_next(pair: tuple[Any, Any], order: str) -> None:
    """Each call is as if alone; between them the cache is cropped to the prompt, which no edit has touched."""
    model, local = pair
    given, name, settings = prompt(1), cache_name(local), model.generation_config.to_dict()
    both = {key: t.expand(2, -1) for key, t in given.items()}
    cache, held = model(**both, use_cache=True)[name], []
    for kind in order.split():
        how, one = KINDS[kind], both if kind in ("plain", "captured", "forward") else given
        vector = kf.axes(VB[: len(one["input_ids"])], "batch hidden")
        cache.crop(7 - cache.get_seq_length())
        new = ids(1, 3, seed=4).expand(len(one["input_ids"]), -1)
        whole = torch.cat([one["input_ids"], new], 1)
        mask = torch.cat([one["attention_mask"], torch.ones_like(new)], 1)
        if kind == "forward":
            ours = model(new, attention_mask=mask, steer={1: vector}, **{name: cache}).logits
            edit = kf.add(vector, 1, at=[7, 8, 9])
            assert_close(ours, model(whole, attention_mask=mask, edit=edit).logits[:, 7:])
            continue
        kwargs = [{"edit": kf.add(vector, 1, at="generated")} for _ in range(2)]
        if "capture" in how:
            kwargs = [{**own, "capture": kf.Capture(resid=[1], at="generated")} for own in kwargs]
        how = {key: value for key, value in how.items() if key != "capture"}
        x = {"input_ids": whole, "attention_mask": mask}
        ours, alone = generated(model, how, x, **{name: cache}, **kwargs[0]), generated(model, how, x, **kwargs[1])
        assert torch.equal(ours, alone)
        if "capture" in kwargs[0]:
            for acts in (own["capture"] for own in kwargs):
                held.append((acts, acts["resid", 1]))
            assert_close(held[0][1], held[1][1])
    assert all(torch.equal(acts["resid", 1], before) for acts, before in held)  # whatever the later calls did
    assert model.generation_config.to_dict() == settings
    with pytest.raises(SessionError, match="make a new one"):
        model.generate(**prompt(), max_new_tokens=2, capture=held[0][0])


def test_the_ends_of_two_prompts_with_pads_and_no_mask(pair: tuple[Any, Any]) -> None:
    """transformers makes the mask, and each call says its own prompt's end."""
    model, local = pair
    x, pads = ids(2, 6), {"pad_token_id": 0, "return_dict_in_generate": True}
    x[1, :2] = 0
    first = generated(model, pads, {"input_ids": x})
    whole = torch.cat([first.sequences, ids(2, 3, seed=5)], 1)
    assert not bool((whole[:, 6:] == 0).any())
    end = [kf.add(5 * V, 1, at="prompt[-1]")]
    again = generated(model, pads, {"input_ids": x}, edit=kf.add(0 * V, 1, at="prompt[-1]"))
    cache = {cache_name(local): again[cache_name(local)]}
    ours = generated(model, pads, {"input_ids": whole}, edit=end, **cache).sequences
    assert torch.equal(ours, generated(model, pads, {"input_ids": whole}, edit=end).sequences)


@pytest.mark.parametrize("tokens", [0, -1, -3, -99, 2])
def test_crop_means_what_transformers_means(pair: tuple[Any, Any], tokens: int) -> None:
    lengths, logits, name = [], [], cache_name(pair[1])
    for one in pair:
        with torch.no_grad():
            cache = one(ids(2, 6), use_cache=True)[name]
            if tokens > 0:
                with pytest.raises(ValueError, match="negative integer"):
                    cache.crop(tokens)
            else:
                cache.crop(tokens)
            lengths.append(cache.get_seq_length())
            logits.append(one(ids(2, 2, seed=3), **{name: cache}).logits)
    assert lengths[0] == lengths[1]
    assert_close(*logits)


def test_a_cache_goes_on_from_what_it_holds_and_from_nothing_else(pair: tuple[Any, Any]) -> None:
    model, local = pair
    given, name, more = prompt(), cache_name(local), {"max_new_tokens": 3, "do_sample": False}
    cache = generated(model, {"max_new_tokens": 1, "return_dict_in_generate": True}, given)[name]
    whole = torch.cat([given["input_ids"], ids(2, 3, seed=4)], 1)
    mask = torch.cat([given["attention_mask"], torch.ones(2, 3).long()], 1)
    other, pads = whole.clone(), whole.clone()
    other[1, 5], pads[1, :3] = whole[1, 5] ^ 1, 3
    with Requests(model.flow) as requests:
        for tokens, columns, said in (
            (other, mask, rf"token {int(other[1, 5])} at row 1, column 5, where the cache holds {int(whole[1, 5])}"),
            (whole[:, :6], mask[:, :6], r"input_ids has 6 columns, and the cache holds 7.*crop\(-2\)"),
            (whole[:, :7], mask[:, :7], r"crop\(-1\)"),
            (whole[:, 7:], None, "input_ids has 3 columns"),
            (whole[:, 8:], mask, "attention_mask has 10 columns and input_ids 2, and the cache holds 7"),
            (whole[:1], mask[:1], "input_ids has 1 rows, copies included, and the cache 2"),
        ):
            with pytest.raises(SessionError, match=said):
                model.generate(tokens, attention_mask=columns, **more, **{name: cache})
        embeds = local.get_input_embeddings()(whole[:, :6])
        with pytest.raises(SessionError, match="inputs_embeds has 6 columns"):
            model.generate(inputs_embeds=embeds, attention_mask=mask[:, :6], **more, **{name: cache})
        with pytest.raises(UnsupportedError, match="drafting on a cache"):
            model.generate(whole, attention_mask=mask, **more, prompt_lookup_num_tokens=2, **{name: cache})
        with pytest.raises(ValueError, match="key = 3, expected 10"):  # forward takes new tokens, and a mask of all
            model(whole[:, 7:], attention_mask=mask[:, 7:], **{name: cache})
    assert not len(requests)
    expected = generated(local, more, {"input_ids": pads, "attention_mask": mask})
    assert torch.equal(generated(model, more, {"input_ids": pads, "attention_mask": mask}, **{name: cache}), expected)
    cache.crop(5 - cache.get_seq_length())  # as the error says
    x = {"input_ids": other, "attention_mask": mask}
    assert torch.equal(generated(model, more, x, **{name: cache}), generated(local, more, x))


def test_a_cache_knows_its_tokens_through_reorders_embeddings_and_steps_of_its_session(pair: tuple[Any, Any]) -> None:
    model, local = pair
    whole, name = ids(2, 9), cache_name(local)
    embeds, swapped = local.get_input_embeddings()(whole), whole[[1, 0]]
    cache = model(whole[:, :3], use_cache=True)[name]
    model(inputs_embeds=embeds[:, 3:5], **{name: cache})
    with torch.no_grad():
        cache.session.step(**cache.session.inputs(whole[:, 5:6]))
    model(whole[:, 6:8], **{name: cache})
    cache.reorder_cache(torch.tensor([1, 0]))
    for column in (1, 7):
        other = swapped.clone()
        other[0, column] ^= 1
        with pytest.raises(SessionError, match=f"row 0, column {column}"):
            model.generate(other, **{name: cache})
    assert torch.equal(
        generated(model, {}, {"input_ids": swapped}, **{name: cache}), generated(local, {}, {"input_ids": swapped})
    )


def test_a_4d_mask_after_a_2d_one_on_a_cache() -> None:
    model = kf.AutoDistributedModelForCausalLM.from_pretrained(folder("llama"), flow=make_flow("llama", TWO))
    given, new = prompt(), ids(2, 1, seed=3)
    mask = torch.cat([given["attention_mask"], torch.ones(2, 1).long()], 1)
    first, other = (model(**given, use_cache=True).past_key_values for _ in range(2))
    expected = model(new, attention_mask=mask, cache=first).logits
    assert_close(model(new, attention_mask=mask[:, None, None].bool(), cache=other).logits, expected)
    with pytest.raises(SessionError, match="row 0, column 7"):
        model.generate(torch.cat([given["input_ids"], new ^ 1, new], 1), max_new_tokens=2, cache=other)


# ---- drafts, streams, and what is refused


def drafts(family: str) -> dict[str, tuple[dict[str, Any], dict[str, Tensor]]]:
    """Ways that check several drafted tokens in one step; one row, as transformers wants it."""
    assistant, one = huggingface("gpt2" if family != "gpt2" else "llama"), prompt(1, (2,))
    again = {"input_ids": torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6, 7]])}
    return {
        "assisted": ({"assistant_model": assistant}, one),
        "assisted by itself": ({"assistant_model": huggingface(family)}, one),
        "assisted, sampled": ({"assistant_model": assistant, "do_sample": True}, one),
        "prompt lookup": ({"prompt_lookup_num_tokens": 3}, again),
        "a draft longer than the rest": ({"prompt_lookup_num_tokens": 8, "max_new_tokens": 2}, again),
        "guided": ({"guidance_scale": 1.5}, one),
    }


@pytest.mark.parametrize(
    "way",
    [pytest.param(w, marks=() if w == "prompt lookup" else pytest.mark.rest) for w in drafts("llama")],
)
def test_drafted_tokens_are_the_local_ones_and_only_the_target_takes_kwargs(pair: tuple[Any, Any], way: str) -> None:
    model, local = pair
    how, given = drafts(local.config.model_type)[way]
    how = {"max_new_tokens": 12, **how}
    tokens = generated(model, how, given)  # in a session with no more room than it takes
    how = {**how, "output_logits": True, "return_dict_in_generate": True}
    ours, theirs = (generated(one, how, given) for one in pair)
    assert type(ours) is type(theirs) and torch.equal(ours.sequences, theirs.sequences)
    assert torch.equal(tokens, theirs.sequences)
    for a, b in zip(ours.logits, theirs.logits, strict=True):
        assert_bits(a, b)
    if how.get("assistant_model") is not local:  # which the hook would steer too
        ours = generated(model, how, given, steer={2: V})
        with hooked(local, adding({2: V[None, None]})):
            theirs = generated(local, how, given)
        assert torch.equal(ours.sequences, theirs.sequences)


def test_a_remote_model_drafts_for_another() -> None:
    """A Distributed assistant, of a Distributed target and of a local one."""
    small = kf.AutoDistributedModelForCausalLM.from_pretrained(folder("gpt2"), flow=make_flow("gpt2", TWO))
    large = kf.AutoDistributedModelForCausalLM.from_pretrained(folder("llama"), flow=make_flow("llama", TWO))
    expected = generated(huggingface("llama"), {}, prompt(1))
    for target in (large, huggingface("llama")):
        assert torch.equal(generated(target, {"assistant_model": small}, prompt(1)), expected)
    steered = generated(large, {}, prompt(1), steer={2: V})  # the target's alone, though both take it
    assert torch.equal(generated(large, {"assistant_model": small}, prompt(1), steer={2: V}), steered)


def test_streamers_are_given_what_the_local_model_gives(pair: tuple[Any, Any]) -> None:
    from threading import Thread

    from transformers import TextIteratorStreamer
    from transformers.generation.streamers import BaseStreamer

    class Kept(BaseStreamer):
        def __init__(self) -> None:
            self.values: list[Any] = []

        def put(self, value: Tensor) -> None:
            self.values.append(value.tolist())

        def end(self) -> None:
            self.values.append("end")

    model, local = pair
    for how, given in (({}, prompt(1)), ({"prompt_lookup_num_tokens": 3}, drafts("llama")["prompt lookup"][1])):
        kept = []
        for one in pair:
            kept.append(Kept())
            generated(one, {**how, "streamer": kept[-1]}, given)
        assert kept[0].values == kept[1].values and kept[0].values[-1] == "end"
    tokenizer = model.flow.tokenizer
    stream = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=20)
    thread = Thread(target=lambda: generated(model, {"streamer": stream}, prompt(1), steer={1: V}))
    thread.start()
    text = "".join(stream)
    thread.join(20)
    steered = generated(model, {}, prompt(1), steer={1: V})
    assert text.strip() == tokenizer.decode(steered[0, 7:]).strip() != ""


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "contrastive": ({"penalty_alpha": 0.6, "top_k": 4}, "contrastive search: transformers keeps it at .*from the hub"),
    "group beams": ({"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}, "group beam search.*the hub"),
    "constrained": ({"force_words_ids": [[3]], "num_beams": 2}, "constrained beam search.*the hub"),
    "dola": ({"dola_layers": "low"}, "dola generation.*the hub"),
    "custom": ({"custom_generate": "someone/something"}, "code from the hub; a function is taken"),
    "no cache": ({"use_cache": False}, "use_cache=False.*always used"),
    "static cache": ({"cache_implementation": "static"}, "in a session"),
    "paged": ({"cache_implementation": "paged"}, "in a session"),
    "early exit": ({"assistant_early_exit": 2}, "drafts with this model's own layers"),
    "mtp": ({"use_mtp": True}, "drafts with this model's own layers"),
    "hidden states": ({"output_hidden_states": True}, r"flow\[:layer \+ 1\]"),
    "attentions": ({"output_attentions": True}, "on the workers"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_generate_cannot_do_is_refused_before_a_step(pair: tuple[Any, Any], what: str) -> None:
    from transformers import GenerationConfig

    model, _ = pair
    how, said = REFUSED[what]
    with Requests(model.flow) as requests:
        with pytest.raises(UnsupportedError, match=said):
            model.generate(**prompt(), **how, max_new_tokens=2)
        if "custom_generate" not in how:  # said by a config, it is the same
            config = GenerationConfig(max_new_tokens=2)
            config.update(**how)
            with pytest.raises(UnsupportedError, match=said):
                model.generate(**prompt(), generation_config=config)
    assert len(requests) == 0
    with pytest.raises(UnsupportedError, match="generate_batch"):
        model.generate_batch([[3, 4]])


# ---- forward


@pytest.mark.parametrize("batch", [1, 2])
def test_forward_returns_what_the_model_returns(pair: tuple[Any, Any], batch: int) -> None:
    model, local = pair
    given = prompt(batch)
    ours, theirs = model(**given), local(**given)
    assert type(ours) is type(theirs)
    assert_bits(ours.logits, theirs.logits)
    assert ours.logits.device == theirs.logits.device
    assert_bits(ours[0], theirs[0])
    assert_bits(model(**given, labels=given["input_ids"]).loss, local(**given, labels=given["input_ids"]).loss)
    assert isinstance(model(**given, return_dict=False), tuple)
    for refused in ("output_hidden_states", "output_attentions"):
        with pytest.raises(UnsupportedError, match=refused):
            model(**given, **{refused: True})


def test_forward_under_grad_gives_gradients(pair: tuple[Any, Any]) -> None:
    model, local = pair
    given, found = prompt(), []
    for one in pair:
        v, e = V.clone().requires_grad_(), random(2, 7, D, seed=8).requires_grad_()
        if one is model:
            logits = one(inputs_embeds=e, attention_mask=given["attention_mask"], steer={1: v}).logits
        else:
            with hooked(one, adding({1: v[None, None]})):
                logits = one(inputs_embeds=e, attention_mask=given["attention_mask"]).logits
        (logits * given["attention_mask"][..., None]).square().mean().backward()
        found.append((v.grad, e.grad))
    for a, b in zip(*found, strict=True):
        assert_close(a, b)
    assert not any(p.requires_grad for p in model.parameters())


def test_forward_with_a_cache_is_a_session(pair: tuple[Any, Any]) -> None:
    model, local = pair
    given, name = prompt(), cache_name(local)
    outs = []
    for one in pair:
        with torch.no_grad():
            first = one(**given, use_cache=True)
            mask = torch.cat([given["attention_mask"], torch.ones(2, 1).long()], 1)
            outs.append((first.logits, one(ids(2, 1, seed=3), attention_mask=mask, **{name: first[name]}).logits))
    for a, b in zip(*outs, strict=True):
        assert_bits(a, b)
    from transformers import DynamicCache

    with pytest.raises(KwargError, match="DynamicCache"):
        model(ids(2, 1), **{name: DynamicCache(config=local.config)})


def test_a_conversation_goes_on_as_far_as_it_likes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Past the room that its session had at first, and past max_position_embeddings, which nothing bounds here."""
    monkeypatch.setattr("kwflow.worker.server.FIRST_ROOM", 8)
    remote, local = make_flow("llama", TWO, own_ends=True), huggingface("llama")
    model = kf.AutoDistributedModelForCausalLM.from_pretrained(folder("llama"), flow=remote)
    name, both = cache_name(local), []
    for one in (model, local):
        first = generated(one, {"return_dict_in_generate": True}, {"input_ids": ids(2, 4)})
        longer = torch.cat([first.sequences, ids(2, 60, seed=9)], 1)
        both.append(one.generate(longer, max_new_tokens=3, do_sample=False, **{name: first[name]}))
        out = one(ids(2, 4), use_cache=True)
        both[-1] = both[-1], one(ids(2, 70, seed=1), **{name: out[name]}).logits
    assert torch.equal(both[0][0], both[1][0])
    assert_bits(both[0][1], both[1][1])
    assert out[name].get_max_length() == -1 == model(ids(1, 2), use_cache=True)[name].get_max_length()


def lora_hooks(local: nn.Module, a: Tensor, b: Tensor) -> list[Any]:
    """Add what row ``r`` of ``a`` (layer, batch, rank, in) and ``b`` makes to each o_proj; beams stand row by row."""

    def hook(number: int) -> Any:
        def after(_: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
            rows = [t[number].repeat_interleave(len(out) // t.shape[1], 0) for t in (a, b)]
            return out + args[0] @ rows[0].transpose(1, 2) @ rows[1].transpose(1, 2)

        return after

    return [(layer.self_attn.o_proj, "post", hook(n)) for n, layer in enumerate(layers_of(local))]  # type: ignore[union-attr]


def at_columns(v: Tensor, first: int, last: int) -> Callable[[int, Tensor, Tensor], Tensor]:
    """Add at layer 1, at columns ``first`` to ``last``; a step of one column is far behind the prompt."""

    def edit(layer: int, _: Tensor, out: Tensor) -> Tensor:
        column = torch.arange(out.shape[1]) if out.shape[1] > 1 else torch.tensor([98])
        there = (first <= column) & (column <= last)
        return torch.where(there[:, None], out + v, out) if layer == 1 else out

    return edit


def test_where_transformers_takes_all_columns_again() -> None:
    """phi3 drops its cache where longrope changes its scale: edits, adapters and captures stand as before."""
    local, remote = huggingface("phi3_longrope"), make_flow("phi3_longrope", TWO, own_ends=True)
    model = kf.AutoDistributedModelForCausalLM.from_pretrained(folder("phi3_longrope"), flow=remote)
    given, acts = {"input_ids": ids(2, 29, seed=3), "attention_mask": left_padded([0, 3], 29)}, kf.Capture(resid=[2])
    a, b = random(LAYERS, 2, 2, D, seed=1), random(LAYERS, 2, D, 2, seed=2)
    lora = {"o_proj": {"A": kf.axes(a, "layer batch rank in"), "B": kf.axes(b, "layer batch out rank")}}
    beams, steer = {"num_beams": 2}, {1: kf.axes(VB, "batch hidden")}
    cases: list[tuple[dict[str, Any], dict[str, Any], Any]] = [
        ({}, {"edit": kf.add(V, 1, at="generated")}, hooked(local, at_columns(V, 29, 99))),
        ({}, {"edit": kf.add(V, 1, at="prompt[-1]")}, hooked(local, at_columns(V, 28, 28))),
        (beams, {"steer": steer}, hooked(local, adding({1: VB[:, None]}))),
        (beams, {"lora": lora}, having(lora_hooks(local, a, b))),
        ({"return_dict_in_generate": True}, {"capture": acts}, hooked(local, lambda _, __, out: out)),
    ]
    for way, own, theirs in cases:
        config = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
        ours = model.generate(**given, **{**config, **way}, **own)
        with theirs:
            expected: Any = local.generate(**given, **{**config, **way})  # type: ignore[operator]
        assert torch.equal(ours.sequences, expected.sequences), f"{own}"
        for mine, want in zip(ours.logits, expected.logits, strict=True):
            assert_close(mine, want, f"{own}")
    mask = torch.cat([given["attention_mask"], torch.ones(2, 7).long()], 1)
    assert acts.mask.sum(1).tolist() == mask.sum(1).tolist(), "each column once"
    kept: list[Tensor] = []
    with hooked(local, lambda layer, _, out: kept.append(out) or out if layer == 2 else out):
        local(expected.sequences[:, :-1], attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
    assert_close(acts["resid", 2][0], kept[0][0])
    assert_close(acts["resid", 2][1, :-3], kept[0][1, 3:])


def test_a_prefix_that_all_columns_are_taken_again_behind_is_given_again() -> None:
    model = kf.AutoDistributedModelForCausalLM.from_pretrained(
        folder("phi3_longrope"), flow=make_flow("phi3_longrope", TWO, own_ends=True)
    )
    kv = {n: random(LAYERS, 1, 2, 3, D // 4, seed=i) for i, n in enumerate(("k", "v"), 7)}
    given = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True, "prefix_kv": kv}
    whole = model.generate(ids(1, 29), max_new_tokens=6, **given)
    assert_close(whole.logits[-1], model(whole.sequences[:, :-1], prefix_kv=kv).logits[:, -1])
    first, name = model.generate(ids(1, 29), max_new_tokens=2, **given), cache_name(huggingface("phi3_longrope"))
    with pytest.raises(SessionError, match="prefix_kv before them came with an earlier call"):
        model.generate(first.sequences, max_new_tokens=6, **{name: first[name]})


def test_from_pretrained(tmp_path: Any) -> None:
    with pytest.raises(UnknownKwarg, match="Did you mean 'timeout'"):
        kf.AutoDistributedModelForCausalLM.from_pretrained(folder("gpt2"), tiemout=3)
    with pytest.raises(TypeError, match="from_pretrained"):
        kf.AutoDistributedModelForCausalLM()
    model = kf.AutoDistributedModelForCausalLM.from_pretrained(folder("gpt2"), batch_tokens=7, timeout=30)
    assert model.flow.dispatcher.options.batch_tokens == 7 and isinstance(model, type(huggingface("gpt2")))
    assert torch.equal(
        model.generate(**prompt(), max_new_tokens=3), huggingface("gpt2").generate(**prompt(), max_new_tokens=3)
    )


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_forward_goes_on_from_a_cache_by_its_older_name(pair: tuple[Any, Any]) -> None:
    logits = []
    for one in pair:
        with torch.no_grad():
            first = one(ids(2, 6), use_cache=True)
            logits.append(one(ids(2, 1), past_key_values=first[cache_name(pair[1])]).logits)
    assert_bits(*logits)


def test_default_length_is_transformers_own(pair: tuple[Any, Any]) -> None:
    with pytest.warns(UserWarning, match="default `max_length`"):  # transformers' remark on both sides
        made = [one.generate(ids(2, 4), do_sample=False) for one in pair]
    assert made[0].shape == made[1].shape and torch.equal(*made)


def test_a_float_mask_of_ones_and_zeros_is_taken_as_transformers_takes_it(pair: tuple[Any, Any]) -> None:
    model, local = pair
    mask = left_padded([0, 2], 4)
    assert_bits(model(ids(2, 4), attention_mask=mask.float()).logits, local(ids(2, 4), attention_mask=mask).logits)


@pytest.mark.parametrize("way", quickly(("beams",), ("greedy", "beams", "sampled, several returned")))
def test_a_bool_mask_says_which_columns_of_the_prompt_are_edited(pair: tuple[Any, Any], way: str) -> None:
    model, local = pair
    given, chosen = prompt(), torch.zeros(2, 7, dtype=torch.bool)
    chosen[0, [2, 6]] = chosen[1, 4:6] = True

    def edit(layer: int, _: Tensor, out: Tensor) -> Tensor:
        if layer != 2 or out.shape[1] != 7:
            return out
        return out + 9 * V * chosen.repeat_interleave(len(out) // 2, 0)[..., None]

    with hooked(local, edit):
        theirs = generated(local, WAYS[way], given)
    acts = kf.Capture({"resid": [2]}, at=chosen)
    ours = generated(model, WAYS[way], given, edit=kf.add(9 * V, 2, at=chosen), capture=acts)
    assert torch.equal(ours, theirs) and not torch.equal(ours, generated(local, WAYS[way], given))
    assert acts["resid", 2].shape[1] == 2  # of the generated tokens none
    with kf.steering.as_hooks(local, [kf.add(9 * V, 2, at=chosen)]):
        assert torch.equal(generated(local, {}, given), generated(model, {}, given, edit=kf.add(9 * V, 2, at=chosen)))
    with pytest.raises(KwargError, match="bool mask, of a prompt that comes as one"):
        generated(model, WAYS["prefilled in chunks"], given, edit=kf.add(9 * V, 2, at=chosen))
    with pytest.raises(ShapeError, match=r"a bool mask is \(batch, seq\)"):
        generated(model, WAYS[way], given, edit=kf.add(9 * V, 2, at=chosen[:, :5]))


def test_a_pipeline_runs_and_says_nothing(pair: tuple[Any, Any], caplog: pytest.LogCaptureFixture) -> None:
    from transformers import pipeline
    from transformers.utils import logging

    model, local = pair
    logging.enable_propagation()
    try:
        one, other = (pipeline("text-generation", model=m, tokenizer=model.flow.tokenizer) for m in (model, local))
    finally:
        logging.disable_propagation()
    assert not [record for record in caplog.records if "is not supported" in record.getMessage()]
    said = {"max_new_tokens": 3, "do_sample": False}
    assert one("a b c", **said) == other("a b c", **said)


def test_what_would_be_silent_is_refused(pair: tuple[Any, Any], tmp_path: Any) -> None:
    model, _ = pair
    with pytest.raises(UnsupportedError, match="base model"):
        model.base_model(ids(1, 3))
    for number in (0, 3, -1):
        stand_in = layers_of(model)[number]
        for when in ("forward", "forward_pre", "full_backward", "full_backward_pre"):
            with pytest.raises(UnsupportedError, match="hooks do not reach them: edit= and steer= act there"):
                getattr(stand_in, f"register_{when}_hook")(lambda *_: None)
        with pytest.raises(AttributeError, match="no 'mlp' here: the layers are on the workers"):
            _ = stand_in.mlp
    with pytest.raises(IndexError):
        _ = layers_of(model)[LAYERS]
    with pytest.raises(UnsupportedError, match="nothing to save"):
        model.save_pretrained(tmp_path)
    assert model.config.num_hidden_layers == LAYERS
    with pytest.raises(KwargError, match="connected already"):
        kf.AutoDistributedModelForCausalLM.from_pretrained(model.flow.ends.folder, flow=model.flow, dtype="float32")


def test_a_kwarg_that_generate_takes_too_is_refused_by_name() -> None:
    def warm(params: Any, hidden: Tensor, /, *, block: Any, temperature: float = 1.0, **kw: Any) -> Tensor:
        return block(params, hidden * temperature, **kw)

    flow = make_flow("gpt2", TWO, block_fn=warm)
    model = kf.AutoDistributedModelForCausalLM.from_pretrained(folder("gpt2"), flow=flow)
    with pytest.raises(KwargError, match="both generate and a block_fn take 'temperature'"):
        model.generate(ids(1, 3), temperature=2.0, do_sample=True, max_new_tokens=2)
