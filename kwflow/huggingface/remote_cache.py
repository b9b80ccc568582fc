"""A session on the workers in the place of a Hugging Face cache: ``forward`` and ``generate`` go on from it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from kwflow.client.session import Session
from kwflow.errors import SessionError, UnsupportedError


class RemoteLayer(CacheLayerMixin):
    """What transformers sees as the cache of the one layer.

    ``prefix``: columns before the first token, of trained prompts. transformers counts tokens, so they are left out,
    but for the base model, which is given them (``RemoteCache.whole``).
    """

    is_croppable = True
    is_sliding = False

    def __init__(self, session: Session, prefix: int = 0):
        super().__init__()
        self.session, self.prefix, self.hidden = session, prefix, prefix

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise AssertionError("keys and values live on the workers")

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        raise AssertionError("keys and values live on the workers")

    def get_seq_length(self) -> int:
        return max(0, self.session.position - self.hidden)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        if self.session.max_length is None:
            return -1  # transformers' word for no limit
        return self.session.max_length - self.session.prefix - self.hidden

    def crop(self, tokens_to_remove: int) -> None:
        """As transformers': 0 or a negative number, of tokens to remove; more than there are removes all.

        Without tokens the prefix goes too: it is given again with the next first token.
        """
        if tokens_to_remove > 0:
            raise SessionError(
                f"crop({tokens_to_remove}): transformers' caches take the number of tokens to remove as a negative "
                f"integer: this one holds {self.get_seq_length()}, and crop(-1) removes the last"
            )
        left = max(0, self.session.position - self.prefix + tokens_to_remove)
        self.session.rollback(left + self.prefix if left else 0)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.session.reorder(beam_idx)

    def reset(self) -> None:
        self.session.rollback(0)


class RemoteCache(Cache):
    """A session as ``generate`` and ``forward`` take and return it; ``session`` is the session itself."""

    is_compileable = False  # type: ignore[assignment]

    def __init__(self, session: Session, prefix: int = 0):
        self._layer = RemoteLayer(session, prefix)
        super().__init__(layers=[self._layer])
        self.session = session

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Within, the columns of the prefix count too."""
        self._layer.hidden = 0
        try:
            yield
        finally:
            self._layer.hidden = self._layer.prefix

    def __repr__(self) -> str:
        return f"RemoteCache({self.session!r})"

    def __deepcopy__(self, memo: Any) -> RemoteCache:
        raise UnsupportedError(
            "a session cannot be copied: its keys and values live on the workers; session.fork() computes them again, "
            "for another one"
        )

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise UnsupportedError("a session's rows cannot be repeated after its first step; repeat the inputs instead")

    def batch_select_indices(self, indices: Tensor) -> None:
        raise UnsupportedError("a session keeps its rows; reorder(ids) changes their order only")

    def common(self, ids: Tensor) -> int:
        """With how many columns of ``ids`` (batch, columns) begins what is held; of what is not known, with none."""
        held = self.session.token_ids
        if held is None:
            return 0
        held = held[:, self._layer.prefix :]
        width = min(held.shape[1], ids.shape[1])
        same = (held[:, :width] == ids[:, :width].cpu()).all(0)
        return int(same.long().cumprod(0).sum())

    def check_begins(self, ids: Tensor) -> None:
        """Raise SessionError, naming the token, unless ``ids`` (batch, more columns) begin with what is held."""
        past, before = self.get_seq_length(), self._layer.prefix
        if ids.shape[0] != self.session.batch:
            raise SessionError(f"input_ids has {ids.shape[0]} rows, copies included, and the cache {self.batch_size}")
        if self.session.token_ids is None:  # of embeddings, or of the session's own steps
            return
        held = self.session.token_ids[:, before:]
        differs = (held >= 0) & (held != ids[:, :past].cpu())
        if not bool(differs.any()):
            return
        column = int(differs.any(0).nonzero()[0])
        row = int(differs[:, column].nonzero()[0])
        raise SessionError(
            f"input_ids has token {int(ids[row, column])} at row {row}, column {column}, where the cache holds "
            f"{int(held[row, column])}: it goes on from what it holds. cache.crop({column - past}) keeps the columns "
            f"before; or give no cache"
        )

    @property
    def batch_size(self) -> int:
        return self.session.batch or -1
