"""The weight table against the release, and loading: what arrives, and every misfit reported at once."""

import hashlib
import itertools
import json
import shutil
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from dgemma_jax.config import Config, gemma_26b_a4b
from dgemma_jax.convert import hf, table, weights
from dgemma_jax.model.transformer import build
from tests.parity.checkpoints import NARROW, WIDE, hf_config, random_tensors, tensor_shapes, write

EMBEDDING = "model.decoder.embed_tokens.weight"


def table_with_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    _, abstract = build(config)
    return {name: e.layout.file_shape(table.leaf(abstract, e.path).shape) for name, e in hf.table(config).items()}


def golden_26b() -> dict[str, tuple[int, ...]]:
    tensors = {}
    for line in (Path(__file__).parent / "golden" / "tensors_26b.txt").read_text().splitlines()[1:]:
        name, shape, layers = line.split()
        bounds = [] if layers == "-" else [part.split("-") for part in layers.split(",")]
        numbers = itertools.chain(*(range(int(bound[0]), int(bound[-1]) + 1) for bound in bounds))
        for full_name in [name] if layers == "-" else [name.replace("*", str(number)) for number in numbers]:
            tensors[full_name] = tuple(int(size) for size in shape.split(","))
    return tensors


def test_the_table_is_the_release():
    ours = table_with_shapes(gemma_26b_a4b())
    assert ours == golden_26b() and len(ours) == 1047
    text = "\n".join(sorted(f"{name}\t{','.join(map(str, shape))}" for name, shape in ours.items()))
    assert hashlib.sha256(text.encode()).hexdigest() == (
        "b676a83454c391440bd04be8cb6282855c1fd3671244129263a4855ed163bf96"
    )


@pytest.mark.parametrize("shape", [NARROW, WIDE])
def test_the_table_is_that_of_small_models(shape):
    assert table_with_shapes(Config.from_hf(hf_config(shape))) == tensor_shapes(shape)


def test_the_table_fills_the_params_exactly():
    config = gemma_26b_a4b()
    _, abstract = build(config)
    paths = [tuple(key.key for key in path) for path, _ in jax.tree.leaves_with_path(abstract)]
    assert sorted(map(str, paths)) == sorted(str(entry.path) for entry in hf.table(config).values())


def test_clipped_linears_add_their_bounds():
    config = hf_config(WIDE)
    plain = len(hf.table(Config.from_hf(config)))
    config["vision_config"] = config["vision_config"] | {"use_clipped_linears": True}
    assert len(hf.table(Config.from_hf(config))) == plain + 2 * 7 * 4


@settings(deadline=None)
@given(st.sampled_from([hf.SAME, hf.SCALAR, hf.MATRIX, hf.HEADS_IN, hf.HEADS_OUT]), st.data())
def test_layouts_invert(layout, data):
    rank = {hf.SCALAR: 0, hf.HEADS_IN: 3, hf.HEADS_OUT: 3}.get(layout) or data.draw(st.integers(2, 3))
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=rank, max_size=rank))) if layout != hf.SCALAR else ()
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    stored = layout.to_file(array)
    assert stored.shape == layout.file_shape(shape)
    np.testing.assert_array_equal(layout.from_file(stored, shape), array)


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("narrow"), NARROW)


@pytest.fixture
def directory(original, tmp_path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "model"))


def load(directory: Path, shape=NARROW, dtype: str | None = None) -> tuple[dict, str]:
    config = Config.from_hf(hf_config(shape))
    return weights.load(weights.open_weights(directory, config), build(config)[1], dtype)


def rewrite(directory: Path, change) -> dict[str, np.ndarray]:
    tensors = random_tensors(NARROW)
    change(tensors)
    save_file(tensors, directory / "model.safetensors")
    return tensors


def test_loading_transposes_and_keeps_values(directory):
    params, dtype = load(directory)
    stored = random_tensors(NARROW)
    assert dtype == "float32"
    layer = params["layers"][2]
    q = stored["model.decoder.layers.2.self_attn.q_proj.weight"]
    np.testing.assert_array_equal(layer["attention"]["q"][:, 3], q[3 * 24 : 4 * 24].T)
    o = stored["model.decoder.layers.2.self_attn.o_proj.weight"]
    np.testing.assert_array_equal(layer["attention"]["o"][3], o[:, 3 * 24 : 4 * 24].T)
    gate_up = stored["model.decoder.layers.2.experts.gate_up_proj"]
    np.testing.assert_array_equal(layer["experts"]["gate_up"][1][:, :24], gate_up[1, :24].T)
    assert "v" not in layer["attention"] and "v" in params["layers"][0]["attention"]
    assert layer["decoder_scalar"] == stored["model.decoder.layers.2.layer_scalar"][0]
    assert layer["encoder_scalar"] == stored["model.encoder.language_model.layers.2.layer_scalar"][0]
    assert layer["encoder_scalar"] != layer["decoder_scalar"]


@pytest.mark.parametrize("shape", [NARROW, WIDE])
def test_params_match_the_model_and_go_back(shape, tmp_path):
    config = Config.from_hf(hf_config(shape))
    params, _ = load(write(tmp_path, shape), shape)
    _, abstract = build(config)
    assert jax.tree.structure(params) == jax.tree.structure(abstract)
    assert jax.tree.map(np.shape, params) == jax.tree.map(lambda leaf: leaf.shape, abstract)
    back, stored = hf.to_hf(params, config), random_tensors(shape)
    assert back.keys() == stored.keys()
    assert all(np.array_equal(back[name], stored[name]) for name in stored)


@pytest.mark.parametrize("stored", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_dtype_none_is_as_stored(directory, stored):
    rewrite(directory, lambda t: t.update({name: array.astype(stored) for name, array in t.items()}))
    params, dtype = load(directory)
    assert dtype == np.dtype(stored).name
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(stored)}


def test_a_dtype_that_is_asked_for(directory):
    params, dtype = load(directory, dtype="bfloat16")
    assert dtype == "bfloat16"
    table = random_tensors(NARROW)[EMBEDDING].astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(params["embedder"]["table"], table)


def shard(directory: Path, count: int = 3) -> list[str]:
    """Splits the single file into shards with an index, as large checkpoints are stored."""
    tensors = random_tensors(NARROW)
    files = [f"model-{index + 1:05}-of-{count:05}.safetensors" for index in range(count)]
    where = {name: files[index % count] for index, name in enumerate(sorted(tensors))}
    for file in files:
        save_file({name: tensors[name] for name in tensors if where[name] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    (directory / "model.safetensors").unlink()
    return files


def test_shards_are_read_through_their_index(directory):
    whole, _ = load(directory)
    shard(directory)
    parts, _ = load(directory)
    jax.tree.map(np.testing.assert_array_equal, whole, parts)


def problems(directory: Path, shape=NARROW, dtype: str | None = None) -> tuple[list, str]:
    with pytest.raises(weights.WeightsError) as error:
        load(directory, shape, dtype)
    return error.value.problems, str(error.value)


def test_all_problems_are_reported_at_once(directory):
    def spoil(tensors):
        del tensors["model.decoder.layers.0.router.scale"]
        del tensors["model.decoder.layers.1.router.scale"]
        tensors["model.decoder.layers.3.self_attn.v_proj.bias"] = np.zeros(4, np.float32)
        tensors["model.decoder.norm.weight"] = np.ones(7, np.float32)
        tensors["model.decoder.layers.2.mlp.up_proj.weight"] = np.ones((80, 48), np.int8)
        tensors["model.decoder.layers.4.mlp.up_proj.weight"][1, 2] = np.nan
        tensors["lm_head.weight"] = tensors[EMBEDDING] + 1

    rewrite(directory, spoil)
    found, message = problems(directory)
    assert sorted(problem.kind for problem in found) == sorted(
        ["missing", "missing", "unexpected", "wrong shape", "wrong dtype", "not finite", "disagrees"]
    )
    first, *others = message.splitlines()
    assert "7 problems" in first and len(others) == 5, "the two missing tensors share a line"
    for words in (
        "layers.{0-1}.router.scale: expected [48]",
        "[7], the config asks for [48]",
        "I8, expected one of bfloat16, float32, float16",
        "1 of 3840 values as float32, the first at [1, 2]",
        "lm_head.weight: expected a copy of model.decoder.embed_tokens.weight",
        "layers.3.self_attn.v_proj.bias: [4], the config has no such weight",
    ):
        assert words in message


def test_copies_of_tied_weights_are_dropped_when_equal(directory):
    def add_copies(tensors):
        tensors["lm_head.weight"] = tensors[EMBEDDING].copy()
        for name in [name for name in tensors if ".decoder.layers." in name and not name.endswith("layer_scalar")]:
            tensors[name.replace("model.decoder", "model.encoder.language_model")] = tensors[name].copy()

    whole, _ = load(directory)
    rewrite(directory, add_copies)
    with_copies, _ = load(directory)
    jax.tree.map(np.testing.assert_array_equal, whole, with_copies)

    def and_change_one(tensors):
        add_copies(tensors)
        tensors["model.encoder.language_model.layers.1.router.scale"][5] += 1

    rewrite(directory, and_change_one)
    found, message = problems(directory)
    assert len(found) == 1 and "1 problem:" in message
    assert "model.encoder.language_model.layers.1.router.scale: expected a copy of" in message


def test_swapped_scalars_are_not_mistaken_for_copies(directory):
    params, _ = load(directory)
    scalars = [(layer["encoder_scalar"], layer["decoder_scalar"]) for layer in params["layers"].values()]
    assert len({float(value) for pair in scalars for value in pair}) == 2 * len(NARROW.layers)


def test_values_too_large_for_the_asked_dtype_are_found(directory):
    rewrite(directory, lambda t: t[EMBEDDING].__setitem__((0, 0), 1e5))
    load(directory, dtype="bfloat16")
    _, message = problems(directory, dtype="float16")
    assert "1 of 29328 values as float16, the first at [0, 0]" in message


@settings(deadline=None)
@given(st.lists(st.floats(width=16), max_size=5), st.sampled_from(sorted(table.DTYPES)))
def test_the_quick_check_of_values_is_isfinite(values, dtype):
    array = np.array(values, table.DTYPES[dtype])
    assert weights.all_finite(array) == np.isfinite(array).all()


@pytest.mark.parametrize("size", [0, 4, 100, -2])
def test_a_truncated_file(directory, size):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read: .*; download it again") as error:
        load(directory)
    assert "\n" not in str(error.value)


def test_missing_and_truncated_shards_and_what_else_is_wrong(directory):
    first, second, third = shard(directory)
    (directory / first).unlink()
    (directory / second).write_bytes((directory / second).read_bytes()[:-1])
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    kept = [name for name, file in index["weight_map"].items() if file == third]
    tensors = {name: random_tensors(NARROW)[name] for name in kept[1:]}
    save_file(tensors, directory / third)
    found, message = problems(directory)
    assert [problem.kind for problem in found] == ["file", "file", "missing"]
    assert first in message and "missing (" in message and "cannot be read" in message
    assert found[2].name == kept[0]


def test_a_tensor_in_two_shards(directory):
    first, *_ = shard(directory)
    save_file(random_tensors(NARROW), directory / first)
    assert {problem.kind for problem in problems(directory)[0]} == {"twice"}


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"weight_map": 3}', '{"weight_map": {"a": "../b.safetensors"}}'])
def test_a_broken_index(directory, text):
    shard(directory)
    (directory / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match="no index of safetensors files"):
        load(directory)


def test_no_weights(directory):
    (directory / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="no weights at all"):
        load(directory)
    (directory / "pytorch_model.bin").touch()
    with pytest.raises(ValueError, match=r"only pytorch_model\.bin; save the model with"):
        load(directory)


def test_the_wrong_config_is_told_by_the_shapes(directory):
    found, message = problems(directory, shape=WIDE)
    assert "wrong shape: model.decoder.embed_tokens.weight: [611, 48], the config asks for [2500, 64]" in message
    assert len(message.splitlines()) < len(found)
