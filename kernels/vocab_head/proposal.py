"""How the proposal is drawn while the table goes by: a candidate of every tile, then one of the tiles."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Float32, Int32

from dgemma_jax.kernels.vocab_head.reference import inverse_cdf
from dgemma_jax.kernels.vocab_head.types import TILE
from dgemma_jax.shapes import Array, Logits, PerRow

BLOCK = 128  # ids whose cumulative sum is taken at once when choosing inside a tile


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tiles:
    """What the proposal needs of each tile: its sum of weights relative to `peak`, and the id chosen inside it."""

    total: Float32[Array, "B C t"]
    peak: Float32[Array, "B C t"]
    choice: Int32[Array, "B C t"]


def tiles_of(
    weights: Logits, peak: Float32[Array, "B C"], uniform: Float32[Array, "B C t"], start: Int32[Array, ""]
) -> Tiles:
    """Sum and choice of every tile in a chunk: first a block of the tile, then an id of the block."""
    B, C, n = weights.shape
    tiles = -(-n // TILE)
    weights = jnp.pad(weights, ((0, 0), (0, 0), (0, tiles * TILE - n)))
    weights = weights.reshape(B, C, tiles, TILE // BLOCK, BLOCK)
    upto = jnp.cumsum(jnp.sum(weights, axis=-1), axis=-1)
    target = uniform * upto[..., -1]
    block = jnp.sum(upto <= target[..., None], axis=-1, dtype=jnp.int32)
    before = jnp.where(block > 0, jnp.take_along_axis(upto, jnp.maximum(block - 1, 0)[..., None], axis=-1)[..., 0], 0.0)
    chosen = jnp.take_along_axis(weights, block[..., None, None], axis=3)[..., 0, :]
    inside = jnp.cumsum(chosen, axis=-1)
    # The block's own sum may be rounded below what the sums of blocks promise: stay inside it.
    target = jnp.minimum(target - before, jnp.nextafter(inside[..., -1], 0.0))
    within = jnp.sum(inside <= target[..., None], axis=-1, dtype=jnp.int32)
    first = start + TILE * jnp.arange(tiles, dtype=jnp.int32)
    return Tiles(upto[..., -1], jnp.broadcast_to(peak[..., None], upto.shape[:-1]), first + block * BLOCK + within)


def choose(
    tiles: Tiles, peak: Float32[Array, "B C"], uniform: Float32[Array, "B C"], divisor: PerRow
) -> Int32[Array, "B C"]:
    """The candidate of a tile drawn in proportion to the tiles' sums, brought to one common peak."""
    sums = tiles.total * jnp.exp((tiles.peak - peak[..., None]) / divisor[:, None, None])
    return jnp.take_along_axis(tiles.choice, inverse_cdf(sums, uniform)[..., None], axis=-1)[..., 0]
