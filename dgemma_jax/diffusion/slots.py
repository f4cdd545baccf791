"""The slots of a batch on the device, and the loop that advances all of them.

A slot denoises its canvas, then commits it, or rests; each pass serves all slots whatever they do.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Bool, Int32

from dgemma_jax.cache import KVCache
from dgemma_jax.config import Config
from dgemma_jax.diffusion.policy import Knobs, Policy
from dgemma_jax.diffusion.random import step_keys
from dgemma_jax.diffusion.step import CanvasState, select, start, update
from dgemma_jax.functional import head_stats
from dgemma_jax.kernels.shard import Shard
from dgemma_jax.kernels.vocab_head import Likeliest, likeliest
from dgemma_jax.model.transformer import Transformer
from dgemma_jax.sampling import MOST_LOGPROBS
from dgemma_jax.shapes import Array, CanvasHidden, Lengths, RowKeys, RowMask
from dgemma_jax.sharding import shard_of
from dgemma_jax.spmd import CACHE, ROWS, WHOLE, on_devices


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Slots:
    """What every slot works on; a row of each array per slot.

    state: the canvases. keys: the requests' own. canvas_index: which canvas of its request a slot is at. knobs and
    suppress: what the requests chose. active: slots that hold a request. committing: active slots whose finished canvas
    is to be encoded in the next pass.
    """

    state: CanvasState
    keys: RowKeys
    canvas_index: Lengths
    knobs: Knobs
    suppress: Bool[Array, "B V"]
    active: RowMask
    committing: RowMask

    @property
    def ready(self) -> RowMask:
        """Slots whose canvas is finished and which wait to be told whether to commit it."""
        return self.active & ~self.state.running & ~self.committing


def idle(config: Config, keys: RowKeys, knobs: Knobs, dtype: str) -> Slots:
    """As many slots as there are keys, all at rest; keys and knobs are those of no request in particular."""
    B = len(keys)
    nobody, zeros = jnp.zeros(B, bool), jnp.zeros(B, jnp.int32)
    suppress = jnp.zeros((B, config.vocab_size), bool)
    state = start(config, keys, zeros, nobody, dtype)
    return Slots(state, keys, zeros, jax.tree.map(jnp.asarray, knobs), suppress, nobody, nobody)


def advance(
    graph: nnx.GraphDef,
    config: Config,
    policy: Policy,
    params: dict,
    cache: KVCache,
    slots: Slots,
    allowance: Int32[Array, ""],
) -> tuple[KVCache, Slots]:
    """Passes until a slot is ready, nothing is left to do, or `allowance` is used up."""
    batch = len(slots.active)

    def loop(model: Transformer, cache: KVCache, slots: Slots, allowance: Array) -> tuple[KVCache, Slots]:
        rows = shard_of("rows", batch, model.mesh)

        def body(carry: tuple[KVCache, Slots, Array, Array]) -> tuple[KVCache, Slots, Array, Array]:
            cache, slots = one_pass(model, config, policy, *carry[:2])
            allowance = carry[2] - 1
            return cache, slots, allowance, unfinished(slots, allowance, rows)

        # What devices have to agree on is asked in the body: a loop's condition is no place to wait for others.
        carry = (cache, slots, allowance, unfinished(slots, allowance, rows))
        return jax.lax.while_loop(lambda carry: carry[3], body, carry)[:2]

    takes, gives = (CACHE, ROWS, WHOLE), (CACHE, ROWS)
    return on_devices(graph, params, batch, loop, takes, gives)(cache, slots, allowance)


def unfinished(slots: Slots, allowance: Int32[Array, ""], rows: Shard | None = None) -> Bool[Array, ""]:
    """Whether to make another pass: a slot has work, none waits for the host, and the allowance lasts.

    rows: which of all slots these are, on several devices.
    """
    any_slot = rows.any if rows else jnp.any
    return any_slot(slots.active) & ~any_slot(slots.ready) & (allowance > 0)


def one_pass(model: Transformer, config: Config, policy: Policy, cache: KVCache, slots: Slots) -> tuple[KVCache, Slots]:
    """Denoises the running slots and encodes the committing ones, which then begin their next canvas."""
    state, knobs = slots.state, slots.knobs
    canvas = jnp.where(slots.committing[:, None], state.best, state.canvas)
    cache, hidden = model.denoise_or_commit(canvas, state.soft, state.running, slots.committing, cache)
    now = step_keys(slots.keys, slots.canvas_index, state.steps)
    temperature = policy.schedule(state.steps, knobs)
    draws = (knobs.draw_temperature, knobs.top_k, knobs.top_p)
    stats = head_stats(model, hidden, temperature, now, slots.suppress, *draws, state.running)
    likeliest = _likeliest(model, hidden, state, knobs)
    state = update(state, stats, likeliest, now, knobs, policy, config.vocab_size)
    index = slots.canvas_index + slots.committing
    fresh = start(config, slots.keys, index, slots.committing, str(state.soft.dtype))
    state = select(slots.committing, fresh, state)
    return cache, replace(slots, state=state, canvas_index=index, committing=jnp.zeros_like(slots.committing))


def _likeliest(model: Transformer, hidden: CanvasHidden, state: CanvasState, knobs: Knobs) -> Likeliest:
    """Of all slots if a running one asks, else what they had: a request that does not ask pays nothing for it."""
    table, softcap = model.embedder.table[...], model.config.final_logit_softcapping
    n = min(MOST_LOGPROBS, model.config.vocab_size)

    def look() -> Likeliest:
        found = likeliest(hidden, table, n, softcap, shard=model.embedder.shard)
        missing = ((0, 0), (0, 0), (0, MOST_LOGPROBS - n))
        return jax.tree.map(lambda array: jnp.pad(array, missing), found)

    return jax.lax.cond(jnp.any(state.running & (knobs.top_logprobs > 0)), look, lambda: state.likeliest)
