"""Programs over rows and their cache, run on every device of a mesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from dgemma_jax.cache import KVCache, fitted
from dgemma_jax.config import Config
from dgemma_jax.kernels.shard import Shard
from dgemma_jax.model.transformer import merge, specs
from dgemma_jax.sharding import partition, shard_of

# How an argument or a result lies on the mesh: whole on every device, cut along its leading row axis, the cache of all
# rows, or the cache of a single row.
WHOLE, ROWS, CACHE, ROW_CACHE = P(), "rows", "cache", "row cache"


@dataclass(frozen=True)
class Layout:
    """How `batch` rows lie on a mesh; None is one device. Rows that it does not divide are whole on every device."""

    config: Config
    batch: int
    mesh: Mesh | None

    @property
    def rows(self) -> Shard:
        """The rows of one device."""
        return shard_of("rows", self.batch, self.mesh)

    def run(self, function: Callable, takes: tuple, gives: Any) -> Callable:
        """The function on every device's parts; itself without a mesh.

        takes: of each argument WHOLE, ROWS, CACHE, ROW_CACHE, or PartitionSpecs. gives: of its result or results.
        """
        if self.mesh is None:
            return function

        # A KVCache of PartitionSpecs would be none, so caches go in and come out as tuples of their parts.
        def inside(*arguments: Any) -> Any:
            results = function(*_of_caches(_whole, arguments, takes))
            return _of_caches(_parts, results, gives)

        def outside(*arguments: Any) -> Any:
            fitting = _of_caches(lambda cache: fitted(self.config, cache, self.mesh), arguments, takes)
            return _of_caches(_whole, across(*_of_caches(_parts, fitting, takes)), gives)

        specs = {"in_specs": self.specs(takes), "out_specs": self.specs(gives)}
        across = jax.shard_map(inside, mesh=self.mesh, **specs, check_vma=False)
        return outside

    def specs(self, kinds: Any) -> Any:
        """The PartitionSpecs of arguments or results; of a cache those of its k, v and lengths."""
        if isinstance(kinds, tuple):
            return tuple(map(self.specs, kinds))
        if kinds is ROWS:
            return partition(self.rows)
        if kinds in (CACHE, ROW_CACHE):
            rows = self.rows if kinds is CACHE else None
            buffer = partition(rows, None, shard_of("heads", self.config.num_attention_heads, self.mesh))
            return buffer, buffer, partition(rows)
        return kinds


def _parts(cache: KVCache) -> tuple:
    return cache.k, cache.v, cache.lengths


def _whole(parts: tuple) -> KVCache:
    return KVCache(*parts)


def _of_caches(change: Callable, values: Any, kinds: Any) -> Any:
    """`change` of the values that are caches, the others as they are."""
    if isinstance(kinds, tuple):
        return tuple(_of_caches(change, value, kind) for value, kind in zip(values, kinds, strict=True))
    return change(values) if kinds in (CACHE, ROW_CACHE) else values


def on_devices(graph: nnx.GraphDef, params: dict, batch: int, function: Callable, takes: tuple, gives: Any) -> Callable:
    """`function(model, *arguments)`, to be called with the arguments; on every device of the model's mesh, if any.

    batch: rows. takes, gives: see `Layout.run`.
    """
    model = merge(graph, params)
    if model.mesh is None:
        return partial(function, model)
    layout = Layout(model.config, batch, model.mesh)
    inside = lambda params, *arguments: function(merge(graph, params), *arguments)  # noqa: E731
    return partial(layout.run(inside, (specs(model), *takes), gives), params)
