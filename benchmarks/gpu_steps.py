"""A layer, the head and whole denoising steps against their floors, for `benchmarks/gpu.py`."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.gpu_cases import Sizes, head_case, normal, seconds
from dgemma_jax.cache import init_cache
from dgemma_jax.config import Config
from dgemma_jax.diffusion.policy import Knobs, Policy
from dgemma_jax.diffusion.random import key_from_seed
from dgemma_jax.diffusion.step import start, step
from dgemma_jax.model.transformer import Implementations, build, merge
from dgemma_jax.sampling import BUILT_IN


@dataclass(frozen=True)
class Device:
    """What floors are computed from, both measured, and what runs."""

    bytes_per_second: float
    operations_per_second: float
    implementations: Implementations

    def floor(self, sizes: Sizes, numbers: float, operations: float) -> float:
        """Milliseconds to read so many numbers of the model's dtype, or for the operations if those take longer."""
        by_memory = numbers * jnp.dtype(sizes.dtype).itemsize / self.bytes_per_second
        return 1e3 * max(by_memory, operations / self.operations_per_second)


def random_model(config: Config, dtype: str, implementations: Implementations) -> tuple:
    """Graph and random parameters on the device."""
    graph, abstract = build(config, dtype, implementations)
    leaves, tree = jax.tree.flatten(abstract)
    scales = (leaf.shape[-2] ** -0.5 if len(leaf.shape) > 1 else 1.0 for leaf in leaves)
    arrays = [
        normal(seed, leaf.shape, dtype, scale) for seed, (leaf, scale) in enumerate(zip(leaves, scales, strict=True))
    ]
    return graph, jax.tree.unflatten(tree, arrays)


@cache
def whole_model(sizes: Sizes, implementations: Implementations) -> tuple:
    """`random_model` of all layers, made once: 47 GiB at full size."""
    return random_model(sizes.config, sizes.dtype, implementations)


def against(taken: float, floor: float) -> dict:
    """The figures of a case, from milliseconds."""
    return {"ms": taken, "floor ms": floor, "times the floor": taken / floor}


def layers_floor(config: Config, params: dict, rows: int, prefix: int) -> tuple[float, float]:
    """(numbers read, operations) of the layers and self-conditioning, weights and cache read once.

    Every expert counts as read: A of E for each token of a canvas leave hardly one out.
    """
    C, tokens = config.canvas_length, rows * config.canvas_length
    leaves = jax.tree.leaves((params["layers"], params["self_conditioning"]))
    numbers = float(sum(leaf.size for leaf in leaves))
    idle = 3 * config.hidden_size * config.moe_intermediate_size * (config.num_experts - config.top_k_experts)
    operations = 2.0 * tokens * (numbers - len(config.layers) * idle)
    for layer in config.layers:
        seen = min(prefix, config.sliding_window) if layer.kind == "sliding" else prefix
        numbers += 2 * rows * seen * layer.num_key_value_heads * layer.head_dim
        operations += 4.0 * tokens * (seen + C) * config.num_attention_heads * layer.head_dim
    return numbers, operations


def head_floor(config: Config, rows: int) -> tuple[float, float]:
    """(numbers read, operations) of the head: logits, and the embedding of their softmax."""
    table = config.vocab_size * config.hidden_size
    return table, 4.0 * rows * config.canvas_length * table


def time_layer(config: Config, sizes: Sizes, device: Device) -> dict:
    """One layer, with embedding and self-conditioning, over one canvas. config: with that layer only."""
    graph, params = random_model(config, sizes.dtype, device.implementations)
    prefix = sizes.prefixes[1]
    kept = replace(init_cache(config, 1, prefix, sizes.dtype), lengths=jnp.array([prefix], jnp.int32))
    canvas = jnp.zeros((1, config.canvas_length), jnp.int32)
    soft = jnp.zeros((1, config.canvas_length, config.hidden_size), sizes.dtype)
    run = jax.jit(lambda params, canvas, kept, soft: merge(graph, params).denoise(canvas, kept, soft))
    taken = 1e3 * seconds(run, params, canvas, kept, soft)
    return against(taken, device.floor(sizes, *layers_floor(config, params, 1, prefix)))


def time_head(sizes: Sizes, device: Device) -> dict:
    """The vocabulary head of one row."""
    op, arguments = head_case(sizes.config, sizes.dtype, 1)
    return against(1e3 * seconds(jax.jit(op), *arguments), device.floor(sizes, *head_floor(sizes.config, 1)))


class Step:
    """A compiled step of some rows; calling it with a prefix times it there."""

    def __init__(self, sizes: Sizes, device: Device, rows: int):
        config = sizes.config
        self.sizes, self.device, self.rows = sizes, device, rows
        graph, self.params = whole_model(sizes, device.implementations)
        self.kept = init_cache(config, rows, max(sizes.prefixes), sizes.dtype)
        keys, index = jnp.stack([key_from_seed(row) for row in range(rows)]), jnp.zeros(rows, jnp.int32)
        state = start(config, keys, index, jnp.ones(rows, bool), sizes.dtype)
        knobs = jax.tree.map(jnp.asarray, Knobs.of([BUILT_IN] * rows))
        self.rest = (state, keys, index, knobs, jnp.zeros((rows, config.vocab_size), bool))
        jitted = jax.jit(partial(step, graph), static_argnums=7)
        started = time.perf_counter()
        self.program = jitted.lower(self.params, self.kept, *self.rest, Policy()).compile()
        self.compiled_in = time.perf_counter() - started

    def facts(self) -> dict:
        """Of the compilation."""
        temp = self.program.memory_analysis().temp_size_in_bytes
        return {"compiled in s": self.compiled_in, "temp MiB": temp / 2**20}

    def __call__(self, prefix: int) -> dict:
        behind = replace(self.kept, lengths=jnp.full(self.rows, prefix, jnp.int32))
        taken = 1e3 * seconds(self.program, self.params, behind, *self.rest, calls=5)
        layers = layers_floor(self.sizes.config, self.params, self.rows, prefix)
        both = (sum(pair) for pair in zip(layers, head_floor(self.sizes.config, self.rows), strict=True))
        return against(taken, self.device.floor(self.sizes, *both))


def run(add: Callable[..., dict | None], sizes: Sizes, facts: dict) -> None:
    """All cases of this file. add: `gpu.Report.add`. facts: `gpu.device_facts`."""
    chosen = Implementations(attention=facts["attention"], experts=facts["experts"])
    device = Device(facts["bytes per second"], facts["operations per second"], chosen)
    for layer in dict.fromkeys(sizes.config.layers):
        one = replace(sizes.config, layers=(layer,))
        add(f"layer, {layer.kind}", partial(time_layer, one, sizes, device), seconds=20)
    add("vocabulary head, 1 row", partial(time_head, sizes, device), seconds=20)
    expected = 40.0
    for rows in sizes.rows:
        made: dict[str, Step] = {}
        started = time.monotonic()
        add(f"step, {rows} rows, compiled", partial(_prepare, made, sizes, device, rows), seconds=expected)
        expected = max(expected, time.monotonic() - started)
        for prefix in sizes.prefixes if made else ():
            add(f"step, {rows} rows, prefix {prefix}", partial(made["step"], prefix), seconds=5)


def _prepare(made: dict[str, Any], sizes: Sizes, device: Device, rows: int) -> dict:
    made["step"] = Step(sizes, device, rows)
    return made["step"].facts()
