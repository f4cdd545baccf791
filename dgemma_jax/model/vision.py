"""The image tower: patches to soft tokens, and soft tokens to their places among a prompt's embeddings.

Source: transformers' Gemma 4 vision model, as DiffusionGemma uses it. Letters here: B images, P patches of each, Q soft
tokens of each, k the side of the pooling kernel.
"""

from typing import cast

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Bool, Float, Float32, Int32

from dgemma_jax.config import Config, Rope, VisionConfig
from dgemma_jax.image_batch import ImageBatch
from dgemma_jax.kernels.mixed_attention import mixed_attention
from dgemma_jax.model.layers import RMSNorm, inverse_frequencies, rms_norm, rotate, weight
from dgemma_jax.shapes import Array, Blocks, Hidden, Lengths, Queries

Patches = Float[Array, "B P M"]
Positions = Int32[Array, "B P 2"]


class ClipBounds(nnx.Module):
    """Scalar clamps around one linear layer, of checkpoints with clipped linears."""

    def __init__(self, dtype: str):
        self.input_min = weight(dtype=dtype)
        self.input_max = weight(dtype=dtype)
        self.output_min = weight(dtype=dtype)
        self.output_max = weight(dtype=dtype)


def clips(count: int, vision: VisionConfig, dtype: str) -> list[ClipBounds | None]:
    """The bounds of so many linear layers."""
    return [ClipBounds(dtype) if vision.use_clipped_linears else None for _ in range(count)]


def linear(x: Float[Array, "*B I"], matrix: Float[Array, "I O"], clip: ClipBounds | None) -> Float[Array, "*B O"]:
    """x times a matrix, as one plain product (see layers.MLP), between the clamps if there are any."""
    if clip is not None:
        x = jnp.clip(x, clip.input_min[...], clip.input_max[...])
    out = (x.reshape(-1, x.shape[-1]) @ matrix).reshape(*x.shape[:-1], -1)
    return out if clip is None else jnp.clip(out, clip.output_min[...], clip.output_max[...])


class PatchEmbedder(nnx.Module):
    """Projection of flattened patches and the two-axis position table (x first)."""

    def __init__(self, vision: VisionConfig, dtype: str):
        self.input_proj = weight(3 * vision.patch_size**2, vision.hidden_size, dtype=dtype)
        self.position_table = weight(2, vision.position_embedding_size, vision.hidden_size, dtype=dtype)

    def __call__(self, patches: Float32[Array, "B P I"], positions: Positions) -> Patches:
        table = self.position_table[...]
        x = linear((2 * (patches - 0.5)).astype(table.dtype), self.input_proj[...], None)
        places = jnp.maximum(positions, 0)
        return x + jnp.where(positions[..., :1] >= 0, table[0][places[..., 0]] + table[1][places[..., 1]], 0)


class VisionAttention(nnx.Module):
    """Every patch of an image sees every other; queries and keys turn by x in their first half, by y in the second."""

    def __init__(self, vision: VisionConfig, dtype: str, implementation: str):
        M, N, K, H = vision.hidden_size, vision.num_attention_heads, vision.num_key_value_heads, vision.head_dim
        self.q = weight(M, N, H, dtype=dtype)
        self.k = weight(M, K, H, dtype=dtype)
        self.v = weight(M, K, H, dtype=dtype)
        self.o = weight(N, H, M, dtype=dtype)
        self.q_norm = RMSNorm(H, vision.rms_norm_eps, dtype)
        self.k_norm = RMSNorm(H, vision.rms_norm_eps, dtype)
        self.q_clip, self.k_clip, self.v_clip, self.o_clip = clips(4, vision, dtype)
        self.eps, self.implementation = vision.rms_norm_eps, implementation

    def __call__(self, x: Patches, tables: Float32[Array, "axes 2 B P h"], length: Lengths) -> Patches:
        q = self._turned(self.q_norm(_heads(x, self.q[...], self.q_clip)), tables)
        k = self._turned(self.k_norm(_heads(x, self.k[...], self.k_clip)), tables)
        v = rms_norm(_heads(x, self.v[...], self.v_clip), self.eps)
        nothing = jnp.zeros_like(k[:, :1])  # there is no cached prefix
        rows = (jnp.zeros_like(length), length, jnp.zeros_like(length, bool))
        out = mixed_attention(q, k, v, nothing, nothing, *rows, window=None, implementation=self.implementation)
        o = self.o[...]
        return linear(cast(Queries, out).reshape(*x.shape[:2], -1), o.reshape(-1, o.shape[2]), self.o_clip)

    @staticmethod
    def _turned(x: Float[Array, "B P N H"], tables: Float32[Array, "axes 2 B P h"]) -> Float[Array, "B P N H"]:
        halves = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([rotate(half, table) for half, table in zip(halves, tables, strict=True)], axis=-1)


def _heads(x: Patches, weight: Float[Array, "M N H"], clip: ClipBounds | None) -> Float[Array, "B P N H"]:
    return linear(x, weight.reshape(weight.shape[0], -1), clip).reshape(*x.shape[:2], *weight.shape[1:])


class VisionMLP(nnx.Module):
    """(gelu(x Wg) * (x Wu)) Wd with the tanh GELU."""

    def __init__(self, vision: VisionConfig, dtype: str):
        self.gate = weight(vision.hidden_size, vision.intermediate_size, dtype=dtype)
        self.up = weight(vision.hidden_size, vision.intermediate_size, dtype=dtype)
        self.down = weight(vision.intermediate_size, vision.hidden_size, dtype=dtype)
        self.gate_clip, self.up_clip, self.down_clip = clips(3, vision, dtype)

    def __call__(self, x: Patches) -> Patches:
        gate = jax.nn.gelu(linear(x, self.gate[...], self.gate_clip), approximate=True)
        return linear(gate * linear(x, self.up[...], self.up_clip), self.down[...], self.down_clip)


class VisionLayer(nnx.Module):
    """Attention and MLP, each normed before and after, on a plain residual stream."""

    input_norm: RMSNorm
    post_attention_norm: RMSNorm
    pre_mlp_norm: RMSNorm
    post_mlp_norm: RMSNorm

    def __init__(self, vision: VisionConfig, dtype: str, implementation: str):
        for name in ("input_norm", "post_attention_norm", "pre_mlp_norm", "post_mlp_norm"):
            setattr(self, name, RMSNorm(vision.hidden_size, vision.rms_norm_eps, dtype))
        self.attention = VisionAttention(vision, dtype, implementation)
        self.mlp = VisionMLP(vision, dtype)

    def __call__(self, x: Patches, tables: Float32[Array, "axes 2 B P h"], length: Lengths) -> Patches:
        x = x + self.post_attention_norm(self.attention(self.input_norm(x), tables, length))
        return x + self.post_mlp_norm(self.mlp(self.pre_mlp_norm(x)))


class VisionTower(nnx.Module):
    """Patch embedder, encoder layers, pooling, standardisation and the projection into the text model's width."""

    def __init__(self, config: Config, vision: VisionConfig, dtype: str, implementation: str):
        self.vision = vision
        self.patch_embedder = PatchEmbedder(vision, dtype)
        self.layers = nnx.List([VisionLayer(vision, dtype, implementation) for _ in range(vision.num_hidden_layers)])
        if vision.standardize:
            self.std_bias = weight(vision.hidden_size, dtype=dtype)
            self.std_scale = weight(vision.hidden_size, dtype=dtype)
        self.projection = weight(vision.hidden_size, config.hidden_size, dtype=dtype)

    def __call__(self, images: ImageBatch) -> Float[Array, "B Q D"]:
        """The soft tokens of each image; those beyond its count mean nothing.

        One image after the other: an image keeps a GPU busy, eight need the memory of one, and none's numbers depend on
        the others.
        """
        see = lambda image: self._see(*(part[None] for part in image))[0]  # noqa: E731
        return jax.lax.map(see, (jnp.asarray(images.patches), jnp.asarray(images.positions)))

    def _see(self, patches: Float32[Array, "B P I"], positions: Positions) -> Float[Array, "B Q D"]:
        """The soft tokens of images, together."""
        tables, length = self._tables(positions), jnp.sum(positions[..., 0] >= 0, axis=1, dtype=jnp.int32)
        x = self.patch_embedder(patches, positions)
        for layer in self.layers:
            x = layer(x, tables, length)
        pooled = pool(x, positions, self.vision.pooling_kernel_size).astype(x.dtype)
        soft = pooled.astype(jnp.float32) * self.vision.hidden_size**0.5
        if self.vision.standardize:
            soft = (soft - self.std_bias[...].astype(jnp.float32)) * self.std_scale[...].astype(jnp.float32)
        return linear(rms_norm(soft.astype(x.dtype), self.vision.rms_norm_eps), self.projection[...], None)

    def _tables(self, positions: Positions) -> Float32[Array, "axes 2 B P h"]:
        """cos and sin of the angles of each axis, x first: pair j of half a head turns by theta**(-4j/H) a patch."""
        frequencies = inverse_frequencies(Rope(self.vision.rope_theta), self.vision.head_dim // 2)
        angle = jnp.moveaxis(positions, 2, 0)[..., None].astype(jnp.float32) * frequencies
        return jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=1)


def pool(x: Patches, positions: Positions, k: int) -> Float32[Array, "B Q M"]:
    """Means over squares of k x k patches, which lie in raster order; P must be a multiple of k squared."""
    B, P, M = x.shape
    columns = jnp.max(positions[..., 0], axis=1, keepdims=True) + 1
    across, token = jnp.maximum(columns // k, 1), jnp.arange(P // k**2)
    corner = token // across * k * columns + token % across * k
    square = jnp.arange(k)[:, None] * columns[..., None] + jnp.arange(k)
    place = (corner[:, :, None, None] + square[:, None]).reshape(B, -1, 1)
    patches = jnp.take_along_axis(x, jnp.minimum(place, P - 1), axis=1)  # beyond an image's tokens: whatever there is
    return jnp.mean(patches.reshape(B, -1, k**2, M).astype(jnp.float32), axis=2)


def place(
    features: Float[Array, "n Q D"], counts: Int32[Array, " n"], holes: Bool[Array, "B T"]
) -> tuple[Hidden, Blocks]:
    """Soft tokens at the holes, images in order, row after row: f[B,T,D], and which image each hole got, from 1 on.

    Elsewhere both mean nothing and 0. There must be as many holes as counts say.
    """
    ends = jnp.cumsum(counts)
    number = (jnp.cumsum(holes.reshape(-1)) - 1).reshape(holes.shape)
    image = jnp.minimum(jnp.searchsorted(ends, number, side="right"), len(counts) - 1)
    offset = number - (ends - counts)[image]
    blocks = jnp.where(holes, image + 1, 0).astype(jnp.int32)
    return features[image, jnp.clip(offset, 0, features.shape[1] - 1)], blocks
