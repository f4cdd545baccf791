"""The random stream, part of the project's contract: seed, canvas and step determine every draw of a row.

All draws use threefry2x32 with the partitionable layout, fixed here at trace time, and explicit dtypes, so that no flag
or environment variable changes numbers. A row's draws never depend on its place in the batch or on other rows.

    key(seed)          = fold_in(key(seed mod 2^32), seed >> 32)      of copy j >= 1: fold_in(key(seed), j)
    k                  = fold_in(fold_in(key, canvas), step)          canvas and step count from 0
    start canvas       = randint(fold_in(k, 0), [C], 0, V)            at step 0
    proposal uniforms  = uniform(fold_in(k, 1), [1 + tiles, C])       tiles of 2,048 ids, see kernels.vocab_head
    renoise            = randint(fold_in(k, 2), [C], 0, V)
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32, Int32, Key

from dgemma_jax.kernels.vocab_head import TILE
from dgemma_jax.shapes import Array, Canvas, RowKeys


def key_from_seed(seed: int, copy: int = 0) -> Key[Array, ""]:
    """The key of a request, or of a further copy of it; seed in 0 .. 2^63 - 1, ValueError otherwise."""
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed is {seed}; expected 0 .. 2**63 - 1")
    with jax.threefry_partitionable(True):
        low = jax.random.key(np.uint32(seed % 2**32), impl="threefry2x32")
        key = jax.random.fold_in(low, np.uint32(seed >> 32))
        return jax.random.fold_in(key, np.uint32(copy)) if copy else key


def step_keys(keys: RowKeys, canvas: Int32[Array, " B"], step: Int32[Array, " B"]) -> RowKeys:
    """The keys of one denoising step of a canvas, row by row, from the requests' own."""
    with jax.threefry_partitionable(True):
        fold = jax.vmap(jax.random.fold_in)
        return fold(fold(keys, canvas), step)


def start_canvas(keys: RowKeys, C: int, V: int) -> Canvas:
    """Uniform ids over the whole vocabulary; keys of step 0."""
    return _uniform_ids(keys, 0, C, V)


def renoise_ids(keys: RowKeys, C: int, V: int) -> Canvas:
    """Fresh uniform ids for the positions that a step did not accept."""
    return _uniform_ids(keys, 2, C, V)


def proposal_uniforms(keys: RowKeys, C: int, V: int) -> Float32[Array, "B U C"]:
    """U = 1 + ceil(V / TILE) numbers in [0, 1) per position, for the head's inverse-CDF draw."""
    shape = (1 - (-V // TILE), C)
    with jax.threefry_partitionable(True):
        return jax.vmap(lambda key: jax.random.uniform(jax.random.fold_in(key, 1), shape, jnp.float32))(keys)


def _uniform_ids(keys: RowKeys, purpose: int, C: int, V: int) -> Canvas:
    with jax.threefry_partitionable(True):
        return jax.vmap(lambda key: jax.random.randint(jax.random.fold_in(key, purpose), (C,), 0, V, jnp.int32))(keys)
