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
from kwflow.client.stages import Stages
from kwflow.errors import KwargError, ModelError, SessionError, UnsupportedError
from tests.families.marks import every_family, quickly
from tests.oracle import assert_bits, assert_close, cache_name, layers_of
from tests.oracle.tiny import (
    HIDDEN,
    LAYERS,
    TWO,
    folder,
    huggingface,
    ids,
    left_padded,
    make_flow,
    random,
)

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


@pytest.mark.parametrize("family", ["llama", *(pytest.param(f, marks=pytest.mark.slow) for f in ("gpt2", "bloom"))])
@every_mode
@pytest.mark.parametrize("way", quickly(["beams", "chunked"], WAYS))
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


def test_a_tuned_session_is_resumed_and_drafts_are_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model, local = tuned("llama"), huggingface("llama")
    name, step, sent = cache_name(local), Stages.step, []

    def kept(self: Any, one: Any, *more: Any) -> Any:
        sent.append("prompts" in one.bound.names())
        return step(self, one, *more)

    monkeypatch.setattr(Stages, "step", kept)
    whole = model.generate(ids(2, 4), max_new_tokens=9, do_sample=False)
    assert sent == [True, *[False] * 8], "deep prompts are sent with the first columns only"
    first = model.generate(ids(2, 4), max_new_tokens=5, do_sample=False, return_dict_in_generate=True)
    assert first[name].get_seq_length() == 8 and first[name].session.position == 8 + P
    again = model.generate(first.sequences, max_new_tokens=4, do_sample=False, **{name: first[name]})
    assert torch.equal(again, whole)
    other = whole.clone()
    other[1, 6] ^= 1
    with pytest.raises(SessionError, match="row 1, column 6"):  # of the tokens; the prompts have none
        model.generate(other, max_new_tokens=4, **{name: first[name]})
    first[name].crop(-first[name].get_seq_length())  # to nothing: the prompts are given again
    assert first[name].session.position == 0
    assert torch.equal(model.generate(ids(2, 4), max_new_tokens=9, do_sample=False, **{name: first[name]}), whole)
    alone = model.generate(ids(1, 4), max_new_tokens=9, do_sample=False)
    assert torch.equal(model.generate(ids(1, 4), max_new_tokens=9, do_sample=False, assistant_model=local), alone)


@every_family
@every_mode
def test_the_base_model_and_a_classifier_drop_the_prompts_too(family: str, mode: str) -> None:
    from transformers import AutoModel, AutoModelForSequenceClassification

    x = given(2, True)
    model, local = tuned(family, mode, kf.AutoDistributedModel), AutoModel.from_pretrained(folder(family)).eval()
    with hooked(Inside(local), *prompts_of(model)):
        theirs = local(**x)
    ours = model(**x)
    assert type(ours) is type(theirs)
    assert_bits(ours.last_hidden_state, theirs.last_hidden_state)
    with torch.no_grad():
        assert_bits(model(**x, use_cache=True).last_hidden_state, theirs.last_hidden_state)

    labels = torch.tensor([2, 0])
    torch.manual_seed(1)
    with pytest.warns(UserWarning, match=r"has no score\.weight"):
        model = tuned(family, mode, Classifier, num_labels=3)
    torch.manual_seed(1)
    local = AutoModelForSequenceClassification.from_pretrained(folder(family), num_labels=3).eval()
    local.base_model.requires_grad_(False)
    prompts, deep = prompts_of(model)
    with hooked(local, prompts, deep):
        theirs = local(**x, labels=labels)
    ours = model(**x, labels=labels)
    assert_bits(ours.logits, theirs.logits)
    ours.loss.backward()
    theirs.loss.backward()
    assert_close(model.score.weight.grad, local.score.weight.grad)
    assert_close(model.prompt_embeddings.grad, prompts.grad)
    if deep is not None:
        assert_close(model.deep_prompt_embeddings.grad, deep.grad)


class Inside(nn.Module):
    """A base model as something that stands on one."""

    def __init__(self, base: nn.Module):
        super().__init__()
        self.base, self.base_model_prefix = base, "base"


@pytest.mark.slow
def test_thirty_steps_of_tuning_a_classifier_in_fp64() -> None:
    """The losses of every step within the table: nothing is lost of a gradient, and nothing drifts."""
    from transformers import AutoModelForSequenceClassification

    dtype, losses = torch.float64, []
    with pytest.warns(UserWarning, match=r"score\.weight"):
        model = tuned("gpt2", "deep_ptune", Classifier, num_labels=3, dtype=dtype)
    local = AutoModelForSequenceClassification.from_pretrained(folder("gpt2"), num_labels=3, dtype=dtype).eval()
    local.base_model.requires_grad_(False)
    with torch.no_grad():
        local.score.weight.copy_(model.score.weight)
    prompts, deep = prompts_of(model)
    mine = [p for p in model.parameters() if p.requires_grad]
    assert len(mine) == 3 and all(p.dtype is dtype for p in mine)
    for one, weights in ((model, mine), (local, [local.score.weight, prompts, deep])):
        optimizer, found = torch.optim.AdamW(weights, lr=0.02), []
        for step in range(30):
            x = {"input_ids": ids(4, 7, seed=step % 3), "attention_mask": left_padded((0, 1, 3, 0), 7)}
            x["input_ids"] = x["input_ids"] * x["attention_mask"]  # pads are the pad token
            labels = torch.arange(4) % 3
            with hooked(local, prompts, deep):  # type: ignore[arg-type]
                loss = one(**x, labels=labels).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.detach())
        losses.append(torch.stack(found))
    for ours, theirs in zip(*losses, strict=True):
        assert_close(ours, theirs)
    assert losses[0][-3:].mean() < losses[0][:3].mean() / 2, "nothing was learnt"


@every_family
def test_heads_and_embeddings_are_trained_as_locally(family: str) -> None:
    from transformers import AutoModelForCausalLM

    flow = make_flow(family, TWO, own_ends=True)
    model = CausalLM.from_pretrained(folder(family), flow=flow)
    local = AutoModelForCausalLM.from_pretrained(folder(family)).eval().requires_grad_(False)
    x = given(2, True)
    for one in (model, local):
        one.get_input_embeddings().requires_grad_(True)
        one.get_output_embeddings().requires_grad_(True)
        one(**x, labels=x["input_ids"]).loss.backward()
    grads = [{n: p.grad for n, p in one.named_parameters() if p.grad is not None} for one in (model, local)]
    assert grads[0].keys() == grads[1].keys() and len(grads[0]) == (2 if family == "llama" else 1)  # else they are tied
    for name, grad in grads[0].items():
        assert_close(grad, grads[1][name], name)


# ---- saved and read again


def test_what_is_trained_is_saved_and_read_again(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"score\.weight"):
        model = tuned("llama", "deep_ptune", Classifier, num_labels=3)
    model.model.norm.requires_grad_(True)
    with torch.no_grad():
        model.model.norm.weight.add_(0.25)
    model.save_pretrained(tmp_path)
    x = given(2, True)
    expected = model(**x).logits
    assert {f.name for f in tmp_path.iterdir()} == {"model.safetensors", "tuned.json"}
    assert sum(f.stat().st_size for f in tmp_path.iterdir()) < 6000  # no block, no embedding
    again = Classifier.from_pretrained(folder("llama"), flow=make_flow("llama", TWO, own_ends=True), tuned=tmp_path)
    assert again.config.num_labels == 3 and again.tuning.mode == "deep_ptune"
    assert_bits(again(**x).logits, expected)
    again.save_pretrained(tmp_path / "again")  # what was read is not forgotten, though the norm is frozen now
    saved = [json.loads((where / "tuned.json").read_text()) for where in (tmp_path, tmp_path / "again")]
    assert saved[0] == saved[1]
    last = Classifier.from_pretrained(
        folder("llama"), flow=make_flow("llama", TWO, own_ends=True), tuned=tmp_path / "again"
    )
    assert_bits(last(**x).logits, expected)


def test_what_was_tuned_for_another_model_is_refused(tmp_path: Path) -> None:
    model = tuned("llama", "ptune")
    model.save_pretrained(tmp_path)
    others: dict[str, Callable[[], Any]] = {
        "class": lambda: tuned("gpt2", "ptune").load_tuned(tmp_path),
        "checkpoint": lambda: CausalLM.from_pretrained(
            folder("llama", torch.bfloat16), tuning_mode="ptune", pre_seq_len=P
        ).load_tuned(tmp_path),
        "tuning_mode 'ptune'": lambda: tuned("llama", "deep_ptune").load_tuned(tmp_path),
        "class 'LlamaForCausalLM'": lambda: tuned("llama", "ptune", kf.AutoDistributedModel).load_tuned(tmp_path),
        "pre_seq_len 3": lambda: CausalLM.from_pretrained(
            folder("llama"), tuning_mode="ptune", pre_seq_len=P + 1
        ).load_tuned(tmp_path),
    }
    for said, load in others.items():
        with pytest.raises(ModelError, match=said):
            load()
    with pytest.raises(ModelError, match=r"no tuned\.json"):
        model.load_tuned(folder("llama"))
    from safetensors.torch import save_file

    for tensors, said in (
        ({"prompt_embedings": torch.zeros(P, D)}, "Did you mean 'prompt_embeddings'"),
        ({"prompt_embeddings": torch.zeros(P, D + 1)}, r"float32\(3, 33\)"),
    ):
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(ModelError, match=said):
            model.load_tuned(tmp_path)
    with pytest.raises(UnsupportedError, match="nothing to save"):
        CausalLM.from_pretrained(folder("llama"), flow=make_flow("llama", TWO)).save_pretrained(tmp_path)


def test_modes_and_lengths_are_checked() -> None:
    flow = make_flow("gpt2", TWO, own_ends=True)
    for wrong, said in (
        ({"tuning_mode": "deep_tune", "pre_seq_len": 3}, "Did you mean 'deep_ptune'"),
        ({"tuning_mode": "ptune"}, "pre_seq_len=None"),
        ({"pre_seq_len": 3}, "tuning_mode is None"),
        ({"tuning_mode": "ptune", "pre_seq_len": 0}, "1 or more"),
        ({"tuned": "somewhere", "pre_seq_len": 3}, "says its own"),
    ):
        with pytest.raises(KwargError, match=said):
            CausalLM.from_pretrained(folder("gpt2"), flow=flow, **wrong)
    model = CausalLM.from_pretrained(folder("gpt2"), flow=flow, tuning_mode="deep_ptune", pre_seq_len=P)
    with pytest.raises(KwargError, match="deep_ptune's own"):
        model(ids(1, 4), prompts=random(LAYERS, 1, 2, D))
    with pytest.raises(UnsupportedError, match="give one"):
        model(ids(1, 4), attention_mask=torch.ones(1, 1, 4, 4).bool())
    with pytest.raises(UnsupportedError, match="token_type_ids"):
        model(ids(1, 4), token_type_ids=torch.zeros(1, 4).long())
    plain = CausalLM.from_pretrained(folder("gpt2"), flow=flow)  # another model over the same flow has no prompts
    assert_bits(plain(ids(2, 4)).logits, huggingface("gpt2")(ids(2, 4)).logits)
    assert model.prompt_embeddings.abs().max() < 0.2 and not model.deep_prompt_embeddings.any()
    steered = model(ids(2, 4), steer={1: random(D)}).logits
    assert steered.shape == (2, 4, 64) and not torch.equal(steered, model(ids(2, 4)).logits)


# ---- transformers' Trainer


@pytest.mark.slow
def test_trainer_runs_saves_and_resumes(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    data = [{"input_ids": ids(1, 6, seed=n)[0], "labels": n % 3} for n in range(16)]

    def run(where: Path, steps: int, resume: str | None = None) -> tuple[Any, Any]:
        torch.manual_seed(0)
        with pytest.warns(UserWarning, match=r"score\.weight"):
            model = tuned("llama", "deep_ptune", Classifier, num_labels=3)
        settings = transformers.TrainingArguments(
            output_dir=str(where),
            max_steps=steps,
            per_device_train_batch_size=4,
            learning_rate=0.01,
            save_steps=3,
            save_strategy="steps",
            lr_scheduler_type="constant",
            report_to=[],
            use_cpu=True,
            seed=0,
            logging_steps=1,
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = transformers.Trainer(model, settings, train_dataset=data, eval_dataset=data[:4])
        trainer.train(resume_from_checkpoint=resume)
        return model, trainer

    whole, trainer = run(tmp_path / "whole", 6)
    assert trainer.evaluate()["eval_loss"] > 0
    run(tmp_path / "half", 3)
    resumed, _ = run(tmp_path / "half", 6, str(tmp_path / "half" / "checkpoint-3"))
    for (name, a), (_, b) in zip(whole.named_parameters(), resumed.named_parameters(), strict=True):
        assert_bits(b, a, name)
    assert_bits(resumed.score.weight, whole.score.weight)
    saved = {f.name for f in (tmp_path / "whole" / "checkpoint-6").iterdir()}
    assert {"model.safetensors", "tuned.json", "optimizer.pt"} <= saved
    again = Classifier.from_pretrained(
        folder("llama"), flow=make_flow("llama", TWO, own_ends=True), tuned=tmp_path / "whole" / "checkpoint-6"
    )
    assert_bits(again(**given(2, True)).logits, whole.eval()(**given(2, True)).logits)
