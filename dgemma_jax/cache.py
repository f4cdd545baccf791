"""The key/value cache: full buffers for full layers, rings of the window for sliding layers, a length per row."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Float

from dgemma_jax.config import Config, LayerConfig
from dgemma_jax.kernels.shard import Shard
from dgemma_jax.shapes import Array, Keys, Lengths
from dgemma_jax.sharding import copies, partition, shard_of


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Committed keys (rotated) and values (normed) of every layer.

    k, v: one f[B,S,K,H] per layer. Position p of a row lies in slot p of a full layer (S = capacity) and in slot
    p % S of a sliding layer (S = min(window, capacity)). lengths i32[B]: positions written so far; what lies in slots
    not yet written has no influence.
    """

    k: tuple[Float[Array, "B _ _ _"], ...]
    v: tuple[Float[Array, "B _ _ _"], ...]
    lengths: Lengths

    @property
    def capacity(self) -> int:
        """Positions a row can hold."""
        return max(buffer.shape[1] for buffer in self.k)


def init_cache(
    config: Config, batch: int, capacity: int, dtype: str | None = None, mesh: Mesh | None = None
) -> KVCache:
    """An empty cache for `batch` rows of up to `capacity` positions; dtype None: the config's.

    mesh: the model's, if it has one; rows and heads are then cut as its devices share them.
    Raises ValueError if batch or capacity is not positive.
    """
    if batch < 1 or capacity < 1:
        raise ValueError(f"batch is {batch} and capacity {capacity}; expected at least 1 of each")
    rows, heads = shard_of("rows", batch, mesh), shard_of("heads", config.num_attention_heads, mesh)

    def zeros(shape: tuple[int, ...], kind: str, *cut: Shard | None) -> Array:
        return jnp.zeros(shape, kind, device=None if mesh is None else NamedSharding(mesh, partition(*cut)))

    def buffers() -> tuple[Array, ...]:
        return tuple(
            zeros(
                (batch, _slots(config, layer.kind, capacity), _heads(config, layer, mesh), layer.head_dim),
                dtype or config.dtype,
                *(rows, None, heads),
            )
            for layer in config.layers
        )

    return KVCache(k=buffers(), v=buffers(), lengths=zeros((batch,), "int32", rows))


def _heads(config: Config, layer: LayerConfig, mesh: Mesh | None) -> int:
    return layer.num_key_value_heads * copies(config, layer.num_key_value_heads, mesh)


def fitted(config: Config, cache: KVCache, mesh: Mesh | None) -> KVCache:
    """The same contents with as many copies of the K/V heads as the mesh needs; for a cache made without it."""

    def fit(buffers: tuple[Array, ...]) -> tuple[Array, ...]:
        return tuple(
            b if b.shape[2] == (heads := _heads(config, layer, mesh)) else jnp.repeat(b, heads // b.shape[2], axis=2)
            for b, layer in zip(buffers, config.layers, strict=True)
        )

    return replace(cache, k=fit(cache.k), v=fit(cache.v))


def _slots(config: Config, kind: str, capacity: int) -> int:
    return min(config.sliding_window, capacity) if kind == "sliding" else capacity


def write(
    buffer: Float[Array, "B S K H"], new: Keys, start: Lengths, count: Lengths, *, ring: bool
) -> Float[Array, "B S K H"]:
    """Put the first count[b] entries of new f[B,T,K,H] at positions start[b]..; of a ring only the last S survive.

    Entries that do not survive, padding, and positions beyond a full buffer are dropped, so the scatter never writes
    a slot twice and, donated, works in place.
    """
    slots = buffer.shape[1]
    index = jnp.arange(new.shape[1])[None]
    position = start[:, None] + index
    kept = (index < count[:, None]) & (index >= count[:, None] - slots)
    if not ring:
        kept &= position < slots
    rows = jnp.arange(buffer.shape[0])[:, None]
    return (
        jnp.asarray(buffer)
        .at[rows, jnp.where(kept, position % slots, slots)]
        .set(new.astype(buffer.dtype), mode="drop")
    )


def grow(config: Config, cache: KVCache, capacity: int) -> KVCache:
    """The same contents in a larger cache. Raises ValueError where a ring would have to change its size.

    Capacities come in powers of two times the window, so a ring has its final size from the start.
    """

    def resize(buffer: Array, kind: str) -> Array:
        missing = _slots(config, kind, capacity) - buffer.shape[1]
        if missing < 0 or (missing and kind == "sliding"):
            raise ValueError(f"grow: a cache of {cache.capacity} positions cannot become one of {capacity}")
        return jnp.pad(buffer, ((0, 0), (0, missing), (0, 0), (0, 0)))

    kinds = [layer.kind for layer in config.layers]
    return replace(
        cache,
        k=tuple(resize(b, kind) for b, kind in zip(cache.k, kinds, strict=True)),
        v=tuple(resize(b, kind) for b, kind in zip(cache.v, kinds, strict=True)),
    )


def cut(config: Config, cache: KVCache, capacity: int) -> KVCache:
    """The first `capacity` positions of a cache; rings stay whole. The inverse of `grow`."""

    def part(buffers: tuple[Array, ...]) -> tuple[Array, ...]:
        kinds = [layer.kind for layer in config.layers]
        return tuple(b[:, :capacity] if kind == "full" else b for b, kind in zip(buffers, kinds, strict=True))

    return replace(cache, k=part(cache.k), v=part(cache.v))
