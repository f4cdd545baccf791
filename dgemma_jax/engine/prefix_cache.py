"""Encoded prompts kept for later requests that begin with the same tokens."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from dgemma_jax.cache import KVCache


class Snapshot(NamedTuple):
    """The cache of a row right behind `length` tokens. A ring holds the keys before that place and no other."""

    length: int
    row: KVCache
    nbytes: int


class PrefixCache:
    """Snapshots by the tokens before them, at most `capacity` bytes; the least recently used go first.

    A prompt finds a snapshot only at the exact place where it was taken, because the rings of sliding layers keep
    nothing older. hits: lookups that found one.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.hits = self.nbytes = 0
        self._snapshots: OrderedDict[bytes, Snapshot] = OrderedDict()

    def __len__(self) -> int:
        return len(self._snapshots)

    def clear(self) -> None:
        """Forget all of them."""
        self._snapshots.clear()
        self.nbytes = 0

    def find(self, ids: Sequence[int]) -> Snapshot | None:
        """The longest snapshot that a prompt begins with; the whole prompt may be one."""
        lengths = sorted({snapshot.length for snapshot in self._snapshots.values() if snapshot.length <= len(ids)})
        found = [key for key in _keys(ids, lengths) if key in self._snapshots]
        if not found:
            return None
        self._snapshots.move_to_end(found[-1])
        self.hits += 1
        return self._snapshots[found[-1]]

    def add(self, ids: Sequence[int], nbytes: int, take: Callable[[], KVCache]) -> None:
        """Keep what `take` copies: the cache of a row that holds exactly `ids`, in `nbytes` bytes.

        Not if it is there already, nor if it alone exceeds the capacity. Others go before it is copied.
        """
        (key,) = _keys(ids, [len(ids)])
        if key in self._snapshots or nbytes > self.capacity:
            return
        while self.nbytes + nbytes > self.capacity:
            self.nbytes -= self._snapshots.popitem(last=False)[1].nbytes
        self._snapshots[key] = Snapshot(len(ids), take(), nbytes)
        self.nbytes += nbytes


def _keys(ids: Sequence[int], lengths: Sequence[int]) -> Iterator[bytes]:
    """A hash of the first so many ids, for each of the ascending lengths."""
    array, running, seen = np.asarray(ids, np.int32), hashlib.sha256(), 0
    for length in lengths:
        running.update(array[seen:length].tobytes())
        seen = length
        yield running.digest()
