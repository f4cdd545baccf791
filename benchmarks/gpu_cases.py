"""Sizes, inputs and timing of `benchmarks/gpu.py`."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dgemma_jax.config import Config, LayerConfig, gemma_26b_a4b, tiny
from dgemma_jax.kernels import grouped_matmul, mixed_attention, vocab_head

Op = Callable[..., Any]


@dataclass(frozen=True)
class Sizes:
    """What is measured: the model, and how much of everything."""

    config: Config
    dtype: str
    prefixes: tuple[int, ...]
    rows: tuple[int, ...]
    tokens: tuple[int, ...]
    product: int  # side of the square matrices whose product gives the device's rate
    copied: int  # bytes of the copy that gives its bandwidth


FULL = Sizes(
    replace(gemma_26b_a4b(), vision=None),
    "bfloat16",
    prefixes=(1024, 8192, 32_768, 131_072),
    rows=(1, 4, 8),
    tokens=(33, 256, 2048),
    product=8192,
    copied=2 << 30,
)
SMALL = Sizes(
    replace(tiny(), vocab_size=4096, layers=(LayerConfig("sliding", 2, 16), LayerConfig("full", 1, 32))),
    "float32",
    prefixes=(64, 256),
    rows=(1, 2),
    tokens=(9,),
    product=256,
    copied=1 << 20,
)


def seconds(function: Op, *arguments: Any, calls: int = 10) -> float:
    """Of one call: the median over three batches of calls that wait for the device only at their end."""
    jax.block_until_ready(function(*arguments))
    taken = []
    for _ in range(3):
        started = time.perf_counter()
        out = [function(*arguments) for _ in range(calls)][-1]
        jax.block_until_ready(out)
        taken.append((time.perf_counter() - started) / calls)
    return statistics.median(taken)


def heads(config: Config) -> dict[str, int]:
    return {layer.kind: layer.head_dim for layer in config.layers}


@partial(jax.jit, static_argnums=(1, 2, 3))
def normal(seed: int, shape: tuple[int, ...], dtype: str, scale: float) -> jax.Array:
    """Random numbers, made on the device: at full size there are tens of GB of them."""
    return (jax.random.normal(jax.random.key(seed, impl="rbg"), shape) * scale).astype(dtype)


def attention_case(
    config: Config, layer: LayerConfig, dtype: str, lengths: Sequence[int], capacity: int, mixed: bool
) -> tuple[Op, tuple]:
    """(op, arguments) of one layer over canvases behind `lengths` cached positions; mixed: every other row causal."""
    B, C, K, H = len(lengths), config.canvas_length, layer.num_key_value_heads, layer.head_dim
    window = config.sliding_window if layer.kind == "sliding" else None
    prefix = (B, min(capacity, window or capacity), K, H)
    shapes = ((B, C, config.num_attention_heads, H), (B, C, K, H), (B, C, K, H), prefix, prefix)
    arrays = [normal(seed, shape, dtype, 0.5) for seed, shape in enumerate(shapes)]
    causal = jnp.asarray([mixed and row % 2 == 1 for row in range(B)])
    rows = jnp.asarray(lengths, jnp.int32), jnp.full(B, C, jnp.int32), causal
    return partial(mixed_attention.mixed_attention, window=window), (*arrays, *rows)


def experts_case(config: Config, dtype: str, tokens: int) -> tuple[Op, tuple]:
    """(op, arguments) of the expert layer for some tokens."""
    E, D, inner = config.num_experts, config.hidden_size, config.moe_intermediate_size
    x = normal(0, (tokens, D), dtype, 1.0)
    matrices = normal(1, (E, D, 2 * inner), dtype, D**-0.5), normal(2, (E, inner, D), dtype, inner**-0.5)
    chance = np.random.default_rng(0).random((tokens, E))
    ids = np.argsort(chance, axis=1)[:, : config.top_k_experts].astype(np.int32)
    weights = jnp.full(ids.shape, 1 / config.top_k_experts, jnp.float32)
    return grouped_matmul.experts, (x, *matrices, weights, jnp.asarray(ids))


def head_case(config: Config, dtype: str, rows: int) -> tuple[Op, tuple]:
    """(op, arguments) of the vocabulary head for some rows."""
    C, D, V = config.canvas_length, config.hidden_size, config.vocab_size
    hidden, table = normal(0, (rows, C, D), dtype, 1.0), normal(1, (V, D), dtype, 5 * D**-0.5)
    uniforms = np.random.default_rng(0).random((rows, 1 - (-V // vocab_head.TILE), C), np.float32)
    temperatures = jnp.full(rows, 0.6), jnp.ones(rows)

    def op(*arguments: Any, **chosen: str) -> vocab_head.HeadStats:
        return vocab_head.vocab_head(*arguments, None, softcap=30.0, scale=D**0.5, **chosen)

    return op, (hidden, table, *temperatures, jnp.asarray(uniforms))
