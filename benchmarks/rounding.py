"""``python -m benchmarks.rounding``: what other shapes of the same computation round otherwise, a Markdown table.

Rows in batches of 2, 4 and 8 against each row alone, and texts in pieces against whole ones: the largest gap of any
number, relative to the largest magnitude of its tensor. Models: the embedded one and a small random one of every
family. One row for the kernels that this process takes; other processors' kernels are taken by the environment:

    ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 python -m benchmarks.rounding

The bounds of ``kwflow.verify.OTHER_SHAPES`` are from here. ``--dtype``: of the models. Progress goes to stderr.
"""

# B batch, S seq, D hidden

from __future__ import annotations

import argparse
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import Tensor

import kwflow as kf
from kwflow.errors import KwflowError
from tests.families.configs import CONFIGS, config
from tests.oracle import tiny

BATCHES, ROWS = (2, 4, 8), 8
EXPERTS = {"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"}  # of a mixture's config
Gaps = Iterator[tuple[str, float]]


def gap(ours: Tensor, expected: Tensor) -> float:
    """Of two tensors, relative to the largest magnitude."""
    return ((ours.double() - expected.double()).abs().max() / expected.double().abs().max()).item()


@torch.no_grad()
def batches(flow: kf.Flow, x: Tensor) -> Gaps:
    """Hidden and logits of rows together against alone."""
    alone = torch.cat([flow(row[None]) for row in x])
    heads = torch.cat([flow.head(row[None]) for row in alone])
    for batch in BATCHES:
        together = torch.cat([flow(rows) for rows in x.split(batch)])
        yield "hidden, batch", gap(together, alone)
        yield "logits, batch", gap(torch.cat([flow.head(rows) for rows in together.split(batch)]), heads)


@torch.no_grad()
def pieces(flow: kf.Flow, x: Tensor) -> Gaps:
    """Hidden and logits of texts in pieces, a token at a time too, against whole."""
    length = x.shape[1]
    quarter = max(1, length // 4)
    for rows in (x[:1], x[:4]):
        whole = flow(rows)
        for sizes in ([1, length - 1], [length // 2, length - length // 2], quarter, 1):
            with flow.session(length) as session:
                out = torch.cat([session.step(part) for part in rows.split(sizes, 1)], 1)
            yield "hidden, pieces", gap(out, whole)
            yield "logits, pieces", gap(flow.head(out), flow.head(whole))


def gradients(flow: kf.Flow, x: Tensor) -> Gaps:
    """Of hidden and of a steering vector that rows share: together against alone, which are summed."""
    weights, v = tiny.random(*x.shape, seed=1, dtype=x.dtype), torch.zeros(x.shape[-1], dtype=x.dtype)
    middle = flow.stop // 2

    def run(batch: int) -> tuple[Tensor, Tensor]:
        leaf, vector = x.clone().requires_grad_(), v.clone().requires_grad_()
        for rows, weight in zip(leaf.split(batch), weights.split(batch), strict=True):
            (flow(rows, steer={middle: vector}) * weight).sum().backward()
        assert leaf.grad is not None and vector.grad is not None
        return leaf.grad, vector.grad

    alone = run(1)
    for batch in BATCHES:
        yield from (("gradients, batch", gap(*pair)) for pair in zip(run(batch), alone, strict=True))


def measure(flow: kf.Flow, lengths: tuple[int, ...], vocabulary: int, largest: dict[str, float]) -> None:
    """The largest gaps of a model, each added to those of its kind."""
    for seq in lengths:
        ids = torch.randint(2, vocabulary, (ROWS, seq), generator=torch.Generator().manual_seed(seq))
        x = flow.inputs(ids)["hidden"]
        for check in (batches, pieces, gradients) if seq > 1 else (batches, gradients):
            for kind, found in check(flow, x):
                largest[kind] = max(largest[kind], found)


def main() -> int:
    """Measure, print, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rounding", description=__doc__)
    parser.add_argument("--dtype", default="float32", choices=["float64", "float32", "bfloat16"])
    dtype = getattr(torch, parser.parse_args().dtype)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows: dict[str, dict[str, float]] = {}
    print("smollm2-135m", file=sys.stderr, flush=True)
    rows["smollm2-135m"] = found = defaultdict(float)
    measure(kf.connect("smollm2-135m", dtype=dtype), (1, 6, 32), 49152, found)
    for name in CONFIGS:
        kind = "small random mixtures" if EXPERTS & set(config(name).to_dict()) else "small random models"
        found = rows.setdefault(kind, defaultdict(float))
        own: dict[str, float] = defaultdict(float)
        try:
            measure(tiny.flow(name, dtype=dtype), (1, 4, 14), tiny.VOCAB, own)
        except (KwflowError, RuntimeError) as error:
            print(f"{name}: {str(error).splitlines()[0]:.100}", file=sys.stderr, flush=True)
            continue
        worst = max(own, key=lambda kind: own[kind])
        print(f"{name}: {own[worst]:.1e} ({worst})", file=sys.stderr, flush=True)
        for kind, value in own.items():
            found[kind] = max(found[kind], value)
    heads = list(rows["smollm2-135m"])
    print("| model | " + " | ".join(heads) + " |\n" + "|---" * (len(heads) + 1) + "|")
    for name, values in rows.items():
        print(f"| {name} | " + " | ".join(f"{values[head]:.1e}" for head in heads) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
