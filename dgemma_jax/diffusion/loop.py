"""The denoising loop: steps over all rows on the device until every canvas is finished."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Bool, Int32

from dgemma_jax.cache import KVCache
from dgemma_jax.diffusion.policy import Knobs, Policy
from dgemma_jax.diffusion.step import CanvasState, step
from dgemma_jax.shapes import Array, Lengths, RowKeys


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Carry:
    """The loop's state: the canvases, and how many more steps this call may make."""

    state: CanvasState
    allowance: Int32[Array, ""]


def unfinished(carry: Carry) -> Bool[Array, ""]:
    """A row still runs and the allowance lasts; rows at rest do not hold the loop."""
    return jnp.any(carry.state.running) & (carry.allowance > 0)


def denoise_canvases(
    graph: nnx.GraphDef,
    params: dict,
    cache: KVCache,
    state: CanvasState,
    keys: RowKeys,
    canvas_index: Lengths,
    knobs: Knobs,
    suppress: Bool[Array, "B V"],
    allowance: Int32[Array, ""],
    policy: Policy,
) -> CanvasState:
    """At most `allowance` steps; call again with the result to go on. The cache is only read."""

    def body(carry: Carry) -> Carry:
        moved = step(graph, params, cache, carry.state, keys, canvas_index, knobs, suppress, policy)
        return Carry(moved, carry.allowance - 1)

    return jax.lax.while_loop(unfinished, body, Carry(state, allowance)).state
