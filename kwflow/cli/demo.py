"""``kwflow demo``: two worker processes, one local model, and a table of what was measured between them in this run.

Every proof has the same oracle: Hugging Face's own model in this process, changed by plain hooks written here. One of
the few modules that put the parts together.
"""

# S seq, P prefix, D hidden

from __future__ import annotations

import io
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kwflow.errors import KwargError, KwflowError, NoRoute

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
class Lab:
    """What the proofs share: the swarm, the remote model, the local one, and times per token as they come."""

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
        from kwflow.models.families import family_of, layer_list

        base = getattr(self.local, self.local.base_model_prefix)
        return layer_list(base, family_of(self.local.config))


def run_demo(model: str = "smollm2-135m", tokens: int = 40) -> int:
    """Run two workers of ``model``, prove what they give against the local model; exit status 1 if a proof fails."""
    if tokens < 2:
        raise KwargError(f"the demo needs 2 tokens or more to compare, got {tokens}")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without UTF-8 shows ? for ×, and nothing fails
    console, began = Console(highlight=False), time.monotonic()
    with warnings.catch_warnings(), _without_warnings():
        warnings.simplefilter("ignore")
        facts, texts = _run(console, model, tokens)
    console.print()
    console.print(_table(facts, model, plain=not console.encoding.lower().startswith("utf")))
    console.print(_both(texts))
    failed = sum(fact.ok is False for fact in facts)
    proofs = sum(fact.ok is not None for fact in facts)
    console.print(f"\n{proofs - failed} of {proofs} proofs hold; {time.monotonic() - began:.0f} s in all.")
    return 1 if failed else 0


def _run(console: Console, model: str, tokens: int) -> tuple[list[Fact], dict[str, str]]:
    from kwflow.models.files.checkpoint import model_path

    with _stage(console, f"find {model}"):
        folder = model_path(model)
    with ThreadPoolExecutor(1) as starting:
        with _stage(console, "start two workers, and meanwhile load the same model here"):
            from kwflow.swarm.local import local_swarm

            future = starting.submit(local_swarm, model, 2, threads=THREADS)
            try:
                local = _load_local(str(folder))
            finally:
                swarm = future.result()
    from kwflow.huggingface.auto import AutoDistributedModelForCausalLM
    from kwflow.models.spans import quiet

    with swarm, quiet():
        with _stage(console, "join the swarm over libp2p"):
            remote = AutoDistributedModelForCausalLM.from_pretrained(model, initial_peers=swarm.peers)
        lab = Lab(swarm, remote, local, tokens)
        lab.layer = round(0.4 * len(lab.layers))
        with lab.flow:
            return _prove(console, lab)


def _load_local(folder: str) -> Any:
    """Hugging Face's own model, whole, in this process: the oracle."""
    import torch

    from kwflow.research.reference import load_local

    torch.set_num_threads(THREADS)
    return load_local(folder)


def _prove(console: Console, lab: Lab) -> tuple[list[Fact], dict[str, str]]:
    facts = [workers(lab)]
    with _stage(console, "compare the last hidden state, bit by bit"):
        facts.append(last_hidden(lab))
    with _stage(console, f"generate {lab.tokens} tokens, here and on the workers"):
        found, ids, step = greedy(lab)
        facts.append(found)
    with _stage(console, f"make a steering vector at layer {lab.layer}, generate with it"):
        vector, residual = steering_vector(lab)
        found, steered = steering(lab, vector, residual, ids)
        facts.append(found)
    with _stage(console, "differentiate a loss through the network"):
        facts += gradients(lab, vector)
    facts += [step, speed(lab)]
    with _stage(console, "kill a worker, and start another in its place"):
        facts += killed(lab)
    words = lab.flow.tokenizer.decode
    return facts, {"plain": _one_line(words(ids)), "steered": _one_line(words(steered))}


# ---- the proofs ------------------------------------------------------------------------------------------------------


def workers(lab: Lab) -> Fact:
    """Two processes that are not this one cover all layers."""
    who = [f"pid {w.pid}: layers {w.span[0]}:{w.span[1]}" for w in lab.swarm.workers]
    covered = [layer for w in lab.swarm.workers for layer in range(*w.span)]
    ok = all(w.alive for w in lab.swarm.workers) and covered == list(range(len(lab.layers)))
    return Fact(f"Two worker processes run the model's {len(covered)} blocks.", "\n".join(who), ok)


def last_hidden(lab: Lab) -> Fact:
    """A batch with left padding, whole against whole."""
    from kwflow.research.verify import exact_match

    inputs = lab.flow.inputs([PROMPT, "The weather in Paris is so fine today that everybody"])
    match = exact_match(lab.flow, lab.local, **inputs, threads=THREADS)
    numbers = " and ".join(f"{c.name} {'×'.join(map(str, c.shape))}" for c in match.outputs)
    measured = f"every bit of {numbers}" if match.bitwise else f"{match.verdict}: {match.why}"
    return Fact(
        "The last hidden state and the logits of a padded batch are the local model's.", measured, match.bitwise
    )


def greedy(lab: Lab) -> tuple[Fact, Tensor, Fact]:
    """Hugging Face's generate on both sides; the second fact is what a step costs on the wire."""
    expected = _generate(lab, "local")
    pool = lab.flow.peers.pool
    before = pool.bytes_sent + pool.bytes_received
    ours = _generate(lab, "remote")
    moved = pool.bytes_sent + pool.bytes_received - before
    prompt = lab.flow.ends.tokenize([PROMPT])["input_ids"].shape[1]
    hops, steps = len(lab.swarm.workers), lab.tokens  # the prefill gives the first token
    rows = 2 * hops * prompt + (1 + hops) * (steps - 1)  # after the prompt, workers hand hidden on to each other
    tensors = rows * lab.flow.ends.hidden_size * lab.flow.ends.dtype.itemsize
    extra = (moved - tensors) / (steps * hops)
    step = Fact(
        "A step of generation costs little beside the hidden state; workers hand it on to each other.",
        f"{moved / (steps * hops):,.0f} bytes per step and worker\nto and from here, {extra:.0f} of them not tensors",
        None,
    )
    return (
        _same_tokens(f"{lab.tokens} greedy tokens by generate are the local model's tokens.", ours, expected),
        ours,
        step,
    )


def steering_vector(lab: Lab) -> tuple[Tensor, float]:
    """The contrast of two prompts in the residual stream: (hidden,), and the norm of the residual it is added to."""
    import torch

    early = lab.flow[: lab.layer + 1]
    with torch.no_grad():
        towards, away = early(**early.inputs([TOWARDS, AWAY]))[:, -1]
        residual = early(**early.inputs(PROMPT))[0, -1].float().norm().item()
    contrast = (towards - away).float()
    return contrast * (STRENGTH * residual / contrast.norm()), residual


def steering(lab: Lab, vector: Tensor, residual: float, plain: Tensor) -> tuple[Fact, Tensor]:
    """The vector at one middle layer through generate, against a forward hook on the local layer."""
    with hooked(lab.layers, steer={lab.layer: vector}):
        expected = _generate(lab, "local")
    ours = _generate(lab, "remote", steer={lab.layer: vector})
    same = _same_tokens("", ours, expected)
    changed = ours.tolist() != plain.tolist()
    sentence = (
        f"A vector made from two prompts, added after layer {lab.layer} on its worker, changes the text "
        f"just as a hook on the local model does."
    )
    measured = f"{same.measured};\nnorm {vector.norm():.1f} on a residual of {residual:.0f}"
    return Fact(
        sentence, measured if changed else f"{measured}; the text did not change", bool(same.ok) and changed
    ), ours


def gradients(lab: Lab, vector: Tensor) -> list[Fact]:
    """One next-token loss, differentiated with respect to the vector and to deep prompts on both sides."""
    import torch
    from torch.nn.functional import cross_entropy

    ids = lab.flow.ends.tokenize([f"{PROMPT} a kind person, and we often talk about the weather over the fence."])[
        "input_ids"
    ]
    generator = torch.Generator().manual_seed(0)
    shape = (len(lab.layers), 1, PREFIX, lab.flow.ends.hidden_size)
    given = [vector.clone(), 0.02 * torch.randn(shape, generator=generator)]

    def differentiate(logits: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, ...]:
        steer, prompts = (tensor.clone().requires_grad_() for tensor in given)
        loss = cross_entropy(logits(steer, prompts)[0, :-1].float(), ids[0, 1:])
        return torch.autograd.grad(loss, (steer, prompts))

    def at_home(steer: Tensor, prompts: Tensor) -> Tensor:
        with hooked(lab.layers, steer={lab.layer: steer}, prompts=prompts):
            return lab.local(input_ids=ids, use_cache=False).logits

    inputs = lab.flow.inputs(ids)

    def away(steer: Tensor, prompts: Tensor) -> Tensor:
        return lab.flow.head(lab.flow(**inputs, steer={lab.layer: steer}, prompts=prompts))

    expected = differentiate(at_home)
    pool = lab.flow.peers.pool
    sent, received = pool.bytes_sent, pool.bytes_received
    ours = differentiate(away)
    moved = pool.bytes_sent - sent, pool.bytes_received - received
    names = f"the vector at layer {lab.layer}", f"{PREFIX} deep prompts in each of {len(lab.layers)} layers"
    facts = [_same_gradient(lab, *row) for row in zip(names, ours, expected, strict=True)]
    return [*facts, _bytes(lab, moved, inputs, given)]


def _same_gradient(lab: Lab, name: str, ours: Tensor, expected: Tensor) -> Fact:
    from kwflow.research.verify import compare

    found = compare(name, ours, expected)
    limit = RELATIVE.get(str(lab.flow.ends.dtype), RELATIVE_HALF)
    bits = "every bit" if found.bitwise else "not every bit"
    measured = f"max relative error {found.max_rel:.2g} ({bits} of {ours.numel():,} numbers)"
    ok = found.bitwise or (0.0 < expected.abs().max().item() and found.max_rel <= limit)
    return Fact(f"The gradient with respect to {name} is local autograd's.", measured, ok)


def _bytes(lab: Lab, moved: tuple[int, int], inputs: Mapping[str, Tensor], given: list[Tensor]) -> Fact:
    """What the tensors alone weigh: forward and backward send inputs and kwargs, backward a cotangent too."""
    hops, hidden = len(lab.swarm.workers), inputs["hidden"].nbytes
    call = hops * sum(tensor.nbytes for tensor in inputs.values()) + sum(tensor.nbytes for tensor in given)
    sent = 2 * call + hops * hidden
    received = hops * hidden + (hops - 1) * hidden + sum(tensor.nbytes for tensor in given)
    overhead = sum(moved) / (sent + received) - 1
    return Fact(
        "Forward and backward moved their tensors and hardly more; each worker got its own layers' part of the kwargs.",
        f"{moved[0]:,} bytes out and {moved[1]:,} back for {sent:,} and {received:,} of tensors: "
        f"{100 * overhead:.2f} % over",
        overhead <= 0.02,
    )


def speed(lab: Lab) -> Fact:
    """Milliseconds per token of the runs above, prompt included."""
    each = {side: 1000 * sum(seconds) / (lab.tokens * len(seconds)) for side, seconds in lab.seconds.items()}
    ratio = each["local"] / each["remote"]
    return Fact(
        f"Generation through two workers, against the local model with as many threads ({THREADS}).",
        f"{each['remote']:.1f} ms per token against {each['local']:.1f}: {ratio:.2f} of the local speed",
        None,
    )


def killed(lab: Lab) -> list[Fact]:
    """While nobody serves some layers, an error in time; when somebody does again, a session with the same values."""
    import torch

    inputs, swarm = lab.flow.inputs(PROMPT), lab.swarm
    steps = [lab.flow.embed(torch.full((1, 1), 100 + number)) for number in range(4)]

    def run(session: Any, between: Callable[[], None]) -> list[Tensor]:
        outs = [session.step(**inputs), session.step(steps[0])]
        between()
        return outs + [session.step(hidden) for hidden in steps[1:]]

    with torch.no_grad(), lab.flow.session(32) as session:
        expected = run(session, lambda: None)
    missed: list[Fact] = []

    def lose() -> None:
        swarm.kill(1)
        missed.append(_missed(lab, inputs))
        swarm.add(*swarm.workers[1].span)

    with torch.no_grad(), lab.flow.session(32) as session:
        got = run(session, lose)
        replays = session.replays
    same = all(torch.equal(ours, theirs) for ours, theirs in zip(got, expected, strict=True))
    measured = "every bit of 3 steps after it" if same else "the steps after it differ"
    if replays:
        measured += f"; {replays[0].steps} steps repeated there in {replays[0].seconds:.1f} s"
    sentence = "A session goes on when another worker takes the place of a killed one."
    return [*missed, Fact(sentence, measured, same and len(replays) == 1)]


def _missed(lab: Lab, inputs: Mapping[str, Tensor]) -> Fact:
    """A call that needs a dead worker, and nobody is in its place."""
    began = time.monotonic()
    try:
        lab.flow.options(timeout=KILL_SECONDS)(**inputs)
        said, typed = "the call went through", False
    except NoRoute as error:  # DeadlineError would say that nobody noticed the death
        said, typed = type(error).__name__, True
    except KwflowError as error:
        said, typed = type(error).__name__, False
    took = time.monotonic() - began
    return Fact(
        "A call that meets a killed worker (kill -9), and no other, raises a typed error before its deadline.",
        f"{said} after {1000 * took:.0f} ms; the deadline was {KILL_SECONDS:g} s",
        typed and took < KILL_SECONDS,
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

    def prefix(own: Tensor) -> Callable[..., Any]:
        def before(_: Any, args: tuple[Any, ...]) -> Any:
            first = args[0][:, : own.shape[1]] + own.to(args[0].dtype)
            return (torch.cat([first, args[0][:, own.shape[1] :]], 1), *args[1:])

        return before

    hooks = [layers[layer].register_forward_hook(add(vector)) for layer, vector in steer.items()]
    if prompts is not None:
        hooks += [layers[layer].register_forward_pre_hook(prefix(own)) for layer, own in enumerate(prompts)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _generate(lab: Lab, side: str, **kwargs: Any) -> Tensor:
    """New token ids (S,) by Hugging Face's generate, timed."""
    inputs = dict(lab.flow.ends.tokenize([PROMPT]))
    ids, pad = inputs["input_ids"], lab.flow.tokenizer.pad_token_id
    settings = {"max_new_tokens": lab.tokens, "min_new_tokens": lab.tokens, "do_sample": False, "pad_token_id": pad}
    began = time.perf_counter()
    model = lab.local if side == "local" else lab.remote
    out = model.generate(input_ids=ids, attention_mask=inputs["attention_mask"], **settings, **kwargs)
    lab.seconds[side].append(time.perf_counter() - began)
    return out[0, ids.shape[1] :]


def _same_tokens(sentence: str, ours: Tensor, expected: Tensor) -> Fact:
    same = 0
    for a, b in zip(ours.tolist(), expected.tolist(), strict=False):
        if a != b:
            break
        same += 1
    ok = ours.tolist() == expected.tolist()
    return Fact(sentence, f"{same} of {len(expected)} tokens equal", ok)


# ---- the terminal ----------------------------------------------------------------------------------------------------


@contextmanager
def _without_warnings() -> Iterator[None]:
    """That a call waits for a worker is part of the show."""
    log = logging.getLogger("kwflow")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


@contextmanager
def _stage(console: Console, what: str) -> Iterator[None]:
    """A spinner while it runs, where the terminal can; one line when it is done."""
    began = time.monotonic()
    try:
        with console.status(f"{what} …"):
            yield
    except BaseException:
        console.print(f"{time.monotonic() - began:6.1f} s  {what}: failed", markup=False)
        raise
    console.print(f"{time.monotonic() - began:6.1f} s  {what}", markup=False)


def _table(facts: list[Fact], model: str, *, plain: bool) -> Table:
    table = Table(title=f"Measured in this run: {model}", box=box.SIMPLE_HEAD, show_lines=True, title_justify="left")
    table.add_column("what was shown", ratio=5)
    table.add_column("measured", ratio=4)
    table.add_column("", width=2 if plain else 1)
    held, failed = ("ok", "NO") if plain else ("✓", "✗")
    marks = {True: Text(held, "green"), False: Text(failed, "red"), None: Text("")}
    for fact in facts:
        table.add_row(Text(fact.sentence), Text(fact.measured), marks[fact.ok])
    return table


def _both(texts: Mapping[str, str]) -> Table:
    table = Table(title=f'"{PROMPT} …"', box=box.SIMPLE, show_header=False, title_justify="left")
    for name, text in texts.items():
        table.add_row(f"{name}:", Text(text))
    return table


def _one_line(text: str) -> str:
    return " ".join(text.split())
