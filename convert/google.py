"""Google's names: the Orbax tree of google-deepmind/gemma's DiffusionGemma, as one table like that of hf.py.

Source of the names: the module tree of gemma 4.1.0, its checkpoint reader for the spellings. Leaves may end in "/w" or
not; text layers lie one by one (layer_7) or stacked by their place in the pattern of attention kinds, where layer
i * pattern + p is number i of attention_type_p. The tree has a single scalar per layer, which both passes use.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dgemma_jax.config import Config, VisionConfig
from dgemma_jax.convert.table import MATRIX, SAME, SCALAR, Entry, Layout, Rows

NOTE = "one skip_scale per layer fills both encoder_scalar and decoder_scalar"

HEADS_FIRST = Layout(heads_first=True)  # [D, N, H] <-> [N, D, H]
GATE_UP = Layout(swapped=True, parts=2)  # [E, D, 2I] <-> [E, 2, I, D]
STACK = "stacked_layers/attention_type_"

LAYER_NORMS = {
    "input_norm": "pre_attention_norm",
    "post_attention_norm": "post_attention_norm",
    "pre_mlp_norm": "pre_ffw2_norm",
    "post_mlp_norm": "post_ffw2_norm",
    "pre_experts_norm": "pre_ffw_norm",
    "post_experts_norm": "post_ffw1_norm",
    "post_feedforward_norm": "post_ffw_norm",
}
VISION_NORMS = {
    "input_norm": "pre_attention_norm",
    "post_attention_norm": "post_attention_norm",
    "pre_mlp_norm": "pre_ffw_norm",
    "post_mlp_norm": "post_ffw_norm",
}


def canonical(keys: Iterable[str]) -> str:
    """The name in this table of a leaf at `keys` of the stored tree, whose keys may themselves hold slashes."""
    name = "/".join(keys)
    for prefix in ("params/", "transformer/"):
        name = name.removeprefix(prefix)
    return name.removesuffix("/w")


def is_stacked(name: str) -> bool:
    """A tensor that holds one parameter of several text layers."""
    return name.startswith(STACK)


def table(config: Config, names: Iterable[str]) -> Rows:
    """Every parameter with the tensor that holds it; `names` are those of the tree, which tell how layers lie in it.

    Layers of one stack are neighbours, so that a stack is read once.
    """
    kinds = {name.removeprefix(STACK).split("/")[0] for name in names if is_stacked(name)}
    count = len(config.layers)
    pattern = len(kinds) or count
    rows = list(_outside_layers(config))
    for index in sorted(range(count), key=lambda index: (index % pattern, index)):
        number, kind = divmod(index, pattern)
        root, at = (f"{STACK}{kind}/", (number,)) if kinds else (f"layer_{index}/", ())
        for name, (path, layout, inner) in _text_layer(has_values=config.layers[index].kind == "sliding"):
            rows.append((root + name, Entry(("layers", index, *path), layout, at + inner)))
    return rows + (list(_vision(config.vision)) if config.vision else [])


def _outside_layers(config: Config) -> Iterator[tuple[str, Entry]]:
    yield "embedder/input_embedding", Entry(("embedder", "table"), SAME)
    yield "final_norm/scale", Entry(("final_norm", "scale"), SAME)
    yield "self_conditioner/pre_norm/scale", Entry(("self_conditioning", "pre_norm", "scale"), SAME)
    yield from _mlp("self_conditioner/ffw", ("self_conditioning", "mlp"))


def _mlp(name: str, path: tuple[str, ...]) -> Iterator[tuple[str, Entry]]:
    for number, part in enumerate(("gate", "up")):
        yield f"{name}/gating_einsum", Entry((*path, part), MATRIX, (number,))
    yield f"{name}/linear", Entry((*path, "down"), SAME)


def _attention(has_values: bool) -> Iterator[tuple[str, Entry]]:
    yield "attn/q_einsum", Entry(("attention", "q"), HEADS_FIRST)
    if has_values:
        for number, part in enumerate("kv"):
            yield "attn/kv_einsum", Entry(("attention", part), HEADS_FIRST, (number,))
    else:
        yield "attn/k_einsum", Entry(("attention", "k"), HEADS_FIRST)
    yield "attn/attn_vec_einsum", Entry(("attention", "o"), SAME)
    yield "attn/query_norm/scale", Entry(("attention", "q_norm", "scale"), SAME)
    yield "attn/key_norm/scale", Entry(("attention", "k_norm", "scale"), SAME)


def _text_layer(has_values: bool) -> Iterator[tuple[str, Entry]]:
    """One layer, names and paths relative to it."""
    for ours, name in LAYER_NORMS.items():
        yield f"{name}/scale", Entry((ours, "scale"), SAME)
    yield from _attention(has_values)
    yield from _mlp("mlp2", ("mlp",))
    yield "mlp/router_logits", Entry(("router", "proj"), SAME)
    yield "mlp/router_scale", Entry(("router", "scale"), SAME)
    yield "mlp/per_expert_scale", Entry(("router", "per_expert_scale"), SAME)
    yield "mlp/gating_einsum", Entry(("experts", "gate_up"), GATE_UP)
    yield "mlp/linear", Entry(("experts", "down"), SAME)
    yield "skip_scale", Entry(("encoder_scalar",), SCALAR)
    yield "skip_scale", Entry(("decoder_scalar",), SCALAR)


def _vision(vision: VisionConfig) -> Iterator[tuple[str, Entry]]:
    root = "vision_encoder/"
    if vision.use_clipped_linears:
        raise ValueError("vision_config.use_clipped_linears is true; Google's tree has no clip bounds: set it to false")
    yield root + "entry/input_projection", Entry(("vision", "patch_embedder", "input_proj"), SAME)
    yield root + "entry/pos_emb", Entry(("vision", "patch_embedder", "position_table"), HEADS_FIRST)
    for index in range(vision.num_hidden_layers):
        for name, (path, layout, inner) in _vision_layer():
            entry = Entry(("vision", "layers", index, *path), layout, (index, *inner))
            yield f"{root}transformer/stacked_layers/block/{name}", entry
    for ours, name in {"std_bias": "bias", "std_scale": "scale"}.items() if vision.standardize else ():
        yield f"{root}standardize/{name}", Entry(("vision", ours), SAME)
    yield "embedder/mm_input_projection", Entry(("vision", "projection"), SAME)


def _vision_layer() -> Iterator[tuple[str, Entry]]:
    for ours, name in VISION_NORMS.items():
        yield f"{name}/scale", Entry((ours, "scale"), SAME)
    yield from _attention(has_values=True)
    yield from _mlp("mlp", ("mlp",))
