"""Encoded prompts kept for later requests that begin with the same tokens and images."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np

from dgemma_jax.cache import KVCache
from dgemma_jax.images.placement import Placed
from dgemma_jax.sharding import share


@dataclass(frozen=True)
class Snapshot:
    """The cache of a row right behind `length` tokens. A ring holds the keys before that place and no other."""

    length: int
    row: KVCache

    @property
    def nbytes(self) -> int:
        """What it takes on each device."""
        return sum(share(leaf) * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.row))


class PrefixCache:
    """Snapshots by the tokens before them, at most `capacity` bytes; the least recently used go first.

    A prompt finds a snapshot only at the exact place where it was taken, because the rings of sliding layers keep
    nothing older. hits: lookups that found one.
    """

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.hits = 0
        self._snapshots: OrderedDict[bytes, Snapshot] = OrderedDict()

    def __len__(self) -> int:
        return len(self._snapshots)

    @property
    def nbytes(self) -> int:
        """Of all snapshots."""
        return sum(snapshot.nbytes for snapshot in self._snapshots.values())

    def find(self, ids: tuple[int, ...], images: Sequence[Placed] = ()) -> Snapshot | None:
        """The longest snapshot that lies strictly inside a prompt: its last token must still be encoded."""
        lengths = {snapshot.length for snapshot in self._snapshots.values() if snapshot.length < len(ids)}
        for length in sorted(lengths, reverse=True):
            key = _key(ids[:length], images)
            if key in self._snapshots:
                self._snapshots.move_to_end(key)
                self.hits += 1
                return self._snapshots[key]
        return None

    def holds(self, ids: tuple[int, ...], images: Sequence[Placed] = ()) -> bool:
        """Whether there is a snapshot right behind these tokens."""
        return _key(ids, images) in self._snapshots

    def add(self, ids: tuple[int, ...], row: KVCache, images: Sequence[Placed] = ()) -> None:
        """Keep the cache of a row that holds exactly `ids`, unless it alone is larger than the capacity."""
        snapshot = Snapshot(len(ids), row)
        if snapshot.nbytes > self.capacity:
            return
        while self._snapshots and self.nbytes + snapshot.nbytes > self.capacity:
            self._snapshots.popitem(last=False)
        self._snapshots[_key(ids, images)] = snapshot


def _key(ids: tuple[int, ...], images: Sequence[Placed]) -> bytes:
    """Of the tokens, and of the images that lie among them, whose tokens are all the same."""
    digests = b"".join(image.digest for start, image in images if start < len(ids))
    return hashlib.sha256(len(ids).to_bytes(8) + np.asarray(ids, np.int32).tobytes() + digests).digest()
