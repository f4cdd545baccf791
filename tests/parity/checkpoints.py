"""Random checkpoints in the Hugging Face layout, written with numpy alone so that tests without torch can use them.

No tensor keeps a value that a wrong implementation could ignore: norm weights differ from 1, the two sets of layer
scalars differ from 1 and from each other, routers spread their probability, clip bounds cut something off.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

KINDS = {"S": "sliding_attention", "F": "full_attention"}


@dataclass(frozen=True)
class Shape:
    """The sizes of one random model.

    layers spells the pattern, S for sliding and F for full attention. branch scales what a layer adds to the residual
    stream, feedback what self-conditioning adds to the canvas. Small factors let a canvas converge, and keep rounding
    errors from growing step by step: at 1, they double with every step.
    """

    name: str
    vocab: int
    hidden: int
    mlp: int
    experts: int
    top_k: int
    expert_width: int
    heads: int
    kv_heads: int
    head: int
    full_kv_heads: int
    full_head: int
    window: int
    canvas: int
    layers: str
    rotary: float = 0.25
    softcap: float = 30.0
    context: int = 512
    eps: float = 1e-6
    embedding_std: float = 0.4
    branch: float = 1.0
    feedback: float = 1.0
    vision: bool = False
    clipped: bool = False
    seed: int = 0


# Vocabularies of one and of two proposal tiles, neither a multiple of the tile. Patterns with and without neighbouring
# full layers. K/V heads of the full layers fewer than, and as many as, those of the sliding layers.
NARROW = Shape(
    name="narrow", vocab=611, hidden=48, mlp=80, experts=6, top_k=2, expert_width=24, heads=4, kv_heads=2, head=12,
    full_kv_heads=1, full_head=24, window=8, canvas=16, layers="SSFSF", seed=11,
)  # fmt: skip
WIDE = Shape(
    name="wide", vocab=2500, hidden=64, mlp=56, experts=10, top_k=4, expert_width=16, heads=6, kv_heads=3, head=16,
    full_kv_heads=3, full_head=32, window=12, canvas=32, layers="SFF", rotary=0.5, softcap=20.0, eps=1e-5,
    vision=True, seed=23,
)  # fmt: skip
# Canvases converge within some steps, and not all rows at once: for tests of stopping.
CALM = replace(NARROW, name="calm", branch=0.4, feedback=0.5, embedding_std=0.6, seed=31)
CALM_WIDE = replace(WIDE, name="calm_wide", branch=0.3, feedback=0.5, embedding_std=0.6, vision=False, seed=37)
# Canvases of the lengths in use, many windows long; few layers, because each takes programs of its own.
CALM_64, CALM_256 = (replace(CALM, name=f"calm_{n}", canvas=n, context=1024, layers="SF") for n in (64, 256))

# With an image tower; canvases converge. An image of 6 x 8 patches is longer than the window.
PICTURES = replace(CALM, name="pictures", vision=True, layers="SSF", seed=41)
CLIPPED = replace(PICTURES, name="clipped", clipped=True, seed=43)

VISION = {
    "model_type": "gemma4_vision", "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 12, "patch_size": 4, "pooling_kernel_size": 2,
    "position_embedding_size": 16, "standardize": True, "use_clipped_linears": False, "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh", "rope_parameters": {"rope_type": "axial", "rope_theta": 100.0},
}  # fmt: skip


def hf_config(shape: Shape) -> dict:
    """config.json in the spelling of the release: the full layers' geometry in two ``global_*`` fields."""
    text = {
        "model_type": "diffusion_gemma_text",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.mlp,
        "num_hidden_layers": len(shape.layers),
        "layer_types": [KINDS[letter] for letter in shape.layers],
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head,
        "num_global_key_value_heads": shape.full_kv_heads,
        "global_head_dim": shape.full_head,
        "num_experts": shape.experts,
        "top_k_experts": shape.top_k,
        "moe_intermediate_size": shape.expert_width,
        "sliding_window": shape.window,
        "max_position_embeddings": shape.context,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": shape.eps,
        "final_logit_softcapping": shape.softcap,
        "use_bidirectional_attention": "vision",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": shape.rotary,
                "rope_theta": 1000000.0,
            },
        },
        "dtype": "float32",
    }
    return {
        "model_type": "diffusion_gemma",
        "architectures": ["DiffusionGemmaForBlockDiffusion"],
        "canvas_length": shape.canvas,
        "image_token_id": shape.vocab - 10,
        "boi_token_id": shape.vocab - 9,
        "eoi_token_id": shape.vocab - 8,
        "tie_word_embeddings": True,
        "dtype": "float32",
        "text_config": text,
        "vision_config": VISION | {"use_clipped_linears": shape.clipped} if shape.vision else None,
    }


def layer_tensors(shape: Shape, kind: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of one text layer, relative to the layer."""
    d, head = shape.hidden, shape.full_head if kind == "F" else shape.head
    kv = head * (shape.full_kv_heads if kind == "F" else shape.kv_heads)
    norms = ["input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"]
    norms += ["pre_feedforward_layernorm_2", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2"]
    tensors = {f"{norm}.weight": (d,) for norm in norms}
    tensors |= {
        "layer_scalar": (1,),
        "self_attn.q_proj.weight": (shape.heads * head, d),
        "self_attn.k_proj.weight": (kv, d),
        "self_attn.o_proj.weight": (d, shape.heads * head),
        "self_attn.q_norm.weight": (head,),
        "self_attn.k_norm.weight": (head,),
        "mlp.gate_proj.weight": (shape.mlp, d),
        "mlp.up_proj.weight": (shape.mlp, d),
        "mlp.down_proj.weight": (d, shape.mlp),
        "router.proj.weight": (shape.experts, d),
        "router.scale": (d,),
        "router.per_expert_scale": (shape.experts,),
        "experts.gate_up_proj": (shape.experts, 2 * shape.expert_width, d),
        "experts.down_proj": (shape.experts, d, shape.expert_width),
    }
    if kind == "S":
        tensors["self_attn.v_proj.weight"] = (kv, d)
    return tensors


def vision_tensors(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the vision tower and its projection."""
    m, f, head = VISION["hidden_size"], VISION["intermediate_size"], VISION["head_dim"]
    width = VISION["num_attention_heads"] * head
    tower = "model.encoder.vision_tower."
    tensors = {
        tower + "patch_embedder.input_proj.weight": (m, 3 * VISION["patch_size"] ** 2),
        tower + "patch_embedder.position_embedding_table": (2, VISION["position_embedding_size"], m),
        tower + "std_bias": (m,),
        tower + "std_scale": (m,),
        "model.encoder.embed_vision.embedding_projection.weight": (shape.hidden, m),
    }
    for index in range(VISION["num_hidden_layers"]):
        layer = f"{tower}encoder.layers.{index}."
        for norm in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            tensors[f"{layer}{norm}_layernorm.weight"] = (m,)
        for name in "qkv":
            tensors[f"{layer}self_attn.{name}_proj.linear.weight"] = (width, m)
        tensors[layer + "self_attn.o_proj.linear.weight"] = (m, width)
        tensors |= {f"{layer}self_attn.{name}_norm.weight": (head,) for name in "qk"}
        tensors |= {f"{layer}mlp.{name}_proj.linear.weight": (f, m) for name in ("gate", "up")}
        tensors[layer + "mlp.down_proj.linear.weight"] = (m, f)
    if shape.clipped:
        linears = [name.removesuffix("linear.weight") for name in tensors if name.endswith("linear.weight")]
        tensors |= {
            f"{name}{way}_{end}": () for name in linears for way in ("input", "output") for end in ("min", "max")
        }
    return tensors


def tensor_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Every tensor of the file: the text stack once, and the encoder's own layer scalars."""
    d, text = shape.hidden, "model.decoder."
    tensors = {
        text + "embed_tokens.weight": (shape.vocab, d),
        text + "norm.weight": (d,),
        text + "self_conditioning.pre_norm.weight": (d,),
        text + "self_conditioning.gate_proj.weight": (shape.mlp, d),
        text + "self_conditioning.up_proj.weight": (shape.mlp, d),
        text + "self_conditioning.down_proj.weight": (d, shape.mlp),
    }
    for index, kind in enumerate(shape.layers):
        tensors |= {f"{text}layers.{index}.{name}": size for name, size in layer_tensors(shape, kind).items()}
        tensors[f"model.encoder.language_model.layers.{index}.layer_scalar"] = (1,)
    return tensors | (vision_tensors(shape) if shape.vision else {})


def draw(name: str, size: tuple[int, ...], shape: Shape, rng: np.random.Generator) -> np.ndarray:
    """Random values that keep activations of order one and attention soft enough for fp32 to compare well."""
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        values = 0.4 * rng.uniform(0.4, 1.7, size)
    elif name.endswith("layer_scalar"):
        values = rng.uniform(0.55, 1.25, size)
    elif not size:  # about a tenth of the values lies beyond each bound
        values = np.asarray(rng.uniform(1.0, 1.6) * (-1 if name.endswith("min") else 1))
    elif name.endswith("std_bias"):
        values = rng.normal(0, 0.8, size)
    elif name.endswith(("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")):
        values = shape.branch * rng.uniform(0.4, 1.7, size)
    elif name.endswith("self_conditioning.down_proj.weight"):
        values = rng.normal(0, 1.4 * shape.feedback / np.sqrt(size[-1]), size)
    elif len(size) == 1:
        values = rng.uniform(0.4, 1.7, size)
    elif name.endswith("embed_tokens.weight"):
        values = rng.normal(0, shape.embedding_std, size)
    elif name.endswith("router.proj.weight"):
        values = rng.normal(0, 2.0, size)
    else:
        values = rng.normal(0, 1.4 / np.sqrt(size[-1]), size)
    return values.astype(np.float32)


def random_tensors(shape: Shape) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(shape.seed)
    return {name: draw(name, size, shape, rng) for name, size in sorted(tensor_shapes(shape).items())}


def write(directory: Path, shape: Shape) -> Path:
    """Write the checkpoint of ``shape`` into ``directory`` in the spelling of the release."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file(random_tensors(shape), directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(hf_config(shape), indent=1))
    generation = {"eos_token_id": [1], "pad_token_id": 0, "max_new_tokens": 256}
    (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory
