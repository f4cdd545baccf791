"""The jitted programs of one model: every device action of generation, built once, with all knobs traced."""

from dataclasses import replace
from functools import partial

import jax
import numpy as np
from flax import nnx
from jaxtyping import Bool, Int32

from dgemma_jax.cache import KVCache, grow
from dgemma_jax.config import Config
from dgemma_jax.diffusion.loop import denoise_canvases
from dgemma_jax.diffusion.policy import Knobs, Policy
from dgemma_jax.diffusion.step import CanvasState, start
from dgemma_jax.functional import encode
from dgemma_jax.shapes import Array, Canvas, Lengths, RowKeys, RowMask, Tokens


class Programs:
    """Prefill, start, denoise, commit and grow. The cache is donated to every program that returns one.

    Each is compiled once per number of slots and cache capacity, prefill also per chunk bucket, denoise per Policy.
    """

    def __init__(self, graph: nnx.GraphDef, config: Config):
        self._prefill = jax.jit(partial(_prefill, graph), donate_argnums=1)
        self._commit = jax.jit(partial(_commit, graph), donate_argnums=1)
        self._denoise = jax.jit(partial(denoise_canvases, graph), static_argnums=8, donate_argnums=2)
        self._start = jax.jit(partial(start, config), static_argnums=3)
        self._grow = jax.jit(partial(grow, config), static_argnums=1)

    def prefill(
        self, params: dict, cache: KVCache, tokens: Tokens, slot: np.int32, start: np.int32, count: np.int32
    ) -> KVCache:
        """Encode the first `count` of tokens i32[1,T] into row `slot`, at positions start, start + 1, ...

        One row at a time, so that a row's numbers never depend on how long its neighbours' prompts are.
        """
        return self._prefill(params, cache, tokens, slot, start, count)

    def start(self, keys: RowKeys, canvas_index: Lengths, active: RowMask, dtype: str) -> CanvasState:
        """Fresh canvases for the active rows."""
        return self._start(keys, canvas_index, active, dtype)

    def denoise(
        self,
        params: dict,
        cache: KVCache,
        state: CanvasState,
        keys: RowKeys,
        canvas_index: Lengths,
        knobs: Knobs,
        suppress: Bool[Array, "B V"],
        allowance: int,
        policy: Policy,
    ) -> CanvasState:
        """At most `allowance` denoising steps; the state is donated."""
        return self._denoise(params, cache, state, keys, canvas_index, knobs, suppress, allowance, policy)

    def commit(self, params: dict, cache: KVCache, canvas: Canvas, lengths: Lengths) -> KVCache:
        """Append each row's finished canvas (lengths C) or nothing (lengths 0)."""
        return self._commit(params, cache, canvas, lengths)

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
    row = jax.tree.map(lambda array: jax.lax.dynamic_slice_in_dim(array, slot, 1), cache)
    row, _ = encode(graph, params, tokens, count[None], replace(row, lengths=start[None]))
    return jax.tree.map(lambda array, new: jax.lax.dynamic_update_slice_in_dim(array, new, slot, 0), cache, row)


def _commit(graph: nnx.GraphDef, params: dict, cache: KVCache, canvas: Canvas, lengths: Lengths) -> KVCache:
    return encode(graph, params, canvas, lengths, cache)[0]
