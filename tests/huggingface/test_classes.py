"""The classes that people know: config, base model and sequence classification as Hugging Face's own, batch 1 and 2."""

# B batch, S seq, D hidden

from __future__ import annotations

import importlib
import inspect
import pickle
import pydoc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kwflow as kf
from kwflow.client.flow import Flow
from kwflow.errors import KwargError, ModelError, UnknownKwarg, UnsupportedError
from kwflow.models.ends import ModelEnds
from kwflow.models.files.checkpoint import Checkpoint
from tests.families.marks import every_family, families
from tests.oracle import assert_bits, assert_close, cache_name, layers_of
from tests.oracle.tiny import HIDDEN, LAYERS, TWO, ends, folder, huggingface, ids, left_padded, make_flow, random, span

every_batch = pytest.mark.parametrize("batch", [1, 2])
Base, Classifier = kf.AutoDistributedModel, kf.AutoDistributedModelForSequenceClassification
AUTOS = (Base, kf.AutoDistributedModelForCausalLM, Classifier)
NAMES = {  # of transformers' classes, as the Auto ones stand above
    "llama": ("LlamaModel", "LlamaForCausalLM", "LlamaForSequenceClassification"),
    "gpt2": ("GPT2Model", "GPT2LMHeadModel", "GPT2ForSequenceClassification"),
    "bloom": ("BloomModel", "BloomForCausalLM", "BloomForSequenceClassification"),
    "mixtral": ("MixtralModel", "MixtralForCausalLM", "MixtralForSequenceClassification"),
    "gemma3_text": ("Gemma3TextModel", "Gemma3ForCausalLM", "Gemma3TextForSequenceClassification"),
}
V = random(HIDDEN, seed=1, scale=3.0)


def given(batch: int) -> dict[str, Tensor]:
    mask = left_padded((0, 3)[:batch], 7)
    return {"input_ids": ids(batch, 7) * mask, "attention_mask": mask}  # pads are the pad token


def classifiers(family: str, **labels: Any) -> tuple[Any, Any]:
    """Ours and Hugging Face's, whose new heads are drawn from the same seed."""
    from transformers import AutoModelForSequenceClassification

    # made here: after the seed they would take numbers
    where, flow = folder(family), make_flow(family, TWO, own_ends=True)
    torch.manual_seed(4)
    local = AutoModelForSequenceClassification.from_pretrained(where, **labels).eval()
    torch.manual_seed(4)
    with pytest.warns(UserWarning, match=r"has no score\.weight .*initialised as transformers does, and trainable"):
        ours = Classifier.from_pretrained(where, flow=flow, **labels)
    return ours, local


@every_family
def test_the_config_is_transformers_own(family: str) -> None:
    from transformers import AutoConfig

    ours, theirs = kf.AutoDistributedConfig.from_pretrained(folder(family)), AutoConfig.from_pretrained(folder(family))
    assert type(ours) is type(theirs) and ours.to_dict() == theirs.to_dict()
    assert kf.AutoDistributedConfig.from_pretrained("smollm2-135m").num_hidden_layers == 30
    with pytest.raises(ModelError, match="no-such-model"):
        kf.AutoDistributedConfig.from_pretrained("no-such-model")


@families((*NAMES, "gpt_oss"), quick=("llama", "gemma3_text"))
def test_the_spec_of_a_model_is_what_its_workers_say(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, here = span(family, 0, LAYERS), ends(family)
    monkeypatch.setattr(Checkpoint, "read", None)  # weights are not read
    said = kf.AutoDistributedConfig.spec(folder(family))
    assert (said.name, said.family, said.layers, said.hidden_size) == (here.name, family, LAYERS, HIDDEN)
    assert said.kinds == tuple(block.kind for block in whole.blocks)
    assert (len(set(said.kinds)) > 1) is (family in ("gemma3_text", "gpt_oss"))
    assert (said.checkpoint, said.dtype) == (whole.identity["checkpoint"], whole.dtype)
    assert said.schema == whole.schema and said.layers_name == here.layers_name
    with pytest.raises(ModelError, match="no-such-model"):
        kf.AutoDistributedConfig.spec("no-such-model")


# ---------------------------------------------------------------- a class for each of transformers'


@families(tuple(NAMES))
@pytest.mark.filterwarnings("ignore:.* has no score.weight")
def test_an_auto_class_makes_the_family_s_own(family: str) -> None:
    flow, outs = make_flow(family, TWO), []
    for auto, name in zip(AUTOS, NAMES[family], strict=True):
        own = getattr(kf, f"Distributed{name}")
        for kind in (own, auto):
            torch.manual_seed(4)  # of the classifier's head
            model = kind.from_pretrained(folder(family), flow=flow, timeout=30)
            assert type(model) is own and isinstance(model, auto) and model.flow.dispatcher.options.timeout == 30
            outs.append(model(**given(2))[0])
        assert_bits(*outs[-2:], name)


@pytest.mark.parametrize("family", NAMES)
def test_a_class_says_where_it_is_imported_from(family: str) -> None:
    for auto, name in zip(AUTOS, NAMES[family], strict=True):
        own = getattr(importlib.import_module("kwflow.huggingface"), f"Distributed{name}")
        theirs = getattr(importlib.import_module("transformers"), name)
        assert own is getattr(kf, f"Distributed{name}") and issubclass(own, auto) and issubclass(own, theirs)
        assert (own.__module__, own.__qualname__) == ("kwflow.huggingface", f"Distributed{name}")
        assert pickle.loads(pickle.dumps(own)) is own  # noqa: S301
        assert inspect.signature(own.forward) == inspect.signature(theirs.forward)
        assert own.forward.__qualname__ == f"Distributed{name}.forward"
        assert f"kf.Distributed{name}.from_pretrained(" in pydoc.render_doc(own)


def test_every_served_class_is_listed_and_others_say_why_not() -> None:
    there = dir(importlib.import_module("kwflow.huggingface"))
    assert {f"Distributed{name}" for names in NAMES.values() for name in names} <= set(there)
    assert {auto.__name__ for auto in AUTOS} <= set(there) and "DistributedCohereForSequenceClassification" not in there
    assert not [name for name in dir(kf) if name.startswith("Distributed")]
    for name, said in {
        "DistributedT5Model": "'t5' is not supported: it is an encoder-decoder",
        "DistributedMambaForCausalLM": "'mamba' is not supported: its layers keep a state",
        "DistributedLlamaForTokenClassification": "of llama, a base model, .* Nearest: DistributedLlamaForSequenceC",
        "DistributedGPT2ForCausalLM": "no model class 'GPT2ForCausalLM'. Nearest: .*DistributedGPT2LMHeadModel",
        "DistributedLlamaConfig": r"AutoDistributedConfig.from_pretrained\(model\)",
    }.items():
        with pytest.raises(AttributeError, match=said):
            getattr(kf, name)


def test_a_family_s_class_refuses_other_models_and_loads_no_layers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from kwflow import DistributedLlamaForCausalLM

    class Mine(DistributedLlamaForCausalLM):
        """A user's own."""

    flow = make_flow("llama", TWO)
    tuned = DistributedLlamaForCausalLM.from_pretrained(folder("llama"), flow=flow, tuning_mode="ptune", pre_seq_len=2)
    tuned.save_pretrained(tmp_path)
    mine = Mine.from_pretrained(folder("llama"), flow=flow, tuned=tmp_path)
    assert type(mine) is Mine and torch.equal(mine.prompt_embeddings, tuned.prompt_embeddings)
    monkeypatch.setattr(Checkpoint, "read", None)
    said = "Mine.* is a bloom; use DistributedBloomForCausalLM, or AutoDistributedModelForCausalLM, which takes every"
    with pytest.raises(ModelError, match=said):
        Mine.from_pretrained(folder("bloom"))
    with pytest.raises(UnknownKwarg, match="DistributedLlamaForCausalLM.from_pretrained got 'device_map'"):
        DistributedLlamaForCausalLM.from_pretrained(folder("llama"), device_map="cpu")
    config = kf.AutoDistributedConfig.from_pretrained(folder("llama"))
    for make in (DistributedLlamaForCausalLM, DistributedLlamaForCausalLM._from_config):
        with pytest.raises(TypeError, match="use DistributedLlamaForCausalLM.from_pretrained"):
            make(config)


@every_family
@every_batch
def test_the_base_model_returns_what_theirs_returns(family: str, batch: int) -> None:
    from transformers import AutoModel

    model = Base.from_pretrained(folder(family), flow=make_flow(family, TWO))
    local, x = AutoModel.from_pretrained(folder(family)).eval().requires_grad_(False), given(batch)
    assert isinstance(model, type(local))
    ours, theirs = model(**x), local(**x)
    assert type(ours) is type(theirs)
    assert_bits(ours.last_hidden_state, theirs.last_hidden_state)
    assert_bits(model(**x, return_dict=False)[0], local(**x, return_dict=False)[0])
    hook = layers_of(huggingface(family))[1].register_forward_hook(
        lambda _, __, out: (out[0] + V, *out[1:]) if isinstance(out, tuple) else out + V
    )
    steered = huggingface(family).base_model(**x).last_hidden_state
    hook.remove()
    assert_bits(model(**x, steer={1: V}).last_hidden_state, steered)
    with pytest.raises(UnsupportedError, match=r"output_hidden_states=True.*flow\[:layer \+ 1\]"):
        model(**x, output_hidden_states=True)
    with pytest.raises(UnknownKwarg, match="Did you mean 'steer'"):
        model(**x, stear={1: V})


@every_family
@pytest.mark.parametrize("return_dict", [True, False])
def test_a_step_on_a_session_returns_the_cache_where_theirs_does(family: str, return_dict: bool) -> None:
    from transformers import AutoModel

    local = AutoModel.from_pretrained(folder(family)).eval().requires_grad_(False)
    name, outs = cache_name(local), []
    for one in (Base.from_pretrained(folder(family), flow=make_flow(family, TWO)), local):
        with torch.no_grad():
            first = one(ids(2, 5), use_cache=True, return_dict=return_dict)
            cache = first[name] if return_dict else first[1]
            assert len(first) == 2 and cache.get_seq_length() == 5
            outs.append(one(ids(2, 2, seed=3), use_cache=True, **{name: cache})[0])
    assert_bits(*outs)


@every_family
@every_batch
def test_a_classifier_returns_what_theirs_returns(family: str, batch: int) -> None:
    ours, local = classifiers(family, num_labels=3)
    x, labels = given(batch), torch.tensor([2, 0])[:batch]
    assert_bits(ours.score.weight, local.score.weight, "the new head, drawn from the same seed")
    assert isinstance(ours, type(local)) and ours.config.to_dict() == local.config.to_dict()
    assert [n for n, p in ours.named_parameters() if p.requires_grad] == ["score.weight"]
    a, b = ours(**x, labels=labels), local(**x, labels=labels)
    assert type(a) is type(b) and a.logits.shape == (batch, 3)
    assert_bits(a.logits, b.logits)
    assert_bits(a.loss, b.loss)
    a.loss.backward()
    b.loss.backward()
    assert_close(ours.score.weight.grad, local.score.weight.grad)
    v = V.clone().requires_grad_()
    ours(**x, labels=labels, steer={1: v}).loss.backward()
    assert v.grad is not None and v.grad.abs().max() > 0
    embeds = local.get_input_embeddings()(x["input_ids"]).detach()
    mask = x["attention_mask"]
    assert_bits(
        ours(inputs_embeds=embeds, attention_mask=mask).logits, local(inputs_embeds=embeds, attention_mask=mask).logits
    )


def test_labels_of_every_kind() -> None:
    for labels, target in (
        ({"num_labels": 1}, torch.tensor([0.5, -1.0])),
        ({"num_labels": 3, "problem_type": "multi_label_classification"}, torch.tensor([[1.0, 0, 1], [0, 0, 1]])),
        ({"id2label": {0: "no", 1: "yes"}, "label2id": {"no": 0, "yes": 1}}, torch.tensor([1, 0])),
    ):
        ours, local = classifiers("gpt2", **labels)
        assert_bits(ours(**given(2), labels=target).loss, local(**given(2), labels=target).loss)
        assert ours.config.id2label == local.config.id2label


def test_a_checkpoint_of_a_classifier_needs_no_language_model_head(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    local = AutoModelForSequenceClassification.from_pretrained(folder("llama"), num_labels=3).eval()
    local.save_pretrained(tmp_path)
    flow = kf.connect(tmp_path)
    ours = Classifier.from_pretrained(tmp_path, flow=flow)  # no warning: every tensor is there
    assert_bits(ours(**given(2)).logits, local(**given(2)).logits)
    assert not any(p.requires_grad for p in ours.parameters())
    base = Base.from_pretrained(tmp_path, flow=flow)
    assert_bits(base(**given(2)).last_hidden_state, local.base_model(**given(2)).last_hidden_state)
    for call in (
        lambda: kf.AutoDistributedModelForCausalLM.from_pretrained(tmp_path, flow=flow),
        lambda: flow.head(random(1, 2, HIDDEN)),
    ):
        with pytest.raises(UnsupportedError, match=r"no tensor for 'lm_head\.weight'"):
            call()
    with pytest.raises(ModelError, match=r"num_labels=5 makes it \(5, 32\)"):
        Classifier.from_pretrained(tmp_path, flow=flow, num_labels=5)


def test_a_cache_says_which_session_it_is() -> None:
    model = kf.AutoDistributedModelForCausalLM.from_pretrained(folder("llama"), flow=make_flow("llama", TWO))
    said = repr(model(ids(2, 4), use_cache=True).past_key_values)
    assert said.startswith("RemoteCache(Session(") and "columns 4, batch 2" in said


@every_family
def test_no_block_weights_are_here(family: str) -> None:
    flow = make_flow(family, TWO)
    inside = {name for name, _ in layers_of(huggingface(family))[0].named_parameters()}
    for auto in (Base, kf.AutoDistributedModelForCausalLM):
        model = auto.from_pretrained(folder(family), flow=flow)
        names = [*model.state_dict(), *(name for name, _ in model.named_parameters())]
        assert names and not [name for name in names if any(name.endswith(own) for own in inside)]
        assert not any(p.is_meta for p in model.parameters())


def test_models_over_one_flow_share_tensors_and_nothing_else() -> None:
    flow = make_flow("llama", TWO)
    one = kf.AutoDistributedModelForCausalLM.from_pretrained(folder("llama"), flow=flow, timeout=30)
    other = kf.AutoDistributedModelForCausalLM.from_pretrained(folder("llama"), flow=flow)
    base = Base.from_pretrained(folder("llama"), flow=flow)
    assert one is not other and one.flow.dispatcher.options.timeout == 30 != other.flow.dispatcher.options.timeout
    assert one.get_input_embeddings().weight is base.get_input_embeddings().weight
    x = flow.inputs(ids(2, 4))
    assert_bits(flow.head(flow(**x)), one(ids(2, 4)).logits, "embed and head do not run the layers")
    assert_bits(one(ids(2, 4)).logits, huggingface("llama")(ids(2, 4)).logits)


@every_family
def test_a_float32_client_of_bfloat16_workers_has_a_float32_head(family: str) -> None:
    """The way to a fast head on a CPU without bfloat16 arithmetic: the layers' bits stay, norm and head are exact."""
    low = torch.bfloat16
    mine = ModelEnds(folder(family, low), torch.float32)
    flow = Flow(mine, make_flow(family, TWO, low).peers, (0, LAYERS))
    model = kf.AutoDistributedModelForCausalLM.from_pretrained(folder(family, low), flow=flow)
    before, local = huggingface(family, low, low), huggingface(family, torch.float32, low)
    x, seen = given(2), []
    hook = layers_of(before)[-1].register_forward_hook(lambda _, __, out: seen.append(out))
    before(**x)
    hook.remove()
    last = (seen[0][0] if isinstance(seen[0], tuple) else seen[0]).float()
    hook = layers_of(local)[-1].register_forward_hook(
        lambda _, __, out: (last, *out[1:]) if isinstance(out, tuple) else last
    )
    expected = local(**x).logits
    hook.remove()
    assert_bits(model(**x).logits, expected)


def test_layers_that_would_drop_out_are_refused_in_training() -> None:
    model = Base.from_pretrained(folder("gpt2"), flow=make_flow("gpt2", TWO, own_ends=True))
    with pytest.raises(UnsupportedError, match=r"attn_dropout 0\.1.*resid_dropout 0\.1"):
        model.train()
    assert not model.training
    model.config.attn_pdrop = model.config.resid_pdrop = 0.0
    assert model.train().training and model.drop.training  # the embeddings' own dropout is the client's
    for family in ("llama", "bloom"):
        assert Base.from_pretrained(folder(family), flow=make_flow(family, TWO, own_ends=True)).train().training


def test_what_is_given_by_a_wrong_name() -> None:
    for auto, wrong, said in (
        (Base, {"num_label": 3}, "num_label"),
        (Base, {"zzz": 3}, "AutoDistributedModel.from_pretrained got 'zzz'. It takes initial_peers, flow, dtype"),
        (Base, {"revision": "v1"}, "user/name@revision"),
        (Base, {"quantize": "nf4"}, "Give it to kf.connect"),
        (kf.AutoDistributedModelForCausalLM, {"num_labels": 3}, "AutoDistributedModelForSequenceClassification takes"),
        (Classifier, {"num_label": 3}, "Did you mean 'num_labels'"),
        (Classifier, {"initial_pears": []}, "Did you mean 'initial_peers'"),
    ):
        with pytest.raises(UnknownKwarg, match=said):
            auto.from_pretrained(folder("gpt2"), **wrong)
    for auto in (Base, Classifier, kf.AutoDistributedConfig):
        with pytest.raises(TypeError, match=f"{auto.__name__}.from_pretrained"):
            auto(folder("gpt2"))
    flow = make_flow("gpt2", TWO)
    with pytest.raises(KwargError, match="serves"):
        Base.from_pretrained(folder("llama"), flow=flow)
    with pytest.raises(UnsupportedError, match="no sequence classification for model_type 'cohere'"):
        Classifier.from_pretrained(folder("cohere"))
