"""Weights as small integers with scales: the layout, and how a weight or a part of one becomes numbers again.

The products take a `Quantized` wherever they take an array, and turn it into numbers a tile at a time.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Float

from dgemma_jax.config import INT4_GROUP
from dgemma_jax.shapes import Array

HALF = INT4_GROUP // 2  # bytes that hold the numbers of a group


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quantized:
    """A weight: every number times the scale that serves it. The axes are those of the weight.

    8 bits: values i8 of the weight's shape; scales f32, of extent 1 along the axes that a product sums over.
    4 bits: along one such axis, numbers come in groups of INT4_GROUP with a scale each (bf16) and lie two to a byte:
    values u8, whose byte j of a group holds number j in its low half and number HALF + j in its high half, each plus 8.
    A byte pairs numbers that far apart so that the low and the high halves of a group are each a run of rows. (jnp.int4
    is two to a byte only on the device: in host memory and in files it takes a byte.)
    """

    values: Array
    scales: Array

    @property
    def packed(self) -> int | None:
        """The axis along which two numbers share a byte, None with 8 bits."""
        if self.values.dtype != jnp.uint8:
            return None
        extents = zip(self.values.shape, self.scales.shape, strict=True)
        return next(axis for axis, (rows, groups) in enumerate(extents) if rows != groups)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight."""
        return tuple(2 * n if axis == self.packed else n for axis, n in enumerate(self.values.shape))


Weight = Float[Array, "..."] | Quantized
Matrix = Float[Array, "K N"] | Quantized
Table = Float[Array, "V D"] | Quantized


def dequantized(weight: Weight, dtype: jnp.dtype | str) -> Array:
    """The numbers of a weight in `dtype`, rounded once; of an array the array as it is."""
    if not isinstance(weight, Quantized):
        return weight
    numbers, scales, axis = weight.values, weight.scales.astype(jnp.float32), weight.packed
    if axis is None:
        return (numbers.astype(jnp.float32) * scales).astype(dtype)
    shape = numbers.shape
    groups = numbers.reshape(*shape[:axis], shape[axis] // HALF, HALF, *shape[axis + 1 :])
    numbers = jnp.concatenate(unpacked(groups), axis=axis + 1).astype(jnp.float32)
    return (numbers * jnp.expand_dims(scales, axis + 1)).astype(dtype).reshape(weight.shape)


def unpacked(values: Array) -> tuple[Array, Array]:
    """The numbers i8 in the low and in the high halves of bytes u8."""
    return (values & 15).astype(jnp.int8) - 8, (values >> 4).astype(jnp.int8) - 8


def as_matrix(weight: Weight, inputs: int) -> Matrix:
    """A weight as a matrix from its first `inputs` axes to the others; of 4 bits its groups must run along the last
    of them."""
    return jax.tree.map(lambda part: part.reshape(math.prod(part.shape[:inputs]), -1), weight)


def after(x: Array, weight: Weight) -> Weight:
    """The weight, of which nothing is computed before x is there.

    Inside a loop XLA would otherwise compute the numbers of all weights ahead of it, and keep them.
    """
    return jax.lax.optimization_barrier((x, weight))[1] if isinstance(weight, Quantized) else weight


def taken(weight: Weight, start: Array, size: int, axis: int) -> Weight:
    """`size` numbers from `start` on along an axis that is not packed."""

    def part(array: Array) -> Array:
        if array.dtype != jnp.bfloat16 or not isinstance(weight, Quantized):
            return jax.lax.dynamic_slice_in_dim(array, start, size, axis)
        # For a CPU XLA turns bf16 arrays that it cuts into fp32, whole; integers it leaves as they are.
        bits = jax.lax.bitcast_convert_type(array, jnp.uint16)
        return jax.lax.bitcast_convert_type(jax.lax.dynamic_slice_in_dim(bits, start, size, axis), jnp.bfloat16)

    return jax.tree.map(part, weight)
