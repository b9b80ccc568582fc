"""The Markdown that ``python -m benchmarks`` prints and docs/speed.md holds: ratios first, then what is in them."""

from __future__ import annotations

import datetime
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median

import torch

from benchmarks.measure import Row, Setting, Side, Split


def report(setting: Setting, rows: Sequence[Row]) -> str:
    """Two tables: every task against the local model, and where a decoded token's time goes."""
    return "\n".join([headline(setting), "", *_ratios(rows), "", *_splits(rows)])


def headline(setting: Setting) -> str:
    """When and on what this was measured, and how to read it."""
    sizes = setting.sizes
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    machine = f"{cores} cores of {cpu()}, torch {torch.__version__}"
    repeats = (
        f"{sizes.decode_repeats} (decode: {sizes.tokens} tokens after a prompt of {sizes.prompt}) and {sizes.repeats}"
    )
    return (
        f"{datetime.date.today().isoformat()}, {machine}, {os.path.basename(setting.model)}. "
        f"Workers are processes on this machine, over libp2p on loopback; the local side is the same Hugging Face "
        f"model in the same run, with as many threads as each worker. Ratio: local time / time through the workers, "
        f"above 1 is faster than local; medians [lowest, highest] of {repeats} interleaved repetitions. "
        f"A worker recomputes its forward pass in backward. Every process runs with "
        f"OMP_WAIT_POLICY={os.environ.get('OMP_WAIT_POLICY', 'unset')}; the local one also holds the clients."
    )


def _ratios(rows: Sequence[Row]) -> list[str]:
    lines = [
        "| task | threads | workers | ratio | local | through workers "
        "| on the wire | of that not tensors | peak memory: local, each worker |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        local, *swarms = row.sides
        for side in swarms:
            paired = [a / b for a, b in zip(local.seconds, side.seconds, strict=True)]
            ratio = f"**{median(paired):.2f}** [{min(paired):.2f}, {max(paired):.2f}]"
            tensors = row.tensors(side.workers) / row.tokens
            moved = side.moved / row.tokens
            memory = f"{_mb(local.peak_bytes)}, {_mb(side.peak_bytes)}"
            cells = [row.task, row.threads, side.workers, ratio, _time(row, local), _time(row, side), _bytes(moved)]
            lines.append("| " + " | ".join(map(str, [*cells, _bytes(moved - tensors), memory])) + " |")
    return lines


def _splits(rows: Sequence[Row]) -> list[str]:
    lines = [
        "Where a decoded token's milliseconds go (means). Layers: the local layers, or computing on the workers. "
        "Network: round trips less queue and compute. Client: generate, embedding, head and the session.",
        "",
        "| threads | workers | in all | layers | queue | network | client |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        for side in row.sides:
            if side.splits:
                split = _mean(side.splits)
                rest = split.total - split.layers - split.queue - split.network
                numbers = (split.total, split.layers, split.queue, split.network, rest)
                who = side.workers or "local"
                lines.append(f"| {row.threads} | {who} | " + " | ".join(f"{1000 * n:.1f}" for n in numbers) + " |")
    return lines if len(lines) > 4 else []


def _mean(splits: Sequence[Split]) -> Split:
    names = ("total", "layers", "queue", "network")
    return Split(*(mean(getattr(split, name) for split in splits) for name in names))


def _time(row: Row, side: Side) -> str:
    middle = median(side.seconds)
    return f"{1000 * middle:.1f} ms/token" if row.task == "decode" else f"{middle:.2f} s"


def _bytes(count: float) -> str:
    return f"{count / 1e6:.2f} MB" if abs(count) >= 1e5 else f"{count:,.0f} B"


def _mb(count: int | None) -> str:
    return "–" if count is None else f"{count / 1e6:.0f} MB"


def cpu() -> str:
    """The processor's name, as the system says it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
