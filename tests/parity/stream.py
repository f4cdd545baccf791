"""The random stream written a second time, from its definition, for answering transformers' own random draws.

A row's numbers depend on its seed, the canvas and the step alone. The proposal is an inverse CDF in two stages over
tiles of 2,048 ids; it is evaluated here in float64 on probabilities that somebody else computed.
"""

import jax
import numpy as np

TILE = 2048


def step_key(seed: int, canvas: int, step: int) -> jax.Array:
    key = jax.random.fold_in(jax.random.key(seed % 2**32, impl="threefry2x32"), seed >> 32)
    return jax.random.fold_in(jax.random.fold_in(key, canvas), step)


def start_canvas(seed: int, canvas: int, length: int, vocab: int) -> np.ndarray:
    """Ids i32[C] that a canvas starts from."""
    with jax.threefry_partitionable(True):
        key = jax.random.fold_in(step_key(seed, canvas, 0), 0)
        return np.asarray(jax.random.randint(key, (length,), 0, vocab))


def renoise_ids(seed: int, canvas: int, step: int, length: int, vocab: int) -> np.ndarray:
    """Ids i32[C] for the positions that a step rejects."""
    with jax.threefry_partitionable(True):
        key = jax.random.fold_in(step_key(seed, canvas, step), 2)
        return np.asarray(jax.random.randint(key, (length,), 0, vocab))


def proposal_uniforms(seed: int, canvas: int, step: int, length: int, vocab: int) -> np.ndarray:
    """f32[1 + tiles, C]: row 0 chooses the tile, row 1 + j the id inside tile j."""
    with jax.threefry_partitionable(True):
        key = jax.random.fold_in(step_key(seed, canvas, step), 1)
        return np.asarray(jax.random.uniform(key, (1 + -(-vocab // TILE), length)))


def choose(weights: np.ndarray, uniform: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Inverse CDF along the last axis: chosen index, and how far the draw lay from changing it (share of the mass)."""
    cumulative = np.cumsum(weights, -1) / np.sum(weights, -1, keepdims=True)
    index = np.sum(cumulative <= uniform[..., None], -1)
    index = np.minimum(index, weights.shape[-1] - 1)
    above = np.take_along_axis(cumulative, index[..., None], -1)[..., 0]
    below = np.take_along_axis(np.pad(cumulative, [(0, 0)] * (index.ndim) + [(1, 0)]), index[..., None], -1)[..., 0]
    # below 0 and above 1 there is no other index to change to
    low = np.where(below <= 0, np.inf, uniform - below)
    high = np.where(above >= 1, np.inf, above - uniform)
    return index, np.minimum(low, high)


def propose(probabilities: np.ndarray, uniforms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Proposal [C] from probabilities [C, V] and uniforms [1 + tiles, C], and the smaller margin of its two choices."""
    length, vocab = probabilities.shape
    tiles = uniforms.shape[0] - 1
    padded = np.zeros((length, tiles * TILE), np.float64)
    padded[:, :vocab] = probabilities
    padded = padded.reshape(length, tiles, TILE)
    tile, outer = choose(padded.sum(-1), uniforms[0].astype(np.float64))
    inside = np.take_along_axis(padded, tile[:, None, None], 1)[:, 0]
    offset, inner = choose(inside, uniforms[1 + tile, np.arange(length)].astype(np.float64))
    return tile * TILE + offset, np.minimum(outer, inner)
