"""The promises kwflow began with, each in a few lines. Read this file first.

A flow runs a model's blocks on workers; here they live in this process, and everything still goes through bytes.
"""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

import kwflow as kf
from tests.oracle import assert_bits, assert_close, assert_near, residual
from tests.oracle.tiny import HIDDEN, LAYERS, THREE, folder, ids, make_flow, random

MODEL = folder("llama")
LOCAL = AutoModelForCausalLM.from_pretrained(MODEL).eval().requires_grad_(False)
FLOW = make_flow("llama", THREE, own_ends=True)  # layers 0:1, 1:3 and 3:4 on three workers
X = FLOW.inputs(ids(2, 5))  # hidden, attention_mask, position_ids
V = random(HIDDEN)


def test_logits_equal_the_local_model_s() -> None:
    assert_bits(FLOW.head(FLOW(**X)), LOCAL(ids(2, 5)).logits)


def test_outputs_are_equal_with_arbitrary_kwargs() -> None:
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    prompts = random(LAYERS, 2, 3, HIDDEN, seed=1)
    out = FLOW(X["hidden"], attention_mask=mask, prompts=prompts, steer={1: V, 3: 2 * V})
    assert_bits(
        out,
        residual(LOCAL, X["hidden"], attention_mask=mask, prompts=dict(enumerate(prompts)), steer={1: V, 3: 2 * V}),
    )


def test_kwargs_have_gradients() -> None:
    prompts = random(LAYERS, 1, 3, HIDDEN, seed=1).requires_grad_()
    FLOW(**X, prompts=prompts).sum().backward()
    assert prompts.grad is not None and prompts.grad.shape == prompts.shape

    local = prompts.detach().requires_grad_()
    residual(LOCAL, X["hidden"], prompts=dict(enumerate(local))).sum().backward()
    assert_close(prompts.grad, local.grad)


def test_torch_func_works_through_the_workers() -> None:
    gradient = torch.func.grad(lambda v: FLOW(**X, steer={2: v}).square().sum())(V)
    sweep = torch.func.vmap(lambda scale: FLOW(**X, steer={2: scale * V}))(torch.tensor([0.0, 1.0, 2.0]))
    assert gradient.shape == V.shape
    assert_near(sweep[2], FLOW(**X, steer={2: 2 * V}))


def test_each_layer_may_have_its_own_kwargs() -> None:
    out = FLOW(**X, **kf.per_layer([None, {"steer": V}, None, {"steer": -V, "prompts": random(2, 1, HIDDEN)}]))
    assert_bits(out, residual(LOCAL, X["hidden"], steer={1: V, 3: -V}, prompts={3: random(2, 1, HIDDEN)}))


def test_a_worker_s_own_block_fn_takes_any_kwarg() -> None:
    def block_fn(params, hidden, /, *, block, gain: kf.Axes["[layer] hidden"], **kw):
        return hidden + gain * (block(params, hidden, **kw) - hidden)

    flow = kf.connect(MODEL, block_fn=block_fn)
    gain = random(LAYERS, HIDDEN).requires_grad_()
    out = flow(**X, gain=gain)
    assert_bits(out, residual(LOCAL, X["hidden"], gain=dict(enumerate(gain))))
    out.sum().backward()
    assert gain.grad is not None


def test_a_typo_is_an_error_before_anything_is_sent() -> None:
    try:
        FLOW(**X, stear={1: V})
    except TypeError as error:
        assert "Did you mean 'steer'?" in str(error)
    else:
        raise AssertionError("nothing is ignored")


def test_a_session_keeps_keys_and_values_on_the_workers() -> None:
    whole = FLOW(**X, steer={2: V})
    with FLOW.session(max_length=8) as session, torch.no_grad():
        steps = [session.step(X["hidden"][:, :3], steer={2: V}), session.step(X["hidden"][:, 3:], steer={2: V})]
    assert_near(torch.cat(steps, 1), whole)


def test_generate_is_hugging_face_s_own() -> None:
    model = kf.AutoDistributedModelForCausalLM.from_pretrained(MODEL, flow=FLOW)
    prompt = {"input_ids": ids(2, 5), "attention_mask": torch.ones(2, 5).long()}
    assert torch.equal(model.generate(**prompt, max_new_tokens=6), LOCAL.generate(**prompt, max_new_tokens=6))
    steered = model.generate(**prompt, max_new_tokens=6, steer={1: 5 * V})
    assert not torch.equal(steered, model.generate(**prompt, max_new_tokens=6))
