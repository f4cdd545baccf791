"""Weights of a Hugging Face DiffusionGemma directory, through one table: tensor name -> (path in params, layout).

Source of the names: transformers' DiffusionGemmaForBlockDiffusion as it saves them; the release holds 1,047 tensors.
The encoder's text stack is the decoder's except for its layer scalars, and the vocabulary head is the embedding table:
copies of those, which some files carry, are compared and dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from dgemma_jax.config import Config, VisionConfig
from dgemma_jax.convert.table import MATRIX, SAME, SCALAR, Entry, Layout, leaf

HEADS_OUT = Layout(merged=1, swapped=True)  # [D, N, H] <-> [N*H, D]
HEADS_IN = Layout(merged=0, swapped=True)  # [N, H, D] <-> [D, N*H]


def table(config: Config) -> dict[str, Entry]:
    """Every tensor of the file by name, in the order of the model."""
    return dict(_text(config)) | (dict(_vision(config.vision)) if config.vision else {})


LAYER_NORMS = {
    "input_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "pre_mlp_norm": "pre_feedforward_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm_1",
    "pre_experts_norm": "pre_feedforward_layernorm_2",
    "post_experts_norm": "post_feedforward_layernorm_2",
    "post_feedforward_norm": "post_feedforward_layernorm",
}
VISION_NORMS = {
    "input_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "pre_mlp_norm": "pre_feedforward_layernorm",
    "post_mlp_norm": "post_feedforward_layernorm",
}
ATTENTION = {"q": HEADS_OUT, "k": HEADS_OUT, "v": HEADS_OUT, "o": HEADS_IN}
MLP = {"gate": MATRIX, "up": MATRIX, "down": MATRIX}
CLIP_BOUNDS = ("input_min", "input_max", "output_min", "output_max")


def _text(config: Config) -> Iterator[tuple[str, Entry]]:
    root = "model.decoder."
    yield root + "embed_tokens.weight", Entry(("embedder", "table"), SAME)
    yield root + "norm.weight", Entry(("final_norm", "scale"), SAME)
    yield root + "self_conditioning.pre_norm.weight", Entry(("self_conditioning", "pre_norm", "scale"), SAME)
    for name, layout in MLP.items():
        yield f"{root}self_conditioning.{name}_proj.weight", Entry(("self_conditioning", "mlp", name), layout)
    for index, layer in enumerate(config.layers):
        for name, entry in _text_layer(has_values=layer.kind == "sliding"):
            yield f"{root}layers.{index}.{name}", Entry(("layers", index, *entry.path), entry.layout)
        scalar = f"model.encoder.language_model.layers.{index}.layer_scalar"
        yield scalar, Entry(("layers", index, "encoder_scalar"), SCALAR)


def _text_layer(has_values: bool) -> Iterator[tuple[str, Entry]]:
    """One layer, names and paths relative to it."""
    for ours, name in LAYER_NORMS.items():
        yield f"{name}.weight", Entry((ours, "scale"), SAME)
    for name, layout in ATTENTION.items():
        if name != "v" or has_values:
            yield f"self_attn.{name}_proj.weight", Entry(("attention", name), layout)
    for name in ("q_norm", "k_norm"):
        yield f"self_attn.{name}.weight", Entry(("attention", name, "scale"), SAME)
    for name, layout in MLP.items():
        yield f"mlp.{name}_proj.weight", Entry(("mlp", name), layout)
    yield "router.proj.weight", Entry(("router", "proj"), MATRIX)
    yield "router.scale", Entry(("router", "scale"), SAME)
    yield "router.per_expert_scale", Entry(("router", "per_expert_scale"), SAME)
    yield "experts.gate_up_proj", Entry(("experts", "gate_up"), MATRIX)
    yield "experts.down_proj", Entry(("experts", "down"), MATRIX)
    yield "layer_scalar", Entry(("decoder_scalar",), SCALAR)


def _vision(vision: VisionConfig) -> Iterator[tuple[str, Entry]]:
    root = "model.encoder.vision_tower."
    yield root + "patch_embedder.input_proj.weight", Entry(("vision", "patch_embedder", "input_proj"), MATRIX)
    position = root + "patch_embedder.position_embedding_table"
    yield position, Entry(("vision", "patch_embedder", "position_table"), SAME)
    for index in range(vision.num_hidden_layers):
        for name, entry in _vision_layer(vision.use_clipped_linears):
            yield f"{root}encoder.layers.{index}.{name}", Entry(("vision", "layers", index, *entry.path), entry.layout)
    for name in ("std_bias", "std_scale") if vision.standardize else ():
        yield root + name, Entry(("vision", name), SAME)
    yield "model.encoder.embed_vision.embedding_projection.weight", Entry(("vision", "projection"), MATRIX)


def _vision_layer(clipped: bool) -> Iterator[tuple[str, Entry]]:
    for ours, name in VISION_NORMS.items():
        yield f"{name}.weight", Entry((ours, "scale"), SAME)
    for name in ("q_norm", "k_norm"):
        yield f"self_attn.{name}.weight", Entry(("attention", name, "scale"), SAME)
    for ours, theirs, layouts in (("attention", "self_attn", ATTENTION), ("mlp", "mlp", MLP)):
        for name, layout in layouts.items():
            yield f"{theirs}.{name}_proj.linear.weight", Entry((ours, name), layout)
            for bound in CLIP_BOUNDS if clipped else ():
                yield f"{theirs}.{name}_proj.{bound}", Entry((ours, f"{name}_clip", bound), SAME)


def original_of(name: str) -> str | None:
    """The tensor that `name` repeats in files with copies of tied weights, None if it can be no copy."""
    if name == "lm_head.weight":
        return "model.decoder.embed_tokens.weight"
    encoder = "model.encoder.language_model."
    return "model.decoder." + name.removeprefix(encoder) if name.startswith(encoder) else None


def to_hf(params: Mapping, config: Config) -> dict[str, np.ndarray]:
    """Name -> array as the file holds it, dtypes kept: the inverse of loading."""
    return {name: entry.layout.to_file(np.asarray(leaf(params, entry.path))) for name, entry in table(config).items()}
