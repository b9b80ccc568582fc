"""The proofs of ``kwflow demo``: each a sentence, what was measured for it, and whether it holds.

Every proof has the same oracle: Hugging Face's own model in this process, changed by plain hooks written here. Torch
and models are imported when a proof runs.
"""

# S seq, P prefix, D hidden

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kwflow.errors import KwflowError, NoRoute

if TYPE_CHECKING:
    from torch import Tensor

THREADS = 1  # of each worker and of the local model: equal, or the bits may differ
PREFIX = 8  # deep prompts per layer
KILL_SECONDS = 1.0  # deadline of the call that meets a dead worker
PROMPT = "I think that my neighbour is"
TOWARDS, AWAY = "This is wonderful, I am so happy", "This is terrible, I am so sad"
STRENGTH = 0.16  # norm of the steering vector, as a share of the residual's at that layer
RELATIVE = {"torch.float32": 1e-5}  # a gradient that is not bitwise equal may differ by rounding only
RELATIVE_HALF = 1.6e-2


@dataclass(frozen=True)
class Fact:
    """One row of the table; ``ok`` is None for what is measured and proves nothing."""

    sentence: str
    measured: str
    ok: bool | None


@dataclass
class Setup:
    """What the proofs run on: the swarm, the remote model, the local one; and the seconds of each generate so far."""

    swarm: Any
    remote: Any
    local: Any
    tokens: int
    layer: int = 0
    seconds: dict[str, list[float]] = field(default_factory=lambda: {"local": [], "remote": []})

    @property
    def flow(self) -> Any:
        return self.remote.flow

    @property
    def layers(self) -> Any:
        """The local model's own list of layers."""
        from kwflow.models.families import family_of
        from kwflow.models.layout import layer_list

        base = getattr(self.local, self.local.base_model_prefix)
        return layer_list(base, family_of(self.local.config))


def workers(setup: Setup) -> Fact:
    """Two processes that are not this one cover all layers."""
    who = [f"pid {w.pid}: layers {w.span[0]}:{w.span[1]}" for w in setup.swarm.workers]
    covered = [layer for w in setup.swarm.workers for layer in range(*w.span)]
    ok = all(w.alive for w in setup.swarm.workers) and covered == list(range(len(setup.layers)))
    return Fact(f"Two worker processes run the model's {len(covered)} blocks.", "\n".join(who), ok)


def last_hidden(setup: Setup) -> Fact:
    """A batch with left padding, whole against whole."""
    from kwflow.research.verify import exact_match

    inputs = setup.flow.inputs([PROMPT, "The weather in Paris is so fine today that everybody"])
    match = exact_match(setup.flow, setup.local, **inputs, threads=THREADS)
    numbers = " and ".join(f"{c.name} {'×'.join(map(str, c.shape))}" for c in match.outputs)
    measured = f"every bit of {numbers}" if match.bitwise else f"{match.verdict}: {match.why}"
    return Fact(
        "The last hidden state and the logits of a padded batch are the local model's.", measured, match.bitwise
    )


def greedy(setup: Setup) -> tuple[Fact, Tensor, Fact]:
    """Hugging Face's generate on both sides; the second fact is what a step costs on the wire."""
    expected = _generate(setup, "local")
    pool = setup.flow.peers.pool
    before = pool.bytes_sent + pool.bytes_received
    ours = _generate(setup, "remote")
    moved = pool.bytes_sent + pool.bytes_received - before
    prompt = setup.flow.ends.tokenize([PROMPT])["input_ids"].shape[1]
    hops, steps = len(setup.swarm.workers), setup.tokens  # the prefill gives the first token
    rows = 2 * hops * prompt + (1 + hops) * (steps - 1)  # after the prompt, workers hand hidden on to each other
    tensors = rows * setup.flow.ends.hidden_size * setup.flow.ends.dtype.itemsize
    extra = (moved - tensors) / (steps * hops)
    step = Fact(
        "A step of generation costs little beside the hidden state; workers hand it on to each other.",
        f"{moved / (steps * hops):,.0f} bytes per step and worker\nto and from here, {extra:.0f} of them not tensors",
        None,
    )
    return (
        _same_tokens(f"{setup.tokens} greedy tokens by generate are the local model's tokens.", ours, expected),
        ours,
        step,
    )


def steering_vector(setup: Setup) -> tuple[Tensor, float]:
    """The contrast of two prompts in the residual stream: (hidden,), and the norm of the residual it is added to."""
    import torch

    early = setup.flow[: setup.layer + 1]
    with torch.no_grad():
        towards, away = early(**early.inputs([TOWARDS, AWAY]))[:, -1]
        residual = early(**early.inputs(PROMPT))[0, -1].float().norm().item()
    contrast = (towards - away).float()
    return contrast * (STRENGTH * residual / contrast.norm()), residual


def steering(setup: Setup, vector: Tensor, residual: float, plain: Tensor) -> tuple[Fact, Tensor]:
    """The vector at one middle layer through generate, against a forward hook on the local layer."""
    with hooked(setup.layers, steer={setup.layer: vector}):
        expected = _generate(setup, "local")
    ours = _generate(setup, "remote", steer={setup.layer: vector})
    same = _same_tokens("", ours, expected)
    changed = ours.tolist() != plain.tolist()
    sentence = (
        f"A vector made from two prompts, added after layer {setup.layer} on its worker, changes the text "
        f"just as a hook on the local model does."
    )
    measured = f"{same.measured};\nnorm {vector.norm():.1f} on a residual of {residual:.0f}"
    return Fact(
        sentence, measured if changed else f"{measured}; the text did not change", bool(same.ok) and changed
    ), ours


def gradients(setup: Setup, vector: Tensor) -> list[Fact]:
    """One next-token loss, differentiated with respect to the vector and to deep prompts on both sides."""
    import torch
    from torch.nn.functional import cross_entropy

    ids = setup.flow.ends.tokenize([f"{PROMPT} a kind person, and we often talk about the weather over the fence."])[
        "input_ids"
    ]
    generator = torch.Generator().manual_seed(0)
    shape = (len(setup.layers), 1, PREFIX, setup.flow.ends.hidden_size)
    leaves = [vector.clone(), 0.02 * torch.randn(shape, generator=generator)]

    def differentiate(logits: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, ...]:
        steer, prompts = (tensor.clone().requires_grad_() for tensor in leaves)
        loss = cross_entropy(logits(steer, prompts)[0, :-1].float(), ids[0, 1:])
        return torch.autograd.grad(loss, (steer, prompts))

    def local_logits(steer: Tensor, prompts: Tensor) -> Tensor:
        with hooked(setup.layers, steer={setup.layer: steer}, prompts=prompts):
            return setup.local(input_ids=ids, use_cache=False).logits

    inputs = setup.flow.inputs(ids)

    def remote_logits(steer: Tensor, prompts: Tensor) -> Tensor:
        return setup.flow.head(setup.flow(**inputs, steer={setup.layer: steer}, prompts=prompts))

    expected = differentiate(local_logits)
    pool = setup.flow.peers.pool
    sent, received = pool.bytes_sent, pool.bytes_received
    ours = differentiate(remote_logits)
    moved = pool.bytes_sent - sent, pool.bytes_received - received
    names = f"the vector at layer {setup.layer}", f"{PREFIX} deep prompts in each of {len(setup.layers)} layers"
    facts = [_same_gradient(setup, *row) for row in zip(names, ours, expected, strict=True)]
    return [*facts, _bytes(setup, moved, inputs, leaves)]


def _same_gradient(setup: Setup, name: str, ours: Tensor, expected: Tensor) -> Fact:
    from kwflow.research.verify import compare

    comparison = compare(name, ours, expected)
    limit = RELATIVE.get(str(setup.flow.ends.dtype), RELATIVE_HALF)
    bits = "every bit" if comparison.bitwise else "not every bit"
    measured = f"max relative error {comparison.max_rel:.2g} ({bits} of {ours.numel():,} numbers)"
    ok = comparison.bitwise or (0.0 < expected.abs().max().item() and comparison.max_rel <= limit)
    return Fact(f"The gradient with respect to {name} is local autograd's.", measured, ok)


def _bytes(setup: Setup, moved: tuple[int, int], inputs: Mapping[str, Tensor], leaves: list[Tensor]) -> Fact:
    """What the tensors alone weigh: forward and backward send inputs and kwargs, backward a cotangent too."""
    hops, hidden = len(setup.swarm.workers), inputs["hidden"].nbytes
    call = hops * sum(tensor.nbytes for tensor in inputs.values()) + sum(tensor.nbytes for tensor in leaves)
    sent = 2 * call + hops * hidden
    received = hops * hidden + (hops - 1) * hidden + sum(tensor.nbytes for tensor in leaves)
    overhead = sum(moved) / (sent + received) - 1
    return Fact(
        "Forward and backward moved their tensors and hardly more; each worker got its own layers' part of the kwargs.",
        f"{moved[0]:,} bytes out and {moved[1]:,} back for {sent:,} and {received:,} of tensors: "
        f"{100 * overhead:.2f} % over",
        overhead <= 0.02,
    )


def speed(setup: Setup) -> Fact:
    """Milliseconds per token of the runs above, prompt included."""
    each = {side: 1000 * sum(seconds) / (setup.tokens * len(seconds)) for side, seconds in setup.seconds.items()}
    ratio = each["local"] / each["remote"]
    return Fact(
        f"Generation through two workers, against the local model with as many threads ({THREADS}).",
        f"{each['remote']:.1f} ms per token against {each['local']:.1f}: {ratio:.2f} of the local speed",
        None,
    )


def killed(setup: Setup) -> list[Fact]:
    """While nobody serves some layers, an error in time; when somebody does again, a session with the same values."""
    import torch

    inputs, swarm = setup.flow.inputs(PROMPT), setup.swarm
    steps = [setup.flow.embed(torch.full((1, 1), 100 + number)) for number in range(4)]

    def run(session: Any, between: Callable[[], None]) -> list[Tensor]:
        outs = [session.step(**inputs), session.step(steps[0])]
        between()
        return outs + [session.step(hidden) for hidden in steps[1:]]

    with torch.no_grad(), setup.flow.session(32) as session:
        expected = run(session, lambda: None)
    missed: list[Fact] = []

    def lose() -> None:
        swarm.kill(1)
        missed.append(_missed(setup, inputs))
        swarm.add(*swarm.workers[1].span)

    with torch.no_grad(), setup.flow.session(32) as session:
        ours = run(session, lose)
        replays = session.replays
    same = all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
    measured = "every bit of 3 steps after it" if same else "the steps after it differ"
    if replays:
        measured += f"; {replays[0].steps} steps repeated there in {replays[0].seconds:.1f} s"
    sentence = "A session goes on when another worker takes the place of a killed one."
    return [*missed, Fact(sentence, measured, same and len(replays) == 1)]


def _missed(setup: Setup, inputs: Mapping[str, Tensor]) -> Fact:
    """A call that needs a dead worker, and nobody is in its place."""
    start = time.monotonic()
    try:
        setup.flow.options(timeout=KILL_SECONDS)(**inputs)
        outcome, typed = "the call went through", False
    except NoRoute as error:  # DeadlineError would say that nobody noticed the death
        outcome, typed = type(error).__name__, True
    except KwflowError as error:
        outcome, typed = type(error).__name__, False
    seconds = time.monotonic() - start
    return Fact(
        "A call that meets a killed worker (kill -9), and no other, raises a typed error before its deadline.",
        f"{outcome} after {1000 * seconds:.0f} ms; the deadline was {KILL_SECONDS:g} s",
        typed and seconds < KILL_SECONDS,
    )


# ---- the local side ------------------------------------------------------------------------------------------------


@contextmanager
def hooked(layers: Any, *, steer: Mapping[int, Tensor], prompts: Tensor | None = None) -> Iterator[None]:
    """Plain hooks on local layers: a vector added to an output, deep prompts (layer 1 prefix hidden) to inputs."""
    import torch

    def add(vector: Tensor) -> Callable[..., Any]:
        def after(_: Any, __: Any, out: Any) -> Any:
            return (
                (out[0] + vector.to(out[0].dtype), *out[1:]) if isinstance(out, tuple) else out + vector.to(out.dtype)
            )

        return after

    def prefix(layer_prompt: Tensor) -> Callable[..., Any]:
        def before(_: Any, args: tuple[Any, ...]) -> Any:
            first = args[0][:, : layer_prompt.shape[1]] + layer_prompt.to(args[0].dtype)
            return (torch.cat([first, args[0][:, layer_prompt.shape[1] :]], 1), *args[1:])

        return before

    hooks = [layers[layer].register_forward_hook(add(vector)) for layer, vector in steer.items()]
    if prompts is not None:
        hooks += [
            layers[layer].register_forward_pre_hook(prefix(layer_prompt)) for layer, layer_prompt in enumerate(prompts)
        ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _generate(setup: Setup, side: str, **kwargs: Any) -> Tensor:
    """New token ids (S,) by Hugging Face's generate, timed."""
    inputs = dict(setup.flow.ends.tokenize([PROMPT]))
    ids, pad = inputs["input_ids"], setup.flow.tokenizer.pad_token_id
    settings = {"max_new_tokens": setup.tokens, "min_new_tokens": setup.tokens, "do_sample": False, "pad_token_id": pad}
    start = time.perf_counter()
    model = setup.local if side == "local" else setup.remote
    out = model.generate(input_ids=ids, attention_mask=inputs["attention_mask"], **settings, **kwargs)
    setup.seconds[side].append(time.perf_counter() - start)
    return out[0, ids.shape[1] :]


def _same_tokens(sentence: str, ours: Tensor, expected: Tensor) -> Fact:
    same = 0
    for a, b in zip(ours.tolist(), expected.tolist(), strict=False):
        if a != b:
            break
        same += 1
    ok = ours.tolist() == expected.tolist()
    return Fact(sentence, f"{same} of {len(expected)} tokens equal", ok)
