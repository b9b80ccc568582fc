"""kf.chat: turns over a kept session say what the local model says of the whole text, whatever fails between."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import kwflow as kf
from kwflow.errors import DeadlineError, KwargError, ModelError, NoRoute, SessionError, SpanError, UnknownKwarg
from tests.doubles.mortal import Swarm
from tests.families.marks import every_family
from tests.oracle import assert_close
from tests.oracle.tiny import HEADS, HIDDEN, KV_HEADS, LAYERS, TWO, Requests, folder, huggingface, make_flow, random

V = random(HIDDEN, seed=11)
BEGIN = "{% for m in messages %}{{ {'system': 'w5', 'user': 'w6', 'assistant': 'w7'}[m.role] }} "
END = " <eos> {% endfor %}{% if add_generation_prompt %}w7 {% endif %}"
PLAIN = BEGIN + "{{ m.content }}" + END
# as templates do that leave out what a model thought, but for the last time; and one whose first token changes
SHORT = BEGIN + "{{ m.content.split(' ')[0] if m.role == 'assistant' else m.content }}" + END
COUNTED = "w{{ 20 + messages|length }} " + PLAIN
TURNS = ["w10 w11 w12", "w13", "w14 w15"]


def model_of(family: str, **more: Any) -> Any:
    flow = make_flow(family, TWO, own_ends=True)
    return kf.AutoDistributedModelForCausalLM.from_pretrained(folder(family), flow=flow, **more)


def prompt_of(chat: Any, messages: Any, template: str) -> Any:
    how = {"chat_template": template, "add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    return chat.model.flow.tokenizer.apply_chat_template(messages, **how)["input_ids"]


def replies_of(one: Any, chat: Any, template: str, turns: list[str] = TURNS, **kwargs: Any) -> list[str]:
    """The same conversation by a model that takes the whole text each turn, and keeps nothing."""
    messages, replies = [m for m in chat.messages if m["role"] == "system"], []
    for text in turns:
        messages = [*messages, {"role": "user", "content": text}]
        ids = prompt_of(chat, messages, template)
        out = one.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False, **kwargs)
        replies.append(chat.model.flow.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
        messages.append({"role": "assistant", "content": replies[-1]})
    return replies


def said(chat: Any, turns: list[str] = TURNS, **kwargs: Any) -> list[str]:
    return [chat.turn(text, max_new_tokens=5, do_sample=False, **kwargs) for text in turns]


@every_family
@pytest.mark.parametrize("system", [None, "w8 w9"], ids=["", "system"])
def test_a_conversation_is_the_local_models_and_runs_what_is_new(family: str, system: str | None) -> None:
    with kf.chat(model_of(family), PLAIN, system=system) as chat:
        with Requests(chat.model.flow) as requests:
            replies = said(chat)
        assert replies == replies_of(huggingface(family), chat, PLAIN) and all(replies)
        told = [m["content"] for m in chat.messages if m["role"] == "assistant"]
        assert told == replies and len(chat.messages) == 2 * len(TURNS) + (system is not None)
        widths = [request.meta["start"] for _, request, _ in requests.seen if request.meta["op"] == "step"]
        assert widths == sorted(widths) and chat.rerun == 0, "something was run again"
        assert chat.session.position == widths[-1] + 1
        assert f"{len(TURNS)} turns" in repr(chat)
    assert chat.session.closed
    with pytest.raises(SessionError, match="closed"):
        chat.turn("w5")
    assert len(chat.messages) == 2 * len(TURNS) + (system is not None)


@pytest.mark.parametrize("template", [SHORT, COUNTED], ids=["shorter replies", "another first token"])
def test_where_the_template_writes_the_past_otherwise_it_is_run_again(template: str) -> None:
    with kf.chat(model_of("llama"), template) as chat:
        rerun, replies = [], []
        for text in TURNS:
            held, messages = chat.session.position, chat.messages
            with pytest.raises(UnknownKwarg):
                chat.turn(text, stear={1: V})
            assert chat.messages == messages
            replies += said(chat, [text])
            rerun.append((chat.rerun, held))
        assert replies == replies_of(huggingface("llama"), chat, template)
        assert rerun[0] == (0, 0)
        if template is COUNTED:
            assert all(again == held > 0 for again, held in rerun[1:])
        else:
            assert all(0 < again < held for again, held in rerun[1:])
        chat.rollback(1)
        assert said(chat, TURNS[2:]) == replies[2:]


@pytest.mark.parametrize("kwarg", ["steer", "edit"])
def test_a_turn_may_be_steered(kwarg: str) -> None:
    """What acts is what the turn runs: the columns from the last reply's last token on."""
    model, reference = model_of("llama"), model_of("llama")
    with kf.chat(model, PLAIN) as chat:
        first = said(chat, TURNS[:1])
        held = chat.session.position
        value = {1: 9 * V} if kwarg == "steer" else [kf.add(9 * V, 1, at="all")]
        acts = kf.Capture(resid=[1])
        second = said(chat, TURNS[1:2], **{kwarg: value}, capture=acts)
        assert acts["resid", 1].shape[1] == chat.session.position - held
        history = [{"role": "user", "content": TURNS[0]}, {"role": "assistant", "content": first[0]}]
        history.append({"role": "user", "content": TURNS[1]})
        ids = prompt_of(chat, history, PLAIN)
        ours = {"edit": kf.add(9 * V, 1, at=list(range(held, 60))), "capture": (kept := kf.Capture(resid=[1]))}
        out = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False, **ours)
        assert model.flow.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True) == second[0]
        assert_close(acts["resid", 1], kept["resid", 1][:, held:])
        chat.rollback()
        plain = said(chat, TURNS[1:])
        assert plain == replies_of(huggingface("llama"), chat, PLAIN)[1:] and plain[0] != second[0]


def test_rollback_forgets_turns() -> None:
    with kf.chat(model_of("llama"), PLAIN, system="w8") as chat:
        replies, positions, messages = [], [0], [chat.messages]
        for text in TURNS:
            replies += said(chat, [text])
            positions.append(chat.session.position)
            messages.append(chat.messages)
        for turns in (0, 1, 2, 3):
            left = len(TURNS) - turns
            chat.rollback(turns)
            assert chat.session.position == positions[left] and chat.messages == messages[left]
            assert said(chat, TURNS[left:]) == replies[left:]
        for turns in (4, -1, "one", None):
            with pytest.raises(KwargError, match="has 3 turns"):
                chat.rollback(turns)  # type: ignore[arg-type]
        chat.messages.clear()
        assert chat.messages == messages[-1]


def swarm_model(*spans: tuple[int, int]) -> tuple[Swarm, Any]:
    swarm = Swarm("llama", *spans)
    return swarm, kf.AutoDistributedModelForCausalLM.from_pretrained(folder("llama"), flow=swarm.flow)


@pytest.mark.parametrize("turn", [pytest.param(0, marks=pytest.mark.rest), 1])
@pytest.mark.parametrize("how", ["no worker", "interrupted", "a mistake", "own code"])
def test_a_turn_that_fails_did_not_happen(turn: int, how: str) -> None:
    swarm, model = swarm_model((0, 2), (2, 4))
    chat = kf.chat(model, PLAIN)
    expected = replies_of(huggingface("llama"), chat, PLAIN)
    said(chat, TURNS[:turn])
    before = chat.session.position, chat.messages
    failing = {"steer": {1: 9 * V}, "max_new_tokens": 5, "do_sample": False}
    if how == "no worker":
        flow, model.flow = model.flow, model.flow.options(timeout=1)
        chat.session.dispatcher = model.flow.dispatcher
        swarm.kill(1, after=2)
        with pytest.raises((NoRoute, DeadlineError)):
            chat.turn(TURNS[turn], **failing)
        swarm.revive(1)
        model.flow, chat.session.dispatcher = flow, flow.dispatcher
    elif how == "interrupted":
        swarm.interrupt(lambda: chat.turn(TURNS[turn], **failing), worker=1)
    elif how == "a mistake":
        for wrong, error in (({"stear": {1: V}}, UnknownKwarg), ({"steer": {9: V}}, ValueError)):
            with pytest.raises(error):
                chat.turn(TURNS[turn], **{**failing, **wrong})
    else:
        steps = iter(range(2))
        with pytest.raises(StopIteration):
            chat.turn(TURNS[turn], logits_processor=[lambda _, scores: (next(steps), scores)[1]], **failing)
    assert (chat.session.position, chat.messages) == before
    assert said(chat, TURNS[turn:]) == expected[turn:]
    chat.close()


def test_a_conversation_goes_on_over_other_workers() -> None:
    swarm, model = swarm_model((0, 2), (2, 4), (2, 4))
    with kf.chat(model, PLAIN) as chat:
        replies = said(chat, TURNS[:1])
        swarm.kill(swarm.names.index(chat.session.workers[1].hop.peer))
        replies += said(chat, TURNS[1:])
        assert replies == replies_of(huggingface("llama"), chat, PLAIN)
        (told,) = chat.session.replays
        assert told.bitwise


def test_a_flow_or_a_model_with_prompts_or_a_prefix() -> None:
    flow = make_flow("llama", TWO, own_ends=True)
    with kf.chat(flow, PLAIN) as chat:
        assert said(chat) == replies_of(huggingface("llama"), chat, PLAIN)
    tuned = model_of("llama", tuning_mode="deep_ptune", pre_seq_len=3)
    torch.nn.init.normal_(tuned.prompt_embeddings)
    for template in (PLAIN, SHORT, COUNTED):
        with kf.chat(tuned, template) as chat:
            replies = said(chat)
            assert replies == replies_of(tuned, chat, template)
            chat.rollback(2)
            assert said(chat, TURNS[1:]) == replies[1:]
    kv = {n: random(LAYERS, 1, KV_HEADS, 3, HIDDEN // HEADS, seed=i) for i, n in enumerate(("k", "v"), 7)}
    for template in (PLAIN, COUNTED):
        with kf.chat(model_of("llama"), template) as chat:
            replies = said(chat, TURNS[:1], prefix_kv=kv)
            if template is COUNTED:
                with pytest.raises(SessionError, match="give it again"):
                    said(chat, TURNS[1:])
            again = {"prefix_kv": kv} if template is COUNTED else {}
            replies += said(chat, TURNS[1:], **again)
            assert replies == replies_of(chat.model, chat, template, prefix_kv=kv)


def test_what_a_chat_cannot_take_is_said_before_anything_is_sent() -> None:
    model = model_of("llama")
    with pytest.raises(
        ModelError, match=r"llama-float32 has no chat template: give one, kf\.chat\(model, template=…\)"
    ):
        kf.chat(model)
    with pytest.raises(SpanError, match=f"over all {LAYERS} layers"):
        kf.chat(model.flow[1:], PLAIN)
    for wrong, text in ((3, "got int"), (huggingface("llama"), "got LlamaForCausalLM")):
        with pytest.raises(KwargError, match=text):
            kf.chat(wrong, PLAIN)  # type: ignore[arg-type]
    with pytest.raises(KwargError, match="in Jinja"):
        kf.chat(model, ["w5"])  # type: ignore[arg-type]
    with pytest.raises(KwargError, match="system's message is a int"):
        kf.chat(model, PLAIN, system=3)  # type: ignore[arg-type]
    with Requests(model.flow) as requests, kf.chat(model, PLAIN) as chat:
        for wrong in ({"input_ids": 1}, {"cache": None}, {"num_beams": 2}, {"num_return_sequences": 3}):
            with pytest.raises(KwargError, match=next(iter(wrong))):
                chat.turn("w5", **wrong)
        with pytest.raises(KwargError, match="user's message is a list"):
            chat.turn(["w5"])  # type: ignore[arg-type]
        for template, text in (("{{ raise_exception('no') }}", "take this conversation: no"), ("{% if", "take this")):
            with pytest.raises(KwargError, match=text):
                kf.chat(model, template).turn("w5")
        with pytest.raises(KwargError, match="not one token"):
            kf.chat(model, " ").turn("w5")
        assert chat.messages == []
    assert not len(requests)


def test_a_reply_is_as_long_as_somebody_says_or_as_the_model_goes_on() -> None:
    """transformers' own default is a whole text of 20 tokens."""
    with kf.chat(model_of("llama"), PLAIN) as chat:
        enough = [lambda ids, _, **__: torch.full((1,), ids.shape[1] >= 30)]
        chat.turn("w5", do_sample=False, stopping_criteria=enough)
        assert chat.session.position == 29
        config = copy.deepcopy(chat.model.generation_config)
        config.max_new_tokens, config.do_sample, config.return_dict_in_generate = 3, False, True
        assert len(chat.turn("w5", generation_config=config).split()) <= 3
