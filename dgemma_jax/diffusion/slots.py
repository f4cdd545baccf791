"""The slots of a batch on the device, and the loop that advances all of them.

A slot denoises its canvas, then commits it, or rests; each pass serves all slots whatever they do.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

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
from dgemma_jax.kernels.vocab_head import Likeliest, likeliest
from dgemma_jax.model.transformer import Transformer, merge
from dgemma_jax.sampling import MOST_LOGPROBS
from dgemma_jax.shapes import Array, CanvasHidden, Lengths, PerRow, RowKeys, RowMask


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


def admit(slots: Slots, at: Int32[Array, ""], new: Slots) -> Slots:
    """`new`, which is a single slot, in place of the one at `at`."""
    return jax.tree.map(lambda array, row: jax.lax.dynamic_update_slice_in_dim(array, row, at, 0), slots, new)


def advance(
    graph: nnx.GraphDef,
    config: Config,
    policy: Policy,
    params: dict,
    cache: KVCache,
    slots: Slots,
    allowance: Int32[Array, ""],
    *,
    in_turn: bool = False,
) -> tuple[KVCache, Slots]:
    """Passes until a slot is ready, nothing is left to do, or `allowance` is used up.

    in_turn: a pass takes the slots that have work one after the other, instead of all slots at once. An accelerator
    reads the weights once for all; a CPU, which is kept busy by a single canvas, would spend as much on slots at rest.
    """
    one_pass = partial(_one_pass, graph, config, policy, params, single=in_turn)
    all_slots = partial(_in_turn, one_pass) if in_turn else one_pass

    def body(carry: tuple[KVCache, Slots, Array]) -> tuple[KVCache, Slots, Array]:
        cache, slots, allowance = carry
        return *all_slots(cache, slots), allowance - 1

    cache, slots, _ = jax.lax.while_loop(lambda carry: unfinished(*carry[1:]), body, (cache, slots, allowance))
    return cache, slots


def unfinished(slots: Slots, allowance: Int32[Array, ""]) -> Bool[Array, ""]:
    """Whether to make another pass: a slot has work, none waits for the host, and the allowance lasts."""
    return jnp.any(slots.active) & ~jnp.any(slots.ready) & (allowance > 0)


def _in_turn(
    one_pass: Callable[[KVCache, Slots], tuple[KVCache, Slots]], cache: KVCache, slots: Slots
) -> tuple[KVCache, Slots]:
    """`one_pass` over each slot that has work, by itself."""
    busy = slots.active & (slots.state.running | slots.committing)
    order = jnp.nonzero(busy, size=len(busy), fill_value=0)[0]

    def visit(index: Int32[Array, ""], everything: tuple[KVCache, Slots]) -> tuple[KVCache, Slots]:
        row = order[index]
        mine = jax.tree.map(lambda array: jax.lax.dynamic_slice_in_dim(array, row, 1), everything)
        put = partial(jax.lax.dynamic_update_slice_in_dim, start_index=row, axis=0)
        return jax.tree.map(put, everything, one_pass(*mine))

    return jax.lax.fori_loop(0, jnp.sum(busy, dtype=jnp.int32), visit, (cache, slots))


def _one_pass(
    graph: nnx.GraphDef, config: Config, policy: Policy, params: dict, cache: KVCache, slots: Slots, *, single: bool
) -> tuple[KVCache, Slots]:
    """Denoises the running slots and encodes the committing ones, which then begin their next canvas.

    single: there is one slot; the vocabulary head, which only denoising needs, is left out where it commits.
    """
    model, state, knobs = merge(graph, params), slots.state, slots.knobs
    canvas = jnp.where(slots.committing[:, None], state.best, state.canvas)
    cache, hidden = model.denoise_or_commit(canvas, state.soft, slots.committing, cache)
    now = step_keys(slots.keys, slots.canvas_index, state.steps)

    def denoise() -> CanvasState:
        temperature = policy.schedule(state.steps, knobs)
        stats = head_stats(model, hidden, temperature, now, slots.suppress, *_draws(knobs, state.running))
        likeliest = _likeliest(model, hidden, state, knobs)
        return update(state, stats, likeliest, now, knobs, policy, config.vocab_size)

    state = jax.lax.cond(state.running[0], denoise, lambda: state) if single else denoise()
    index = slots.canvas_index + slots.committing
    fresh = start(config, slots.keys, index, slots.committing, str(state.soft.dtype))
    state = select(slots.committing, fresh, state)
    return cache, replace(slots, state=state, canvas_index=index, committing=jnp.zeros_like(slots.committing))


def _draws(knobs: Knobs, running: RowMask) -> tuple[PerRow, Lengths, PerRow]:
    """draw_temperature, top_k and top_p; neutral in slots at rest, since the head takes longer where a row asks."""
    return (
        jnp.where(running, knobs.draw_temperature, 1.0),
        jnp.where(running, knobs.top_k, 0),
        jnp.where(running, knobs.top_p, 1.0),
    )


def _likeliest(model: Transformer, hidden: CanvasHidden, state: CanvasState, knobs: Knobs) -> Likeliest:
    """Of all slots if a running one asks, else what they had: a request that does not ask pays nothing for it."""
    table, softcap = model.embedder.table[...], model.config.final_logit_softcapping
    n = min(MOST_LOGPROBS, len(table))

    def look() -> Likeliest:
        found = likeliest(hidden, table, n, softcap)
        missing = ((0, 0), (0, 0), (0, MOST_LOGPROBS - n))
        return jax.tree.map(lambda array: jnp.pad(array, missing), found)

    return jax.lax.cond(jnp.any(state.running & (knobs.top_logprobs > 0)), look, lambda: state.likeliest)
