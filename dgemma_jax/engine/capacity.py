"""What memory holds: how long a context, and how many slots of it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dgemma_jax.cache import init_cache
from dgemma_jax.config import Config, is_int
from dgemma_jax.diffusion.policy import Knobs
from dgemma_jax.diffusion.random import key_from_seed
from dgemma_jax.diffusion.slots import idle
from dgemma_jax.memory import free_bytes
from dgemma_jax.sampling import BUILT_IN

logger = logging.getLogger(__name__)
# What a pass takes beside weights, cache and slots: ceilings, below which the compiled 26B programs stay (gpu-aot).
STEP_BYTES, STEP_BYTES_PER_SLOT = 64 << 20, 64 << 20
# Chosen at most. A pass over few slots costs a GPU hardly more than over one; it costs a CPU in proportion.
MOST_CHOSEN = {"cpu": 8}
MOST_CHOSEN_ELSEWHERE = 64
MOST_SLOTS = 65_536  # at all
PREFIX_SHARE = 0.1  # of the slots' cache, for encoded prompts


class Plan(NamedTuple):
    """Slots of `max_model_len` positions each, and the bytes for encoded prompts."""

    slots: int
    max_model_len: int
    prefix_cache_bytes: int


def check_slots(slots: int) -> int:
    """The number of slots as it was asked for; ValueError if it can be none."""
    if not is_int(slots, 1) or slots > MOST_SLOTS:
        raise ValueError(f"slots is {slots!r}; expected 1 .. {MOST_SLOTS}, or None to have them chosen")
    return int(slots)


@cache
def cache_bytes(config: Config, capacity: int, dtype: str) -> int:
    """Bytes of a cache for one row of `capacity` positions."""
    return _bytes(partial(init_cache, config, 1, capacity, dtype))


def context(config: Config, dtype: str, wanted: int | None) -> int:
    """max_model_len as asked for, or the config's context lowered (and said so) to what memory holds for one row."""
    limit = config.max_position_embeddings
    if wanted is not None:
        if not is_int(wanted, 2) or wanted > limit:
            raise ValueError(f"max_model_len is {wanted!r}; expected an integer in 2 .. {limit}, the model's context")
        return int(wanted)
    fits = _longest(lambda length: cache_bytes(config, length, dtype), limit, free_bytes())
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
) -> Plan:
    """Fits what is left open into `fraction` of the device's memory, less what lies there already.

    slots None: as many as fit, a power of two. max_model_len None: `longest`, or what fits for the slots asked for.
    ValueError, with the bytes, for what does not fit.
    """
    slots = slots if slots is None else check_slots(slots)
    free = free_bytes(fraction)
    row = _bytes(lambda: idle(config, jnp.stack([key_from_seed(0)]), Knobs.of([BUILT_IN]), dtype))

    def need(slots: int, length: int) -> int:
        one = cache_bytes(config, length, dtype)
        rows, aside = slots * one, one if slots > 1 else 0  # a prompt is encoded in a copy of its row
        prefixes = int(PREFIX_SHARE * rows) if prefix_cache_bytes is None else prefix_cache_bytes
        return rows + aside + prefixes + slots * (row + STEP_BYTES_PER_SLOT) + STEP_BYTES

    length = longest if max_model_len is None else max_model_len
    if slots is None:
        slots = MOST_CHOSEN.get(jax.default_backend(), MOST_CHOSEN_ELSEWHERE)
        while slots > 1 and need(slots, length) > free:
            slots //= 2
    elif max_model_len is None:
        length = max(2, _longest(partial(need, slots), longest, free))
    if need(slots, length) > free:
        raise ValueError(
            f"{slots} slots of {length:,} positions take {need(slots, length):,} bytes, {free:,} are free: lower slots"
            " or max_model_len, or raise memory_fraction"
        )
    rows = slots * cache_bytes(config, length, dtype)
    logger.info(
        "%d slots of %s positions: %.1f MB of cache, %.1f MB free", slots, f"{length:,}", rows / 1e6, free / 1e6
    )
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
