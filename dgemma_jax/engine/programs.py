"""The jitted programs of one model: every device action of generation, built once, with all knobs traced."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Bool, Float, Int32

from dgemma_jax.cache import KVCache, cut, grow
from dgemma_jax.config import Config
from dgemma_jax.diffusion.policy import Knobs, Policy
from dgemma_jax.diffusion.slots import Slots, advance, idle
from dgemma_jax.diffusion.step import start
from dgemma_jax.functional import image_features
from dgemma_jax.image_batch import ImageBatch
from dgemma_jax.model.transformer import Transformer
from dgemma_jax.shapes import Array, Blocks, Canvas, Hidden, RowKeys, RowMask, Tokens
from dgemma_jax.sharding import shard_of
from dgemma_jax.spmd import CACHE, ROW_CACHE, ROWS, WHOLE, Layout, on_devices


class Programs:
    """Prefill, admit, advance, take, put and grow. What a program returns anew is donated to it: the cache, the slots.

    Each is compiled once per number of slots and cache capacity, prefill also per chunk bucket, advance per Policy. Of
    models that read images also features, once per bucket of patches.
    mesh: that of the graph.
    """

    def __init__(self, graph: nnx.GraphDef, config: Config, mesh: Mesh | None = None):
        self.mesh = mesh
        self._prefill = jax.jit(partial(_prefill, graph), donate_argnums=1)
        self._admit = jax.jit(partial(_admit, config, mesh), donate_argnums=0)
        self._advance = jax.jit(partial(_advance, graph, config), static_argnums=0, donate_argnums=(2, 3))
        self._grow = jax.jit(partial(_grow, config, mesh), static_argnums=1)
        self._take = jax.jit(partial(_take, config, mesh), static_argnums=2)
        self._put = jax.jit(partial(_put, config, mesh), donate_argnums=0)
        self._idle = jax.jit(partial(_idle, config, mesh), static_argnums=2)
        self._features = jax.jit(partial(image_features, graph))

    def compile(self, calls: Sequence[tuple]) -> None:
        """Compile programs side by side; each of `calls` is a name and the arguments of a call that is to come."""
        lowered = [getattr(self, f"_{name}").lower(*arguments) for name, *arguments in calls]
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda program: program.compile(), lowered))

    def idle(self, keys: RowKeys, knobs: Knobs, dtype: str) -> Slots:
        """Slots at rest, see `diffusion.slots.idle`."""
        return self._idle(keys, knobs, dtype)

    def prefill(
        self,
        params: dict,
        cache: KVCache,
        tokens: Tokens,
        slot: np.int32,
        start: np.int32,
        count: np.int32,
        soft: Hidden | None = None,
        blocks: Blocks | None = None,
    ) -> KVCache:
        """Encode the first `count` of tokens i32[1,T] into row `slot`, at positions start, start + 1, ...

        soft f[1,T,D], blocks i32[1,T]: soft tokens of images and where they are, see `Transformer.encode`.
        One row at a time, so that a row's numbers never depend on how long its neighbours' prompts are.
        """
        return self._prefill(params, cache, tokens, slot, start, count, soft, blocks)

    def features(self, params: dict, images: ImageBatch) -> Float[Array, "n Q D"]:
        """The soft tokens of images, see `functional.image_features`."""
        return self._features(params, images)

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
    soft: Hidden | None,
    blocks: Blocks | None,
) -> KVCache:
    batch = len(cache.lengths)

    def run(
        model: Transformer,
        cache: KVCache,
        tokens: Tokens,
        slot: Array,
        start: Array,
        count: Array,
        soft: Hidden | None,
        blocks: Blocks | None,
    ) -> KVCache:
        at, here = shard_of("rows", batch, model.mesh).locate(slot)
        row = _row(cache, at)
        row = replace(row, lengths=jnp.where(here, start, row.lengths))
        count = jnp.where(here, count, 0)[None]  # no token for another device's row
        row, _ = model.encode(tokens, count, row, soft, blocks)
        return _with_row(cache, row, at)

    takes = (CACHE, *[WHOLE] * 6)
    return on_devices(graph, params, batch, run, takes, CACHE)(cache, tokens, slot, start, count, soft, blocks)


def _take(config: Config, mesh: Mesh | None, cache: KVCache, slot: Int32[Array, ""], capacity: int) -> KVCache:
    layout = Layout(config, len(cache.lengths), mesh)

    def run(cache: KVCache, slot: Array) -> KVCache:
        at, here = layout.rows.locate(slot)
        return jax.tree.map(lambda x: layout.rows.sum(jnp.where(here, x, 0)), cut(config, _row(cache, at), capacity))

    return layout.run(run, (CACHE, WHOLE), ROW_CACHE)(cache, slot)


def _put(config: Config, mesh: Mesh | None, cache: KVCache, row: KVCache, slot: Int32[Array, ""]) -> KVCache:
    layout = Layout(config, len(cache.lengths), mesh)

    def run(cache: KVCache, row: KVCache, slot: Array) -> KVCache:
        return _with_row(cache, row, *layout.rows.locate(slot))

    return layout.run(run, (CACHE, ROW_CACHE, WHOLE), CACHE)(cache, row, slot)


def _row(arrays: Any, at: Int32[Array, ""]) -> Any:
    """Row `at` of every array, as a batch of one."""
    return jax.tree.map(lambda array: jax.lax.dynamic_slice_in_dim(array, at, 1), arrays)


def _with_row(arrays: Any, row: Any, at: Int32[Array, ""], here: bool | Bool[Array, ""] = True) -> Any:
    """The arrays with `row`, which may be shorter, as their row `at`; as they were where it is not `here`."""

    def put(array: Array, new: Array) -> Array:
        place = (at, *[0] * (array.ndim - 1))
        old = jax.lax.dynamic_slice(array, place, new.shape)
        return jax.lax.dynamic_update_slice(array, jnp.where(here, new, old), place)

    return jax.tree.map(put, arrays, row)


def _grow(config: Config, mesh: Mesh | None, cache: KVCache, capacity: int) -> KVCache:
    larger = lambda cache: grow(config, cache, capacity)  # noqa: E731
    return Layout(config, len(cache.lengths), mesh).run(larger, (CACHE,), CACHE)(cache)


def _idle(config: Config, mesh: Mesh | None, keys: RowKeys, knobs: Knobs, dtype: str) -> Slots:
    run = lambda keys, knobs: idle(config, keys, knobs, dtype)  # noqa: E731
    return Layout(config, len(keys), mesh).run(run, (ROWS, ROWS), ROWS)(keys, knobs)


def _admit(
    config: Config,
    mesh: Mesh | None,
    slots: Slots,
    at: Int32[Array, ""],
    key: RowKeys,
    knobs: Knobs,
    suppress: Bool[Array, "1 V"],
    canvas: Canvas,
    pinned: Bool[Array, "1 C"],
) -> Slots:
    layout = Layout(config, len(slots.active), mesh)

    def run(
        slots: Slots, at: Array, key: RowKeys, knobs: Knobs, suppress: Array, canvas: Canvas, pinned: Array
    ) -> Slots:
        zero, one = jnp.zeros(1, jnp.int32), jnp.ones(1, bool)
        state = start(config, key, zero, one, str(slots.state.soft.dtype))
        state = replace(state, canvas=jnp.where(canvas < 0, state.canvas, canvas), pinned=pinned)
        new = Slots(state, key, zero, knobs, suppress, active=one, committing=~one)
        return _with_row(slots, new, *layout.rows.locate(at))

    takes = (ROWS, *[WHOLE] * 6)
    return layout.run(run, takes, ROWS)(slots, at, key, knobs, suppress, canvas, pinned)


def _advance(
    graph: nnx.GraphDef,
    config: Config,
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
    return advance(graph, config, policy, params, cache, slots, allowance)
