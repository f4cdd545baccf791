"""Reads a Hugging Face `config.json` into a Config.

A missing field takes the default of transformers' DiffusionGemma classes. A field that would change the model is
accepted when it says what the model does and refused by name otherwise. Two spellings of the full layers' sizes exist:
the release has `global_head_dim` and `num_global_key_value_heads`, transformers saves `per_layer_config`, which wins.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any, Literal

from dgemma_jax.config import INT4_GROUP, Config, LayerConfig, Rope, VisionConfig, check, is_int

RELEASE = "google/diffusiongemma-26B-A4B-it"
ARCHITECTURE = "DiffusionGemmaForBlockDiffusion"
KINDS = {"sliding_attention": "sliding", "full_attention": "full"}

# Fields that do not reach the forward pass. eos_token_id is read with the sampling defaults.
NO_EFFECT = {
    "_name_or_path",
    "attention_dropout",
    "auto_map",
    "chunk_size_feed_forward",
    "default_output_length",
    "eos_token_id",
    "id2label",
    "initializer_range",
    "is_encoder_decoder",
    "label2id",
    "output_attentions",
    "output_hidden_states",
    "problem_type",
    "return_dict",
    "transformers_version",
    "use_cache",
    "vision_soft_tokens_per_image",
}
# The values that agree with the model, per field; most fields are Gemma 4's and absent from the release.
TOP_FLAGS = {"tie_word_embeddings": (True,)}
TEXT_FLAGS = {
    "model_type": ("diffusion_gemma_text",),
    "hidden_activation": ("gelu_pytorch_tanh",),
    "attention_bias": (False, None),
    "attention_k_eq_v": (True, None),
    "attn_logit_softcapping": (None,),
    "enable_moe_block": (True, None),
    "hidden_size_per_layer_input": (0, None),
    "num_kv_shared_layers": (0, None),
    "tie_word_embeddings": (True,),
    "use_double_wide_mlp": (False, None),
}
VISION_FLAGS = {
    "model_type": ("gemma4_vision",),
    "hidden_activation": ("gelu_pytorch_tanh",),
    "attention_bias": (False, None),
}
# `quantization_config` of what `dgemma convert --quantize` writes. Every other one is of a format that is not read.
QUANTIZATION_FIELDS = {
    "int8": {"quant_method": "dgemma-jax", "bits": 8},
    "int4": {"quant_method": "dgemma-jax", "bits": 4, "group_size": INT4_GROUP},
}
OTHER_INPUTS = (
    "audio_config",
    "audio_token_id",
    "boa_token_id",
    "eoa_token_id",
    "eoa_token_index",
    "video_config",
    "video_token_id",
)

TEXT_DEFAULTS = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_attention_heads": 8,
    "sliding_window": 512,
    "rms_norm_eps": 1e-6,
    "final_logit_softcapping": 30.0,
    "num_experts": None,
    "top_k_experts": None,
    "moe_intermediate_size": None,
    "max_position_embeddings": 131_072,
    "bos_token_id": 2,
}
VISION_DEFAULTS = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "head_dim": 64,
    "patch_size": 16,
    "pooling_kernel_size": 3,
    "position_embedding_size": 10_240,
    "standardize": False,
    "use_clipped_linears": False,
    "rms_norm_eps": 1e-6,
}

logger = logging.getLogger(__name__)


class _Section:
    """One object of config.json; remembers what was read, so that the rest can be reported."""

    def __init__(self, fields: Any, prefix: str = "") -> None:
        if not isinstance(fields, Mapping):
            raise ValueError(f"{prefix.rstrip('.') or 'config.json'} is {fields!r}; expected a JSON object")
        self.fields = fields
        self.prefix = prefix
        self.unread = {name for name in fields if name not in NO_EFFECT}

    def take(self, name: str, default: Any = None) -> Any:
        self.unread.discard(name)
        return self.fields.get(name, default)

    def take_all(self, defaults: Mapping[str, Any]) -> dict[str, Any]:
        return {name: self.take(name, default) for name, default in defaults.items()}

    def check_flags(self, flags: Mapping[str, tuple]) -> None:
        """Refuses by name every field of `flags` that is present with another value than those listed."""
        for name, accepted in flags.items():
            value = self.take(name, accepted[0])
            ok = any(type(value) is type(other) and value == other for other in accepted)
            check(ok, self.prefix + name, value, " or ".join(json.dumps(other) for other in accepted))


def parse(config: Mapping[str, Any]) -> Config:
    """See Config.from_hf."""
    top = _Section(config)
    _check_model(top)
    quantization = _quantization(top)
    top.check_flags(TOP_FLAGS)
    text = _Section(top.take("text_config"), "text_config.")
    text.check_flags(TEXT_FLAGS)
    _refuse_quantization(text, text.take("quantization_config"))
    vision_fields = top.take("vision_config")
    vision = None if vision_fields is None else _Section(vision_fields, "vision_config.")

    sizes: dict[str, Any] = text.take_all(TEXT_DEFAULTS)
    pad = text.take("pad_token_id", 0)
    self_conditioning = text.take("self_conditioning_size")
    result = Config(
        **sizes,
        self_conditioning_size=sizes["intermediate_size"] if self_conditioning is None else self_conditioning,
        layers=_layers(text),
        **_ropes(text),
        canvas_length=top.take("canvas_length", 256),
        pad_token_id=0 if pad is None else pad,  # only fills rows up; never seen
        **_image_ids(top, sizes["vocab_size"]),
        dtype=_dtype(top, text),
        vision=None if vision is None else _vision(vision),
        quantization=quantization,
        image_blocks=_image_blocks(text, vision is not None),
    )
    _report_unread([section for section in (top, text, vision) if section is not None])
    return result


def _check_model(top: _Section) -> None:
    model_type = top.take("model_type")
    expected = f"'diffusion_gemma': this package runs DiffusionGemma only, for instance {RELEASE}"
    check(model_type == "diffusion_gemma", "model_type", model_type, expected)
    architectures = top.take("architectures")
    check(architectures in (None, [ARCHITECTURE]), "architectures", architectures, f"[{ARCHITECTURE!r}]")
    for name in OTHER_INPUTS:
        value = top.take(name)
        check(value is None, name, value, "null: DiffusionGemma reads text and images, no audio and no video")


def _quantization(top: _Section) -> str | None:
    """How `dgemma convert --quantize` stored the weights, None if it did not."""
    for field in ("quantization_config", "compression_config"):
        value = top.take(field)
        found = next((name for name, fields in QUANTIZATION_FIELDS.items() if value == fields), None)
        if found is not None and field == "quantization_config":
            return found
        _refuse_quantization(top, value, field)
    return None


def _refuse_quantization(section: _Section, value: Any, field: str = "quantization_config") -> None:
    if value is not None:
        method = value.get("quant_method") if isinstance(value, Mapping) else value
        raise ValueError(
            f"{section.prefix}{field} (quant_method {method!r:.60}) is not supported; use a checkpoint in bfloat16 or "
            f"float32, for instance {RELEASE}, and `dgemma convert --quantize` for 8 or 4 bits"
        )


def _layers(text: _Section) -> tuple[LayerConfig, ...]:
    """One LayerConfig per text layer, from either spelling of the full layers' sizes."""
    count = text.take("num_hidden_layers", 30)
    check(is_int(count, 1), "text_config.num_hidden_layers", count, "a positive integer")
    kinds = _layer_kinds(text, count)
    sliding = {"head_dim": text.take("head_dim", 256), "num_key_value_heads": text.take("num_key_value_heads", 4)}
    full = {"head_dim": text.take("global_head_dim", 512)}
    shared = text.take("num_global_key_value_heads")
    if shared is not None:
        full["num_key_value_heads"] = shared
    per_layer = text.take("per_layer_config")
    if per_layer is None:
        overrides = {index: full for index, kind in enumerate(kinds) if kind == "full"}
    else:
        overrides = _per_layer(per_layer, count)
    return tuple(LayerConfig(kind=kind, **sliding | overrides.get(index, {})) for index, kind in enumerate(kinds))


def _layer_kinds(text: _Section, count: int) -> list[Any]:
    types = text.take("layer_types")
    if types is None:
        types = ["full_attention" if index % 6 == 5 else "sliding_attention" for index in range(count)]
    check(isinstance(types, list | tuple), "text_config.layer_types", types, "a list")
    if len(types) != count:
        raise ValueError(f"text_config.layer_types has {len(types)} entries, num_hidden_layers is {count}")
    for index, kind in enumerate(types):
        check(kind in list(KINDS), f"text_config.layer_types[{index}]", kind, " or ".join(KINDS))
    kinds = [KINDS[kind] for kind in types]
    if kinds[-1] != "full":
        logger.warning("text_config.layer_types: the last layer is made a full_attention layer, as transformers does")
        kinds[-1] = "full"
    return kinds


def _per_layer(table: Any, count: int) -> dict[int, dict[str, Any]]:
    """`per_layer_config` by layer number; its keys are numbers as text, "5" or "05"."""
    name = "text_config.per_layer_config"
    check(isinstance(table, Mapping), name, table, "an object of layer numbers")
    overrides: dict[int, dict[str, Any]] = {}
    for key, fields in table.items():
        ok = str(key).isdecimal() and int(key) < count
        check(ok, f"{name} key", key, f"a layer number below {count}")
        check(int(key) not in overrides, f"{name} key", key, "each layer once")
        known = isinstance(fields, Mapping) and set(fields) <= {"head_dim", "num_key_value_heads"}
        check(known, f"{name}[{key!r}]", fields, "an object of head_dim and num_key_value_heads")
        overrides[int(key)] = dict(fields)
    return overrides


def _ropes(text: _Section) -> dict[str, Any]:
    parameters = text.take("rope_parameters")
    if parameters is None:
        return {"sliding_rope": Rope(1e4), "full_rope": Rope(1e6, rotary_fraction=0.25)}
    section = _Section(parameters, "text_config.rope_parameters.")
    ropes = {f"{kind}_rope": _rope(section, name) for name, kind in KINDS.items()}
    check(not section.unread, "text_config.rope_parameters", parameters, "only " + " and ".join(KINDS))
    return ropes


def _rope(section: _Section, name: str) -> Rope:
    rope = _Section(section.take(name), f"{section.prefix}{name}.")
    kind = rope.take("rope_type", "default")
    check(kind in ("default", "proportional"), rope.prefix + "rope_type", kind, '"default" or "proportional"')
    theta = rope.take("rope_theta", 1e4)
    fraction = rope.take("partial_rotary_factor", 1.0)
    factor = rope.take("factor", 1.0)
    check(not rope.unread, rope.prefix.rstrip("."), dict(rope.fields), "rope_type, rope_theta and their factors only")
    if kind == "default":  # there the fraction narrows the rotated width itself, and the factor has no meaning
        check(fraction == 1, rope.prefix + "partial_rotary_factor", fraction, '1 with rope_type "default"')
        check(factor == 1, rope.prefix + "factor", factor, '1 with rope_type "default"')
    return Rope(theta, fraction, factor)


def _image_ids(top: _Section, vocab_size: int) -> dict[str, Any]:
    """The ids around an image, None where they lie outside the vocabulary and so can never occur in a prompt."""
    ids = top.take_all({"image_token_id": 258_880, "boi_token_id": 255_999, "eoi_token_id": 258_882})
    outside = [name for name, value in ids.items() if is_int(value) and is_int(vocab_size) and value >= vocab_size]
    if outside and top.fields.get("vision_config") is not None:
        logger.warning("%s outside the vocabulary of %d: the model takes no images", ", ".join(outside), vocab_size)
    return {name: None if name in outside else value for name, value in ids.items()}


def _image_blocks(text: _Section, images: bool) -> Literal["all", "none"]:
    """Where an image's tokens see each other; in a model that has no images this means nothing and stays "all"."""
    value = text.take("use_bidirectional_attention")
    check(value in ("vision", None), text.prefix + "use_bidirectional_attention", value, '"vision" or null')
    return "none" if value is None and images else "all"


def _dtype(top: _Section, text: _Section) -> str:
    spellings = [section.take(name) for section in (top, text) for name in ("dtype", "torch_dtype")]
    return next((value for value in spellings if value is not None), "float32")


def _vision(section: _Section) -> VisionConfig:
    section.check_flags(VISION_FLAGS)
    section.take_all({"max_position_embeddings": None, "dtype": None})  # in no formula; the text stack's dtype counts
    parameters = section.take("rope_parameters")
    rope = _Section({} if parameters is None else parameters, section.prefix + "rope_parameters.")
    rope.check_flags({"rope_type": ("axial", "default")})  # for this tower both mean axial
    theta = rope.take("rope_theta", 100.0)
    check(not rope.unread, rope.prefix.rstrip("."), parameters, "rope_type and rope_theta only")
    return VisionConfig(**section.take_all(VISION_DEFAULTS), rope_theta=theta)


def _report_unread(sections: list[_Section]) -> None:
    names = [section.prefix + name for section in sections for name in sorted(section.unread)]
    if names:
        logger.warning("config.json: unknown fields, not used: %s", ", ".join(names))
