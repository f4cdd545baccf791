"""Config: the two spellings of config.json, what is refused and how it says so."""

import copy
import dataclasses
import json
import logging
import string
import subprocess
import sys
import textwrap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dgemma_jax.config import Config, LayerConfig, Rope, gemma_26b_a4b, tiny
from tests.parity.checkpoints import NARROW, WIDE, hf_config

S, F = "sliding_attention", "full_attention"

# config.json of google/diffusiongemma-26B-A4B-it, where it says something else than the defaults of transformers.
RELEASE = {
    "architectures": ["DiffusionGemmaForBlockDiffusion"],
    "model_type": "diffusion_gemma",
    "canvas_length": 256,
    "image_token_id": 258880,
    "boi_token_id": 255999,
    "eoi_token_id": 258882,
    "tie_word_embeddings": True,
    "eos_token_id": [1, 106],
    "vision_soft_tokens_per_image": 280,
    "dtype": "bfloat16",
    "text_config": {
        "model_type": "diffusion_gemma_text",
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "global_head_dim": 512,
        "num_global_key_value_heads": 2,
        "layer_types": [S, S, S, S, S, F] * 5,
        "sliding_window": 1024,
        "max_position_embeddings": 262144,
        "rope_parameters": {
            S: {"rope_type": "default", "rope_theta": 10000.0},
            F: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
        },
        "num_experts": 128,
        "top_k_experts": 8,
        "moe_intermediate_size": 704,
        "use_bidirectional_attention": "vision",
        "eos_token_id": 1,
    },
    "vision_config": {
        "model_type": "gemma4_vision",
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 72,
        "position_embedding_size": 10240,
        "standardize": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    },
}


def changed(path: str, value: object, base: dict = RELEASE) -> dict:
    """`base` with the field at the dotted path set to `value`."""
    config = copy.deepcopy(base)
    *parents, name = path.split("/")
    section = config
    for parent in parents:
        section = section[parent]
    section[name] = value
    return config


def test_the_release_is_its_preset(caplog):
    assert Config.from_hf(RELEASE) == gemma_26b_a4b()
    assert not caplog.records, "every field of the release is known"


def test_presets_have_the_layers_of_the_design():
    large, small = gemma_26b_a4b(), tiny()
    assert [index for index, layer in enumerate(large.layers) if layer.kind == "full"] == [5, 11, 17, 23, 29]
    assert large.num_hidden_layers == 30 and hash(large) == hash(gemma_26b_a4b())
    assert [layer.kind[0] for layer in small.layers] == list("ssfssf") and small.canvas_length == 32


def test_both_spellings_of_the_full_layers_agree():
    config = copy.deepcopy(RELEASE)
    text = config["text_config"]
    sizes = {"head_dim": text.pop("global_head_dim"), "num_key_value_heads": text.pop("num_global_key_value_heads")}
    text["per_layer_config"] = {"05": sizes} | {str(index): sizes for index in (11, 17, 23, 29)}
    assert Config.from_hf(config) == gemma_26b_a4b()
    text["global_head_dim"] = 128
    assert Config.from_hf(config) == gemma_26b_a4b(), "per_layer_config wins"


def test_neither_spelling_means_the_defaults_of_transformers():
    config = changed("text_config/num_global_key_value_heads", None)
    del config["text_config"]["global_head_dim"]
    assert Config.from_hf(config).layers[5] == LayerConfig("full", 8, 512)


@pytest.mark.parametrize("canvas", [16, 32, 64, 256])
def test_canvas_lengths(canvas):
    assert Config.from_hf(changed("canvas_length", canvas)).canvas_length == canvas


@pytest.mark.parametrize("shape", [NARROW, WIDE])
def test_small_models(shape):
    config = Config.from_hf(hf_config(shape))
    assert config.full_rope == Rope(1e6, rotary_fraction=shape.rotary)
    assert (config.vision is None) != shape.vision


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("text_config/self_conditioning_size", None),
        ("text_config/self_conditioning_size", 2112),
        ("text_config/enable_moe_block", True),
        ("text_config/attention_k_eq_v", True),
        ("text_config/hidden_size_per_layer_input", 0),
        ("audio_config", None),
        ("quantization_config", None),
        ("text_config/attention_dropout", 0.0),
        ("vision_config/rope_parameters", {"rope_type": "axial", "rope_theta": 100.0}),
        ("text_config/per_layer_config", None),
        ("text_config/layer_types", None),
    ],
)
def test_fields_that_agree_are_accepted(path, value, caplog):
    assert Config.from_hf(changed(path, value)) == gemma_26b_a4b()
    assert not caplog.records


def test_self_conditioning_may_have_its_own_width():
    config = Config.from_hf(changed("text_config/self_conditioning_size", 64))
    assert (config.self_conditioning_size, config.intermediate_size) == (64, 2112)


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("model_type", "gemma4", "'diffusion_gemma'"),
        ("architectures", ["DiffusionGemmaModel"], "DiffusionGemmaForBlockDiffusion"),
        ("audio_config", {"hidden_size": 8}, "no audio"),
        ("video_token_id", 258884, "no video"),
        ("quantization_config", {"quant_method": "bitsandbytes"}, "checkpoint in bfloat16"),
        ("tie_word_embeddings", False, "true"),
        ("canvas_length", 0, "positive integer"),
        ("canvas_length", True, "positive integer"),
        ("canvas_length", 300_000, "max_position_embeddings 262144"),
        ("dtype", "int8", "bfloat16, float32, float16"),
        ("text_config", None, "JSON object"),
        ("text_config/model_type", "gemma4_text", "diffusion_gemma_text"),
        ("text_config/enable_moe_block", False, "true or null"),
        ("text_config/attention_k_eq_v", False, "true or null"),
        ("text_config/attention_bias", True, "false or null"),
        ("text_config/hidden_activation", "silu", "gelu_pytorch_tanh"),
        ("text_config/hidden_size_per_layer_input", 256, "0 or null"),
        ("text_config/use_bidirectional_attention", "all", '"vision" or null'),
        ("text_config/hidden_size", "2816", "positive integer"),
        ("text_config/vocab_size", -1, "positive integer"),
        ("text_config/rms_norm_eps", float("nan"), "positive number"),
        ("text_config/final_logit_softcapping", None, "positive number"),
        ("text_config/num_experts", None, "positive integer"),
        ("text_config/top_k_experts", 129, "num_experts 128"),
        ("text_config/num_key_value_heads", 5, "num_attention_heads 16"),
        ("text_config/global_head_dim", 511, "even"),
        ("text_config/num_hidden_layers", 29, "30 entries"),
        ("text_config/layer_types", ["chunked_attention"] * 30, "sliding_attention or full_attention"),
        ("text_config/per_layer_config", {"31": {"head_dim": 512}}, "below 30"),
        ("text_config/per_layer_config", {"5": {"sliding_window": 4}}, "head_dim and num_key_value_heads"),
        ("text_config/per_layer_config", {"5": {"head_dim": 512}, "05": {"head_dim": 512}}, "each layer once"),
        ("text_config/bos_token_id", 262144, "below vocab_size 262144"),
        ("text_config/rope_parameters", {S: {"rope_type": "yarn"}, F: {}}, '"default" or "proportional"'),
        ("text_config/rope_parameters", {S: {}}, "JSON object"),
        ("text_config/rope_parameters", {S: {"partial_rotary_factor": 0.5}, F: {}}, "1 with rope_type"),
        ("vision_config/head_dim", 70, "multiple of 4"),
        ("vision_config/standardize", 1, "true or false"),
        ("vision_config/rope_parameters", {"rope_type": "linear"}, '"axial" or "default"'),
    ],
)
def test_contradictions_are_refused_by_name_and_value(path, value, expected):
    with pytest.raises(ValueError) as error:
        Config.from_hf(changed(path, value))
    message = str(error.value)
    assert expected in message and "\n" not in message
    assert path.split("/")[-1].removeprefix("global_") in message


def test_layers_of_one_kind_have_one_size():
    with pytest.raises(ValueError, match=r"full layers differ in .num_key_value_heads, head_dim.: .*2, 512.*8, 256"):
        Config.from_hf(changed("text_config/per_layer_config", {"5": {"head_dim": 512, "num_key_value_heads": 2}}))


def test_unknown_fields_are_listed_once(caplog):
    config = changed("text_config/new_thing", 1, changed("other_thing", 2))
    assert Config.from_hf(config) == gemma_26b_a4b()
    assert [record.getMessage() for record in caplog.records] == [
        "config.json: unknown fields, not used: other_thing, text_config.new_thing"
    ]


def test_a_last_sliding_layer_becomes_a_full_one_as_in_transformers(caplog):
    config = Config.from_hf(changed("text_config/layer_types", [S, S, S, S, S, F] * 4 + [S] * 6))
    assert config.layers[-1] == LayerConfig("full", 2, 512)
    assert "last layer" in caplog.text


def test_image_ids_outside_the_vocabulary_mean_no_images(caplog):
    base = changed("vision_config", None, hf_config(NARROW))
    assert Config.from_hf(changed("image_token_id", 258880, base)).image_token_id is None
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        config = Config.from_hf(changed("image_token_id", 258880, hf_config(WIDE)))
    assert config.image_token_id is None and "takes no images" in caplog.text


def test_images_see_each_other_only_where_the_config_says_so():
    base = hf_config(WIDE)
    assert Config.from_hf(base).image_blocks == "all"
    assert Config.from_hf(changed("text_config/use_bidirectional_attention", None, base)).image_blocks == "none"
    assert Config.from_hf(changed("text_config/use_bidirectional_attention", None, hf_config(NARROW))).vision is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sliding_window": 0}, "sliding_window is 0; expected a positive integer"),
        ({"image_blocks": "full"}, "image_blocks is 'full'; expected one of all, sliding, none"),
    ],
)
def test_a_config_made_by_hand_is_checked_too(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(tiny(), **change)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(string.printable, max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
PATHS = [name for name in RELEASE if not name.endswith("_config")]
PATHS += [f"{part}/{name}" for part in ("text_config", "vision_config") for name in RELEASE[part]]


@settings(deadline=None)
@given(path=st.sampled_from([*PATHS, "text_config", "vision_config", "text_config/per_layer_config"]), value=JSON)
def test_any_value_anywhere_gives_a_config_or_one_line(path, value):
    try:
        assert isinstance(Config.from_hf(changed(path, value)), Config)
    except ValueError as error:
        assert "\n" not in str(error)


def test_plain_data_modules_import_neither_jax_nor_numpy():
    code = """
        import sys
        import dgemma_jax.config, dgemma_jax.config_hf, dgemma_jax.sampling, dgemma_jax.events
        assert not {"jax", "numpy", "flax"} & set(sys.modules), sys.modules.keys()
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_json_round_trip_of_the_release():
    assert Config.from_hf(json.loads(json.dumps(RELEASE))) == gemma_26b_a4b()
