"""Conversions between layouts and dtypes: the same bits come back, and the result is a model of its own."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

import dgemma_jax as dg
from dgemma_jax.checkpoint import open_checkpoint, open_directory
from dgemma_jax.convert import hf, orbax_files
from dgemma_jax.convert.table import by_item
from tests.convert.convert_helpers import assert_same_params, contents, convert_model, manifest, params_of
from tests.parity.checkpoints import NARROW, WIDE, random_tensors, write

SMALL = replace(WIDE, layers="SF")


def write_as(directory: Path, dtype) -> Path:
    """The small model with vision, stored in `dtype`."""
    write(directory, SMALL)
    save_file({n: t.astype(dtype) for n, t in random_tensors(SMALL).items()}, directory / "model.safetensors")
    (directory / "tokenizer_config.json").write_text("{}")
    (directory / "notes.txt").write_text("not part of the model")
    return directory


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def trip(request, tmp_path_factory) -> dict[str, Path]:
    """HF -> Orbax -> HF, in one dtype."""
    root = tmp_path_factory.mktemp(request.param)
    source = write_as(root / "source", np.dtype(getattr(ml_dtypes, request.param, request.param)))
    before = contents(source)
    convert_model(source, root / "orbax")
    convert_model(root / "orbax", root / "back", to="hf")
    assert contents(source) == before
    return {name: root / name for name in ("source", "orbax", "back")}


def tensors_of(directory: Path) -> dict[str, np.ndarray]:
    tensors = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "numpy") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                assert name not in tensors
                tensors[name] = file.get_tensor(name)
    return tensors


def test_there_and_back_is_the_identity(trip):
    first, last = tensors_of(trip["source"]), tensors_of(trip["back"])
    assert first.keys() == last.keys()
    for name, tensor in first.items():
        assert tensor.dtype == last[name].dtype and tensor.shape == last[name].shape
        assert tensor.tobytes() == last[name].tobytes(), name


def test_all_three_load_to_the_same_model(trip):
    first, *others = (open_checkpoint(path) for path in trip.values())
    for other in others:
        assert (other[0], other[3]) == (first[0], first[3])
        assert_same_params(first[1], other[1])


def test_files_of_the_model_are_carried_along(trip):
    for name in ("orbax", "back"):
        carried = contents(trip[name])
        for file in ("config.json", "generation_config.json", "tokenizer_config.json"):
            assert carried[file] == contents(trip["source"])[file]
        assert "notes.txt" not in carried


def test_the_index_names_each_tensor_once(trip):
    index = json.loads((trip["back"] / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == tensors_of(trip["source"]).keys()
    assert set(index["weight_map"].values()) == {f"model-0000{n}-of-00004.safetensors" for n in (1, 2, 3, 4)}
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors_of(trip["source"]).values())


def test_the_manifest_describes_every_tensor(trip):
    found = manifest(trip["orbax"])
    config = open_directory(trip["orbax"]).config
    assert found["version"] == 1 and found["config"] == orbax_files.config_fields(config)
    assert list(found["items"]) == ["embedding", "layer_000", "layer_001", "vision"]
    tensors = {name: header for item in found["items"].values() for name, header in item["tensors"].items()}
    for path, array in jax.tree.leaves_with_path(params_of(trip["orbax"])):
        header = tensors.pop("/".join(str(key.key) for key in path))
        assert header == orbax_files.record(np.asarray(array))
    assert not tensors


def test_any_orbax_reader_restores_an_item(trip):
    """To the nested dict below that part of params."""
    with ocp.StandardCheckpointer() as checkpointer:
        layer = checkpointer.restore(trip["orbax"].absolute() / "weights" / "layer_001")
    assert_same_params(layer, params_of(trip["source"])["layers"][1])


def test_dg_load_opens_a_converted_model(trip):
    model, source = dg.load(trip["orbax"]), dg.load(trip["source"])
    assert (model.config, model.dtype, model.max_model_len) == (source.config, source.dtype, source.max_model_len)
    assert_same_params(model.params, source.params)


@pytest.mark.parametrize("to", ["orbax", "hf"])
def test_another_dtype(tmp_path, to):
    source = write(tmp_path / "source", SMALL)
    convert_model(source, tmp_path / "half", dtype="bfloat16", to=to)
    fields = json.loads((tmp_path / "half" / "config.json").read_text())
    assert fields["dtype"] == fields["text_config"]["dtype"] == "bfloat16" and "dtype" not in fields["vision_config"]
    assert_same_params(open_checkpoint(source, dtype="bfloat16")[1], params_of(tmp_path / "half"))
    convert_model(tmp_path / "half", tmp_path / "single", dtype="float32")
    assert_same_params(open_checkpoint(tmp_path / "half", dtype="float32")[1], params_of(tmp_path / "single"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_converted_model_loads_to_the_dtype_that_is_asked_for(trip, dtype):
    config, params, _, _ = open_checkpoint(trip["orbax"], dtype=dtype)
    assert config.dtype == dtype and all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(params))
    assert_same_params(params, open_checkpoint(trip["source"], dtype=dtype)[1])


def test_tensors_of_several_dtypes_keep_theirs(tmp_path):
    write(tmp_path / "mixed", SMALL)
    tensors = random_tensors(SMALL)
    half = {n: t if "vision" in n else t.astype(ml_dtypes.bfloat16) for n, t in tensors.items()}
    save_file(half, tmp_path / "mixed" / "model.safetensors")
    convert_model(tmp_path / "mixed", tmp_path / "orbax")
    convert_model(tmp_path / "orbax", tmp_path / "back", to="hf")
    back = tensors_of(tmp_path / "back")
    assert all(back[name].tobytes() == tensor.tobytes() for name, tensor in half.items())


def test_copies_of_tied_tensors_are_written_once(tmp_path):
    source = write(tmp_path / "source", NARROW)
    tensors = random_tensors(NARROW)
    copies = {"lm_head.weight": tensors["model.decoder.embed_tokens.weight"].copy()}
    encoder = "model.encoder.language_model.layers.0.router.scale"
    copies[encoder] = tensors["model.decoder.layers.0.router.scale"].copy()
    save_file(tensors | copies, source / "model.safetensors")
    convert_model(source, tmp_path / "target", to="hf")
    assert tensors_of(tmp_path / "target").keys() == tensors.keys()


def test_symlinked_sources_and_targets(tmp_path):
    """As in the hub's cache, where every file is a link to a blob."""
    real = write(tmp_path / "blobs", NARROW)
    (tmp_path / "snapshot").mkdir()
    for path in real.iterdir():
        (tmp_path / "snapshot" / path.name).symlink_to(path)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "target").symlink_to(tmp_path / "elsewhere")
    convert_model(tmp_path / "snapshot", tmp_path / "target")
    assert not (tmp_path / "elsewhere" / "config.json").is_symlink()
    shutil.rmtree(real)
    assert params_of(tmp_path / "target")


def test_items_are_the_parts_of_the_model():
    config = dg.gemma_26b_a4b()
    items = by_item(list(hf.table(config).items()))
    assert list(items) == ["embedding", *(f"layer_{index:03}" for index in range(30)), "vision"]


@pytest.mark.parity
def test_transformers_loads_what_is_written_and_computes_the_same(tmp_path):
    pytest.importorskip("torch")
    from tests.parity.oracle import Oracle

    source = write(tmp_path / "source", NARROW)
    convert_model(source, tmp_path / "orbax")
    convert_model(tmp_path / "orbax", tmp_path / "back", to="hf")
    canvas = np.random.default_rng(0).integers(0, NARROW.vocab, (1, NARROW.canvas))
    prompt = np.array([[2, 5, 7, 11, 13, 17, 19, 23, 29, 31]])
    logits = []
    for directory in (source, tmp_path / "back"):
        oracle = Oracle(directory)
        for tensor in (
            *oracle.model.parameters(),
            *oracle.model.buffers(),
        ):  # a mapped file need not be aligned, which moves last bits
            tensor.data = tensor.data.clone()
        _, prefix = oracle.encode(prompt)
        logits.append(oracle.logits(canvas, prefix))
    np.testing.assert_array_equal(*logits)
