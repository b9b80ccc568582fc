"""``flow.harvest``: texts run through a flow, and what is at its points kept in a folder, in shards, token by token.

What is in the folder: ``kwflow.client.activation_files``. What reads it: ``kwflow.client.activations``.
"""

# B batch, S seq, P pos

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kwflow.client.activation_files import ABOUT, DIGEST, Index, begin, read_tensors, shard_file
from kwflow.client.activations import Activations
from kwflow.client.inputs import Ends
from kwflow.errors import CallerError, KwargError, SpanError
from kwflow.kwargs.capture import Capture
from kwflow.kwargs.points import PATTERN, captured_features
from kwflow.kwargs.positions import token_position
from kwflow.kwargs.tree import as_int
from kwflow.show.progress import bar

if TYPE_CHECKING:
    from kwflow.client.flow import Flow


def harvest(
    flow: Flow,
    texts: Iterable[Any],
    points: Mapping[str, Any],
    folder: str | os.PathLike[str],
    *,
    at: Any = "all",
    max_tokens: int | None = None,
    batch_size: int = 32,
    shard_mb: float = 256,
) -> Activations:
    """What ``flow.harvest`` does, which says it in full; ``kf.activations.harvest(flow, …)`` is the same."""
    size, tokens = _checked(flow, texts, at, max_tokens, batch_size, shard_mb)
    wanted = Capture(points, at=at)
    if PATTERN in points:
        raise KwargError(
            "harvest: a pattern is as wide as its text; flow.capture({'pattern': [3]}, **x) brings it back"
        )
    last = max(layer for _, layer in wanted)
    flow = flow[: last + 1] if 0 <= last < flow.stop else flow  # of a layer that it lacks, the plan says what is wrong
    recipe, token_bytes = _plan(flow, wanted, tokens)
    room = max(1, int(shard_mb * 1e6) // token_bytes)
    index = begin(path := Path(folder), recipe)
    rows = _rows(flow.ends, [texts] if isinstance(texts, str) else texts, tokens)
    _skip(path, index, rows)
    count = len(texts) if isinstance(texts, Sized) and not isinstance(texts, str) else None
    with torch.no_grad(), bar("harvesting", count, unit="text", initial=index.rows) as shown:
        for first, stop, tensors in _shards(flow, wanted, _batches(rows, size, room), index.rows, room, shown):
            index = index.with_shard(path, (first, stop), tensors)
    if not index.complete:
        replace(index, complete=True).write(path)
    return Activations(path)


def _checked(
    flow: Flow, texts: Any, at: Any, max_tokens: Any, batch_size: Any, shard_mb: Any
) -> tuple[int, int | None]:
    """``batch_size`` and ``max_tokens``. Raises KwargError or SpanError for what no run can do."""
    size, tokens = as_int(batch_size) or 0, as_int(max_tokens)
    if size < 1 or (max_tokens is not None and (tokens or 0) < 1):
        raise KwargError(f"batch_size={batch_size!r:.20}, max_tokens={max_tokens!r:.20}: give numbers from 1 on")
    if isinstance(shard_mb, bool) or not isinstance(shard_mb, int | float) or not 0 < shard_mb < math.inf:
        raise KwargError(f"shard_mb is {shard_mb!r:.20}; give a number of megabytes")
    if not isinstance(at, str | int | Sequence) or isinstance(at, bool):
        raise KwargError(f"at is a {type(at).__name__}; harvest takes what is the same for every text, 'prompt[-1]'")
    if isinstance(texts, Mapping) or not isinstance(texts, Iterable):
        raise KwargError(f"texts is a {type(texts).__name__}; give texts, or the token ids of each, without pads")
    if flow.start != 0:
        raise SpanError(f"harvest runs texts from layer 0; this flow has layers {flow.start}:{flow.stop}")
    return size, tokens


def _plan(flow: Flow, wanted: Capture, max_tokens: int | None) -> tuple[dict[str, Any], int]:
    """What must be the same for another run to go on, and the bytes of a token; checked as a call is, nothing sent."""
    ends: Any = flow.ends
    points = {point: sorted(layer for name, layer in wanted if name == point) for point, _ in wanted}
    hidden = torch.empty(1, 1, ends.hidden_size, dtype=ends.dtype, device="meta")
    hops = flow.plan(hidden, {"capture": Capture(points)}).route
    of = {layer: hop for hop in hops for layer in range(hop.start, hop.stop)}
    features = sum(math.prod(captured_features(point, of[layer].schema, 1)) for point, layer in wanted)
    marks = [hop.hello.fingerprint for hop in hops]
    computed = {" ".join(filter(None, (m.quantization, m.dtype, m.block_fn))) for m in marks}
    recipe = {
        "model": ends.name,
        "checkpoint": sorted({mark.checkpoint or "" for mark in marks}),
        "dtype": str(ends.dtype).removeprefix("torch."),
        "workers": sorted({flow.settings.dtype} if flow.settings.dtype else computed),
        "points": points,
        "at": wanted.at if isinstance(wanted.at, str | int) else list(wanted.at),
        "max_tokens": max_tokens,
    }
    return recipe, features * ends.dtype.itemsize + 8 * len(ABOUT)


# ---- texts -------------------------------------------------------------------------------------------------------


def _rows(ends: Ends, texts: Iterable[Any], max_tokens: int | None) -> Iterator[Tensor]:
    """The token ids (seq,) of each text."""
    for number, text in enumerate(texts):
        ids = ends.tokenize([text])["input_ids"][0] if isinstance(text, str) else _ids(text, number)
        if not len(ids):
            raise KwargError(f"text {number}: {text!r:.40} is not one token; leave it out")
        yield ids[:max_tokens].long()


def _ids(given: Any, number: int) -> Tensor:
    try:
        ids = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError):
        ids = torch.empty(())
    if ids.dim() != 1 or (len(ids) and (ids.is_floating_point() or ids.dtype is torch.bool)):
        raise KwargError(f"text {number} is {given!r:.60}; give a text, or its token ids (seq,) as ints, without pads")
    return ids


def _digest(ids: Tensor) -> int:
    """What tells texts apart."""
    return int.from_bytes(hashlib.blake2b(ids.numpy().tobytes(), digest_size=8).digest(), "little", signed=True)


def _skip(folder: Path, index: Index, rows: Iterator[Tensor]) -> None:
    """Go past the texts that the folder has. Raises KwargError for the first that is another one."""
    for number, shard in enumerate(index.shards):
        kept = read_tensors(shard_file(folder, number), [DIGEST])[DIGEST].tolist()
        for row, digest in zip(range(*shard.rows), kept, strict=True):
            ids = next(rows, None)
            if ids is None:
                raise KwargError(f"{folder} has {index.rows} texts already, and {row} were given: texts differ")
            if _digest(ids) != digest:
                raise KwargError(f"{folder} was begun with other texts: text {row} has other tokens than the one there")


def _batches(rows: Iterable[Tensor], size: int, room: int) -> Iterator[list[Tensor]]:
    """Texts that run together: at most ``size``, and with their pads ``room`` tokens, if not one alone has more."""
    batch: list[Tensor] = []
    for ids in rows:
        width = max(map(len, [*batch, ids]))
        if batch and (len(batch) + 1) * width > room:
            yield batch
            batch = []
        batch.append(ids)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


# ---- activations -------------------------------------------------------------------------------------------------


def _shards(
    flow: Flow, wanted: Capture, batches: Iterable[list[Tensor]], first: int, room: int, shown: Any
) -> Iterator[tuple[int, int, dict[str, Tensor]]]:
    """Whole shards: their first text, the one behind their last, and what is in them."""
    parts: list[dict[str, Tensor]] = []
    held, row = 0, first
    for batch in batches:
        part = _activations(flow, wanted, batch, row)
        count = len(part[ABOUT[0]])
        if parts and held + count > room:
            yield first, row, _joined(parts)
            first, held = row, 0
        parts.append(part)
        held, row = held + count, row + len(batch)
        if held >= room:
            yield first, row, _joined(parts)
            first, held = row, 0
        shown.update(len(batch))
    if parts:
        yield first, row, _joined(parts)


def _joined(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """One after the other; each part's tensor is let go as soon as it was copied, and ``parts`` are empty then."""
    joined = {name: torch.cat([part.pop(name) for part in parts]) for name in list(parts[0])}
    parts.clear()
    return joined


def _activations(flow: Flow, wanted: Capture, batch: Sequence[Tensor], first: int) -> dict[str, Tensor]:
    """What a shard has of some texts: all selected tokens of the first, then of the next; no pads."""
    width = max(map(len, batch))
    ids_BS = torch.stack([torch.constant_pad_nd(ids, (width - len(ids), 0)) for ids in batch])
    mask_BS = torch.stack([torch.arange(width) >= width - len(ids) for ids in batch]).long()
    points: dict[str, list[int]] = {}
    for point, layer in wanted:
        points.setdefault(point, []).append(layer)
    with _about(first, first + len(batch)):
        x: dict[str, Any] = {**flow.inputs({"input_ids": ids_BS, "attention_mask": mask_BS})}
        _, acts = flow.capture(points, at=wanted.at, **x)
    ((_, column_BP, values),) = acts.steps
    there_BP, column_BP = column_BP >= 0, column_BP.clamp(min=0)
    row_BP = torch.arange(first, first + len(batch))[:, None].expand_as(column_BP)
    about = (row_BP, token_position(mask_BS, width).gather(1, column_BP), ids_BS.gather(1, column_BP))
    part = {name: values_BP[there_BP] for name, values_BP in zip(ABOUT, about, strict=True)}
    part[DIGEST] = torch.tensor([_digest(ids) for ids in batch])
    for (point, layer), value in values.items():
        part[f"{point}.{layer}"] = value[there_BP.to(value.device)].cpu()
    return part


@contextmanager
def _about(first: int, stop: int) -> Iterator[None]:
    """Errors say which texts they are about."""
    try:
        yield
    except CallerError as error:
        raise type(error)(f"texts {first}:{stop}: {error}") from error
