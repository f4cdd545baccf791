"""What a model takes of a GPU that need not be there: memory, the floors of a pass, and tokens per second at them.

Computed from the model's shapes and the data sheets; the step's temporaries are the compiler's where it reported them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any, NamedTuple

import jax

from dgemma_jax.config import Config, check, gemma_26b_a4b
from dgemma_jax.engine.capacity import PREFIX_SHARE, aside_bytes, cache_bytes, slot_bytes, step_bytes
from dgemma_jax.model.transformer import build

MIB = 1 << 20
WEIGHTS = {"bf16": None, "int8": "int8", "int4": "int4"}
DTYPE = "bfloat16"  # of the computation


@dataclass(frozen=True)
class Gpu:
    """name: in words. memory: bytes. bandwidth: bytes per second. operations: per second, dense in bfloat16 with sums
    in fp32. fraction: of the memory that is filled; unified memory leaves more to the host. compiled: the GPU of
    TEMPORARIES that stands for it.
    """

    name: str
    memory: float
    bandwidth: float
    operations: float
    compiled: str
    fraction: float = 0.9


# NVIDIA's data sheets. That of GB10 has one figure, a PFLOP/s in sparse fp4, of which dense bf16 is an eighth.
GPUS = {
    "h200": Gpu("NVIDIA H200 SXM", 141e9, 4.8e12, 989e12, "H200"),
    "h100": Gpu("NVIDIA H100 SXM", 80e9, 3.35e12, 989e12, "H200"),
    "a100-80": Gpu("NVIDIA A100 SXM 80 GB", 80e9, 2.039e12, 312e12, "H200"),
    "rtx5090": Gpu("NVIDIA RTX 5090", 32e9, 1.792e12, 209.5e12, "GB10"),
    "gb10": Gpu("NVIDIA GB10 (DGX Spark)", 128e9, 0.273e12, 125e12, "GB10", 0.85),
}
# MiB of one slot and of each further one, by GPU and weights: the loop of the 26B model with 8,192 positions a slot,
# compiled without a device, as `make gpu-aot` stores them.
TEMPORARIES: dict[tuple[str, str], tuple[float, float]] = {
    ("H200", "bf16"): (94.9, 7.4),
    ("H200", "int8"): (95.1, 7.4),
    ("H200", "int4"): (95.1, 7.4),
    ("GB10", "bf16"): (94.9, 7.4),
    ("GB10", "int8"): (95.1, 7.4),
    ("GB10", "int4"): (95.1, 7.4),
}


@dataclass(frozen=True)
class Estimate:
    """Bytes: weights (image tower included), cache of all slots, prefixes kept beside it, a row aside in which a prompt
    is encoded, states of the slots, temporaries of a pass, what may be filled. compiled: whether the temporaries are
    the compiler's figure; the engine's ceiling else. pass_bytes, pass_operations: of a pass over all slots behind full
    caches. tokens: of all canvases.
    """

    gpu: Gpu
    weights: float
    cache: float
    prefixes: float
    aside: float
    states: float
    temporaries: float
    compiled: bool
    usable: float
    pass_bytes: float
    pass_operations: float
    tokens: int

    @property
    def origin(self) -> str:
        """Of the temporaries, in words."""
        by = f"the 26B model compiled for {self.gpu.compiled}, which was not there"
        return f"measured by the compiler: {by}" if self.compiled else "computed: the engine's ceiling"

    @property
    def left(self) -> float:
        """Bytes, negative if it does not fit."""
        cached = self.cache + self.prefixes + self.aside
        return self.usable - self.weights - cached - self.states - self.temporaries

    @property
    def reading(self) -> float:
        """Seconds to read what a pass reads."""
        return self.pass_bytes / self.gpu.bandwidth

    @property
    def computing(self) -> float:
        """Seconds for the operations of a pass."""
        return self.pass_operations / self.gpu.operations

    def rate(self, steps: float) -> float:
        """Tokens per second where a canvas takes so many denoising steps, and its commit one pass, at the floor."""
        return self.tokens / ((steps + 1) * max(self.reading, self.computing))


def estimate(config: Config, gpu: str, weights: str, slots: int, max_model_len: int) -> Estimate:
    """What `slots` slots of `max_model_len` positions take. It may be more than there is: see `Estimate.left`."""
    check(gpu in GPUS, "gpu", gpu, "one of " + ", ".join(GPUS))
    check(weights in WEIGHTS, "weights", weights, "one of " + ", ".join(WEIGHTS))
    config, chosen = replace(config, dtype=DTYPE, quantization=WEIGHTS[weights]), GPUS[gpu]
    stored = _stored(config)
    same = replace(config, vision=None, quantization=None) == replace(gemma_26b_a4b(), vision=None)
    compiled = same and (chosen.compiled, weights) in TEMPORARIES
    temporaries: float = step_bytes(config, DTYPE, slots)
    if compiled:
        one, more = (MIB * figure for figure in TEMPORARIES[chosen.compiled, weights])
        temporaries = one + (slots - 1) * more
    kept = slots * cache_bytes(config, max_model_len, DTYPE)
    return Estimate(
        gpu=chosen,
        weights=stored.all,
        cache=kept,
        prefixes=int(PREFIX_SHARE * kept),
        aside=aside_bytes(config, max_model_len, DTYPE, slots),
        states=slots * slot_bytes(config, DTYPE),
        temporaries=temporaries,
        compiled=compiled,
        usable=chosen.fraction * chosen.memory,
        pass_bytes=_read(config, stored, slots) + kept,
        pass_operations=_operations(config, slots, max_model_len),
        tokens=slots * config.canvas_length,
    )


def check_fits(found: Estimate, slots: int, max_model_len: int) -> None:
    """ValueError, with the bytes, if the estimate is of more than may be filled."""
    if found.left < 0:
        raise ValueError(
            f"{slots} slots of {max_model_len:,} positions take {found.usable - found.left:,.0f} bytes, of which "
            f"{found.weights:,} are weights, and {found.usable:,.0f} of {found.gpu.name} may be filled: lower --slots "
            "or --max-model-len, or take fewer bits with --weights"
        )


class _Stored(NamedTuple):
    """Bytes of weights: of all, of the text model, of its experts."""

    all: int
    text: int
    experts: int


@cache
def _stored(config: Config) -> _Stored:
    params = build(config)[1]
    vision, experts = params.get("vision", {}), [layer["experts"] for layer in params["layers"].values()]
    return _Stored(_bytes(params), _bytes(params) - _bytes(vision), _bytes(experts))


def _read(config: Config, stored: _Stored, slots: int) -> float:
    """Bytes of weights that a pass reads: the text model's, once each, of the experts those that some token chooses."""
    unread = (1 - config.top_k_experts / config.num_experts) ** (slots * config.canvas_length)
    return stored.text - stored.experts * unread


def _operations(config: Config, slots: int, length: int) -> float:
    """Multiplications and additions of a pass over canvases behind `length` positions."""
    D, N, C = config.hidden_size, config.num_attention_heads, config.canvas_length
    per_token = 2 * config.vocab_size * D + 3 * config.self_conditioning_size * D  # logits and soft embedding; its MLP
    for layer in config.layers:
        H, K, sliding = layer.head_dim, layer.num_key_value_heads, layer.kind == "sliding"
        keys = C + (min(length, config.sliding_window) if sliding else length)
        per_token += D * H * (2 * N + (2 if sliding else 1) * K) + 2 * N * H * keys
        per_token += 3 * D * (config.intermediate_size + config.top_k_experts * config.moe_intermediate_size)
        per_token += D * config.num_experts
    return 2.0 * slots * C * per_token


def _bytes(tree: Any) -> int:
    return sum(prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
