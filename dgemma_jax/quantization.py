"""Weights in 8 or 4 bits: which of them, in what shapes, and how their numbers are chosen when a model is converted.

Weight-only: experts, attention and the dense MLP of the text layers in the bits asked for, the embedding table (which
is also the vocabulary head's and self-conditioning's) in 8. Router, norms, scalars, the self-conditioning MLP and the
image tower stay as they are. The layout is that of `dgemma_jax.kernels.quantized`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dgemma_jax.config import INT4_GROUP
from dgemma_jax.convert.table import aligned
from dgemma_jax.kernels.quantized import HALF, Quantized, dequantized
from dgemma_jax.shapes import Array

Path = tuple[str | int, ...]
PARTS = ("values", "scales")  # of a quantised weight in params and in files
BLOCK_BYTES = 64 << 20  # of the weights in fp32 whose numbers are chosen at once
# The axes that a product sums over. The last of them is the one that has groups.
SUMMED: dict[Path, tuple[int, ...]] = {
    ("embedder", "table"): (1,),
    ("attention", "q"): (0,),
    ("attention", "k"): (0,),
    ("attention", "v"): (0,),
    ("attention", "o"): (0, 1),
    ("mlp", "gate"): (0,),
    ("mlp", "up"): (0,),
    ("mlp", "down"): (0,),
    ("experts", "gate_up"): (1,),
    ("experts", "down"): (1,),
}
# Of the scale that maps a group's farthest number to -8: larger ones waste numbers, smaller ones clip a few.
SHRUNK = tuple(float(x) for x in np.linspace(0.7, 1.15, 10))


def summed_axes(path: Path) -> tuple[int, ...] | None:
    """The axes that products with a weight sum over, None for a weight that is never quantised."""
    return SUMMED.get(path[-2:]) if path[0] in ("embedder", "layers") else None


def quantized_spec(path: Path, shape: tuple[int, ...], quantization: str) -> Quantized | None:
    """Shapes and dtypes of a weight's values and scales, None for a weight that stays as it is."""
    axes = summed_axes(path)
    if axes is None:
        return None
    extents = [1 if axis in axes else length for axis, length in enumerate(shape)]
    if quantization == "int8" or path[0] == "embedder":
        return Quantized(_shaped(shape, jnp.int8), _shaped(extents, jnp.float32))
    values = [length // 2 if axis == axes[-1] else length for axis, length in enumerate(shape)]
    scales = [length // INT4_GROUP if axis == axes[-1] else length for axis, length in enumerate(shape)]
    return Quantized(_shaped(values, jnp.uint8), _shaped(scales, jnp.bfloat16))


def _shaped(shape: Sequence[int], dtype: Any) -> Any:
    """Stands for an array."""
    return jax.ShapeDtypeStruct(tuple(shape), dtype)


def stored_paths(path: Path, quantization: str | None) -> list[Path]:
    """Where a weight's arrays lie in params and in converted files: at its path, or below it if it is quantised."""
    if quantization is None or summed_axes(path) is None:
        return [path]
    return [(*path, part) for part in PARTS]


def is_part(path: Path) -> bool:
    """Whether a parameter is the values or the scales of a quantised weight, whose dtype is part of the layout."""
    return path[-1] in PARTS


def quantize(weight: np.ndarray, path: Path, quantization: str) -> dict[Path, np.ndarray]:
    """The arrays that stand for a finite weight, by path; of one that stays as it is, itself.

    8 bits: the scale maps the farthest number of an output channel to 127. 4 bits: of ten scales per group the one
    with the least sum of squared errors. What is all zero gets the scale 1.
    """
    spec = quantized_spec(path, weight.shape, quantization)
    if spec is None:
        return {path: weight}
    axes = SUMMED[path[-2:]]
    choose = partial(_eight, axes=axes) if spec.packed is None else partial(_four, axis=spec.packed)
    split = 0 if 0 not in axes else weight.ndim - 1
    pieces = -(-4 * weight.size // BLOCK_BYTES)
    result = [aligned(part.shape, part.dtype) for part in (spec.values, spec.scales)]
    with jax.default_device(jax.devices("cpu")[0]):
        for at in _slices(weight.shape[split], pieces):
            place = (slice(None),) * split + (at,)
            for whole, part in zip(result, choose(weight[place]), strict=True):
                whole[place] = part
    return dict(zip(stored_paths(path, quantization), result, strict=True))


def _slices(length: int, pieces: int) -> Iterator[slice]:
    """About so many equal parts of a range, the last one shorter."""
    step = -(-length // pieces)
    return (slice(start, start + step) for start in range(0, length, step))


@partial(jax.jit, static_argnames="axes")
def _eight(weight: Array, axes: tuple[int, ...]) -> tuple[Array, Array]:
    weight = weight.astype(jnp.float32)
    scales = _nonzero(jnp.max(jnp.abs(weight), axis=axes, keepdims=True) / 127)
    return jnp.clip(jnp.round(weight / scales), -127, 127).astype(jnp.int8), scales


@partial(jax.jit, static_argnames="axis")
def _four(weight: Array, axis: int) -> tuple[Array, Array]:
    shape, inside = weight.shape, axis + 1
    groups = weight.astype(jnp.float32).reshape(*shape[:axis], -1, INT4_GROUP, *shape[axis + 1 :])
    high, low = (peak(groups, axis=inside, keepdims=True) for peak in (jnp.max, jnp.min))
    farthest = jnp.where(high >= -low, high, low) / -8

    def numbers(scales: Array) -> Array:
        return jnp.clip(jnp.round(groups / scales), -8, 7)

    def better(best: tuple[Array, Array], shrunk: Array) -> tuple[tuple[Array, Array], None]:
        scales = _nonzero((farthest * shrunk).astype(jnp.bfloat16).astype(jnp.float32))
        error = jnp.sum(jnp.square(numbers(scales) * scales - groups), axis=inside, keepdims=True)
        less = error < best[0]
        return (jnp.where(less, error, best[0]), jnp.where(less, scales, best[1])), None

    start = jnp.full(farthest.shape, jnp.inf, jnp.float32), jnp.ones(farthest.shape, jnp.float32)
    (_, scales), _ = jax.lax.scan(better, start, jnp.asarray(SHRUNK, jnp.float32))
    low, high = jnp.split((numbers(scales) + 8).astype(jnp.uint8), 2, axis=inside)
    halved = (*shape[:axis], shape[axis] // INT4_GROUP * HALF, *shape[axis + 1 :])
    return (low | high << 4).reshape(halved), jnp.squeeze(scales, inside).astype(jnp.bfloat16)


def _nonzero(scales: Array) -> Array:
    return jnp.where(scales == 0, 1, scales)


def quantized_params(params: Mapping, quantization: str) -> dict:
    """A model's params quantised in memory, for measurements and tests."""
    result: dict[str | int, Any] = {}
    for path, array in _leaves(params):
        for place, part in quantize(np.asarray(array), path, quantization).items():
            *outer, name = place
            node = result
            for key in outer:
                node = node.setdefault(key, {})
            node[name] = jnp.asarray(part)
    return result


def dequantized_params(params: Mapping, dtype: str) -> dict:
    """Params with the numbers that quantised weights stand for, as arrays, for measurements and tests."""
    return {
        key: value
        if not isinstance(value, Mapping)
        else dequantized(Quantized(**value), dtype)
        if value.keys() == set(PARTS)
        else dequantized_params(value, dtype)
        for key, value in params.items()
    }


def _leaves(tree: Mapping, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value
