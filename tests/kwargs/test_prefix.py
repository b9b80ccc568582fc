"""prefix_kv, against Hugging Face's own forward with a cache that is filled already and a mask with ones before."""

# B batch, S seq, P prefix, D hidden, L layers, H key/value head; B == L == P == 4

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

import kwflow as kf
from kwflow.blocks.precision import LiftFloat32
from kwflow.blocks.span import with_block_fn
from kwflow.errors import AxesError, CallerError, KwargError, SessionError, ShapeError
from kwflow.research.verify import exact_match
from kwflow.wire import loop
from tests.families.marks import marks
from tests.families.table import IDS, MASK, NOT_IN_FLOAT64, PADS, REAL, B, D, L, S, crops, distributed, positions
from tests.oracle import assert_bits, assert_close, assert_near, cache_name, residual
from tests.oracle.tiny import EACH, TWO, Requests, derivable, flow, folder, huggingface, ids, make_flow, random, span

P = 4
ONES = torch.ones(B, P, dtype=torch.long)
QUICK = ["llama", "gpt2"]
OTHERS = [
    "mistral",
    "deepseek_v3",
    "bloom",
    "gemma2",
    "falcon_alibi",
    "falcon_multi_query",
    "mpt",
    "opt",
    "gpt_neo",
    "gptj",
    "gpt_bigcode",
]


def rows(quick: list[str], slow: list[str]) -> Any:
    marked = [*quick, *(pytest.param(n, marks=marks(n, ())) for n in slow)]
    return pytest.mark.parametrize("name", marked)


def prefix_of(name: str, batch: int = B, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Random keys and values of every layer, "layer batch kv_head prefix head_dim"."""
    sizes = span(name, 0, L).schema.sizes
    widths = {"k": sizes.get("key_dim", sizes["head_dim"]), "v": sizes.get("value_dim", sizes["head_dim"])}
    shape = (L, batch, sizes["kv_head"], P)
    return {key: random(*shape, width, seed=seed + n, dtype=dtype) for n, (key, width) in enumerate(widths.items())}


def filled(prefix: dict[str, Tensor], batch: int = B) -> Any:
    """transformers' own cache with the prefix in it; gradients reach the prefix."""
    from transformers import DynamicCache

    cache = DynamicCache()
    for layer, (k, v) in enumerate(zip(prefix["k"], prefix["v"], strict=True)):
        cache.update(k.expand(batch, -1, -1, -1), v.expand(batch, -1, -1, -1), layer)
    return cache


def expected(name: str, x: dict[str, Tensor], prefix: dict[str, Tensor], model: Any = None) -> Tensor:
    """The residual of transformers' own forward behind a filled cache."""
    given = {key: value for key, value in x.items() if key != "hidden"}
    if "attention_mask" in given:
        given["attention_mask"] = torch.cat([ONES, given["attention_mask"]], 1)
    model = huggingface(name) if model is None else model
    return residual(model, x["hidden"], cache=filled(prefix, len(x["hidden"])), **given)


def inputs(name: str, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return flow(name, TWO, dtype).inputs({"input_ids": IDS, "attention_mask": MASK}, prefix=P)


@functools.cache
def weights(dtype: torch.dtype = torch.float32) -> Tensor:
    return random(B, S, D, seed=9, dtype=dtype) * MASK[..., None].to(dtype)


# ---- values


@rows(QUICK, OTHERS)
def test_a_prefix_is_a_filled_cache(name: str) -> None:
    """Left pads 0, 1, 3 and 8; without mask and positions; whole, by worker and by rows; exact_match knows it."""
    x, prefix, remote = inputs(name), prefix_of(name), flow(name, TWO)
    theirs, ours = expected(name, x, prefix), remote(**x, prefix_kv=prefix)
    assert_bits(ours, theirs, "two workers")
    assert (ours - remote(**x))[REAL].abs().max() > 0.01
    bare = {"hidden": x["hidden"]}
    assert_bits(remote(**bare, prefix_kv=prefix), expected(name, bare, prefix), "no mask")
    cut = flow(name, EACH).options(batch_tokens=3 * S)(**x, prefix_kv=prefix)
    assert_near(cut[REAL], theirs[REAL], "each layer on a worker, 3 rows and 1")
    for reference in (huggingface(name), kf.stream(folder(name))):
        assert exact_match(remote, reference, **x, prefix_kv=prefix, steer={2: random(D)}).bitwise
    part = {key: tensor[1:3] for key, tensor in prefix.items()}
    assert exact_match(remote[1:3], huggingface(name), **x, prefix_kv=part).bitwise


def test_every_form_is_the_same_prefix() -> None:
    """One for all rows, axes left out, layer by layer, Hugging Face's tuples and cache, blocks by hand."""
    x, one, remote = inputs("llama"), prefix_of("llama", batch=1), flow("llama", TWO)
    theirs = expected("llama", x, one)
    no_batch = {key: kf.axes(t[:, 0], "layer kv_head prefix head_dim") for key, t in one.items()}
    by_layer = {layer: {key: t[layer] for key, t in one.items()} for layer in range(L)}
    pairs = tuple(zip(one["k"], one["v"], strict=True))
    forms: list[dict[str, Any]] = [
        {"prefix_kv": one},
        {"prefix_kv": {key: t.expand(-1, B, -1, -1, -1) for key, t in one.items()}},
        {"prefix_kv": no_batch},
        {"prefix_kv": by_layer},
        kf.per_layer([{"prefix_kv": by_layer[layer]} for layer in range(L)]),
        {"layer_past": pairs},
        {"layer_past": filled(one, 1), "prefix_kv": None},
    ]
    for form in forms:
        assert_bits(remote(**x, **form), theirs, str(list(form)))
    spec, out, given = span("llama", 0, L), x["hidden"], {k: v for k, v in x.items() if k != "hidden"}
    assert_bits(kf.chain(spec.blocks)(spec.params, out, **given, prefix_kv=one), theirs, "chain")
    for block in spec.blocks:
        mine = {"prefix_kv": by_layer[block.layer]} if block.layer % 2 else {"layer_past": [pairs[block.layer]]}
        out = block(block.params, out, **given, **mine)
    assert_bits(out, theirs, "block by block")
    same = {key: kf.axes(t[0, 0], "kv_head prefix head_dim") for key, t in one.items()}
    repeated = {key: t[:1].expand(L, -1, -1, -1, -1) for key, t in one.items()}
    assert_bits(remote(**x, prefix_kv=same), expected("llama", x, repeated), "the same for all layers")


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_row_is_what_it_is_alone(name: str) -> None:
    """Each row its own prefix, and edits, prompts and captures at tokens of its own."""
    prefix, remote, prompts, v = prefix_of(name), flow(name, TWO), random(L, 1, 2, D, seed=3), random(D, seed=4)
    more = {"prompts": prompts, "edit": kf.add(v, layers=1, at=[1, 3])}
    out, acts = remote.capture({"resid": [1]}, **inputs(name), prefix_kv=prefix, at="prompt[-1]", **more)
    for row, pads in enumerate(PADS):
        x = remote.inputs(IDS[row : row + 1, pads:], prefix=P)
        mine = {key: t[:, row : row + 1] for key, t in prefix.items()}
        alone, own = remote.capture({"resid": [1]}, **x, prefix_kv=mine, at="prompt[-1]", **more)
        assert_near(out[row : row + 1, pads:], alone, f"row {row}")
        assert_near(acts["resid", 1][row], own["resid", 1][0], f"capture of row {row}")
    plain = remote(**inputs(name), prefix_kv=prefix)
    columns = torch.zeros(B, S, D)
    for row, pads in enumerate(PADS):
        columns[row, [pads + 1, pads + 3]] = v
    steered = remote(**inputs(name), prefix_kv=prefix, steer={1: kf.axes(columns, "batch seq hidden")})
    edited = remote(**inputs(name), prefix_kv=prefix, edit=more["edit"])
    assert_close(edited, steered, "at=[1, 3]")
    assert (edited - plain).abs().max() > 0.1


@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_a_4d_mask_covers_the_call_s_own_columns(name: str) -> None:
    x, prefix, remote = inputs(name), prefix_of(name), flow(name, TWO)
    seen = torch.ones(S, S, dtype=torch.bool).tril() & REAL[:, None, None, :] | torch.eye(S, dtype=torch.bool)
    bias = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    if name == "bloom":  # whose ALiBi counts columns where there is no 2-D mask, as transformers does
        x, seen, bias = {"hidden": x["hidden"]}, seen[:1], bias[:1]
    theirs = expected(name, x, prefix)
    given = {key: value for key, value in x.items() if key != "attention_mask"}
    for mask in (seen, bias):
        assert_close(remote(**given, attention_mask=mask, prefix_kv=prefix)[REAL], theirs[REAL], str(mask.dtype))
    with remote.session(P + S) as session, torch.no_grad():
        first, then = ({key: t[:, at] for key, t in given.items()} for at in (slice(0, 5), slice(5, None)))
        cut = session.step(**first, attention_mask=seen[..., :5, :5], prefix_kv=prefix)
        assert_near(cut[REAL[:, :5]], theirs[:, :5][REAL[:, :5]], "first step")
        last = session.step(**then, attention_mask=seen[..., 5:, :])
        assert_near(last[REAL[:, 5:]], theirs[:, 5:][REAL[:, 5:]], "second step")


def test_a_4d_mask_has_a_gradient_beside_a_prefix() -> None:
    """In float64: of its own columns only."""
    dtype, lowest = torch.float64, torch.finfo(torch.float64).min
    x, prefix = inputs("llama", dtype), prefix_of("llama", dtype=dtype)
    given = {key: value for key, value in x.items() if key != "attention_mask"}
    seen = torch.ones(S, S, dtype=torch.bool).tril() & REAL[:, None, None, :] | torch.eye(S, dtype=torch.bool)
    ours, theirs = (torch.where(seen, random(B, 4, S, S, dtype=dtype), lowest).requires_grad_() for _ in range(2))
    (flow("llama", TWO, dtype)(**given, attention_mask=ours, prefix_kv=prefix) * weights(dtype)).sum().backward()
    whole = torch.cat([torch.zeros(B, 4, S, P, dtype=dtype), theirs], -1)
    with LiftFloat32():
        out = residual(derivable("llama"), cache=filled(prefix), attention_mask=whole, **given)
        (out * weights(dtype)).sum().backward()
    assert_close(ours.grad, theirs.grad)  # type: ignore[arg-type]


def test_a_worker_s_own_block_fn_has_the_prefix_inside() -> None:
    def louder(params, hidden, /, *, block, gain: float = 1.0):
        return hidden + gain * (block(params, hidden) - hidden)

    def declares(params, hidden, /, *, block, prefix_kv: dict):
        return block(params, hidden)

    x, prefix = inputs("llama"), prefix_of("llama")
    remote = flow("llama", TWO, block_fn=louder)
    assert_close(remote(**x, prefix_kv=prefix), expected("llama", x, prefix))
    assert (remote(**x, prefix_kv=prefix, gain=2.0) - expected("llama", x, prefix)).abs().max() > 0.1
    with pytest.raises(KwargError, match="'prefix_kv', which is inside `block`"):
        with_block_fn(span("llama", 0, 1), declares, "x")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_prefix_is_cast_where_it_acts(dtype: torch.dtype) -> None:
    remote, x = flow("llama", TWO, dtype), inputs("llama", dtype)
    prefix = {key: t.requires_grad_() for key, t in prefix_of("llama", dtype=torch.float32).items()}
    cast = {key: t.detach().to(dtype) for key, t in prefix.items()}
    out = remote(**x, prefix_kv=prefix)
    assert_bits(out, remote(**x, prefix_kv=cast))
    out.float().sum().backward()
    assert all(t.grad is not None and t.grad.dtype is torch.float32 for t in prefix.values())


# ---- derivatives


@rows(["llama"], ["mistral", "gpt2", "bloom", "deepseek_v3", "gemma2"])
@pytest.mark.parametrize("batch", [1, B])
def test_gradients_are_those_through_the_cache(name: str, batch: int) -> None:
    """Of k, v and hidden; one prefix for all rows gets the sum. Whole, by layers, by rows; backward twice."""
    x = inputs(name)
    theirs = {key: t.requires_grad_() for key, t in prefix_of(name, batch).items()}
    hidden = x["hidden"].clone().requires_grad_()
    (expected(name, {**x, "hidden": hidden}, theirs) * weights()).sum().backward()
    for cuts, tokens in ((TWO, B * S), (EACH, 3 * S)):
        ours = {key: t.requires_grad_() for key, t in prefix_of(name, batch).items()}
        entered = x["hidden"].clone().requires_grad_()
        out = flow(name, cuts).options(batch_tokens=tokens)(**{**x, "hidden": entered}, prefix_kv=ours)
        (out * weights()).sum().backward(retain_graph=True)
        for what, one, other in (("k", ours["k"], theirs["k"]), ("v", ours["v"], theirs["v"]), ("h", entered, hidden)):
            assert_near(one.grad, other.grad, f"{cuts} {what}")  # type: ignore[arg-type]
        first = {key: t.grad.clone() for key, t in ours.items()}  # type: ignore[union-attr]
        (out * weights()).sum().backward()
        for key, t in ours.items():
            assert_bits(t.grad, 2 * first[key], "twice")  # type: ignore[arg-type]


def test_a_layer_past_s_own_tensors_get_gradients() -> None:
    x = inputs("llama")
    pairs = [(k.clone().requires_grad_(), v.clone()) for k, v in zip(*prefix_of("llama").values(), strict=True)]
    (flow("llama", TWO)(**x, layer_past=pairs) * weights()).sum().backward()
    theirs = {key: t.requires_grad_() for key, t in prefix_of("llama").items()}
    (expected("llama", x, theirs) * weights()).sum().backward()
    assert theirs["k"].grad is not None
    for layer, (k, v) in enumerate(pairs):
        assert_close(k.grad, theirs["k"].grad[layer], f"layer {layer}")  # type: ignore[arg-type]
        assert v.grad is None


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # vmap of deepseek's router, locally too
@rows([], ["llama", "gpt2", "bloom", "mistral", "deepseek_v3"])
def test_derivatives_of_any_order(name: str) -> None:
    """grad, jvp, vmap, both second orders and plain double backward, in float64."""
    assert name not in NOT_IN_FLOAT64
    dtype, remote, model = torch.float64, flow(name, TWO, torch.float64), derivable(name)
    x, both = inputs(name, dtype), prefix_of(name, dtype=dtype)
    w = weights(dtype)

    def ours(k: Tensor, v: Tensor) -> Tensor:
        return (remote(**x, prefix_kv={"k": k, "v": v}) * w).sum()

    def local(k: Tensor, v: Tensor) -> Tensor:
        with LiftFloat32(), sdpa_kernel(SDPBackend.MATH):
            return (expected(name, x, {"k": k, "v": v}, model) * w).sum()

    k, v = both["k"], both["v"]
    turns, several = (torch.sin(3 * k), torch.cos(2 * v)), (torch.stack([k, -k]), torch.stack([v, 2 * v]))

    def twice(fn: Callable[..., Tensor]) -> Any:
        leaves = [t.clone().requires_grad_() for t in (k, v)]
        first = torch.autograd.grad(fn(*leaves), leaves, create_graph=True)
        return torch.autograd.grad(sum((g * t).sum() for g, t in zip(first, turns, strict=True)), leaves)

    transforms: dict[str, Callable[[Callable[..., Tensor]], Any]] = {
        "grad": lambda fn: grad(fn, argnums=(0, 1))(k, v),
        "jvp": lambda fn: jvp(fn, (k, v), turns)[1],
        "vmap": lambda fn: vmap(fn)(*several),
        "vmap of k alone": lambda fn: vmap(fn, in_dims=(0, None))(several[0], v),
        "vmap of v alone": lambda fn: vmap(fn, in_dims=(None, 0))(k, several[1]),
        "vmap of grad": lambda fn: vmap(grad(fn))(*several),
        "reverse over reverse": lambda fn: grad(lambda u: (grad(fn)(u, v) * turns[0]).sum())(k),
        "forward over reverse": lambda fn: jvp(grad(fn, argnums=1), (k, v), turns)[1],
        "double backward": twice,
    }
    for what, transform in transforms.items():
        # transformers' own deepseek cannot be mapped over v alone
        wanted = torch.stack([local(k, one) for one in several[1]]) if what == "vmap of v alone" else transform(local)
        found = transform(ours)
        pairs = zip(found, wanted, strict=True) if isinstance(found, tuple) else [(found, wanted)]
        for one, other in pairs:
            assert_close(one, other, what)


def test_the_slope_is_that_of_differences() -> None:
    """Of a few numbers of k and v, against central differences in float64."""
    remote, x = flow("gpt2", TWO, torch.float64), inputs("gpt2", torch.float64)
    both = {key: t.requires_grad_() for key, t in prefix_of("gpt2", dtype=torch.float64).items()}
    (remote(**x, prefix_kv=both) * weights(torch.float64)).sum().backward()
    for key, at in (("k", (0, 1, 2, 3, 0)), ("v", (3, 2, 0, 1, 5)), ("k", (2, 3, 3, 0, 7))):
        values = []
        for step in (1e-5, -1e-5):
            moved = {name: t.detach().clone() for name, t in both.items()}
            moved[key][at] += step
            values.append((remote(**x, prefix_kv=moved) * weights(torch.float64)).sum())
        slope, gradient = (values[0] - values[1]) / 2e-5, both[key].grad
        assert gradient is not None and gradient[at].abs() > 1e-4
        assert (slope - gradient[at]).abs() < 1e-6 * max(1.0, slope.abs().item())


# ---- sessions


@rows(["llama", "gpt2", "mistral"], ["bloom", "gemma2", "deepseek_v3", "opt", "mpt"])
@torch.no_grad()
def test_a_session_goes_on_from_its_prefix(name: str) -> None:
    """A prefill in two steps and ten decodes, left pads 0, 1, 3 and 8, against transformers' own cache."""
    model, remote, prefix = huggingface(name), flow(name, TWO), prefix_of(name)
    cache, steps, exact = filled(prefix), 10, not crops(name)
    x, first = inputs(name), S - 3
    with remote.session(P + S + steps) as session:
        for step in range(steps + 2):
            start = (0, first)[min(step, 1)] if step < 2 else S + step - 2
            stop = (first, S)[step] if step < 2 else start + 1
            mask = torch.cat([ONES, MASK, torch.ones(B, steps, dtype=torch.long)], 1)[:, : P + stop]
            tokens = IDS[:, start:stop] if step < 2 else ids(B, 1, seed=step)
            place = {key: t + 0 for key, t in positions(model, mask, stop - start).items()}
            out = model(
                input_ids=tokens, attention_mask=mask, use_cache=True, **place, **{cache_name(model): cache}
            ).logits
            if step < 2:
                given = {key: t[:, start:stop] for key, t in x.items()} | {"attention_mask": MASK[:, :stop]}
            else:
                given = session.inputs(tokens)
            ours = remote.head(session.step(**given, **({} if step else {"prefix_kv": prefix})))
            keep = REAL[:, start:stop] if step < 2 else torch.ones(B, 1, dtype=torch.bool)
            (assert_bits if exact else assert_close)(ours[keep], out[keep], f"step {step}")
            assert (session.position, session.prefix) == (stop, P)


@torch.no_grad()
def test_a_session_begins_again_with_or_without_a_prefix() -> None:
    prefix, other, remote = prefix_of("gpt2"), prefix_of("gpt2", seed=7), flow("gpt2", TWO)
    x, plain = inputs("gpt2"), remote.inputs({"input_ids": IDS, "attention_mask": MASK})
    tokens = ids(B, 1, seed=5)

    def run(session: Any, given: dict[str, Tensor], **first: Any) -> list[Tensor]:
        return [session.step(**given, **first), session.step(**session.inputs(tokens))]

    wanted = []
    for given, first in ((x, {"prefix_kv": prefix}), (plain, {}), (x, {"prefix_kv": other})):
        with remote.session(P + S + 1) as session:
            wanted.append(run(session, given, **first))
    with remote.session(P + S + 1) as session:
        assert "prefix" not in repr(session)
        for number, (given, first) in enumerate(((x, {"prefix_kv": prefix}), (plain, {}), (x, {"prefix_kv": other}))):
            session.rollback(0)
            assert (session.position, session.prefix) == (0, 0)
            for ours, theirs in zip(run(session, given, **first), wanted[number], strict=True):
                assert_bits(ours, theirs, f"begun {number + 1} times")
        assert f"columns {P + S + 1} of {P + S + 1} with a prefix of {P}" in repr(session)
        session.rollback(S)
        assert_bits(session.step(**session.inputs(tokens)), wanted[2][1], "the last step again")
        with pytest.raises(SessionError, match=rf"prefix_kv stands before column 0.*columns 0:{S + 1}.*first step"):
            session.step(random(B, 1, D), prefix_kv=prefix)


@torch.no_grad()
def test_rows_are_reordered_with_their_prefix() -> None:
    """As beams do; positions that were given go on, too."""
    prefix, order, remote, tokens = prefix_of("llama"), [2, 2, 0, 3], flow("llama", TWO), ids(B, 1, seed=5)
    x = inputs("llama")
    x["position_ids"] = x["position_ids"] + torch.tensor([[0], [5], [2], [1]])
    with remote.session(P + S + 1) as session:
        session.step(**x, prefix_kv=prefix)
        session.reorder(order)
        ours = session.step(**session.inputs(tokens))
    with remote.session(P + S + 1) as session:
        session.step(**{n: t[order] for n, t in x.items()}, prefix_kv={n: t[:, order] for n, t in prefix.items()})
        assert_bits(ours, session.step(**session.inputs(tokens)))


def test_max_length_has_to_hold_the_prefix() -> None:
    prefix, hidden = prefix_of("llama"), random(B, S, D)
    with flow("llama", TWO).session(P + S - 1) as session:
        with pytest.raises(SessionError, match=rf"columns 0:{S} behind a prefix of {P} do not fit max_length {S + 3}"):
            session.step(hidden, prefix_kv=prefix)
        assert (session.position, session.prefix, [stage.steps for stage in session.workers]) == (0, 0, [[], []])
        session.step(hidden)
    with flow("llama", TWO).session(P + S) as session:
        session.step(hidden, prefix_kv=prefix)
        with pytest.raises(SessionError, match=rf"columns {S}:{S + 1} behind a prefix of {P} do not fit"):
            session.step(random(B, 1, D))
        session.max_length += 1  # a client that counts wrongly
        with pytest.raises(
            SessionError, match=rf"behind a prefix of {P} do not fit max_length {P + S} .*said by worker"
        ):
            session.step(random(B, 1, D))


# ---- Hugging Face's classes


@torch.no_grad()
def greedy(name: str, prefix: dict[str, Tensor], tokens: int) -> Tensor:
    """transformers' own forward over a filled cache, one token after the other."""
    model, cache, new, out = huggingface(name), filled(prefix), IDS, IDS
    for step in range(tokens):
        mask = torch.cat([ONES, MASK, torch.ones(B, step, dtype=torch.long)], 1)
        place = positions(model, mask, new.shape[1])
        call = {"input_ids": new, "attention_mask": mask, cache_name(model): cache, **place}
        new = model(**call, use_cache=True).logits[:, -1:].argmax(-1)
        out = torch.cat([out, new], 1)
    return out


@rows(["llama"], ["gpt2", "opt", "mistral", "bloom"])
def test_generate_goes_on_from_a_prefix(name: str) -> None:
    """Greedy, in chunks, resumed; beams expand its rows, and each is what it is alone."""
    model, prefix = distributed(name, torch.float32), prefix_of(name)
    call = {"input_ids": IDS, "attention_mask": MASK, "do_sample": False}
    theirs = greedy(name, prefix, 6)
    assert_bits(model.generate(**call, prefix_kv=prefix, max_new_tokens=6), theirs, "greedy")
    pairs = list(zip(*prefix.values(), strict=True))
    assert_bits(model.generate(**call, layer_past=pairs, max_new_tokens=6, prefill_chunk_size=5), theirs, "chunks")
    begun = model.generate(**call, prefix_kv=prefix, max_new_tokens=2, return_dict_in_generate=True)
    mask = torch.cat([MASK, torch.ones(B, 2, dtype=torch.long)], 1)
    held = {cache_name(huggingface(name)): next(v for v in begun.values() if hasattr(v, "session"))}
    on = {"input_ids": begun.sequences, "attention_mask": mask, **held, "do_sample": False}
    with pytest.raises(SessionError, match="generate: prefix_kv stands before column 0"):
        model.generate(**on, prefix_kv=prefix, max_new_tokens=4)
    assert_bits(model.generate(**on, max_new_tokens=4), theirs, "resumed")
    several = model.generate(**call, prefix_kv=prefix, max_new_tokens=6, num_beams=3, num_return_sequences=2)
    for row, pads in enumerate(PADS):
        mine = {key: t[:, row : row + 1] for key, t in prefix.items()}
        own = {"input_ids": IDS[row : row + 1, pads:], "do_sample": False, "num_beams": 3, "num_return_sequences": 2}
        alone = model.generate(**own, prefix_kv=mine, max_new_tokens=6)
        assert_bits(several[2 * row : 2 * row + 2, S:], alone[:, -6:], f"beams of row {row}")


@rows(["gpt2", "opt"], ["llama", "bloom"])
def test_forward_places_its_tokens_behind_the_prefix(name: str) -> None:
    """Positions that nobody gave, of columns or (opt) of tokens, as transformers' forward over a filled cache."""
    model, local, prefix = distributed(name, torch.float32), huggingface(name), prefix_of(name)
    for mask in (MASK, None):
        whole = None if mask is None else torch.cat([ONES, mask], 1)
        with torch.no_grad():
            theirs = local(input_ids=IDS, attention_mask=whole, **{cache_name(local): filled(prefix)}).logits
            for use_cache in (False, True):
                ours = model(input_ids=IDS, attention_mask=mask, prefix_kv=prefix, use_cache=use_cache).logits
                assert_bits(ours[REAL], theirs[REAL], f"use_cache={use_cache}, mask {mask is not None}")
    leaves = [{key: t.clone().requires_grad_() for key, t in prefix.items()} for _ in range(2)]
    ours = model(input_ids=IDS, attention_mask=MASK, prefix_kv=leaves[0]).logits
    cache = {cache_name(local): filled(leaves[1])}
    theirs = local(input_ids=IDS, attention_mask=torch.cat([ONES, MASK], 1), **cache).logits
    for logits in (ours, theirs):
        logits[REAL].square().mean().backward()
    for key in prefix:
        assert_close(leaves[0][key].grad, leaves[1][key].grad, key)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["gpt2", pytest.param("llama", marks=pytest.mark.slow)])
@torch.no_grad()
def test_trained_prompts_stand_behind_the_prefix(name: str) -> None:
    where, prefix, local = folder(name), prefix_of(name), huggingface(name)
    remote = make_flow(name, TWO, own_ends=True)
    model = kf.AutoDistributedModelForCausalLM.from_pretrained(where, flow=remote, tuning_mode="ptune", pre_seq_len=3)
    embeds = local.get_input_embeddings()(IDS)  # type: ignore[operator]
    whole = torch.cat([model.prompt_embeddings.expand(B, -1, -1), embeds], 1)
    mask = torch.cat([ONES, torch.ones(B, 3, dtype=torch.long), MASK], 1)
    place = torch.cat([torch.arange(3).expand(B, 3), (MASK.cumsum(1) - 1).clamp(min=0) + 3], 1) + P
    call = {"inputs_embeds": whole, "attention_mask": mask, "position_ids": place}
    theirs = local(**call, **{cache_name(local): filled(prefix)}).logits[:, 3:]
    ours = model(input_ids=IDS, attention_mask=MASK, position_ids=place[:, 3:] - 3, prefix_kv=prefix)
    assert_close(ours.logits[REAL], theirs[REAL])
    made = model.generate(input_ids=IDS, attention_mask=MASK, prefix_kv=prefix, max_new_tokens=1, do_sample=False)
    assert_bits(made[:, -1], theirs[:, -1].argmax(-1), "generate")


# ---- what is asked first, and what is refused


def test_a_call_is_checked_and_counted_on_meta() -> None:
    x, prefix, remote = inputs("llama"), prefix_of("llama"), flow("llama", TWO)
    meta = {key: t.to("meta") for key, t in x.items()}
    remote.check(**meta, prefix_kv={key: t.to("meta") for key, t in prefix.items()})
    with pytest.raises(ShapeError, match=r"prefix_kv\['v'\] has kv_head = 4, expected 2"):
        remote.check(**meta, prefix_kv={"k": prefix["k"], "v": torch.empty(L, B, 4, P, 8, device="meta")})
    more = [
        a - b
        for a, b in zip(remote.estimate(**x, prefix_kv=prefix).bytes_sent, remote.estimate(**x).bytes_sent, strict=True)
    ]
    assert more == [sum(t.nbytes for t in prefix.values()) // 2] * 2  # each worker its layers' part


def _wrong() -> list[Any]:
    k, v = prefix_of("llama").values()
    mine = {layer: {"k": k[layer], "v": v[layer]} for layer in range(L)}
    short = {layer: {"k": k[layer, :, :, :2], "v": v[layer, :, :, :2]} for layer in range(L)}
    pairs = list(zip(k, v, strict=True))
    few = {**{1: short[1], 3: short[3]}, **{0: mine[0], 2: mine[2]}}
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"prefix_kv": {"k": k, "v": v[..., :2, :]}}, ShapeError, r"\['v'\] has prefix = 2, expected 4"),
        ({"prefix_kv": {"k": k[:2], "v": v}}, ShapeError, r"\['k'\] has layer = 2, expected 4 or 1"),
        ({"prefix_kv": {"k": k[:, :3], "v": v}}, ShapeError, r"\['k'\] has batch = 3, expected 4 or 1"),
        ({"prefix_kv": {"k": k[..., :7], "v": v}}, ShapeError, r"\['k'\] has head_dim = 7, expected 8"),
        ({"prefix_kv": {"k": k[0], "v": v[0]}}, ShapeError, r"of rank 4; it takes 'layer batch kv_head prefix"),
        ({"prefix_kv": {"k": k.long(), "v": v}}, KwargError, r"\['k'\] is int64\(4, 4, 2, 4, 8\); it takes float"),
        ({"prefix_kv": {"k": k}}, KwargError, r"\['v'\] is None; it takes a tensor with axes"),
        ({"prefix_kv": {"k": k, "v": v, "kv": v}}, KwargError, "has 'kv'; it takes k and v"),
        ({"prefix_kv": k}, KwargError, r"prefix_kv is a Tensor; it takes \{'k': tensor, 'v': tensor\}"),
        ({"prefix_kv": {"k": kf.axes(k, "batch layer kv_head prefix head_dim"), "v": v}}, AxesError, "was declared"),
        ({"prefix_kv": few}, ShapeError, r"prefix = 2 in layers \[1, 3\], 4 in layers \[0, 2\]; it is"),
        ({"prefix_kv": {0: mine[0], 2: mine[2]}}, KwargError, r"given for layers \[0, 2\] and not for \[1, 3\]"),
        ({"layer_past": pairs, "prefix_kv": {"k": k, "v": v}}, KwargError, "one kwarg in two forms"),
        ({"layer_past": pairs[:3]}, ShapeError, "has 3 entries; it takes a list with one .* of the 4 layers"),
        ({"layer_past": pairs[:1]}, ShapeError, "has 1 entries"),
        ({"layer_past": [*pairs[:3], (k[3, ..., :2, :], v[3])]}, ShapeError, r"\[3\] has .*2, 8\), .*\[0\] .*4, 8\)"),
        ({"layer_past": [*pairs[:3], k[3]]}, KwargError, r"layer_past\[3\] is"),
        ({"layer_past": "abcd"}, KwargError, "layer_past is a str"),
        ({"attention_mask": torch.cat([ONES, MASK], 1)}, ShapeError, f"key = {P + S}, expected {S}"),
        ({"position_ids": torch.arange(S)[None]}, KwargError, "position_ids has 0 at a token.*below 4: .*prefix=4"),
        ({"prefix_kw": {"k": k, "v": v}}, TypeError, "Did you mean 'prefix_kv'"),
    ]
    return [pytest.param(*case, id=f"{n}") for n, case in enumerate(cases)]


@pytest.mark.parametrize(("given", "error", "says"), _wrong())
def test_what_cannot_be_is_said_before_anything_is_sent(given: Any, error: type[Exception], says: str) -> None:
    remote, x = flow("llama", TWO), {"hidden": random(B, S, D)}
    whole = (
        given if {"layer_past", "prefix_kv", "prefix_kw"} & given.keys() else {**given, "prefix_kv": prefix_of("llama")}
    )
    with Requests(remote) as requests:
        with pytest.raises(error, match=says) as raised:
            remote(**x, **whole)
        assert isinstance(raised.value, CallerError)
        with remote.session(P + S) as session, pytest.raises(error, match=says):
            session.step(**x, **whole)
    assert not requests.seen


def test_a_pad_may_have_any_position() -> None:
    """Only a token's position says where it stands."""
    x, prefix, remote = inputs("llama"), prefix_of("llama"), flow("llama", TWO)
    low = {**x, "position_ids": torch.where(REAL, x["position_ids"], 0)}
    assert_close(remote(**low, prefix_kv=prefix)[REAL], remote(**x, prefix_kv=prefix)[REAL])
    with remote.session(P + S) as session:
        session.step(**low, prefix_kv=prefix)
    with pytest.raises(KwargError, match=r"prefix is -1"):
        remote.inputs("w1", prefix=-1)


def test_a_worker_checks_what_arrives() -> None:
    """A client that checks nothing gets the caller's error, and the worker goes on."""
    remote, x, prefix = flow("llama", TWO), inputs("llama"), prefix_of("llama")
    plan = remote.plan(x["hidden"], {"prefix_kv": prefix})
    bound = plan.bound.with_tensors([plan.bound.tensors[0], plan.bound.tensors[1][..., :2, :]])
    hop = plan.route[0]
    part, _ = bound.part(None, hop.span)
    with pytest.raises(ShapeError, match=r"prefix = 2, expected 4.*said by worker"):
        loop.run(plan.dispatcher.send(hop, part, (), [x["hidden"], *part.tensors]))
    assert_bits(remote(**x, prefix_kv=prefix), expected("llama", x, prefix))


# ---- the real model


@pytest.mark.slow
def test_smollm2_behind_a_text_s_own_keys_and_values(smollm2: Any) -> None:
    """Two workers in this process: a prefix made of a text's cache gives what the whole text gives."""
    from transformers import AutoModelForCausalLM

    from kwflow.client.flow import Flow
    from kwflow.models.ends import ModelEnds
    from kwflow.models.spans import load_span
    from kwflow.swarm.connect import in_process
    from kwflow.worker.server import Served

    local: Any = AutoModelForCausalLM.from_pretrained(smollm2).eval().requires_grad_(False)
    ends = ModelEnds(smollm2)
    remote = Flow(ends, in_process([Served(load_span(smollm2, 0, 12)), Served(load_span(smollm2, 12, 30))]), (0, 30))
    tokens = ends.tokenize(["The capital of France is a city whose name is"])["input_ids"]
    with torch.no_grad():
        cache = local(input_ids=tokens[:, :6], use_cache=True)[cache_name(local)]
        pairs = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
        theirs = local(input_ids=tokens[:, 6:], **{cache_name(local): cache}).logits
        x = remote.inputs(tokens[:, 6:], prefix=6)
        assert_close(remote.head(remote(**x, layer_past=pairs)), theirs)
        model = kf.AutoDistributedModelForCausalLM.from_pretrained(smollm2, flow=remote)
        whole = local.generate(tokens, max_new_tokens=8, do_sample=False)
        ours = model.generate(tokens[:, 6:], layer_past=pairs, max_new_tokens=8, do_sample=False)
    assert_bits(ours, whole[:, 6:])
    assert exact_match(remote, local, **x, layer_past=pairs).bitwise
