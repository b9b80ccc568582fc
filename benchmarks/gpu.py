"""``python -m benchmarks.gpu``: the proofs and the price of kwflow on a CUDA device, in under ten minutes.

Proofs first: values, gradients and sessions through workers on the device against the Hugging Face model there, in
float32, bfloat16 and with a client of another dtype. Then a block as wide as a 405B model's, with 2,048 tokens:
forward, backward, kwargs and the wire beside the plain Hugging Face layer in the same run. Markdown on stdout; exit
status 1 when a proof fails, 2 without CUDA. ``--device cpu --small`` runs the same script where there is no GPU. The
wide block is written to the temporary folder once: 7 GB there, three times that on the device, and its activations.
"""

# B batch, S seq, D hidden

from __future__ import annotations

import argparse
import copy
import platform
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

import kwflow as kf
from kwflow.client.flow import Flow
from kwflow.models.ends import ModelEnds
from kwflow.models.spans import load_span
from kwflow.swarm.connect import in_process
from kwflow.wire.message import Message, dumps, loads
from kwflow.worker.server import Served

# max|a - b| <= atol + rtol * max|b|, as in the tests
TOLERANCE = {torch.float32: (1.3e-6, 1e-5), torch.bfloat16: (1.6e-2, 1e-5)}


@dataclass(frozen=True)
class Sizes:
    """A Llama block, and how much is sent through it."""

    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    tokens: int
    repeats: int


PROOF = Sizes(hidden=1024, heads=16, kv_heads=4, intermediate=2816, tokens=96, repeats=1)
WIDE = Sizes(hidden=16384, heads=128, kv_heads=8, intermediate=53248, tokens=2048, repeats=5)
SMALL_PROOF = Sizes(hidden=64, heads=4, kv_heads=2, intermediate=96, tokens=12, repeats=1)
SMALL_WIDE = Sizes(hidden=256, heads=8, kv_heads=2, intermediate=832, tokens=64, repeats=2)


@dataclass(frozen=True)
class Proof:
    """What was compared, and how near it came."""

    what: str
    dtypes: str  # client, workers
    verdict: str
    gap: float  # largest, relative to the reference's largest magnitude
    holds: bool


def main(argv: Sequence[str] | None = None) -> int:
    """Run everything; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="kwflow's proofs and price on CUDA.")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, mps or cpu")
    parser.add_argument("--small", action="store_true", help="small sizes: shows that the script runs")
    args = parser.parse_args(argv)
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        print("no CUDA here: torch sees no device. `--device cpu --small` runs the same script on the CPU.")
        return 2
    device = torch.device(args.device)
    warnings.simplefilter("ignore")
    quiet_transformers()
    print(headline(device), flush=True)
    with tempfile.TemporaryDirectory(prefix="kwflow-gpu-") as folder:
        proofs = prove(Path(folder), device, SMALL_PROOF if args.small else PROOF)
        print(proof_table(proofs), flush=True)
        print(price_table(*price(Path(folder), device, SMALL_WIDE if args.small else WIDE)), flush=True)
    failed = [proof for proof in proofs if not proof.holds]
    print(f"\n{len(proofs) - len(failed)} of {len(proofs)} proofs hold.")
    return 1 if failed else 0


def quiet_transformers() -> None:
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def headline(device: torch.device) -> str:
    """What this ran on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    tf32 = f"TF32 {'on' if torch.backends.cuda.matmul.allow_tf32 else 'off'}"
    return f"{device} ({name}), torch {torch.__version__}, {tf32}\n"


def make_model(folder: Path, sizes: Sizes, layers: int, dtype: torch.dtype, device: torch.device) -> Any:
    """A random Llama on the device, also saved to ``folder``; its vocabulary is small."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_hidden_layers=layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        max_position_embeddings=max(4096, sizes.tokens),
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
    model.save_pretrained(folder)
    return model


@contextmanager
def workers(
    folder: Path, device: torch.device, client: torch.dtype, dtype: torch.dtype, cuts: Sequence[int]
) -> Iterator[Flow]:
    """A flow over workers of this process, on the device; requests go through the same bytes as on a network."""
    served = [
        Served(load_span(folder, start, stop, dtype=dtype, device=device))
        for start, stop in zip((0, *cuts), cuts, strict=False)
    ]
    with Flow(ModelEnds(folder, client), in_process(served), (0, cuts[-1])) as flow:
        yield flow


# ---- proofs ------------------------------------------------------------------------------------------------------


def prove(folder: Path, device: torch.device, sizes: Sizes) -> list[Proof]:
    """Values, gradients and sessions for each pair of client's and workers' dtype."""
    f32, bf16 = torch.float32, torch.bfloat16
    where = folder / "proof"
    model = make_model(where, sizes, 4, f32, device)
    found = []
    for client, dtype in ((f32, f32), (bf16, bf16), (f32, bf16), (bf16, f32)):
        with workers(where, device, client, dtype, (2, 4)) as flow:
            local = model if dtype is f32 else _in(model, dtype)
            found += _proofs_of(flow, local, sizes, client, dtype, device)
    return found


def _in(model: Any, dtype: torch.dtype) -> Any:
    """A copy with its parameters cast; the rotary frequencies stay float32, as where a checkpoint is read."""
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.data = parameter.data.to(dtype)
    return other


def _proofs_of(
    flow: Flow, local: Any, sizes: Sizes, client: torch.dtype, dtype: torch.dtype, device: torch.device
) -> list[Proof]:
    hidden = torch.randn(3, sizes.tokens, sizes.hidden).to(client)
    mask = (torch.arange(sizes.tokens)[None] >= torch.tensor([0, 1, 3])[:, None]).long()
    vector, prompts = torch.randn(sizes.hidden), torch.randn(4, 1, 2, sizes.hidden)
    names = f"{_short(client)}, {_short(dtype)}"
    table = torch.bfloat16 if torch.bfloat16 in (client, dtype) else torch.float32
    found = []
    for what, kwargs in (("values", {}), ("values with steer and prompts", {"steer": {1: vector}, "prompts": prompts})):
        match = kf.verify.exact_match(flow, local, hidden, attention_mask=mask, **kwargs)
        gap = max(output.max_rel for output in match.outputs)
        found.append(Proof(what, names, match.verdict, gap, bool(match)))

    here = [tensor.clone().to(device).requires_grad_() for tensor in (hidden, vector)]
    out = flow(here[0], attention_mask=mask.to(device), steer={1: here[1]})
    ours = torch.autograd.grad(out.float().square().sum(), here)
    want = _layers(local, here[0].to(dtype), mask.to(device), steer=(1, here[1])).to(client)
    theirs = torch.autograd.grad(want.float().square().sum(), here)
    for what, a, b in zip(("gradient of hidden", "gradient of steer"), ours, theirs, strict=True):
        found.append(near(f"{what}, on {device.type}", names, a, b, table))

    with flow.session(max_length=sizes.tokens) as session:
        cut = sizes.tokens - 4
        steps = [(0, cut), *((at, at + 1) for at in range(cut, sizes.tokens))]
        outs = [session.step(hidden[:, a:b].to(device), attention_mask=mask[:, :b].to(device)) for a, b in steps]
    with torch.no_grad():
        whole = _layers(local, hidden.to(device, dtype), mask.to(device)).to(client)
    at = mask.bool().to(device)
    found.append(near("prefill and decode", names, torch.cat(outs, 1)[at], whole[at], table))
    return found


def near(what: str, names: str, ours: Tensor, want: Tensor, table: torch.dtype) -> Proof:
    if ours.device != want.device or ours.dtype != want.dtype:
        return Proof(what, names, f"on {ours.device} in {_short(ours.dtype)}", float("inf"), False)
    largest, gap = want.abs().max().item(), (ours.double() - want.double()).abs().max().item()
    rtol, atol = TOLERANCE[table]
    verdict = "bitwise" if torch.equal(ours, want) else "within the table"
    holds = gap <= atol + rtol * largest
    return Proof(what, names, verdict if holds else "different", gap / largest, holds)


def _layers(model: Any, hidden: Tensor, mask: Tensor | None = None, steer: tuple[int, Tensor] | None = None) -> Tensor:
    """The residual before the final norm, by the model's own forward."""
    seen: list[Tensor] = []
    hooks = [model.model.layers[-1].register_forward_hook(lambda _, __, out: seen.append(out))]
    if steer is not None:
        layer, vector = steer
        hooks.insert(0, model.model.layers[layer].register_forward_hook(lambda _, __, out: out + vector.to(out.dtype)))
    try:
        model.model(inputs_embeds=hidden, attention_mask=mask, use_cache=True)
    finally:
        for hook in hooks:
            hook.remove()
    return seen[0]


# ---- price -------------------------------------------------------------------------------------------------------


def price(folder: Path, device: torch.device, sizes: Sizes) -> tuple[Sizes, dict[str, float], list[tuple[str, float]]]:
    """Median seconds of each task for one wide bfloat16 block; and what the wire costs alone."""
    where, dtype = folder / "wide", torch.bfloat16
    model = make_model(where, sizes, 1, dtype, device)
    hidden = torch.randn(1, sizes.tokens, sizes.hidden, device=device).to(dtype)
    vector, prompts = torch.randn(sizes.hidden, device=device), torch.randn(1, 1, 16, sizes.hidden, device=device)
    layer, rotary = model.model.layers[0], model.model.rotary_emb
    positions = torch.arange(sizes.tokens, device=device)[None]

    def plain(hidden: Tensor) -> Tensor:
        embeddings = rotary(hidden, position_ids=positions)
        out = layer(hidden, attention_mask=None, position_embeddings=embeddings, position_ids=positions)
        return out[0] if isinstance(out, tuple) else out

    (block_fn, params), *_ = kf.load_blocks(where, 0, 1, dtype=dtype, device=device)
    with workers(where, device, dtype, dtype, (1,)) as flow:
        steer, both = {"steer": {0: vector}}, {"steer": {0: vector}, "prompts": prompts}
        runs: dict[str, Callable[[Tensor], Tensor]] = {
            "forward: the Hugging Face layer": plain,
            "forward: block_fn in this process": lambda h: block_fn(params, h),
            "forward: through a worker's bytes": lambda h: flow(h),
            "forward: the same with steer": lambda h: flow(h, **steer),
            "forward: the same with steer and 16 prompts": lambda h: flow(h, **both),
        }
        taken = {name: _seconds(lambda run=run: _no_grad(run, hidden), device, sizes) for name, run in runs.items()}
        for name, run in list(runs.items()):
            task = name.replace("forward", "forward and backward")
            taken[task] = _seconds(lambda run=run: _derive(run, hidden), device, sizes)
    return sizes, taken, _wire(hidden, device, sizes)


def _no_grad(run: Callable[[Tensor], Tensor], hidden: Tensor) -> None:
    with torch.no_grad():
        run(hidden)


def _derive(run: Callable[[Tensor], Tensor], hidden: Tensor) -> None:
    hidden = hidden.detach().requires_grad_()
    torch.autograd.grad(run(hidden), hidden, torch.ones_like(hidden))


def _wire(hidden: Tensor, device: torch.device, sizes: Sizes) -> list[tuple[str, float]]:
    message = Message({"op": "run", "span": [0, 1]}, {"hidden": hidden})
    data = dumps(message)
    return [
        ("bytes of a request", float(len(data))),
        ("of that not the tensor's", float(len(data) - hidden.numel() * hidden.itemsize)),
        ("seconds to bytes (dumps, from the device)", _seconds(lambda: dumps(message), device, sizes)),
        (
            "seconds from bytes (loads, to the device)",
            _seconds(lambda: loads(bytearray(data)).tree["hidden"].to(device), device, sizes),
        ),
    ]


def _seconds(work: Callable[[], Any], device: torch.device, sizes: Sizes) -> float:
    """The median of some runs after one to warm up; the device has finished when the clock stops."""
    taken = []
    for _ in range(1 + sizes.repeats):
        _wait(device)
        began = time.perf_counter()
        work()
        _wait(device)
        taken.append(time.perf_counter() - began)
    return median(taken[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


# ---- what is printed ---------------------------------------------------------------------------------------------


def proof_table(proofs: Sequence[Proof]) -> str:
    """One row per proof."""
    lines = ["| proof | client, workers | verdict | largest gap, relative | holds |", "|---|---|---|---|---|"]
    for proof in proofs:
        holds = "yes" if proof.holds else "**NO**"
        lines.append(f"| {proof.what} | {proof.dtypes} | {proof.verdict} | {proof.gap:.2g} | {holds} |")
    return "\n".join(lines)


def price_table(sizes: Sizes, taken: dict[str, float], wire: Sequence[tuple[str, float]]) -> str:
    """Seconds, and ratios to the Hugging Face layer (of forward, or of forward and backward) in the same run."""
    shape = f"hidden {sizes.hidden}, {sizes.heads} heads, {sizes.kv_heads} kv heads, MLP {sizes.intermediate}"
    lines = [f"\nOne Llama block, {shape}, bfloat16, {sizes.tokens:,} tokens:\n"]
    lines += ["| task | milliseconds | Hugging Face layer / this |", "|---|---|---|"]
    for name, seconds in taken.items():
        base = taken[f"{name.partition(':')[0]}: the Hugging Face layer"]
        lines.append(f"| {name} | {1000 * seconds:.2f} | {base / seconds:.2f} |")
    lines += ["", "| the wire alone | |", "|---|---|"]
    lines += [f"| {name} | {f'{value:,.0f}' if 'seconds' not in name else f'{value:.4f}'} |" for name, value in wire]
    return "\n".join(lines)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    sys.exit(main())
