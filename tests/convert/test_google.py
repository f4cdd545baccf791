"""Google's Orbax tree, in each of its spellings, gives the params that Hugging Face's files give."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import save_file

from dgemma_jax.checkpoint import open_directory
from dgemma_jax.config import gemma_26b_a4b
from dgemma_jax.convert import google, hf
from dgemma_jax.convert.table import leaf, stacked_shape
from dgemma_jax.convert.weights import WeightsError
from dgemma_jax.model.transformer import build
from tests.convert.convert_helpers import assert_same_params, convert_model, manifest, params_of
from tests.parity.checkpoints import WIDE, random_tensors, write

SHAPE = replace(WIDE, layers="SSFSSF", full_kv_heads=1, name="google")  # a pattern of three, twice
GOLDEN = Path(__file__).parents[1] / "golden" / "google_26b.txt"
ENCODER = "model.encoder.language_model."


def tied_tensors() -> dict[str, np.ndarray]:
    """The checkpoint under Hugging Face's names, with one scalar per layer, as Google's has."""
    tensors = random_tensors(SHAPE)
    for name in list(tensors):
        if name.startswith(ENCODER):
            tensors[name] = tensors[name.replace(ENCODER, "model.decoder.")].copy()
    return tensors


def heads_first(weight: np.ndarray, width: int) -> np.ndarray:
    """[N*H, D] -> [N, D, H]."""
    return weight.reshape(-1, width, weight.shape[-1]).swapaxes(1, 2)


def text_layer(get: Callable[[str], np.ndarray], kind: str) -> dict[str, np.ndarray]:
    """A layer of Google's tree; `get` reads tensors of the same layer in Hugging Face's layout."""
    width = SHAPE.full_head if kind == "F" else SHAPE.head
    q, k = (heads_first(get(f"self_attn.{name}_proj.weight"), width) for name in "qk")
    keys = {"attn/k_einsum/w": k}
    if kind == "S":
        keys = {"attn/kv_einsum/w": np.stack([k, heads_first(get("self_attn.v_proj.weight"), width)])}
    gate_up = get("experts.gate_up_proj")
    norms = {
        "pre_attention_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "pre_ffw2_norm": "pre_feedforward_layernorm",
        "post_ffw2_norm": "post_feedforward_layernorm_1",
        "pre_ffw_norm": "pre_feedforward_layernorm_2",
        "post_ffw1_norm": "post_feedforward_layernorm_2",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
    return {
        "attn/q_einsum/w": q,
        **keys,
        "attn/attn_vec_einsum/w": get("self_attn.o_proj.weight").T.reshape(SHAPE.heads, width, -1),
        "attn/query_norm/scale": get("self_attn.q_norm.weight"),
        "attn/key_norm/scale": get("self_attn.k_norm.weight"),
        "mlp/gating_einsum/w": gate_up.reshape(len(gate_up), 2, -1, gate_up.shape[-1]),
        "mlp/linear/w": get("experts.down_proj").swapaxes(1, 2),
        "mlp/router_logits/w": get("router.proj.weight").T,
        "mlp/router_scale": get("router.scale"),
        "mlp/per_expert_scale": get("router.per_expert_scale"),
        "mlp2/gating_einsum": np.stack([get("mlp.gate_proj.weight"), get("mlp.up_proj.weight")]),
        "mlp2/linear": get("mlp.down_proj.weight").T,
        "skip_scale": get("layer_scalar"),
        **{f"{name}/scale": get(f"{theirs}.weight") for name, theirs in norms.items()},
    }


def vision_layer(get: Callable[[str], np.ndarray]) -> dict[str, np.ndarray]:
    q, k, v = (heads_first(get(f"self_attn.{name}_proj.linear.weight"), 12) for name in "qkv")
    norms = {
        "pre_attention_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "pre_ffw_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
    return {
        "attn/q_einsum/w": q,
        "attn/kv_einsum/w": np.stack([k, v]),
        "attn/attn_vec_einsum/w": get("self_attn.o_proj.linear.weight").T.reshape(2, 12, -1),
        "attn/query_norm/scale": get("self_attn.q_norm.weight"),
        "attn/key_norm/scale": get("self_attn.k_norm.weight"),
        "mlp/gating_einsum/w": np.stack([get("mlp.gate_proj.linear.weight"), get("mlp.up_proj.linear.weight")]),
        "mlp/linear/w": get("mlp.down_proj.linear.weight").T,
        **{f"{name}/scale": get(f"{theirs}.weight") for name, theirs in norms.items()},
    }


def google_tensors(tensors: dict[str, np.ndarray], stacked: bool = False) -> dict[str, np.ndarray]:
    """The same checkpoint under Google's names, leaves spelled as in the released tree."""
    decoder, tower = "model.decoder.", "model.encoder.vision_tower."
    conditioning = f"{decoder}self_conditioning."
    gates = [tensors[f"{conditioning}{name}_proj.weight"] for name in ("gate", "up")]
    found = {
        "embedder/input_embedding": tensors[decoder + "embed_tokens.weight"],
        "final_norm/scale": tensors[decoder + "norm.weight"],
        "self_conditioner/pre_norm/scale": tensors[conditioning + "pre_norm.weight"],
        "self_conditioner/ffw/gating_einsum": np.stack(gates),
        "self_conditioner/ffw/linear": tensors[conditioning + "down_proj.weight"].T,
        "embedder/mm_input_projection/w": tensors["model.encoder.embed_vision.embedding_projection.weight"].T,
        "vision_encoder/entry/input_projection/w": tensors[tower + "patch_embedder.input_proj.weight"].T,
        "vision_encoder/entry/pos_emb": tensors[tower + "patch_embedder.position_embedding_table"].swapaxes(0, 1),
        "vision_encoder/standardize/bias": tensors[tower + "std_bias"],
        "vision_encoder/standardize/scale": tensors[tower + "std_scale"],
    }
    layers = [
        text_layer(lambda name, root=f"{decoder}layers.{index}.": tensors[root + name], kind)
        for index, kind in enumerate(SHAPE.layers)
    ]
    for kind in range(3 if stacked else 0):
        for name in layers[kind]:
            stack = np.stack([layer[name] for layer in layers[kind::3]])
            found[f"transformer/stacked_layers/attention_type_{kind}/{name}"] = stack
    for index, layer in enumerate([] if stacked else layers):
        found |= {f"layer_{index}/{name}": array for name, array in layer.items()}
    blocks = [
        vision_layer(lambda name, root=f"{tower}encoder.layers.{index}.": tensors[root + name]) for index in range(2)
    ]
    for name in blocks[0]:
        found[f"vision_encoder/transformer/stacked_layers/block/{name}"] = np.stack([block[name] for block in blocks])
    return found


def nested(tensors: dict[str, np.ndarray]) -> dict:
    tree: dict = {}
    for name, array in tensors.items():
        *keys, last = name.split("/")
        inside = tree
        for key in keys:
            inside = inside.setdefault(key, {})
        inside[last] = np.ascontiguousarray(array)
    return tree


def flat(tensors: dict[str, np.ndarray]) -> dict:
    """Keys with slashes, one level above the leaves."""
    tree: dict = {}
    for name, array in tensors.items():
        above, last = name.rsplit("/", 1)
        tree.setdefault(f"transformer/{above}", {})[last] = np.ascontiguousarray(array)
    return tree


def with_leaves(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The other spelling of the leaves: arrays of shared modules below a "w" too."""
    bare = ("gating_einsum", "linear")
    return {f"{name}/w" if name.endswith(bare) else name: array for name, array in tensors.items()}


def write_tree(directory: Path, tree: dict, inside: str = "") -> Path:
    """An Orbax tree, and config files beside it."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save((directory / inside).absolute(), tree)
    write(directory.with_name("files"), SHAPE)
    for name in ("config.json", "generation_config.json"):
        shutil.copy(directory.with_name("files") / name, directory)
    return directory


FORMS = {
    "nested": lambda tensors: nested(google_tensors(tensors)),
    "leaves below w": lambda tensors: nested(with_leaves(google_tensors(tensors))),
    "flat": lambda tensors: flat(google_tensors(tensors)),
    "below params": lambda tensors: {"params": nested(google_tensors(tensors))},
    "stacked": lambda tensors: nested(google_tensors(tensors, stacked=True)),
}


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> dict:
    directory = write(tmp_path_factory.mktemp("hf"), SHAPE)
    save_file(tied_tensors(), directory / "model.safetensors")
    return params_of(directory)


@pytest.mark.parametrize(("form", "inside"), [*((form, "") for form in FORMS), ("nested", "default")])
def test_every_form_gives_the_same_params(tmp_path, reference, form, inside):
    directory = write_tree(tmp_path / "google", FORMS[form](tied_tensors()), inside)
    assert_same_params(params_of(directory), reference)
    convert_model(directory, tmp_path / "target")
    assert_same_params(params_of(tmp_path / "target"), reference)
    assert [int(name[-3:]) for name in manifest(tmp_path / "target")["items"] if "layer" in name] == list(range(6))


def test_the_vision_tower_stays_in_its_own_dtype(tmp_path):
    """As released: text in bfloat16, vision in float32."""
    tensors = {n: t if "vision" in n else t.astype(ml_dtypes.bfloat16) for n, t in tied_tensors().items()}
    directory = write_tree(tmp_path / "google", nested(google_tensors(tensors)))
    convert_model(directory, tmp_path / "target")
    items = manifest(tmp_path / "target")["items"]
    assert {header["dtype"] for header in items["layer_001"]["tensors"].values()} == {"bfloat16"}
    dtypes = {name: header["dtype"] for name, header in items["vision"]["tensors"].items()}
    assert dtypes.pop("vision/projection") == "float32" and set(dtypes.values()) == {"float32"}


def test_what_is_wrong_is_told_by_googles_names(tmp_path):
    tensors = google_tensors(tied_tensors())
    del tensors["layer_1/attn/q_einsum/w"]
    tensors["layer_2/mlp2/linear"] = tensors["layer_2/mlp2/linear"][:, :-1]
    tensors["audio_encoder/x"] = np.ones(3, np.float32)
    tensors["layer_4/mlp/router_scale"] = np.full(SHAPE.hidden, np.nan, np.float32)
    directory = write_tree(tmp_path / "google", nested(tensors))
    with pytest.raises(WeightsError) as error:
        params_of(directory)
    found = {(problem.kind, problem.name) for problem in error.value.problems}
    assert found == {
        ("missing", "layer_1/attn/q_einsum"),
        ("wrong shape", "layer_2/mlp2/linear"),
        ("unexpected", "audio_encoder/x"),
        ("not finite", "layer_4/mlp/router_scale"),
    }
    assert "[56, 63], the config asks for [56, 64]" in str(error.value)


def test_a_tree_without_config(tmp_path):
    directory = write_tree(tmp_path / "google", FORMS["nested"](tied_tensors()))
    (directory / "config.json").unlink()
    with pytest.raises(ValueError, match=r"Orbax tree without config\.json; put the config\.json"):
        open_directory(directory)


def test_clip_bounds_are_refused(tmp_path):
    directory = write_tree(tmp_path / "google", FORMS["nested"](tied_tensors()))
    fields = json.loads((directory / "config.json").read_text())
    fields["vision_config"]["use_clipped_linears"] = True
    (directory / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="use_clipped_linears is true; Google's tree has no clip bounds"):
        open_directory(directory)


def test_the_table_is_the_tree_of_the_26b():
    """Names and shapes of one sliding and one full layer and of everything outside the layers; all text parameters."""
    config = gemma_26b_a4b()
    _, abstract = build(config)
    entries: dict[str, list] = {}
    for name, entry in google.table(config, []):
        entries.setdefault(name, []).append(entry)
    shapes = {
        name: stacked_shape(parts) + parts[0].layout.file_shape(leaf(abstract, parts[0].path).shape)
        for name, parts in entries.items()
    }
    golden = dict(line.split() for line in GOLDEN.read_text().splitlines()[1:])
    kept = {
        name: shape
        for name, shape in shapes.items()
        if not name.startswith("layer_") or name[:8] in ("layer_0/", "layer_5/")
    }
    assert {name: ",".join(map(str, shape)) for name, shape in kept.items()} == golden
    text = sum(int(np.prod(shape)) for name, shape in shapes.items() if "vision" not in name and "mm_input" not in name)
    assert text == 25_250_986_782


def test_both_tables_fill_the_same_params():
    config = gemma_26b_a4b()
    stacks = [f"stacked_layers/attention_type_{kind}/skip_scale" for kind in range(6)]
    ours = sorted(map(str, (entry.path for entry in hf.table(config).values())))
    for names in ([], stacks):
        assert sorted(str(entry.path) for _, entry in google.table(config, names)) == ours
