"""The expert layer as two grouped products in Pallas (Triton): gate and up with GELU between them, then down.

A program multiplies a block of rows that share an expert with some columns of that expert's matrix; which rows and
which expert it reads from the plan. Source of the idea: MegaBlocks (arXiv 2211.15841).
"""

import math
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Float, Float32, Int32

from dgemma_jax.config import INT4_GROUP
from dgemma_jax.kernels import pallas_compat
from dgemma_jax.kernels.grouped_matmul.xla import Plan, combine, plan
from dgemma_jax.kernels.quantized import HALF, Quantized, unpacked
from dgemma_jax.shapes import Array


@dataclass(frozen=True)
class Tile:
    """What a program takes: rows of one expert, columns of the product, terms summed at a time; warps and stages."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int


# By rows per expert. No spills and at most 99 KiB of shared memory in bfloat16: see README.md.
TILES = {
    16: Tile(16, 64, 64, 4, 4),
    32: Tile(32, 64, 64, 4, 4),
    64: Tile(64, 64, 64, 4, 3),
    128: Tile(128, 64, 32, 8, 3),
}


def tile_for(pairs: int, experts: int, itemsize: int) -> Tile:
    """The tile whose rows are next to an expert's average share; for 4-byte numbers a small one, more would spill."""
    if itemsize > 2:
        return replace(TILES[min(TILES)], inner=32)
    return next((tile for rows, tile in TILES.items() if pairs <= experts * rows), TILES[max(TILES)])


def experts(
    x: Float[Array, "R D"],
    gate_up: Float[Array, "E D F"] | Quantized,
    down: Float[Array, "E I D"] | Quantized,
    weights: Float32[Array, "R A"],
    ids: Int32[Array, "R A"],
    *,
    among: int | None = None,
    tile: Tile | None = None,
) -> Float32[Array, "R D"]:
    """See `xla.experts`. tile: instead of the one chosen by shape.

    What lies between the products, and their results, is kept by pair (token, chosen expert): nothing is padded, and
    the sum over a token's experts has a fixed order. Needs a CUDA GPU; on a CPU the kernels are interpreted.
    """
    E, _, D = down.shape
    R, A = ids.shape
    tile = tile or tile_for(R * A, among or E, x.dtype.itemsize)
    where = plan(ids, E, tile.rows)
    hidden = grouped(where, x, gate_up, tile, rows=R * A, gated=True, dtype=x.dtype)
    result = grouped(where, hidden, down, tile, rows=R * A, gated=False, dtype=jnp.float32)
    return combine(weights, result.reshape(R, A, D), ids, E)


def grouped(
    where: Plan,
    source: Float[Array, "rows K"],
    matrices: Float[Array, "E K N"] | Quantized,
    tile: Tile,
    *,
    rows: int,
    gated: bool,
    dtype: jnp.dtype,
) -> Float[Array, "pairs N"]:
    """source[row of the pair] @ matrices[expert of the pair], for every pair; gated: gelu(first half) * second half.

    Blocks are the grid's first axis, so that those of one expert run side by side and find its columns in the L2 cache.
    """
    width = matrices.shape[2] // (2 if gated else 1)
    blocks, parts = where.expert.shape[0], jax.tree.leaves(matrices)
    whole = [pl.BlockSpec(array.shape, lambda block, column, n=array.ndim: (0,) * n) for array in (source, *parts)]
    return pallas_compat.triton_call(
        partial(_multiply, tile=tile, share=rows // source.shape[0], gated=gated),
        *(where.used[None], where.expert, where.pairs, source, *parts),
        grid=(blocks, pl.cdiv(width, tile.columns)),
        in_specs=[
            pl.BlockSpec((None,), lambda block, column: (0,)),
            pl.BlockSpec((None,), lambda block, column: (block,)),
            pl.BlockSpec((tile.rows,), lambda block, column: (block,)),
            *whole,
        ],
        out_specs=pl.BlockSpec((rows, width), lambda block, column: (0, 0)),
        out_shape=jax.ShapeDtypeStruct((rows, width), dtype),
        warps=tile.warps,
        stages=tile.stages,
        name="experts_gate_up" if gated else "experts_down",
    )


def _multiply(used, expert, pairs, source, matrices, *scales_and_out, tile, share, gated):
    """One program: refs source [rows, K], matrices [E, K, N] (with 4 bits [E, K/2, N]), the scales of quantised ones
    [E, 1, N] (with 4 bits [E, K/INT4_GROUP, N]) and out [pairs, width]; N = 2 width where gated.

    share: pairs that read the same row of source. Blocks from `used` on hold no pair: they sum and store nothing.
    8 bits: the whole sums are scaled. 4 bits: a step sums one group, and scales that.
    """
    *scales, out = scales_and_out
    packed = matrices.dtype == jnp.uint8
    K, width = source.shape[1], out.shape[1]
    pair, chosen = pairs[...][:, None], expert[...]
    taken = pair < out.shape[0]
    first = pl.program_id(1) * tile.columns
    column = first + jnp.arange(tile.columns)[None, :]
    inside = column < width
    parts = [pl.ds(first + part * width, tile.columns) for part in range(2 if gated else 1)]
    inner, held = (INT4_GROUP, HALF) if packed else (tile.inner, tile.inner)  # terms of a step, rows that hold them
    steps = jnp.where(pl.program_id(0) < used[...], jnp.int32(pl.cdiv(K, inner)), jnp.int32(0))

    def scaled(sums, group, columns):
        scale = pallas_compat.load(scales[0].at[chosen, pl.ds(group, 1), columns], mask=inside, other=0)
        return sums * scale.astype(jnp.float32)

    def add(step, sums):
        terms = [step * inner + offset + jnp.arange(held) for offset in range(0, inner, held)]
        rows = [
            pallas_compat.load(source.at[pair // share, term[None, :]], mask=taken & (term < K)[None, :], other=0)
            for term in terms
        ]
        mask = (terms[0] < K)[:, None] & inside

        def product(columns):
            numbers = pallas_compat.load(matrices.at[chosen, pl.ds(step * held, held), columns], mask=mask, other=0)
            if not packed:
                return _product(rows[0], numbers.astype(source.dtype))
            low, high = (half.astype(source.dtype) for half in unpacked(numbers))
            return scaled(_product(rows[0], low) + _product(rows[1], high), step, columns)

        return tuple(total + product(columns) for total, columns in zip(sums, parts, strict=True))

    zero = jnp.zeros((tile.rows, tile.columns), jnp.float32)
    sums = jax.lax.fori_loop(jnp.int32(0), steps, add, (zero,) * len(parts))
    if scales and not packed:
        sums = [scaled(total, 0, columns) for total, columns in zip(sums, parts, strict=True)]
    result = _gelu(sums[0]) * sums[1] if gated else sums[0]
    pallas_compat.store(out.at[pair, column], result.astype(out.dtype), mask=taken & inside)


def _product(a, b):
    """a [m,k] times b [k,n], summed in float32; float32 factors are not rounded to TF32."""
    return jax.lax.dot(a, b, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def _gelu(x):
    """GELU with tanh, written as x * sigmoid(2 u): the same function, without a call into a library."""
    u = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
    return x / (1 + jnp.exp(-2 * u))
