"""The small parts of a layer: norm, gated MLP, embedding, rotary positions."""

from functools import partial
from types import EllipsisType

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float, Float32, Int32

from dgemma_jax.config import Rope
from dgemma_jax.kernels.matmul import matmul
from dgemma_jax.kernels.quantized import Quantized, dequantized
from dgemma_jax.kernels.shard import Shard
from dgemma_jax.shapes import Array, Hidden, Tokens


def weight(*shape: int, dtype: str, axes: tuple[Shard | None, ...] = ()) -> nnx.Param:
    """A parameter as its shape and dtype; the arrays come with the params pytree.

    axes: of each dimension from the first on the logical axis, as the mesh cuts it (`dgemma_jax.sharding.shard_of`);
    None, and nothing for the rest, for what every device has whole.
    """
    return nnx.Param(jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)), axes=axes)


class QuantizedWeight(nnx.Module):
    """A weight that the params hold as values and scales; read like a Param. axes: see `weight`."""

    def __init__(self, spec: Quantized, axes: tuple[Shard | None, ...] = ()):
        self.values, self.scales = nnx.Param(spec.values, axes=axes), nnx.Param(spec.scales, axes=axes)

    def __getitem__(self, key: EllipsisType) -> Quantized:
        return Quantized(self.values[key], self.scales[key])


def rms_norm(x: Float[Array, "*B D"], eps: float) -> Float[Array, "*B D"]:
    """x / sqrt(mean(x^2) + eps), computed in fp32."""
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)).astype(x.dtype)


class RMSNorm(nnx.Module):
    """rms_norm times a weight; the product is in fp32 and rounded once (the weight is not 1 + w)."""

    def __init__(self, width: int, eps: float, dtype: str):
        self.scale = weight(width, dtype=dtype)
        self.eps = eps

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        normed = rms_norm(x.astype(jnp.float32), self.eps)
        return (normed * self.scale[...].astype(jnp.float32)).astype(x.dtype)


class MLP(nnx.Module):
    """(gelu(x Wg) * (x Wu)) Wd with the tanh GELU. shard: of the inner axis; None: whole on any mesh."""

    def __init__(self, width: int, inner: int, dtype: str, implementation: str = "auto", shard: Shard | None = None):
        self.gate = weight(width, inner, dtype=dtype, axes=(None, shard))
        self.up = weight(width, inner, dtype=dtype, axes=(None, shard))
        self.down = weight(inner, width, dtype=dtype, axes=(shard,))
        self.implementation, self.shard = implementation, shard

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        product = partial(matmul, implementation=self.implementation)
        tokens = x.reshape(-1, x.shape[-1])  # gradients of weights are slow over two leading axes
        gate = jax.nn.gelu(product(tokens, self.gate[...]), approximate=True)
        inner = gate * product(tokens, self.up[...])
        return product(inner, self.down[...], shard=self.shard).reshape(x.shape)


class Embedder(nnx.Module):
    """The one table of lookup, head and self-conditioning; looked-up rows are scaled by sqrt(D). shard: of the ids."""

    def __init__(self, shard: Shard, width: int, dtype: str):
        self.table = weight(shard.size, width, dtype=dtype, axes=(shard,))
        self.dtype, self.shard = dtype, shard
        self.scale = float(np.sqrt(np.float32(width)).astype(dtype))  # in bf16 53.0 for D = 2816

    def __call__(self, ids: Tokens) -> Hidden:
        place, here = self.shard.locate(ids)
        rows = dequantized(jax.tree.map(lambda part: part[place], self.table[...]), self.dtype)
        if self.shard.cut:
            mine = jnp.expand_dims(here, -1)
            rows = self.shard.sum(jnp.where(mine, rows, 0))  # one device has the row, the others zeros
        return rows * jnp.asarray(self.scale, rows.dtype)


def inverse_frequencies(rope: Rope, width: int) -> np.ndarray:
    """f32[H/2] radians per position of each channel pair (j, j + H/2).

    The exponent runs over the whole head width also where only a fraction of the pairs turns: the first
    rotary_fraction * H / 2 pairs, the others keep frequency zero.
    """
    turning = int(rope.rotary_fraction * width // 2)
    exponent = np.arange(0, 2 * turning, 2, dtype=np.float32) / np.float32(width)
    frequencies = np.zeros(width // 2, np.float32)
    frequencies[:turning] = 1.0 / np.float32(rope.theta) ** exponent
    return frequencies / np.float32(rope.factor)


def rotary_table(rope: Rope, width: int, positions: Int32[Array, "B T"]) -> Float32[Array, "2 B T h"]:
    """cos and sin of every position's angles, in fp32."""
    angle = positions[..., None].astype(jnp.float32) * inverse_frequencies(rope, width)
    return jnp.stack([jnp.cos(angle), jnp.sin(angle)])


def rotate(x: Float[Array, "B T N H"], table: Float32[Array, "2 B T h"]) -> Float[Array, "B T N H"]:
    """Turn channel pairs (j, j + H/2) by their angle; like the reference, with the table rounded to the dtype of x."""
    cos, sin = table.astype(x.dtype)[:, :, :, None]
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
