"""``Uploaded``: a tensor that workers keep, so that calls name it instead of bringing it again.

It is a tensor: what binds, cuts and derives kwargs knows nothing of it. What lies in its memory, its slices too, is
recognised when a request goes out (``kwflow.wire.uploads``).
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kwflow.autograd.transforms import in_forward_mode, in_transform, is_wrapped
from kwflow.errors import CallerError, KwargError, KwflowError, UnsupportedError
from kwflow.kwargs import tree
from kwflow.kwargs.axes import Axed, describe, not_dense
from kwflow.wire import channel, loop
from kwflow.wire.message import Message
from kwflow.wire.uploads import Upload

DROP_SECONDS = 5.0  # for workers to say that they freed it


class Uploaded(Tensor):
    """A tensor that workers keep; made by ``flow.upload``.

    Whatever torch makes of it is an ordinary tensor; views of it are recognised all the same.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as nn.Parameter
    kept = True
    _end: weakref.finalize[..., Any]

    def close(self) -> None:
        """Free it on the workers; from then on it is a tensor like any other. Calling it again does nothing."""
        if (done := self._end()) is not None and not loop.on_network_thread():
            try:
                done.result(DROP_SECONDS)
            except (TimeoutError, KwflowError) as error:
                log.info("freeing what was uploaded: %s", error)

    @property
    def closed(self) -> bool:
        return not self._end.alive

    def __enter__(self) -> Uploaded:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self, **_: Any) -> str:
        return f"Uploaded({describe(self)}{', closed' * self.closed})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().as_subclass(Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.detach().as_subclass(Tensor).__deepcopy__(memo)


log = logging.getLogger(__name__)


def upload_all(pool: channel.Pool, value: Any, idle: float) -> Any:
    """See ``Flow.upload``."""
    if isinstance(value, dict | list | tuple):
        if not tree.flatten(value)[0]:
            raise KwargError(f"flow.upload takes a tensor, or a tree of tensors; there is none in {value!r:.60}")
        return tree.map_leaves(lambda leaf: upload_all(pool, leaf, idle), value)
    if isinstance(value, Axed):
        return Axed(upload(pool, value.tensor, idle), value.axes)
    return upload(pool, value, idle)


def upload(pool: channel.Pool, tensor: Tensor, idle: float) -> Uploaded:
    """One tensor."""
    if not isinstance(tensor, Tensor):
        raise KwargError(f"flow.upload takes a tensor, or a tree of tensors, got {type(tensor).__name__}")
    if isinstance(idle, bool) or not isinstance(idle, int | float) or not 0 < idle < float("inf"):
        raise KwargError(f"flow.upload: idle is {idle!r:.40}; give the seconds without use until workers drop it")
    if kind := not_dense(tensor):
        raise KwargError(f"flow.upload got a {kind} tensor of {tensor.dtype}; dense ones can be kept")
    if in_transform() or is_wrapped(tensor) or in_forward_mode([tensor]):
        raise UnsupportedError(
            "flow.upload inside a torch.func transform: what it would keep is the transform's, gone when that ends, "
            "and may stand for many values; upload outside, and use what it gives inside"
        )
    with torch.inference_mode(False):
        own = tensor.clone(memory_format=torch.contiguous_format)  # nobody else writes to it
    handle: Uploaded = own.as_subclass(Uploaded)
    handle._end = weakref.finalize(handle, _end, weakref.ref(pool), pool.uploads.add(own.detach(), float(idle)))
    handle._end.atexit = False  # workers drop it in time
    return handle


def _end(pool: weakref.ref[channel.Pool], upload: Upload) -> Any:
    """Drop what is on workers, on the network thread; the future, if there is anything to drop."""
    if (alive := pool()) is None or not (gone := alive.uploads.remove(upload)):
        return None
    try:
        return loop.submit(_drop(alive, alive.uploads.scope, gone))
    except CallerError:  # Python is ending
        return None


async def _drop(pool: channel.Pool, scope: str, gone: Mapping[str, list[str]]) -> None:
    async def one(peer: str, names: list[str]) -> None:
        try:
            async with asyncio.timeout(DROP_SECONDS):
                await pool(peer, Message({"op": "drop", "scope": scope, "names": names}))
        except (KwflowError, OSError, TimeoutError) as error:
            log.info("%s was not told to free what was uploaded: %s", peer[-8:], error)

    await asyncio.gather(*(one(peer, names) for peer, names in gone.items()))
