"""Conversations: generate and forward over a session that the caller keeps."""

# B batch, S seq, D hidden

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import kwflow as kf
from kwflow.errors import KwargError, SessionError
from tests.families.marks import every_family
from tests.oracle import assert_bits, assert_close, cache_name
from tests.oracle.tiny import (
    HIDDEN,
    KV_HEADS,
    LAYERS,
    THREE,
    TWO,
    Requests,
    folder,
    huggingface,
    ids,
    left_padded,
    make_flow,
    random,
)

D = HIDDEN
V = random(D, seed=11)


def model_of(family: str, **more: Any) -> Any:
    flow = make_flow(family, TWO, own_ends=True)
    return kf.AutoDistributedModelForCausalLM.from_pretrained(folder(family), flow=flow, **more)


def generated(model: Any, given: Any, new: int = 4, **more: Any) -> Any:
    torch.manual_seed(5)
    return model.generate(given, **{"max_new_tokens": new, "do_sample": False, "pad_token_id": 0, **more})


def rest_of(history: Tensor, more: int, seed: int = 3) -> Tensor:
    return torch.cat([history, ids(history.shape[0], more, seed=seed)], 1)


# ---- a session where a cache is taken

HOW: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True},
    "beams": {"num_beams": 2},
    "several": {"do_sample": True, "num_return_sequences": 2},
}


@every_family
@pytest.mark.parametrize("returned", [False, True], ids=["ids", "dict"])
@pytest.mark.parametrize("how", HOW)
def test_a_session_is_a_cache_and_stays_the_callers(family: str, how: str, returned: bool) -> None:
    model, local = model_of(family), huggingface(family)
    name, settings, x = cache_name(local), HOW[how], ids(2, 5)
    copies = 2 if "num_return_sequences" in settings else 1
    with model.flow.session() as session:
        first = generated(model, x, **settings, return_dict_in_generate=returned, **{name: session})
        if returned:
            assert first[name].session is session
            first = first.sequences
        assert torch.equal(first, generated(local, x, **settings))
        assert not session.closed and session.position == first.shape[1] - 1
        if how == "beams":  # the rows that ran last are not all of a sequence that won
            return
        history = rest_of(first, 3)
        with Requests(model.flow) as requests:
            second = generated(model, history, **{name: session})
        assert torch.equal(second, generated(local, history))
        sent = [request for _, request, _ in requests.seen if request.meta["op"] == "step"]
        assert sent[0].meta["start"] == first.shape[1] - 1 and session.batch == 2 * copies
    assert session.closed


def test_new_tokens_alone_with_a_mask_of_all_columns() -> None:
    model, local = model_of("llama"), huggingface("llama")
    x, mask = ids(2, 5), left_padded([0, 2], 5)
    session = model.flow.session()
    first = generated(model, x, attention_mask=mask, cache=session)
    history = rest_of(first, 2)
    all_columns = torch.cat([mask, torch.ones(2, history.shape[1] - 5).long()], 1)
    new = history[:, session.position :]
    second = generated(model, new, attention_mask=all_columns, cache=session)
    assert torch.equal(second[:, new.shape[1] :], generated(local, history, attention_mask=all_columns)[:, -4:])


@pytest.mark.parametrize("kwarg", ["steer", "edit", "capture"])
def test_kwargs_act_over_a_kept_session_as_over_a_fresh_one(kwarg: str) -> None:
    model = model_of("llama")
    acts = [kf.Capture(resid=[1], at="generated") for _ in range(2)]
    values = {"steer": [{1: 9 * V}] * 2, "edit": [kf.add(9 * V, 1, at="generated")] * 2, "capture": acts}[kwarg]
    session, x = model.flow.session(), ids(2, 5)
    first = generated(model, x, cache=session)
    history = rest_of(first, 3)
    ours = generated(model, history, cache=session, **{kwarg: values[0]})
    if kwarg == "steer":  # which acts on what runs: the columns of the session have been
        edit = kf.add(9 * V, 1, at=list(range(first.shape[1] - 1, 40)))
        assert torch.equal(ours, generated(model, history, edit=edit))
    else:
        assert torch.equal(ours, generated(model, history, **{kwarg: values[1]}))
    if kwarg == "capture":
        assert_close(*(one["resid", 1] for one in acts))


@every_family
def test_forward_takes_a_session(family: str) -> None:
    model, local = model_of(family), huggingface(family)
    name, x = cache_name(local), ids(2, 6)
    with torch.no_grad(), model.flow.session() as session:
        first = model(x[:, :4], **{name: session})
        assert first[name].session is session and session.position == 4
        theirs = local(x[:, :4], use_cache=True)
        assert_bits(first.logits, theirs.logits)
        assert_bits(model(x[:, 4:], **{name: session}).logits, local(x[:, 4:], **{name: theirs[name]}).logits)
        with model.flow.session() as other:
            by_hand = model.flow.head(other.step(**other.inputs(x[:, :4])))
            assert_bits(by_hand, theirs.logits)
            assert_close(model(x[:, 4:], **{name: other}).logits, local(x).logits[:, 4:])


def test_a_session_that_does_not_fit_is_refused_before_anything_is_sent() -> None:
    model, x = model_of("llama"), ids(2, 5)
    closed, used = model.flow.session(), model.flow.session()
    closed.close()
    generated(model, x, cache=used)
    other = x.clone()
    other[1, 2] ^= 1
    wrong = [
        (closed, x, "session is closed"),
        (model.flow[1:].session(), x, f"layers 1:{LAYERS}.*model's layers are 0:{LAYERS} of llama.*flow.session"),
        (make_flow("gpt2", THREE).session(), x, "gpt2.*of llama-float32"),
        (used, rest_of(other, 9), "row 1, column 2, where the cache holds"),
        (used, x, "input_ids has 5 columns, and the cache holds 8"),
    ]
    with Requests(model.flow) as requests:
        for session, given, said in wrong:
            with pytest.raises(SessionError, match=said):
                generated(model, given, cache=session)
        for session in (closed, model.flow[1:].session()):
            with pytest.raises(SessionError, match="session"):
                model(x, cache=session)
        with pytest.raises(KwargError, match=r"cache is a str; give a session, model\.flow\.session"):
            generated(model, x, cache="session")
    assert not len(requests)
    history = rest_of(x, 9)
    used.rollback(5)
    assert torch.equal(generated(model, history, cache=used), generated(model, history))


def test_trained_prompts_stand_before_a_session_that_the_model_began() -> None:
    family = "llama"
    model = model_of(family, tuning_mode="deep_ptune", pre_seq_len=3)
    session, x = model.flow.session(), ids(2, 5)
    first = generated(model, x, cache=session)
    assert torch.equal(first, generated(model, x)) and session.position == 3 + first.shape[1] - 1
    history = rest_of(first, 2)
    assert torch.equal(generated(model, history, cache=session), generated(model, history))
    plain = kf.AutoDistributedModelForCausalLM.from_pretrained(folder(family), flow=model.flow)
    began = model.flow.session()
    generated(plain, x, cache=began)
    with pytest.raises(SessionError, match="began without this model's 3 trained prompts"):
        generated(model, rest_of(x, 9), cache=began)


def test_a_session_with_a_prefix_goes_on() -> None:
    model, x = model_of("llama"), ids(2, 5)
    kv = {n: random(LAYERS, 1, KV_HEADS, 3, D // 4, seed=i) for i, n in enumerate(("k", "v"), 7)}
    session = model.flow.session()
    first = generated(model, x, cache=session, prefix_kv=kv)
    history = rest_of(first, 2)
    assert torch.equal(generated(model, history, cache=session), generated(model, history, prefix_kv=kv))


# ---- forks


@every_family
def test_generate_goes_on_in_forks(family: str) -> None:
    """One history, several continuations: each is as in a session of its own."""
    model, name = model_of(family), cache_name(huggingface(family))
    x, mask = ids(2, 5), left_padded([0, 2], 5)
    with model.flow.session() as session, model.flow.session() as alone:
        first = generated(model, x, attention_mask=mask, **{name: session})
        assert torch.equal(generated(model, x, attention_mask=mask, **{name: alone}), first)
        history = rest_of(first, 3)
        given = {"attention_mask": torch.cat([mask, torch.ones(2, history.shape[1] - 5).long()], 1)}
        with session.fork() as fork:
            steered = generated(model, history, new=8, **given, steer={1: 9 * V}, **{name: fork})
        ours = generated(model, history, **given, **{name: session}, return_dict_in_generate=True, output_logits=True)
        want = generated(model, history, **given, **{name: alone}, return_dict_in_generate=True, output_logits=True)
    assert torch.equal(ours.sequences, want.sequences) and not torch.equal(steered[:, :-4], want.sequences)
    for mine, theirs in zip(ours.logits, want.logits, strict=True):
        assert_bits(mine, theirs)
