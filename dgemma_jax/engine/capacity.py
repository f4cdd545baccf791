"""What memory holds: how long a context, and how many slots of it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dgemma_jax.cache import init_cache
from dgemma_jax.config import Config, gemma_26b_a4b, is_int
from dgemma_jax.diffusion.policy import Knobs
from dgemma_jax.diffusion.random import key_from_seed
from dgemma_jax.diffusion.slots import idle
from dgemma_jax.memory import free_bytes
from dgemma_jax.sampling import BUILT_IN
from dgemma_jax.sharding import data_size, shard_of

logger = logging.getLogger(__name__)
# What a pass of the 26B model takes beside weights, cache and slots: ceilings, below which the compiled programs stay
# (gpu-aot). The first is what the vocabulary head allows itself.
STEP_BYTES, STEP_BYTES_PER_SLOT = 64 << 20, 64 << 20
LEAST_STEP_BYTES = 8 << 20  # of any model's, a chunk of a prompt included
MEMORY_FRACTION = 0.9  # of the device's memory that an engine fills, unless told otherwise
# Chosen at most, by each group of devices with rows of its own. A pass over few slots costs a GPU hardly more than over
# one; it costs a CPU in proportion.
MOST_CHOSEN = {"cpu": 8}
MOST_CHOSEN_ELSEWHERE = 64
MOST_SLOTS = 65_536  # at all
LARGEST_BATCH = 8  # slots of a group of devices that are taken for prompts given all at once
PREFIX_SHARE = 0.1  # of the slots' cache, for encoded prompts


class Plan(NamedTuple):
    """Slots of `max_model_len` positions each, and the bytes for encoded prompts on each device."""

    slots: int
    max_model_len: int
    prefix_cache_bytes: int


def check_slots(slots: int) -> int:
    """The number of slots as it was asked for; ValueError if it can be none."""
    if not is_int(slots, 1) or slots > MOST_SLOTS:
        raise ValueError(f"slots is {slots!r}; expected 1 .. {MOST_SLOTS}, or None to have them chosen")
    return int(slots)


def slots_for(prompts: int | None, mesh: Mesh | None) -> int:
    """How many slots are taken for so many prompts, None for no end of them: the least power of two that holds them,
    at most LARGEST_BATCH, and so many in each group of a mesh.
    """
    groups = data_size(mesh)
    wanted = LARGEST_BATCH if prompts is None else 1 << max(0, -(-prompts // groups) - 1).bit_length()
    return groups * min(LARGEST_BATCH, wanted)


@cache
def cache_bytes(config: Config, capacity: int, dtype: str, mesh: Mesh | None = None) -> int:
    """Bytes of a cache for one row of `capacity` positions, on each device that has a part of it."""
    heads = shard_of("heads", config.num_attention_heads, mesh)
    return _bytes(partial(init_cache, config, 1, capacity, dtype, mesh)) // heads.count


def aside_bytes(config: Config, capacity: int, dtype: str, slots: int, mesh: Mesh | None = None) -> int:
    """Bytes of the copy of a row in which a prompt is encoded beside so many slots; a single one needs none."""
    return cache_bytes(config, capacity, dtype, mesh) if slots > 1 else 0


def step_bytes(config: Config, dtype: str, slots: int) -> int:
    """Bytes that a pass over so many slots takes beside weights, cache and slots: the 26B model's, less where a model
    has smaller arrays."""
    whole, itemsize = gemma_26b_a4b(), jnp.dtype(dtype).itemsize
    positions = slots * config.canvas_length
    # Of the head, which takes one row at a time, five arrays in fp32, and the table.
    head = config.vocab_size * (20 * config.canvas_length + itemsize * config.hidden_size)
    share = itemsize * positions * _width(config) / (2 * whole.canvas_length * _width(whole))
    return max(LEAST_STEP_BYTES, min(STEP_BYTES, head) + int(STEP_BYTES_PER_SLOT * share))


def _width(config: Config) -> int:
    """Numbers at one position in one array of each kind that a layer makes."""
    heads = config.num_attention_heads * max(layer.head_dim for layer in config.layers)
    experts = config.top_k_experts * (config.hidden_size + 2 * config.moe_intermediate_size)
    return config.hidden_size + heads + experts + config.intermediate_size + config.self_conditioning_size


def slot_bytes(config: Config, dtype: str) -> int:
    """Bytes of a slot's state: its canvas and what denoising keeps of it."""
    return _bytes(lambda: idle(config, jnp.stack([key_from_seed(0)]), Knobs.of([BUILT_IN]), dtype))


def context(config: Config, dtype: str, wanted: int | None, mesh: Mesh | None = None) -> int:
    """max_model_len as asked for, or the config's context lowered (and said so) to what memory holds for one row."""
    limit = config.max_position_embeddings
    if wanted is not None:
        if not is_int(wanted, 2) or wanted > limit:
            raise ValueError(f"max_model_len is {wanted!r}; expected an integer in 2 .. {limit}, the model's context")
        return int(wanted)
    fits = _longest(lambda length: cache_bytes(config, length, dtype, mesh), limit, free_bytes(mesh=mesh))
    if fits < limit:
        print(f"dgemma: memory holds {fits} of the model's {limit} positions; max_model_len={fits}", file=sys.stderr)
    return max(2, fits)


def plan(
    config: Config,
    dtype: str,
    slots: int | None,
    max_model_len: int | None,
    longest: int,
    prefix_cache_bytes: int | None,
    fraction: float,
    weights: int = 0,
    mesh: Mesh | None = None,
) -> Plan:
    """Fits what is left open into `fraction` of the device's memory, less what lies there already.

    slots None: as many as fit, a power of two. max_model_len None: `longest`, or what fits for the slots. weights:
    bytes that do not lie there yet. On a mesh all bytes are those of a device, and the power of two is that of the
    slots that it has. ValueError, with the bytes, for what does not fit.
    """
    slots = slots if slots is None else check_slots(slots)
    free = free_bytes(fraction, mesh) - weights
    row = slot_bytes(config, dtype)

    def cached(slots: int, length: int) -> int:
        return shard_of("rows", slots, mesh).length * cache_bytes(config, length, dtype, mesh)

    def need(slots: int, length: int) -> int:
        rows, aside = cached(slots, length), aside_bytes(config, length, dtype, slots, mesh)
        prefixes = int(PREFIX_SHARE * rows) if prefix_cache_bytes is None else prefix_cache_bytes
        own = shard_of("rows", slots, mesh).length
        return rows + aside + prefixes + own * row + step_bytes(config, dtype, own)

    length = longest if max_model_len is None else max_model_len
    if slots is None:
        groups = data_size(mesh)
        slots = groups * MOST_CHOSEN.get(jax.default_backend(), MOST_CHOSEN_ELSEWHERE)
        while slots > groups and need(slots, length) > free:
            slots //= 2
    if max_model_len is None and need(slots, length) > free:
        length = max(2, _longest(partial(need, slots), longest, free))
    if need(slots, length) > free:
        beside = f" beside {weights:,} of weights" if weights else ""
        raise ValueError(
            f"{slots} slots of {length:,} positions take {need(slots, length):,} bytes{beside}, {max(0, free):,} are"
            " free: lower slots or max_model_len, or raise memory_fraction"
        )
    rows = cached(slots, length)
    if not weights:  # else it is asked beforehand
        figures = (slots, f"{length:,}", rows / 1e6, free / 1e6)
        logger.info("%d slots of %s positions: %.1f MB of cache, %.1f MB free", *figures)
    return Plan(slots, length, int(PREFIX_SHARE * rows) if prefix_cache_bytes is None else prefix_cache_bytes)


def _longest(need: Callable[[int], int], limit: int, free: int) -> int:
    """The largest length up to `limit` that needs no more than what is free; 0 if none does."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if need(middle) <= free else (low, middle - 1)
    return low


def _bytes(make: Callable[[], Any]) -> int:
    """Of the arrays that `make` would make."""
    leaves = jax.eval_shape(lambda: jax.tree.leaves(make()))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
