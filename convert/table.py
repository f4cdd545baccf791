"""The form of a name table: which stored tensor holds which parameter, and how its axes lie there."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

ParamPath = tuple[str | int, ...]

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "float16": np.float16}
STORED = DTYPES | {"int8": np.int8, "uint8": np.uint8}  # with those of quantised weights
ALIGNMENT = 64  # bytes; where jax wants an array to begin
BLOCK = 1 << 20  # bytes put in order at once: fewer are mostly the call of jax, more do not stay in the cache


class Layout(NamedTuple):
    """How a parameter lies in the file, step by step.

    merged: this axis and the next become one. swapped: then the last two axes change places. heads_first: then the
    first two do. parts: then the axis before the last is split into (parts, rest).
    """

    merged: int | None = None
    swapped: bool = False
    heads_first: bool = False
    parts: int | None = None

    def file_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The file's shape of a parameter of `shape`."""
        return self.to_file(np.broadcast_to(np.int8(0), shape)).shape

    def to_file(self, array: np.ndarray) -> np.ndarray:
        """The parameter as it lies in the file; a view of it, where numpy can make one."""
        array = self._swap(array.reshape(self._merged(array.shape)))
        if self.parts is None:
            return array
        return array.reshape(*array.shape[:-2], self.parts, -1, array.shape[-1])

    def from_file(self, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """The inverse of to_file for a parameter of `shape`; a view of the file's array."""
        if self.parts is not None:
            array = array.reshape(*array.shape[:-3], -1, array.shape[-1])
        return self._swap(array).reshape(shape)

    def _merged(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if self.merged is None:
            return shape
        at = self.merged
        return (*shape[:at], math.prod(shape[at : at + 2]), *shape[at + 2 :])

    def _swap(self, array: np.ndarray) -> np.ndarray:
        """Both swaps; no layout has both on an array of more than two axes, so their order does not matter."""
        array = array.swapaxes(-1, -2) if self.swapped else array
        return array.swapaxes(0, 1) if self.heads_first else array


SAME = Layout()
SCALAR = Layout(merged=0)  # [] <-> [1]: the product of no axes
MATRIX = Layout(swapped=True)  # [..., in, out] <-> [..., out, in]


class Entry(NamedTuple):
    """One parameter: its path in params, its layout, and where in the stored tensor it begins.

    at: numbers on the leading axes of a tensor that stacks several parameters.
    """

    path: ParamPath
    layout: Layout
    at: tuple[int, ...] = ()


Rows = list[tuple[str, Entry]]


def name_of(path: ParamPath) -> str:
    """The parameter's own name: ("layers", 3, "mlp", "up") is "layers/3/mlp/up"."""
    return "/".join(map(str, path))


def item_of(path: ParamPath) -> str:
    """The part of a model that is converted and stored at once: one layer, the image tower, or all the rest."""
    if path[0] == "layers":
        return f"layer_{path[1]:03}"
    return "vision" if path[0] == "vision" else "embedding"


def by_item(rows: Rows) -> dict[str, Rows]:
    """The rows of each item, items in the order in which they first occur."""
    items: dict[str, Rows] = {}
    for name, entry in rows:
        items.setdefault(item_of(entry.path), []).append((name, entry))
    return items


def stacked_shape(entries: Iterable[Entry]) -> tuple[int, ...]:
    """The extents of a tensor's leading axes that stack these parameters."""
    return tuple(max(numbers) + 1 for numbers in zip(*(entry.at for entry in entries), strict=True))


def owned(array: np.ndarray, dtype: Any) -> np.ndarray:
    """A C-contiguous array of `dtype` in memory of its own; `array` itself if it is one already."""
    if array.flags.c_contiguous and array.flags.writeable and array.dtype == dtype:  # a mapped file is not writeable
        return array
    if not array.flags.c_contiguous and array.strides[0] < max(array.strides):
        return _reordered(array, dtype)
    out = aligned(array.shape, dtype)
    if array.flags.c_contiguous:
        out[...] = array
    else:
        step = max(1, BLOCK // out[0].nbytes)
        for at in range(0, len(out), step):  # blocks of the file, each with its axes in another order
            out[at : at + step] = _reordered(array[at : at + step], dtype)
    return out


def _reordered(array: np.ndarray, dtype: Any) -> np.ndarray:
    """A C-contiguous copy, made by jax on the CPU: for axes in another order several times quicker than numpy."""
    import jax

    return np.asarray(jax.device_put(array.astype(dtype, copy=False), jax.devices("cpu")[0]))


def aligned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An empty array that jax takes without a copy."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


def leaf(tree: Mapping, path: ParamPath) -> Any:
    """What lies at `path` of a nested dict."""
    for key in path:
        tree = tree[key]
    return tree


def insert(tree: dict, path: ParamPath, value: Any) -> None:
    """Puts `value` at `path` of a nested dict."""
    for key in path[:-1]:
        tree = tree.setdefault(key, {})
    tree[path[-1]] = value
