"""The expert layer: every token through its A chosen experts, no capacity limit, nothing dropped."""

import jax.numpy as jnp
from jaxtyping import Float, Float32, Int32

from dgemma_jax.kernels.grouped_matmul import reference, xla
from dgemma_jax.kernels.quantized import Quantized
from dgemma_jax.kernels.shard import Shard
from dgemma_jax.shapes import Array


def _pallas(*arguments: Array, among: int | None = None) -> Array:
    """`pallas.experts`, whose backend is a fifth of a second to import: only for those who choose it."""
    from dgemma_jax.kernels.grouped_matmul import pallas

    return pallas.experts(*arguments, among=among)


IMPLEMENTATIONS = {"reference": reference.experts, "xla": xla.experts, "pallas": _pallas}


def experts(
    x: Float[Array, "R D"],
    gate_up: Float[Array, "E D F"] | Quantized,
    down: Float[Array, "E I D"] | Quantized,
    weights: Float32[Array, "R A"],
    ids: Int32[Array, "R A"],
    *,
    shard: Shard | None = None,
    implementation: str = "auto",
) -> Float[Array, "R D"]:
    """out[r] = sum_a weights[r,a] * (gelu(x[r] Wg) * (x[r] Wu)) Wd with the matrices of expert ids[r,a].

    x: R tokens. gate_up: F = 2I columns, gate first; down: Wd. implementation: a name of IMPLEMENTATIONS, or auto for
    what runs everywhere; ValueError for any other. weights in fp32; they need not sum to 1. The sum over experts is
    accumulated in fp32 and rounded once. tanh GELU. ids of one token are distinct. Quantised matrices become numbers
    an expert, or a tile of one, at a time; of 4 bits in groups along the axis that is summed over. shard: inside
    `shard_map`, which of the experts the matrices are; tokens, weights and ids are those of all experts, and every
    device gets the whole sum.
    """
    name = "xla" if implementation == "auto" else implementation
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"experts: implementation {name!r} is unknown; choose from auto, {', '.join(IMPLEMENTATIONS)}")
    run = IMPLEMENTATIONS[name]
    if shard is None or not shard.cut:
        return run(x, gate_up, down, weights, ids).astype(x.dtype)
    place, here = shard.locate(ids)
    nobody = gate_up.shape[0]
    own = run(x, gate_up, down, weights, jnp.where(here, place, nobody), among=shard.size)
    return shard.sum(own).astype(x.dtype)
