"""Captures against the Hugging Face model's own activations: values, gradients, sessions, generate."""

# B batch, S seq, D hidden, L layers

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kwflow as kf
from kwflow.errors import KwargError, SessionError, SpanError, UnsupportedError
from kwflow.kwargs.capture import take
from kwflow.models.families import FAMILIES as ROWS
from kwflow.models.families import family_of
from tests.families.configs import CONFIGS, config
from tests.families.marks import every_family, families, quickly
from tests.families.table import MASK, B, D, L, S
from tests.oracle import assert_bits, assert_close, assert_near, cache_name, layers_of, residual
from tests.oracle.tiny import (
    EACH,
    TWO,
    Requests,
    flow,
    huggingface,
    ids,
    left_padded,
    make_flow,
    random,
    span,
)

SOME = ("llama", "gpt2", "bloom", "gemma2", "opt")
# not granite, which scales what its parts add; nor where norms stand behind the sums
ADDING = [name for name in CONFIGS if family_of(config(name)).mlp and name != "opt_norm_after"]
V = random(D, seed=1)


def seen(family: str, hidden: Tensor, mask: Tensor | None, model: nn.Module | None = None) -> dict[Any, Tensor]:
    """Every point of every layer, by hooks on the Hugging Face model's modules."""
    model, row, found, hooks = model or huggingface(family), ROWS[family], {}, []

    def keep(key: Any) -> Callable[..., None]:
        def hook(_: Any, args: Any, out: Any = None) -> None:
            value = args[0] if out is None else out[0] if isinstance(out, tuple) else out
            found[key] = value.reshape(*hidden.shape[:2], -1)

        return hook

    for number, layer in enumerate(layers_of(model)):
        hooks.append((layer, "pre", keep(("resid_pre", number))))
        hooks.append((layer.get_submodule(row.out), "pre", keep(("head", number))))
        for point, path in {"attn": row.attn, "mlp": row.mlp}.items():
            hooks.append((layer.get_submodule(path), "post", keep((point, number))))
        hooks.append((layer, "post", keep(("resid", number))))
    given = {} if mask is None else {"attention_mask": mask}
    residual(model, hidden, extra=hooks, **given)
    found["embed", 0] = found["resid_pre", 0]
    return found


@families(ADDING, quick=("llama", "opt"))
def test_the_parts_add_up_to_the_residual_stream(family: str) -> None:
    hidden = random(2, 5, D)
    points = {point: range(L) for point in ("resid_pre", "attn", "mlp", "resid")}
    out, acts = flow(family, TWO).capture(points, hidden)
    assert_bits(out, flow(family, TWO)(hidden))
    assert_bits(acts["resid", L - 1], out)
    for n in range(L):
        assert_close(acts["resid_pre", n] + acts["attn", n] + acts["mlp", n], acts["resid", n], f"layer {n}")
        assert n == 0 or torch.equal(acts["resid_pre", n], acts["resid", n - 1])


AT: dict[str, tuple[Any, Callable[[int], list[int]]]] = {  # the positions of a row with so many tokens
    "all": ("all", lambda n: list(range(n))),
    "prompt[-1]": ("prompt[-1]", lambda n: [n - 1]),
    "prompt[1:-2]": ("prompt[1:-2]", lambda n: list(range(1, n - 2))),
    "in their order": ([4, 0, 5], lambda n: [4, 0, 5]),
    "one": (2, lambda n: [2]),
}


@families(["llama", "gemma2", "opt"])
@pytest.mark.parametrize("at", AT)
def test_what_comes_back_is_what_the_model_holds(family: str, at: str) -> None:
    hidden, (selector, places) = random(B, S, D), AT[at]
    expected = seen(family, hidden, MASK)
    wanted = {"embed": 0, "resid_pre": [1], "attn": range(L), "mlp": [0, 3], "head": [2], "resid": [0, 3]}
    tokens = MASK.sum(1).tolist()
    for cuts, rows in ((TWO, B), (EACH, 3)):
        remote = flow(family, cuts).options(batch_tokens=rows * S)
        _, acts = remote.capture(wanted, at=selector, hidden=hidden, attention_mask=MASK)
        count = max(len(places(n)) for n in tokens)
        for point, layer in acts:
            value = acts[point, layer].reshape(B, count, -1)
            for row, n in enumerate(tokens):
                columns = [S - n + place for place in places(n)]
                assert_near(value[row, : len(columns)], expected[point, layer][row, columns], f"{point} {layer}")
                assert not value[row, len(columns) :].any()
                assert acts.mask[row].tolist() == [True] * len(columns) + [False] * (count - len(columns))
        assert acts["head", 2].shape == (B, count, 4, 8)


def test_mean_is_made_on_the_worker() -> None:
    remote, hidden = flow("llama", TWO), random(B, S, D)
    expected = seen("llama", hidden, MASK)["resid", 2]
    with Requests(remote) as requests:
        _, acts = remote.capture({"resid": [2]}, at="prompt", mean=True, hidden=hidden, attention_mask=MASK)
    assert [len(reply.tree) for _, _, reply in requests.seen] == [1, 2]  # the first worker was not asked
    assert requests.seen[1][2].tree[1].shape == (B, 1, D)
    for row in range(B):
        assert_close(acts["resid", 2][row, 0], expected[row, MASK[row].bool()].mean(0))


def test_a_capture_sees_what_edits_left() -> None:
    remote, hidden = flow("gpt2", TWO), random(2, 4, D)
    plain = remote.capture({"resid": [1]}, hidden)[1]["resid", 1]
    edits = [kf.add(V, 1), kf.scale(2.0, 1, at=[0])]
    _, acts = remote.capture({"resid": [1], "resid_pre": [2]}, hidden, edit=edits)
    assert_close(acts["resid", 1][:, 0], 2 * (plain[:, 0] + V))
    assert_close(acts["resid", 1][:, 1:], plain[:, 1:] + V)
    assert_bits(acts["resid_pre", 2], acts["resid", 1])


@families(SOME)
def test_patching_what_was_captured(family: str) -> None:
    """Every position of one layer replaced by another run's gives that run's output."""
    remote, clean, other = flow(family, TWO), random(2, 5, D), random(2, 5, D, seed=5)
    for point, layer in (("resid", 1), ("resid_pre", 2), ("embed", 0)):
        out, acts = remote.capture({point: layer}, clean)
        assert_bits(remote(other, edit=kf.put(acts[point, layer], layer, point=point)), out)
    _, acts = remote.capture({"head": range(L), "attn": range(L), "mlp": range(L)}, clean)
    edits = [kf.put(acts[key], key[1], point=key[0]) for key in acts if key[0] != "head"]
    assert_close(remote(other, edit=edits) - other, remote(clean) - clean)


# ---- gradients


def test_a_loss_on_an_early_layer_asks_no_later_worker() -> None:
    remote, v = flow("llama", EACH), random(D, seed=2).requires_grad_()
    with Requests(remote) as requests:
        out, acts = remote.capture({"resid": [1]}, random(2, 3, D), steer={0: v})
        acts["resid", 1].sum().backward()
    assert [request.meta["span"] for _, request, _ in requests.seen[4:]] == [[1, 2], [0, 1]]
    assert v.grad is not None and v.grad.abs().sum() > 0
    both = torch.autograd.grad(
        remote.capture({"resid": [1]}, random(2, 3, D), steer={3: v})[1]["resid", 1].sum(), v, allow_unused=True
    )
    assert both == (None,)


# ---- sessions and generate


@families(["llama", "bloom"])
@pytest.mark.parametrize("at", ["all", "generated", "prompt[-1]", [2, 7]])
def test_steps_join(family: str, at: Any) -> None:
    remote, hidden = flow(family, TWO), random(B, S + 3, D)
    mask = torch.cat([MASK, torch.ones(B, 3).long()], 1)
    expected, tokens = seen(family, hidden, mask)["resid", 2], MASK.sum(1).tolist()
    acts = kf.Capture(resid=2, at=at)
    with torch.no_grad(), remote.session(max_length=S + 3) as s:
        s.step(hidden[:, :S], attention_mask=MASK, phase="prompt", capture=acts)
        for n in range(S, S + 3):
            s.step(hidden[:, n : n + 1], phase="generated", capture=acts)
    for row, n in enumerate(tokens):
        places = {"all": range(n + 3), "generated": range(n, n + 3), "prompt[-1]": [n - 1]}.get(str(at), [2, 7])
        columns = [S - n + place for place in places]
        assert acts.mask[row].sum() == len(columns)
        assert_near(acts["resid", 2][row, : len(columns)], expected[row, columns])


def test_columns_of_a_mask_stay_in_order_from_step_to_step() -> None:
    """A bool mask is of each step's own columns: what is counted in it begins again."""
    remote, hidden = flow("llama", TWO), random(2, 6, D)
    at = torch.tensor([[True, False, True], [False, True, False]])
    acts = kf.Capture({"resid": [1]}, at=at)
    with torch.no_grad(), remote.session(max_length=6) as s:
        for n in (0, 3):
            s.step(hidden[:, n : n + 3], capture=acts)
    expected = seen("llama", hidden, torch.ones(2, 6).long())["resid", 1]
    assert acts.mask.sum(1).tolist() == [4, 2]
    assert_near(acts["resid", 1][0], expected[0, [0, 2, 3, 5]])
    assert_near(acts["resid", 1][1, :2], expected[1, [1, 4]])


def test_a_capture_follows_its_session() -> None:
    remote, hidden = flow("llama", TWO), random(3, 6, D)
    acts = kf.Capture({"resid": [3]})
    with torch.no_grad(), remote.session(max_length=12) as s:
        first = s.step(hidden[:, :4], capture=acts)
        s.step(hidden[:, 4:6], capture=acts)
        s.rollback(5)
        assert acts.mask.sum().item() == 3 * 5
        s.reorder([2, 0, 0])
        again = s.step(hidden[[2, 0, 0], 5:6], capture=acts)
        value = acts["resid", 3]
        assert_bits(value[:, :4], first[[2, 0, 0]])
        assert_bits(value[:, 5:], again)
        with pytest.raises(SessionError, match="another session"), remote.session(max_length=4) as other:
            other.step(hidden[:, :1], capture=acts)
        with pytest.raises(SessionError, match="mean"):
            s.step(hidden[:, :1], capture=kf.Capture(resid=3, mean=True))
        with pytest.raises(KwargError, match="is a dict"):
            s.step(hidden[:, :1], capture={"resid": [3]})
    assert_near(
        kf.Capture.__getitem__(acts, ("resid", 3))[:, :4], residual(huggingface("llama"), hidden)[[2, 0, 0], :4]
    )


@every_family
def test_generate_captures(family: str) -> None:
    model, remote = huggingface(family), make_flow(family, TWO, own_ends=True)
    ours = kf.AutoDistributedModelForCausalLM.from_pretrained(remote.ends.folder, flow=remote)
    given = {"input_ids": ids(3, 5), "attention_mask": left_padded([0, 2, 1], 5), "max_new_tokens": 4}
    acts = kf.Capture(resid=[1], at="all")
    found = ours.generate(**given, capture=acts)
    kept: list[Tensor] = []
    hook = layers_of(model)[1].register_forward_hook(
        lambda _, __, out: kept.append(out[0] if isinstance(out, tuple) else out)
    )
    expected: Any = model.generate(**given)  # type: ignore[operator]
    hook.remove()
    assert torch.equal(found, expected)
    whole = torch.cat(kept, 1)
    for row, n in enumerate([5, 3, 4]):
        assert acts.mask[row].sum() == n + 3  # the last token is not run
        assert_near(acts["resid", 1][row, : n + 3], whole[row, 5 - n :])
    last = kf.Capture(resid=[1], at="prompt[-1]")
    twice = ours.generate(**given, num_return_sequences=2, do_sample=True, capture=last, steer={2: V})
    assert len(twice) == 6
    assert_near(last["resid", 1][:, 0], whole[:, 4].repeat_interleave(2, 0))


MODES = {
    "beams": {"num_beams": 3},
    "several returned": {"num_beams": 4, "num_return_sequences": 3, "return_dict_in_generate": True},
    "beams, sampled": {"num_beams": 3, "do_sample": True, "num_return_sequences": 2},
    "ending early": {"num_beams": 4, "num_return_sequences": 4, "eos_token_id": [*range(0, 64, 3)], "pad_token_id": 0},
    "prompt in chunks": {"num_beams": 2, "prefill_chunk_size": 3},
    "sampled": {"do_sample": True, "num_return_sequences": 3},
}


@pytest.mark.parametrize("at", ["all", "prompt[-1]", "generated", "prompt[1:]", [2, 6]])
@pytest.mark.parametrize("mode", quickly(["several returned"], MODES))
def test_captures_are_those_of_the_final_sequences(mode: str, at: Any) -> None:
    """Each final sequence, run anew without a cache by the Hugging Face model: its last token never was an input."""
    family = {"beams": "gpt2", "sampled": "bloom"}.get(mode, "llama")
    model, remote = huggingface(family), flow(family, TWO)
    ours: Any = kf.AutoDistributedModelForCausalLM.from_pretrained(remote.ends.folder, flow=remote)
    pads, length, new = (0, 2, 3), 7, 6
    given = {"input_ids": ids(3, length, seed=4), "attention_mask": left_padded(pads, length), "max_new_tokens": new}
    acts, options = kf.Capture(resid=[1], head=[3], at=at), MODES[mode]
    torch.manual_seed(0)
    out = ours.generate(**given, **options, capture=acts)
    sequences = out.sequences if options.get("return_dict_in_generate") else out
    assert isinstance(sequences, Tensor) and isinstance(out, Tensor) != bool(options.get("return_dict_in_generate"))
    torch.manual_seed(0)
    expected = model.generate(**given, **options)  # type: ignore[operator]
    assert torch.equal(sequences, expected if isinstance(expected, Tensor) else expected.sequences)
    each, ended, early = len(sequences) // 3, options.get("eos_token_id", []), 0
    for row, tokens in enumerate(sequences):
        pad = pads[row // each]
        ends = [n for n in range(length, len(tokens)) if int(tokens[n]) in ended]
        early += bool(ends) and ends[0] < length + new - 1
        ran = min([*ends, len(tokens) - 1])  # columns that were an input: all but the last token
        mask = left_padded([pad], ran)
        whole = seen(family, embedded(model, tokens[None, :ran], mask), mask)
        n = length - pad
        numbers = {"all": range(ran - pad), "generated": range(n, ran - pad), "prompt[-1]": [n - 1]}
        numbers["prompt[1:]"] = range(1, n)
        places = [number for number in numbers.get(str(at), at) if number < ran - pad]
        assert acts.mask[row].sum() == len(places), f"row {row}"
        columns = [pad + place for place in places]
        for key, name in ((("resid", 1), "resid"), (("head", 3), "head")):
            found = acts[key][row, : len(columns)].flatten(1)
            assert_near(found, whole[name, key[1]][0, columns], f"row {row}", small=not columns)
    assert early or mode != "ending early"


STOPS: dict[str, dict[str, Any]] = {
    "eos": {"eos_token_id": 9},
    "several": {"eos_token_id": [41, 9, 33]},
    "at once": {"eos_token_id": 4},  # row 2 begins with it
    "criterion": {"eos_token_id": 63, "stopping_criteria": [lambda ids, _: ids[:, -1] == 41]},
    "criterion, no eos": {"stopping_criteria": [lambda ids, _: ids[:, -1] == 41]},
    "by a config": {"generation_config": {"eos_token_id": [9, 33]}},
}


@pytest.mark.parametrize("new_alone", [False, True])
@pytest.mark.parametrize("stop", quickly(["at once", "criterion, no eos"], STOPS))
def test_what_comes_after_a_rows_end_is_captured_in_no_row(stop: str, new_alone: bool) -> None:
    """Each row alone has the same, and alone nothing comes after; also of a second turn, in columns of its own."""
    remote = make_flow("llama", TWO, own_ends=True)
    ours: Any = kf.AutoDistributedModelForCausalLM.from_pretrained(remote.ends.folder, flow=remote)
    given, how = ids(3, 5, seed=11), {"max_new_tokens": 8, "pad_token_id": 0, **STOPS[stop]}
    if config := how.pop("generation_config", None):
        how = {"generation_config": ours.generation_config.__class__(**how, **config)}

    def run(rows: Tensor, at: Any) -> tuple[Tensor, kf.Capture]:
        acts, given = kf.Capture(resid=[2], head=[1], at=at), {"attention_mask": torch.ones_like(rows)}
        if new_alone:
            given["cache"] = ours(rows[:, :3], use_cache=True).past_key_values
            rows = rows[:, 3:]
        return ours.generate(rows, **given, **how, capture=acts)[:, rows.shape[1] :], acts

    early = 0
    for at, before in (("generated", 0), ("all", 2 if new_alone else 5)):
        out, acts = run(given, at)
        for row in range(3):
            alone, own = run(given[row : row + 1], at)
            early += alone.shape[1] < 8
            count = alone.shape[1] - 1 + before
            assert torch.equal(out[row, : alone.shape[1]], alone[0])
            assert acts.mask[row].sum() == count and own.mask.shape == (1, count)
            assert own["resid", 2].shape == (1, count, D) and own["head", 1].shape == (1, count, 4, D // 4)
            assert_close(acts["resid", 2][row, :count], own["resid", 2][0], small=not count)
    assert early


def test_nothing_generated_went_through_the_layers() -> None:
    """A step that has no such position brings (batch, 0, …), in every way of generating and in sessions."""
    remote = flow("llama", TWO)
    ours: Any = kf.AutoDistributedModelForCausalLM.from_pretrained(remote.ends.folder, flow=remote)
    for how, rows in (({}, 2), ({"num_beams": 2}, 2), ({"num_return_sequences": 3, "do_sample": True}, 6)):
        acts = kf.Capture(resid=[1], head=[2], pattern=[0], at="generated")
        ours.generate(ids(2, 4), max_new_tokens=1, **how, capture=acts)
        assert acts["resid", 1].shape == (rows, 0, D) and acts.mask.shape == (rows, 0) and "(batch, pos)" in repr(acts)
        assert acts["head", 2].shape == (rows, 0, 4, D // 4) and acts["pattern", 0].shape == (rows, 0, 4, 4)
        assert not acts.nbytes and acts._repr_html_()


@pytest.mark.parametrize("at", ["all", [30], "prompt[-1]"], ids=str)
def test_captures_of_beams_where_all_columns_are_taken_again(at: Any) -> None:
    """longrope changes its scale at 32: what went on has that, what had ended what was before."""
    model, remote = huggingface("phi3_longrope"), flow("phi3_longrope", TWO)
    ours: Any = kf.AutoDistributedModelForCausalLM.from_pretrained(remote.ends.folder, flow=remote)
    given = {"input_ids": ids(2, 29, seed=4), "attention_mask": torch.ones(2, 29).long(), "max_new_tokens": 8}
    ended = [*range(1, 64, 3)]
    acts, lengths = kf.Capture(resid=[L - 1], at=at), set[bool]()
    sequences = ours.generate(
        **given, num_beams=4, num_return_sequences=4, eos_token_id=ended, pad_token_id=0, capture=acts
    )
    for row, tokens in enumerate(sequences):
        ran = next((n for n in range(29, len(tokens)) if int(tokens[n]) in ended), len(tokens) - 1)
        lengths.add(ran > 32)
        mask = torch.ones(1, ran).long()
        whole = residual(model, embedded(model, tokens[None, :ran], mask), attention_mask=mask)[0]
        columns = [c for c in {"all": range(ran), "prompt[-1]": [28]}.get(str(at), at) if c < ran]
        assert acts.mask[row].sum() == len(columns), f"row {row}"
        assert_close(acts["resid", L - 1][row, : len(columns)], whole[columns], f"row {row}", small=not columns)
    assert lengths == {True, False}


def embedded(model: Any, tokens: Tensor, mask: Tensor) -> Tensor:
    """What goes into the first layer, positions counted as generate does."""
    kept: list[Tensor] = []
    hook = layers_of(model)[0].register_forward_pre_hook(lambda _, args: kept.append(args[0]))
    positions = {} if model.config.model_type == "bloom" else {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    model(tokens, attention_mask=mask, **positions)
    hook.remove()
    return kept[0]


def test_a_capture_of_beams_is_new_and_stays_as_it_is() -> None:
    remote = flow("llama", TWO)
    ours: Any = kf.AutoDistributedModelForCausalLM.from_pretrained(remote.ends.folder, flow=remote)
    acts, given = kf.Capture(resid=[1]), {"max_new_tokens": 3, "num_beams": 2}
    settings = ours.generation_config.__class__(**given)
    ours.generate(ids(2, 4), generation_config=settings, capture=acts)
    assert not settings.return_dict_in_generate and acts["resid", 1].shape == (2, 6, D)
    with Requests(remote) as requests:
        with pytest.raises(SessionError, match="make a new one"):
            ours.generate(ids(2, 4), **given, capture=acts)
        with pytest.raises(UnsupportedError, match="which beams it keeps"):
            ours.generate(ids(2, 4), **given, capture=kf.Capture(resid=[1]), custom_generate=lambda *a, **k: None)
    assert not len(requests)


# ---- what is wrong


def test_what_is_wrong_is_refused() -> None:
    remote, hidden = flow("llama", TWO), random(2, 3, D)
    with pytest.raises(KwargError, match="Did you mean 'resid'"):
        kf.Capture(residual=[1])
    for theirs, ours in {"resid_post": "resid", "blocks.1.hook_attn_out": "attn", "hook_z": "head"}.items():
        with pytest.raises(KwargError, match=f"no point '{theirs}'.*Did you mean '{ours}'"):
            kf.Capture({theirs: [1]})
    with pytest.raises(KwargError, match=r"mlp\.down_proj\.in\"\.$"):  # nothing here is what it is there
        kf.Capture(hook_scale=[1])
    with pytest.raises(KwargError, match="say what"):
        kf.Capture()
    with pytest.raises(SpanError, match="layer 0"):
        kf.Capture(embed=[1])
    with Requests(remote) as requests:
        with pytest.raises(SpanError, match="layer 7"):
            remote.capture({"resid": [7]}, hidden)
        with pytest.raises(KwargError, match="flow.capture"):
            remote(hidden, capture=kf.Capture(resid=[1]))
        with pytest.raises(KwargError, match="row 0 has 3 tokens"):
            remote.capture({"resid": [1]}, hidden, at=[3])
        with pytest.raises(KwargError, match="at least one row"):
            remote.capture({"resid": [1]}, hidden[:0])
        assert len(requests) == 0
    _, acts = remote.capture({"resid": [1]}, hidden)
    assert_bits(dict(acts)["resid", 1], acts["resid", 1])
    with pytest.raises(KeyError, match="was not captured"):
        acts["resid", 2]
    with pytest.raises(KeyError, match=r"acts\[point, layer\] has \('resid', 1\)"):
        acts["resid"]  # type: ignore[index]
    assert "resid=[1]" in repr(acts) and "(2, 3)" in repr(acts)
    with pytest.raises(SessionError, match="captured nothing"):
        kf.Capture(resid=[1])["resid", 1]


def test_what_cannot_be_captured_is_told() -> None:
    remote, hidden, spec = flow("llama", TWO), random(2, 3, D), span("llama", 0, L)
    wrong: list[Callable[[], Any]] = [
        lambda: asyncio.run(remote.acall(hidden, capture=kf.Capture(resid=[1]))),
        lambda: spec.blocks[1](spec.params[1], hidden, capture=kf.Capture(resid=[1])),
        lambda: kf.chain(spec.blocks)(spec.params, hidden, capture=kf.Capture(resid=[1])),
        lambda: remote.capture(["resid"], hidden),  # type: ignore[arg-type]
        lambda: kf.Capture({"resid": [1]}, resid=[2]),
        lambda: kf.Capture(resid=[1], mean=1),  # type: ignore[arg-type]
        lambda: remote.capture({"resid": [1]}, None),  # type: ignore[arg-type]
        lambda: remote.capture({"resid": [1]}, hidden, at="prompt[5:9]"),
    ]
    with Requests(remote) as requests:
        for one in wrong:
            with pytest.raises(KwargError):
                one()
        assert len(requests) == 0


def test_a_mean_does_not_overflow_in_float16() -> None:
    x = torch.full((2, 3, D), 30000.0, dtype=torch.float16)
    at = kf.axes(torch.tensor([[0, 1, 2], [-1, 0, 1]]), "batch seq")
    assert_bits(take(x, {"point": "resid", "count": 3, "mean": True, "at": at}, 4), x[:, :1])


def test_a_prompt_that_goes_on_after_its_end_was_captured() -> None:
    hidden = random(2, 4, D)
    with torch.no_grad(), flow("llama", TWO).session(8) as s:
        s.step(hidden[:, :2], phase="prompt", capture=kf.Capture(resid=[1], at="prompt[-1]"))
        with pytest.raises(SessionError, match="goes on after"):
            s.step(hidden[:, 2:], phase="prompt")


def test_forward_with_a_cache_takes_edits_and_captures() -> None:
    remote = make_flow("llama", TWO, own_ends=True)
    ours: Any = kf.AutoDistributedModelForCausalLM.from_pretrained(remote.ends.folder, flow=remote).requires_grad_(
        False
    )
    given, acts = ids(2, 4), kf.Capture(resid=[1])
    expected = ours(given, edit=[kf.add(V, 1)]).logits
    out = ours(given, use_cache=True, edit=[kf.add(V, 1)], capture=acts)
    assert_close(out.logits, expected)
    assert acts["resid", 1].shape == (2, 4, D) and out.past_key_values is not None
    for edit in (kf.add(V.clone().requires_grad_(), 1), kf.add(V, 1, scale=torch.tensor(1.0, requires_grad=True))):
        assert ours(given, use_cache=True, edit=edit).logits.requires_grad


def test_a_prompt_in_chunks_or_after_a_cache_is_known() -> None:
    remote = make_flow("llama", TWO, own_ends=True)
    ours: Any = kf.AutoDistributedModelForCausalLM.from_pretrained(remote.ends.folder, flow=remote)
    prompt, end = ids(2, 6), kf.add(3 * V, 1, at="prompt[-1]")
    expected = ours.generate(prompt, max_new_tokens=4, edit=end)
    assert torch.equal(ours.generate(prompt, max_new_tokens=4, prefill_chunk_size=4, edit=end), expected)
    again = []
    for new_alone in (False, True):
        first = ours.generate(prompt, max_new_tokens=2, return_dict_in_generate=True, edit=end)
        whole = torch.cat([first.sequences, ids(2, 3, seed=5)], 1)
        more = {"attention_mask": torch.ones_like(whole), cache_name(huggingface("llama")): first.past_key_values}
        edit = kf.add(5 * V, 1, at="generated")
        later = ours.generate(whole[:, 7 if new_alone else 0 :], max_new_tokens=4, **more, edit=edit)
        again.append(later[:, -4:])
    assert torch.equal(*again)


def test_guidance_runs_a_sequence_of_its_own() -> None:
    """Its second sequence has no part in the prompt's numbers: they are refused there, not taken from the first."""
    remote = make_flow("llama", TWO, own_ends=True)
    ours: Any = kf.AutoDistributedModelForCausalLM.from_pretrained(remote.ends.folder, flow=remote)
    given = {"max_new_tokens": 3, "guidance_scale": 1.5}
    assert ours.generate(ids(1, 6), **given, edit=kf.add(V, 1)).shape == (1, 9)
    for at in ("prompt[-1]", "generated"):
        for named in ({"edit": [kf.add(V, 1), kf.add(V, 1, at=at)]}, {"capture": kf.Capture({"resid": [1]}, at=at)}):
            with pytest.raises(KwargError, match=r"guidance_scale=….*give at='all' or a list of token positions"):
                ours.generate(ids(1, 6), **given, **named)
    assert ours.generate(ids(1, 6), **given, edit=kf.add(V, 1, at=[2, 5])).shape == (1, 9)
    plain = {**given, "guidance_scale": 1.0}
    assert ours.generate(ids(1, 6), **plain, edit=kf.add(V, 1, at="prompt[-1]")).shape == (1, 9)
