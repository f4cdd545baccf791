"""Encoded prompts kept for later requests that begin with the same tokens and images."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from dgemma_jax.cache import KVCache
from dgemma_jax.images.placement import Placed


class Snapshot(NamedTuple):
    """The cache of a row right behind `length` tokens. A ring holds the keys before that place and no other.

    nbytes: what it takes on each device.
    """

    length: int
    row: KVCache
    nbytes: int


class PrefixCache:
    """Snapshots by the tokens before them, at most `capacity` bytes; the least recently used go first.

    A prompt finds a snapshot only at the exact place where it was taken, because the rings of sliding layers keep
    nothing older. hits: lookups that found one. nbytes: of all snapshots.
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

    def find(self, ids: Sequence[int], images: Sequence[Placed] = ()) -> Snapshot | None:
        """The longest snapshot that a prompt begins with; the whole prompt may be one."""
        lengths = sorted({snapshot.length for snapshot in self._snapshots.values() if snapshot.length <= len(ids)})
        found = [key for key in _keys(ids, images, lengths) if key in self._snapshots]
        if not found:
            return None
        self._snapshots.move_to_end(found[-1])
        self.hits += 1
        return self._snapshots[found[-1]]

    def add(self, ids: Sequence[int], nbytes: int, take: Callable[[], KVCache], images: Sequence[Placed] = ()) -> None:
        """Keep what `take` copies: the cache of a row that holds exactly `ids`, in `nbytes` bytes of each device.

        Not if it is there already, nor if it alone exceeds the capacity. Others go before it is copied.
        """
        if nbytes > self.capacity:
            return
        (key,) = _keys(ids, images, [len(ids)])
        if key in self._snapshots:
            return
        while self.nbytes + nbytes > self.capacity:
            self.nbytes -= self._snapshots.popitem(last=False)[1].nbytes
        self._snapshots[key] = Snapshot(len(ids), take(), nbytes)
        self.nbytes += nbytes


def _keys(ids: Sequence[int], images: Sequence[Placed], lengths: Sequence[int]) -> Iterator[bytes]:
    """For each of the ascending lengths a hash of the first so many ids, and of the images that lie among them, whose
    tokens are all the same.
    """
    array, running, seen = np.asarray(ids, np.int32), hashlib.sha256(), 0
    for length in lengths:
        running.update(array[seen:length].tobytes())
        seen, key = length, running.copy()
        key.update(b"".join(image.digest for start, image in images if start < length) + length.to_bytes(8))
        yield key.digest()
