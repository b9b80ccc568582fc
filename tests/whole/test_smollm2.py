"""The real model through two real workers, behind the classes: every way to generate, a resumed session, a tuning."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import kwflow as kf
from tests.huggingface.test_tuning import hooked
from tests.oracle import assert_bits, cache_name

pytestmark = [pytest.mark.swarm, pytest.mark.slow]
MODEL = "smollm2-135m"
TEXTS = ["The weather in Paris is", "Hello"]
NEW = 6


@pytest.fixture(scope="module")
def pair(smollm2_swarm: Any, smollm2: Any) -> tuple[Any, Any]:
    """The model over two workers, and the local one."""
    from transformers import AutoModelForCausalLM

    ours = kf.AutoDistributedModelForCausalLM.from_pretrained(MODEL, initial_peers=smollm2_swarm.peers)
    return ours, AutoModelForCausalLM.from_pretrained(smollm2).eval().requires_grad_(False)


def small(local: Any) -> Any:
    """The local model's first layers: an assistant that is often wrong."""
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(local.config)
    config.num_hidden_layers = 6
    made = AutoModelForCausalLM.from_config(config).eval()
    made.load_state_dict(local.state_dict(), strict=False)
    return made


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 1.2, "top_k": 50, "top_p": 0.9},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "beams, sampled": {"num_beams": 2, "do_sample": True},
    "several": {"do_sample": True, "num_return_sequences": 2},
    "processors": {"no_repeat_ngram_size": 2, "repetition_penalty": 1.3, "min_new_tokens": 4},
    "chunked prefill": {"prefill_chunk_size": 2},
}
ONE_ROW: dict[str, dict[str, Any]] = {
    "assisted": {},
    "assisted, sampled": {"do_sample": True},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
    "stop strings": {"stop_strings": ["a", "."], "max_new_tokens": 12},
}


def generated(model: Any, given: Any, how: dict[str, Any], **more: Any) -> Tensor:
    torch.manual_seed(5)
    return model.generate(**given, **{"max_new_tokens": NEW, "do_sample": False, **how}, **more)


@pytest.mark.parametrize("way", [*WAYS, *ONE_ROW])
def test_every_way_gives_the_local_ids(pair: tuple[Any, Any], way: str) -> None:
    tokenizer = pair[0].flow.tokenizer
    texts = TEXTS if way in WAYS else ["One two three. One two three. One two"]
    given = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
    more: dict[str, Any] = {"assistant_model": small(pair[1])} if "assisted" in way else {}
    if way == "stop strings":
        more["tokenizer"] = tokenizer
    ours, theirs = (generated(one, given, (WAYS | ONE_ROW)[way], **more) for one in pair)
    assert torch.equal(ours, theirs), (tokenizer.batch_decode(ours), tokenizer.batch_decode(theirs))
    assert ours.shape[1] > given["input_ids"].shape[1]
    if way == "stop strings":
        assert ours.shape[1] < given["input_ids"].shape[1] + 12, "it did not stop"


def test_embeddings_streams_and_a_resumed_session(pair: tuple[Any, Any]) -> None:
    from threading import Thread

    from transformers import TextIteratorStreamer

    model, local = pair
    tokenizer, name = model.flow.tokenizer, cache_name(local)
    given = tokenizer(TEXTS, return_tensors="pt", padding=True, padding_side="left")
    embeds = local.get_input_embeddings()(given["input_ids"])
    by_embeds = {"inputs_embeds": embeds, "attention_mask": given["attention_mask"]}
    assert torch.equal(generated(model, by_embeds, {}), generated(local, by_embeds, {}))

    whole = generated(local, given, {})
    first = generated(model, given, {"max_new_tokens": 5, "return_dict_in_generate": True})
    mask = torch.cat([given["attention_mask"], torch.ones(2, 5).long()], 1)
    rest = {"input_ids": first.sequences, "attention_mask": mask, name: first[name]}
    assert torch.equal(generated(model, rest, {"max_new_tokens": NEW - 5}), whole)
    assert first[name].get_seq_length() == whole.shape[1] - 1

    one = tokenizer(TEXTS[:1], return_tensors="pt")
    stream = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    thread = Thread(target=lambda: generated(model, one, {"streamer": stream}))
    thread.start()
    text = "".join(stream)
    thread.join(60)
    assert text == tokenizer.decode(generated(local, one, {})[0, one["input_ids"].shape[1] :]) != ""


@pytest.mark.rest
def test_a_conversation_is_the_local_models(pair: tuple[Any, Any]) -> None:
    """Three turns by the model's own template, one of them steered too, and forgotten; a fork goes on with the last."""
    model, local = pair
    tokenizer, how = model.flow.tokenizer, {"max_new_tokens": 12, "do_sample": False}
    direction = torch.randn(local.config.hidden_size, generator=torch.Generator().manual_seed(1))
    with kf.chat(model) as chat:
        for text in ("What is the capital of France?", "And of Italy?", "Name a river there."):
            before = chat.session.position
            if before:
                steered = chat.turn(text, steer={12: 40 * direction / direction.norm()}, **how)
                chat.rollback()
            reply = chat.turn(text, **how)
            assert chat.rerun == 0 and chat.session.position > before
            given = tokenizer.apply_chat_template(
                chat.messages[:-1], add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            theirs = local.generate(**given, **how)
            assert reply == tokenizer.decode(theirs[0, given["input_ids"].shape[1] :], skip_special_tokens=True)
        assert "Paris" in chat.messages[1]["content"] and steered != reply
        history = torch.cat([theirs, tokenizer("\n", return_tensors="pt")["input_ids"]], 1)
        with chat.session.fork() as fork:
            mask = torch.ones_like(history)
            ours = model.generate(history, attention_mask=mask, **{cache_name(local): fork}, **how)
        assert torch.equal(ours, local.generate(history, attention_mask=mask, **how))
        assert not fork.replays


@pytest.mark.rest
@pytest.mark.slow
def test_a_conversation_goes_beyond_2048_columns(pair: tuple[Any, Any]) -> None:
    """201 tokens in three turns, the first about a text of 2000 tokens; the local model reads all anew at each."""
    model, local = pair
    tokenizer = model.flow.tokenizer
    how = {"max_new_tokens": 67, "min_new_tokens": 67, "do_sample": False}
    lines = [f"On day {day} the ship sailed {day * 7 % 40} miles and the crew saw land." for day in range(100)]
    said = 0
    with kf.chat(model) as chat:
        for text in (
            "\n".join(lines) + "\nTell me about the ship.",
            "What did the crew see?",
            "Where could it go next?",
        ):
            reply = chat.turn(text, **how)
            given = tokenizer.apply_chat_template(
                chat.messages[:-1], add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            theirs = local.generate(**given, **how)[0, given["input_ids"].shape[1] :]
            assert reply == tokenizer.decode(theirs, skip_special_tokens=True)
            said += len(theirs)
        assert said == 201 and chat.session.position > 2048


def test_a_classifier_is_tuned_to_the_bit(smollm2_swarm: Any, smollm2: Any) -> None:
    """Ten steps with deep prompts: with equal threads and uncut batches, every loss has the bits of a local run."""
    from transformers import AutoModelForSequenceClassification

    with pytest.warns(UserWarning, match=r"score\.weight"):
        model = kf.AutoDistributedModelForSequenceClassification.from_pretrained(
            MODEL, initial_peers=smollm2_swarm.peers, num_labels=2, tuning_mode="deep_ptune", pre_seq_len=4
        )
    tokenizer = model.flow.tokenizer
    local = AutoModelForSequenceClassification.from_pretrained(smollm2, num_labels=2).eval()
    local.base_model.requires_grad_(False)
    with torch.no_grad():
        local.score.weight.copy_(model.score.weight)
    prompts, deep = (
        p.detach().clone().requires_grad_() for p in (model.prompt_embeddings, model.deep_prompt_embeddings)
    )
    texts = ["I love this", "Awful, I hate it", "What a joy", "A sad waste of time"]
    x = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
    labels, losses = torch.tensor([1, 0, 1, 0]), []
    mine = [p for p in model.parameters() if p.requires_grad]
    for one, weights in ((model, mine), (local, [prompts, deep, local.score.weight])):
        optimizer, found = torch.optim.AdamW(weights, lr=1e-2), []
        for _ in range(10):
            with hooked(local, prompts, deep):
                loss = one(**x, labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.detach())
        losses.append(torch.stack(found))
    gaps = (losses[0] - losses[1]).abs()
    print(f"losses {losses[1][0]:.4f} to {losses[1][-1]:.4f}, largest gap {gaps.max():.3g}")
    assert losses[0][-1] < losses[0][0] / 2, "nothing was learnt"
    assert_bits(losses[0], losses[1])
