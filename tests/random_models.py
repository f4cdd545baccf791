"""Small random models without a file: no tensor is zero, one, or equal to another."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from dgemma_jax.api import Model
from dgemma_jax.config import Config, LayerConfig, Rope
from dgemma_jax.engine.programs import Programs
from dgemma_jax.model.transformer import AUTO, build
from dgemma_jax.sampling import BUILT_IN, Resolved

SMALL = Config(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    self_conditioning_size=48,
    num_attention_heads=4,
    layers=(LayerConfig("sliding", 2, 8), LayerConfig("full", 1, 16)),
    sliding_window=8,
    sliding_rope=Rope(1e4),
    full_rope=Rope(1e6, rotary_fraction=0.25),
    rms_norm_eps=1e-6,
    final_logit_softcapping=30.0,
    num_experts=4,
    top_k_experts=2,
    moe_intermediate_size=24,
    max_position_embeddings=256,
    canvas_length=16,
    dtype="float32",
)
SMALL_DEFAULTS = replace(BUILT_IN, max_denoising_steps=5)


def random_params(config: Config, seed: int = 0) -> dict:
    """Parameters of the config's tree: matrices of fan-in scale, norms and scalars around one."""
    rng = np.random.default_rng(seed)

    def leaf(path: tuple, spec: jax.ShapeDtypeStruct) -> jax.Array:
        name = path[-1].key
        if name == "table":
            values = rng.normal(0, 0.35, spec.shape)
        elif len(spec.shape) < 2:
            values = rng.uniform(0.5, 1.5, spec.shape)
        else:
            values = rng.normal(0, 1.3 * spec.shape[0 if name != "gate_up" else 1] ** -0.5, spec.shape)
        return jnp.asarray(values, spec.dtype)

    return jax.tree.map_with_path(leaf, build(config)[1])


@cache
def _params(config: Config, seed: int) -> dict:
    return random_params(config, seed)


@cache
def _programs(config: Config, seed: int, quick: bool) -> Programs:
    return Programs(build(config)[0], config)


def random_model(
    config: Config = SMALL, seed: int = 0, defaults: Resolved = SMALL_DEFAULTS, tokenizer=None, **kwargs
) -> Model:
    """A Model over random parameters. All of the same config and seed share them, and what is compiled for them."""
    model = Model(config, _params(config, seed), tokenizer, defaults, **kwargs)
    if model.implementations == AUTO and model.mesh is None:
        model._programs = _programs(config, seed, jax.config.read("jax_disable_most_optimizations"))
    return model
