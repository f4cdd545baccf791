"""How the two GPU kernels are launched: the tile of a program, which programs run, how their results are put together.

Source of the split: Flash-Decoding (Dao and others, 2023).
"""

from dataclasses import dataclass, replace

import jax.numpy as jnp
from jaxtyping import Float, Float32

from dgemma_jax.shapes import Array

PROGRAMS = 128  # as many as keep the 108 to 148 multiprocessors of a data-centre GPU busy
SPLIT = 2048  # fewer cached slots than this are not worth a program and the merge of its result


@dataclass(frozen=True)
class Tile:
    """What one program takes at a time: queries (tokens x heads of a group), keys; and Triton's warps and stages."""

    queries: int
    keys: int
    warps: int
    stages: int


# By the widest head they serve. No spills and at most 99 KiB of shared memory in bfloat16: see README.md.
TILES = {
    128: Tile(64, 64, 4, 2),
    256: Tile(64, 32, 8, 2),
    512: Tile(32, 32, 8, 1),
}


def tile_for(width: int, itemsize: int) -> Tile:
    """The tile for heads of this width, halved both ways for 4-byte numbers. ValueError beyond the widest head."""
    for widest, tile in TILES.items():
        if width <= widest:
            return tile if itemsize <= 2 else replace(tile, queries=tile.queries // 2, keys=tile.keys // 2)
    raise ValueError(
        f"mixed_attention: the GPU kernels have tiles for heads up to {max(TILES)} wide, not {width}; use 'xla'"
    )


def splits_for(programs: int, slots: int) -> int:
    """Programs that share one prefix, so that about PROGRAMS run in all."""
    return max(1, min(PROGRAMS // programs, slots // SPLIT))


@dataclass(frozen=True)
class Launch:
    """A program takes all `heads` of one K/V head, for some tokens of one row, and one of `splits` parts of the prefix.

    tokens: of one program; heads, width: G and H rounded up to what Triton can take. Programs: tiles of tokens on axis
    0, K/V heads on axis 1, and row * splits + split on axis 2.
    """

    tile: Tile
    tokens: int
    heads: int
    width: int
    splits: int
    grid: tuple[int, int, int]


def launch_for(
    B: int, T: int, N: int, K: int, H: int, S: int, itemsize: int, tile: Tile | None = None, splits: int | None = None
) -> Launch:
    """The programs for arguments of these sizes; tile and splits instead of those chosen by size."""
    tile = tile or tile_for(H, itemsize)
    # Triton wants powers of two, and at least 16 each way in a product.
    heads, width = _power_of_two(N // K), max(16, _power_of_two(H))
    tokens = max(1, min(tile.queries, max(16, _power_of_two(T * heads))) // heads)
    tiles = -(-T // tokens)
    splits = splits or splits_for(tiles * K * B, S)
    return Launch(tile, tokens, heads, width, splits, (tiles, K, B * splits))


def _power_of_two(n: int) -> int:
    """The smallest power of two that is at least n >= 1."""
    return 1 << (n - 1).bit_length()


def merge(
    parts: Float[Array, "P B T *heads H"], log_sums: Float32[Array, "P B T *heads"]
) -> tuple[Float[Array, "B T *heads H"], Float32[Array, "B T *heads"]]:
    """The softmax over all keys, and its log-sum-exp, from those over P parts of them; -inf where a part saw none."""
    if len(parts) == 1:
        return parts[0], log_sums[0]
    peak = jnp.max(log_sums, axis=0)
    weights = jnp.exp(log_sums - jnp.where(jnp.isfinite(peak), peak, 0.0))
    total = jnp.sum(weights, axis=0)
    weights /= jnp.where(total == 0, 1.0, total)
    return jnp.sum(parts * weights[..., None], axis=0), peak + jnp.log(total)
