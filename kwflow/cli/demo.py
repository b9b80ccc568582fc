"""``kwflow demo``: two worker processes, one local model, and a table of what was measured between them in this run.

The proofs are in ``kwflow.cli.proofs``; here is what they run on, and what the terminal shows of them. One of the few
modules that put the parts together.
"""

from __future__ import annotations

import io
import logging
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kwflow.cli import proofs
from kwflow.cli.proofs import PROMPT, THREADS, Fact, Setup
from kwflow.errors import KwargError


def run_demo(model: str = "smollm2-135m", tokens: int = 40) -> int:
    """Run two workers of ``model``, prove what they give against the local model; exit status 1 if a proof fails."""
    if tokens < 2:
        raise KwargError(f"the demo needs 2 tokens or more to compare, got {tokens}")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without UTF-8 shows ? for ×, and nothing fails
    console, start = Console(highlight=False), time.monotonic()
    with warnings.catch_warnings(), _without_warnings():
        warnings.simplefilter("ignore")
        facts, texts = _run(console, model, tokens)
    console.print()
    console.print(_facts_table(facts, model, plain=not console.encoding.lower().startswith("utf")))
    console.print(_texts_table(texts))
    failed = sum(fact.ok is False for fact in facts)
    provable = sum(fact.ok is not None for fact in facts)
    console.print(f"\n{provable - failed} of {provable} proofs hold; {time.monotonic() - start:.0f} s in all.")
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
        setup = Setup(swarm, remote, local, tokens)
        setup.layer = round(0.4 * len(setup.layers))
        with setup.flow:
            return _prove(console, setup)


def _load_local(folder: str) -> Any:
    """Hugging Face's own model, whole, in this process: the oracle."""
    import torch

    from kwflow.research.reference import load_local

    torch.set_num_threads(THREADS)
    return load_local(folder)


def _prove(console: Console, setup: Setup) -> tuple[list[Fact], dict[str, str]]:
    facts = [proofs.workers(setup)]
    with _stage(console, "compare the last hidden state, bit by bit"):
        facts.append(proofs.last_hidden(setup))
    with _stage(console, f"generate {setup.tokens} tokens, here and on the workers"):
        fact, ids, step = proofs.greedy(setup)
        facts.append(fact)
    with _stage(console, f"make a steering vector at layer {setup.layer}, generate with it"):
        vector, residual = proofs.steering_vector(setup)
        fact, steered = proofs.steering(setup, vector, residual, ids)
        facts.append(fact)
    with _stage(console, "differentiate a loss through the network"):
        facts += proofs.gradients(setup, vector)
    facts += [step, proofs.speed(setup)]
    with _stage(console, "kill a worker, and start another in its place"):
        facts += proofs.killed(setup)
    decode = setup.flow.tokenizer.decode
    return facts, {"plain": _one_line(decode(ids)), "steered": _one_line(decode(steered))}


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
    start = time.monotonic()
    try:
        with console.status(f"{what} …"):
            yield
    except BaseException:
        console.print(f"{time.monotonic() - start:6.1f} s  {what}: failed", markup=False)
        raise
    console.print(f"{time.monotonic() - start:6.1f} s  {what}", markup=False)


def _facts_table(facts: list[Fact], model: str, *, plain: bool) -> Table:
    table = Table(title=f"Measured in this run: {model}", box=box.SIMPLE_HEAD, show_lines=True, title_justify="left")
    table.add_column("what was shown", ratio=5)
    table.add_column("measured", ratio=4)
    table.add_column("", width=2 if plain else 1)
    held, failed = ("ok", "NO") if plain else ("✓", "✗")
    marks = {True: Text(held, "green"), False: Text(failed, "red"), None: Text("")}
    for fact in facts:
        table.add_row(Text(fact.sentence), Text(fact.measured), marks[fact.ok])
    return table


def _texts_table(texts: Mapping[str, str]) -> Table:
    table = Table(title=f'"{PROMPT} …"', box=box.SIMPLE, show_header=False, title_justify="left")
    for name, text in texts.items():
        table.add_row(f"{name}:", Text(text))
    return table


def _one_line(text: str) -> str:
    return " ".join(text.split())
