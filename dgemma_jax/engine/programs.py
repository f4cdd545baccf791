"""The jitted programs of one model: every device action of generation, built once, with all knobs traced."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Bool, Int32

from dgemma_jax.cache import KVCache, cut, grow
from dgemma_jax.config import Config
from dgemma_jax.diffusion.policy import Knobs, Policy
from dgemma_jax.diffusion.slots import Slots, admit, advance, idle
from dgemma_jax.diffusion.step import start
from dgemma_jax.functional import encode
from dgemma_jax.shapes import Array, Canvas, RowKeys, RowMask, Tokens


class Programs:
    """Prefill, admit, advance, take, put and grow. What a program returns anew is donated to it: the cache, the slots.

    Each is compiled once per number of slots and cache capacity, prefill also per chunk bucket, advance per Policy.
    in_turn: see `diffusion.slots.advance`; None: on a CPU.
    """

    def __init__(self, graph: nnx.GraphDef, config: Config, in_turn: bool | None = None):
        in_turn = jax.default_backend() == "cpu" if in_turn is None else in_turn
        self._prefill = jax.jit(partial(_prefill, graph), donate_argnums=1)
        self._admit = jax.jit(partial(_admit, config), donate_argnums=0)
        self._advance = jax.jit(partial(_advance, graph, config, in_turn), static_argnums=0, donate_argnums=(2, 3))
        self._grow = jax.jit(partial(grow, config), static_argnums=1)
        self._take = jax.jit(partial(_take_cut, config), static_argnums=2)
        self._put = jax.jit(_put, donate_argnums=0)
        self._idle = jax.jit(partial(idle, config), static_argnums=2)

    def compile(self, calls: Sequence[tuple]) -> None:
        """Compile programs side by side; each of `calls` is a name and the arguments of a call that is to come."""
        lowered = [getattr(self, f"_{name}").lower(*arguments) for name, *arguments in calls]
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda program: program.compile(), lowered))

    def idle(self, keys: RowKeys, knobs: Knobs, dtype: str) -> Slots:
        """Slots at rest, see `diffusion.slots.idle`."""
        return self._idle(keys, knobs, dtype)

    def prefill(
        self, params: dict, cache: KVCache, tokens: Tokens, slot: np.int32, start: np.int32, count: np.int32
    ) -> KVCache:
        """Encode the first `count` of tokens i32[1,T] into row `slot`, at positions start, start + 1, ...

        One row at a time, so that a row's numbers never depend on how long its neighbours' prompts are.
        """
        return self._prefill(params, cache, tokens, slot, start, count)

    def admit(
        self,
        slots: Slots,
        at: np.int32,
        key: RowKeys,
        knobs: Knobs,
        suppress: Bool[Array, "1 V"],
        canvas: Canvas,
        pinned: Bool[Array, "1 C"],
    ) -> Slots:
        """Put a request into slot `at` and begin its first canvas.

        key, knobs and suppress have one row. canvas i32[1,C]: ids to start from, -1 for a random one.
        """
        return self._admit(slots, at, key, knobs, suppress, canvas, pinned)

    def advance(
        self,
        policy: Policy,
        params: dict,
        cache: KVCache,
        slots: Slots,
        active: RowMask,
        committing: RowMask,
        allowance: np.int32,
    ) -> tuple[KVCache, Slots]:
        """At most `allowance` passes, fewer once a slot is ready. active, committing: what the slots are to do."""
        return self._advance(policy, params, cache, slots, active, committing, allowance)

    def take(self, cache: KVCache, slot: np.int32, capacity: int) -> KVCache:
        """A copy of row `slot`, of which only the first `capacity` positions count."""
        return self._take(cache, slot, capacity)

    def put(self, cache: KVCache, row: KVCache, slot: np.int32) -> KVCache:
        """The cache with `row` in row `slot`; it may have fewer positions than the cache."""
        return self._put(cache, row, slot)

    def grow(self, cache: KVCache, capacity: int) -> KVCache:
        """The same cache with room for `capacity` positions."""
        return self._grow(cache, capacity)


def _prefill(
    graph: nnx.GraphDef,
    params: dict,
    cache: KVCache,
    tokens: Tokens,
    slot: Int32[Array, ""],
    start: Int32[Array, ""],
    count: Int32[Array, ""],
) -> KVCache:
    row, _ = encode(graph, params, tokens, count[None], replace(_take(cache, slot), lengths=start[None]))
    return _put(cache, row, slot)


def _take(cache: KVCache, slot: Int32[Array, ""]) -> KVCache:
    return jax.tree.map(lambda array: jax.lax.dynamic_slice_in_dim(array, slot, 1), cache)


def _take_cut(config: Config, cache: KVCache, slot: Int32[Array, ""], capacity: int) -> KVCache:
    return cut(config, _take(cache, slot), capacity)


def _put(cache: KVCache, row: KVCache, slot: Int32[Array, ""]) -> KVCache:
    return jax.tree.map(lambda array, new: jax.lax.dynamic_update_slice_in_dim(array, new, slot, 0), cache, row)


def _admit(
    config: Config,
    slots: Slots,
    at: Int32[Array, ""],
    key: RowKeys,
    knobs: Knobs,
    suppress: Bool[Array, "1 V"],
    canvas: Canvas,
    pinned: Bool[Array, "1 C"],
) -> Slots:
    zero, one = jnp.zeros(1, jnp.int32), jnp.ones(1, bool)
    state = start(config, key, zero, one, str(slots.state.soft.dtype))
    state = replace(state, canvas=jnp.where(canvas < 0, state.canvas, canvas), pinned=pinned)
    return admit(slots, at, Slots(state, key, zero, knobs, suppress, active=one, committing=~one))


def _advance(
    graph: nnx.GraphDef,
    config: Config,
    in_turn: bool,
    policy: Policy,
    params: dict,
    cache: KVCache,
    slots: Slots,
    active: RowMask,
    committing: RowMask,
    allowance: Int32[Array, ""],
) -> tuple[KVCache, Slots]:
    running = slots.state.running & active  # a request that was cancelled left its canvas unfinished
    slots = replace(slots, state=replace(slots.state, running=running), active=active, committing=committing)
    return advance(graph, config, policy, params, cache, slots, allowance, in_turn=in_turn)
