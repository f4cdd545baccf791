"""`dgemma bench step`: one denoising step of a model on this machine, its time and its memory."""

from __future__ import annotations

import json
import statistics
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import Console

from dgemma_jax.cli_bench import table
from dgemma_jax.config import check
from dgemma_jax.parallel import mesh_of

if TYPE_CHECKING:
    from dgemma_jax.api import Model

CALLS = 10  # behind one that is not counted
ROWS = (
    ("Canvases", "slots", ",d"),
    ("Cached positions before each", "prefix", ",d"),
    ("Attention", "attention", ""),
    ("Experts", "experts", ""),
    ("Dtype", "dtype", ""),
    ("A step, median (ms)", "median_ms", ".2f"),
    ("A step, fastest (ms)", "fastest_ms", ".2f"),
    ("Temporaries (bytes)", "temporary_bytes", ",d"),
)


def run(args: Namespace) -> int:
    """Measures and prints. ValueError for what cannot be, before weights are read where that can be known."""
    from dgemma_jax.engine.capacity import check_slots

    slots, mesh = check_slots(args.slots), mesh_of(args)
    length = _length(args)

    import dgemma_jax as dg

    how = {"attention_implementation": args.attention_implementation, "mesh": mesh}
    found = {"model": args.model} | measure(dg.load(args.model, args.dtype, length, **how), slots, args.prefix)
    if args.json:
        print(json.dumps(found))
        return 0
    Console(highlight=False, soft_wrap=True).print(table(f"One denoising step of {args.model}", ROWS, found))
    return 0


def _length(args: Namespace) -> int:
    """Positions of a slot: the prefix and its canvas, as far as the context goes."""
    from dgemma_jax.checkpoint import open_directory

    config = open_directory(args.model).config
    most = config.max_position_embeddings - 1  # a canvas has a position at least
    check(0 <= args.prefix <= most, "prefix", args.prefix, f"0 .. {most}, which leave room in the model's context")
    return min(args.prefix + config.canvas_length, config.max_position_embeddings)


def measure(model: Model, slots: int, prefix: int) -> dict[str, Any]:
    """The figures of a step, see ROWS. ValueError, with the bytes, if memory does not hold so many slots."""
    import jax

    from dgemma_jax.engine.capacity import MEMORY_FRACTION, plan

    plan(model.config, model.dtype, slots, model.max_model_len, 0, 0, MEMORY_FRACTION, mesh=model.mesh)
    step, arguments = _program(model, slots, prefix)
    compiled = jax.jit(step).lower(*arguments).compile()
    memory = compiled.memory_analysis()  # None where a backend tells nothing
    seconds = [_seconds(compiled, arguments) for _ in range(1 + CALLS)][1:]
    return {
        "slots": slots,
        "prefix": prefix,
        "attention": model.implementations.attention,
        "experts": model.implementations.experts,
        "dtype": model.dtype,
        "device": jax.devices()[0].device_kind,
        "median_ms": 1e3 * statistics.median(seconds),
        "fastest_ms": 1e3 * min(seconds),
        "temporary_bytes": memory and memory.temp_size_in_bytes,
    }


def _program(model: Model, slots: int, prefix: int) -> tuple[Callable, tuple]:
    """The first step of fresh canvases behind a cache of zeros, which takes as long as any other, and its arguments."""
    import jax
    import jax.numpy as jnp

    from dgemma_jax.cache import init_cache
    from dgemma_jax.diffusion.policy import Knobs, Policy
    from dgemma_jax.diffusion.random import key_from_seed
    from dgemma_jax.diffusion.step import start, step

    cache = init_cache(model.config, slots, model.max_model_len, model.dtype, model.mesh)
    cache = replace(cache, lengths=cache.lengths + prefix)
    keys = jnp.stack([key_from_seed(seed) for seed in range(slots)])
    index, active = jnp.zeros(slots, jnp.int32), jnp.ones(slots, bool)
    state = jax.jit(partial(start, model.config, dtype=model.dtype))(keys, index, active)
    suppress = jnp.zeros((slots, model.config.vocab_size), bool)
    arguments = (model.params, cache, state, keys, index, Knobs.of([model.defaults] * slots), suppress)
    return partial(step, model.graph, policy=Policy()), arguments


def _seconds(function: Callable, arguments: tuple) -> float:
    import jax

    started = time.perf_counter()
    jax.block_until_ready(function(*arguments))
    return time.perf_counter() - started
