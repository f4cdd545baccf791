"""Writes trained parameters as a Hugging Face model directory: the inverse of what `dgemma_jax.load` reads."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from dgemma_jax.config import Config, Rope, VisionConfig
from dgemma_jax.convert.hf import to_hf
from dgemma_jax.train import tokenizer as ids


def hf_config(config: Config, vocabulary: dict[str, int]) -> dict:
    """`config.json` of a model whose last layer is a full one; vocabulary: token string -> id."""
    layers = {layer.kind: layer for layer in config.layers}
    text = {
        "model_type": "diffusion_gemma_text",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": layers["sliding"].num_key_value_heads,
        "head_dim": layers["sliding"].head_dim,
        "num_global_key_value_heads": layers["full"].num_key_value_heads,
        "global_head_dim": layers["full"].head_dim,
        "layer_types": [f"{layer.kind}_attention" for layer in config.layers],
        "sliding_window": config.sliding_window,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": config.sliding_rope.theta},
            "full_attention": _proportional(config.full_rope),
        },
        "final_logit_softcapping": config.final_logit_softcapping,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "num_experts": config.num_experts,
        "top_k_experts": config.top_k_experts,
        "moe_intermediate_size": config.moe_intermediate_size,
        "pad_token_id": config.pad_token_id,
        "eos_token_id": ids.EOS,
        "bos_token_id": config.bos_token_id,
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
    }
    return {
        "architectures": ["DiffusionGemmaForBlockDiffusion"],
        "model_type": "diffusion_gemma",
        "canvas_length": config.canvas_length,
        "tie_word_embeddings": True,
        # Also of a model without image tower: transformers compares prompts with these ids all the same.
        "image_token_id": vocabulary["<|image|>"],
        "boi_token_id": vocabulary["<|image>"],
        "eoi_token_id": vocabulary["<image|>"],
        "dtype": "bfloat16",
        "text_config": text if config.vision is None else text | {"use_bidirectional_attention": "vision"},
        "vision_config": None if config.vision is None else _vision(config.vision),
    }


def _vision(vision: VisionConfig) -> dict:
    sizes = asdict(vision)
    del sizes["max_soft_tokens"]
    theta = sizes.pop("rope_theta")
    return sizes | {
        "model_type": "gemma4_vision",
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_parameters": {"rope_type": "axial", "rope_theta": theta},
        "dtype": "bfloat16",
    }


def processor_config(vision: VisionConfig) -> dict:
    """`preprocessor_config.json`: how transformers cuts images into the patches that the model reads."""
    return {
        "image_processor_type": "Gemma4ImageProcessor",
        "patch_size": vision.patch_size,
        "pooling_kernel_size": vision.pooling_kernel_size,
        "max_soft_tokens": vision.max_soft_tokens,
    }


def _proportional(rope: Rope) -> dict:
    fraction = rope.rotary_fraction
    return {
        "rope_type": "proportional",
        "partial_rotary_factor": fraction,
        "rope_theta": rope.theta,
        "factor": rope.factor,
    }


# The released model's generation defaults.
GENERATION = {
    "max_new_tokens": 256,
    "max_denoising_steps": 48,
    "sampler_config": {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 0.1},
    "t_min": 0.4,
    "t_max": 0.8,
    "stability_threshold": 1,
    "confidence_threshold": 0.005,
    "eos_token_id": [ids.EOS, ids.END_OF_TURN, ids.CONTROL["<|tool_response>"]],
    "pad_token_id": ids.PAD,
}


def export(directory: Path, config: Config, params: dict, tokenizer: Tokenizer, card: str) -> None:
    """Writes config, weights in bf16, tokenizer and model card (README.md); an existing directory is replaced whole."""
    temporary = directory.with_name(directory.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    configs = {"config.json": hf_config(config, tokenizer.get_vocab()), "generation_config.json": GENERATION}
    if config.vision is not None:
        configs["preprocessor_config.json"] = processor_config(config.vision)
    for name, content in configs.items():
        (temporary / name).write_text(json.dumps(content, indent=2) + "\n")
    tensors = {name: np.ascontiguousarray(t.astype(ml_dtypes.bfloat16)) for name, t in to_hf(params, config).items()}
    save_file(dict(sorted(tensors.items())), temporary / "model.safetensors", metadata={"format": "pt"})
    (temporary / "model.safetensors").chmod(0o644)  # the library writes it for its owner alone
    ids.save(tokenizer, temporary, config.max_position_embeddings)
    (temporary / "README.md").write_text(card)
    shutil.rmtree(directory, ignore_errors=True)
    temporary.rename(directory)
