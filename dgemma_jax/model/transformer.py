"""The DiffusionGemma text model: one stack of layers that encodes causally and denoises bidirectionally.

Source: transformers' DiffusionGemma; the equations are restated where they are computed.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Bool

from dgemma_jax.cache import KVCache, write
from dgemma_jax.config import Config, LayerConfig
from dgemma_jax.model.attention import Attention
from dgemma_jax.model.experts import Experts, Router
from dgemma_jax.model.layers import MLP, Embedder, QuantizedWeight, RMSNorm, rms_norm, rotary_table, weight
from dgemma_jax.model.vision import VisionTower
from dgemma_jax.quantization import quantized_spec
from dgemma_jax.shapes import Array, Blocks, Canvas, CanvasHidden, Hidden, Lengths, RowMask
from dgemma_jax.sharding import columns, partition_of, placed, shard_of

LAYER_NORMS = (
    "input_norm",
    "post_attention_norm",
    "pre_mlp_norm",
    "post_mlp_norm",
    "pre_experts_norm",
    "post_experts_norm",
    "post_feedforward_norm",
)


@dataclass(frozen=True)
class Implementations:
    """Which implementation of each op a model runs, see the ops' folders in kernels/; "auto" lets the op choose.

    Only "reference" attention and experts have a reverse mode, so training asks for those. dense: of the products with
    quantised matrices outside the experts.
    """

    attention: str = "auto"
    experts: str = "auto"
    head: str = "auto"
    dense: str = "auto"


AUTO = Implementations()
DIFFERENTIABLE = Implementations(attention="reference", experts="reference")


class Layer(nnx.Module):
    """Attention, then a dense MLP and experts side by side, every branch normed before and after."""

    input_norm: RMSNorm
    post_attention_norm: RMSNorm
    pre_mlp_norm: RMSNorm
    post_mlp_norm: RMSNorm
    pre_experts_norm: RMSNorm
    post_experts_norm: RMSNorm
    post_feedforward_norm: RMSNorm

    def __init__(
        self, config: Config, layer: LayerConfig, dtype: str, implementations: Implementations, mesh: Mesh | None
    ):
        attention, dense, D = implementations.attention, implementations.dense, config.hidden_size
        for name in LAYER_NORMS:
            setattr(self, name, RMSNorm(D, config.rms_norm_eps, dtype))
        self.attention = Attention(config, layer, dtype, attention, dense, mesh)
        shard = columns(config, config.intermediate_size, mesh)
        self.mlp = MLP(D, config.intermediate_size, dtype, dense, shard)
        self.router = Router(config, dtype)
        self.experts = Experts(config, dtype, implementations.experts, mesh)
        self.encoder_scalar = weight(dtype=dtype)
        self.decoder_scalar = weight(dtype=dtype)

    def feed_forward(self, h: Hidden, used: Bool[Array, "B T"]) -> Hidden:
        """h + norm(dense(h) + experts(h)); the router reads h itself, not the experts' normed input.

        used: tokens whose result is; the others go to no expert.
        """
        dense = self.post_mlp_norm(self.mlp(self.pre_mlp_norm(h)))
        tokens = h.reshape(-1, h.shape[-1])
        weights, ids = self.router(tokens)
        ids = jnp.where(used.reshape(-1, 1), ids, self.experts.shard.nowhere)
        mixed = self.experts(self.pre_experts_norm(tokens), weights, ids).reshape(h.shape)
        return h + self.post_feedforward_norm(dense + self.post_experts_norm(mixed))

    def scalar(self, causal: RowMask) -> Hidden:
        """The factor of the whole residual stream: the encoder's in causal rows, the decoder's in denoising rows."""
        return jnp.where(causal, self.encoder_scalar[...], self.decoder_scalar[...])[:, None, None]


class SelfConditioning(nnx.Module):
    """Adds what the previous step expected at each position, then norms the sum (also when there is nothing to add)."""

    def __init__(self, config: Config, dtype: str, mesh: Mesh | None):
        self.pre_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        shard = shard_of("mlp", config.self_conditioning_size, mesh)
        self.mlp = MLP(config.hidden_size, config.self_conditioning_size, dtype, shard=shard)
        self.eps = config.rms_norm_eps

    def __call__(self, embedded: CanvasHidden, soft: CanvasHidden | None) -> CanvasHidden:
        if soft is not None:
            embedded = embedded + self.mlp(self.pre_norm(soft.astype(embedded.dtype)))
        return rms_norm(embedded, self.eps)


class Transformer(nnx.Module):
    """All weights; `encode` for prompts, `denoise` for a canvas, or both row by row.

    On a mesh these run on every device's parts, inside `spmd.on_devices`.
    """

    def __init__(self, config: Config, dtype: str, implementations: Implementations, mesh: Mesh | None):
        self.config, self.implementations, self.mesh = config, implementations, mesh
        self.embedder = Embedder(shard_of("vocab", config.vocab_size, mesh), config.hidden_size, dtype)
        self.self_conditioning = SelfConditioning(config, dtype, mesh)
        self.layers = nnx.List([Layer(config, layer, dtype, implementations, mesh) for layer in config.layers])
        self.final_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        if config.vision is not None:
            self.vision = VisionTower(config, config.vision, dtype, implementations.attention)
        if config.quantization is not None:
            quantize_weights(self, config.quantization)

    def encode(
        self, tokens: Canvas, lengths: Lengths, cache: KVCache, soft: Hidden | None = None, blocks: Blocks | None = None
    ) -> tuple[KVCache, Hidden]:
        """Causal pass over the first lengths[b] tokens of each row, appended to the cache; final-normed states.

        blocks: which image a token belongs to, 0 for text. Soft tokens take the place of those embeddings, unscaled.
        """
        causal, x = jnp.ones(tokens.shape[0], bool), self.embedder(tokens)
        if blocks is not None and soft is not None:
            x = jnp.where((blocks != 0)[..., None], soft.astype(x.dtype), x)
        return self.run(x, cache, lengths, causal, keep=lengths, blocks=blocks)

    def denoise(self, canvas: Canvas, cache: KVCache, soft: CanvasHidden | None) -> CanvasHidden:
        """Bidirectional pass over the canvas behind the cached prefix; the cache is only read."""
        B, C = canvas.shape
        x = self.self_conditioning(self.embedder(canvas), soft)
        return self.run(x, cache, jnp.full(B, C, jnp.int32), jnp.zeros(B, bool), keep=None)[1]

    def denoise_or_commit(
        self, canvas: Canvas, soft: CanvasHidden, denoising: RowMask, committing: RowMask, cache: KVCache
    ) -> tuple[KVCache, CanvasHidden]:
        """One pass in which the committing rows are encoded and appended to the cache and the denoising are denoised.

        canvas: of a committing row the finished canvas, whose self-conditioning input is ignored. The states of rows
        that do neither mean nothing; no expert sees them.
        """
        C, embedded = canvas.shape[1], self.embedder(canvas)
        x = jnp.where(committing[:, None, None], embedded, self.self_conditioning(embedded, soft))
        whole = jnp.where(denoising | committing, C, 0)
        return self.run(x, cache, whole, committing, keep=jnp.where(committing, C, 0))

    def run(
        self,
        x: Hidden,
        cache: KVCache,
        own_length: Lengths,
        causal: RowMask,
        *,
        keep: Lengths | None,
        blocks: Blocks | None = None,
    ) -> tuple[KVCache, Hidden]:
        """All layers and the final norm; the keys and values of the first keep[b] positions go to the cache."""
        token = jnp.arange(x.shape[1])
        positions, used = cache.lengths[:, None] + token, token < own_length[:, None]
        ropes = {"sliding": self.config.sliding_rope, "full": self.config.full_rope}
        shapes = {(layer.kind, layer.head_dim) for layer in self.config.layers}
        tables = {(kind, width): rotary_table(ropes[kind], width, positions) for kind, width in sorted(shapes)}
        ks, vs, lengths = [], [], cache.lengths
        for spec, layer, prefix_k, prefix_v in zip(self.config.layers, self.layers, cache.k, cache.v, strict=True):
            table = tables[spec.kind, spec.head_dim]
            out, k, v = layer.attention(
                layer.input_norm(x), table, prefix_k, prefix_v, lengths, own_length, causal, blocks
            )
            x = layer.feed_forward(x + layer.post_attention_norm(out), used) * layer.scalar(causal)
            if keep is not None:
                # No number exceeds infinity. But XLA, which does not see that the buffers are read before they are
                # written unless the place to write depends on what was read, would copy each of them twice. It writes
                # at the end of the pass: one number of `out` lives until then, since the next layer asks for it.
                lengths = lengths + (jax.lax.optimization_barrier(out[:, 0, 0]) > jnp.inf)
                ks.append(write(prefix_k, k, lengths, keep, ring=spec.kind == "sliding"))
                vs.append(write(prefix_v, v, lengths, keep, ring=spec.kind == "sliding"))
        if keep is not None:
            cache = replace(cache, k=tuple(ks), v=tuple(vs), lengths=cache.lengths + keep)
        return cache, self.final_norm(x)


def quantize_weights(model: Transformer, quantization: str) -> None:
    """Replaces every Param that is stored in 8 or 4 bits, see `dgemma_jax.quantization`."""
    flat: Any = nnx.to_flat_state(nnx.state(model))
    for path, param in flat:
        spec = quantized_spec(path, param.get_value().shape, quantization)
        if spec is not None:
            *outer, name = path
            owner: Any = model
            for key in outer:
                owner = owner[key] if isinstance(key, int) else getattr(owner, key)
            setattr(owner, name, QuantizedWeight(spec, param.axes))


def build(
    config: Config, dtype: str | None = None, implementations: Implementations = AUTO, mesh: Mesh | None = None
) -> tuple[nnx.GraphDef, dict]:
    """The model's structure and its parameters as shapes, nothing allocated.

    Returns (graph, abstract): graph goes to the functional layer together with params; abstract is the nested dict of
    jax.ShapeDtypeStruct that params must match, on a mesh with their sharding. dtype None: the config's.
    """
    model = Transformer(config, dtype or config.dtype, implementations, mesh)
    return nnx.split(model)[0], _of_weights(model, partial(placed, mesh=mesh))


def specs(model: Transformer) -> dict:
    """How the parameters of a model lie on its mesh: the nested dict of their PartitionSpecs."""
    return _of_weights(model, lambda array, axes: partition_of(array.shape, axes))


def _of_weights(model: Transformer, function: Callable[[Any, tuple], Any]) -> dict:
    """function(value, axes) of every weight, in the nested dict of the params."""
    return nnx.to_pure_dict(
        jax.tree.map(
            lambda weight: function(weight.get_value(), weight.axes),
            nnx.state(model),
            is_leaf=lambda x: isinstance(x, nnx.Variable),
        )
    )


def merge(graph: nnx.GraphDef, params: dict) -> Transformer:
    """The model object, for use inside a jitted function."""
    return nnx.merge(graph, nnx.State(params))
