"""`dgemma convert --quantize`: what is written, what loading checks, and models that run from 8 and 4 bits."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import dgemma_jax as dg
from dgemma_jax.api import Model
from dgemma_jax.checkpoint import open_directory
from dgemma_jax.cli import main
from dgemma_jax.convert import orbax_files
from dgemma_jax.convert.table import insert, leaf
from dgemma_jax.convert.weights import WeightsError
from dgemma_jax.quantization import dequantized_params, summed_axes
from dgemma_jax.train import tokenizer as vocabulary
from tests.convert.convert_helpers import convert_model, manifest
from tests.convert.test_failures import error_of
from tests.parity.checkpoints import WIDE, random_tensors, write

SHAPE = replace(WIDE, vocab=800, mlp=64, expert_width=32, head=32, full_head=64, layers="SF", branch=0.5, feedback=0.5)
FORMATS = ("int8", "int4")
pytestmark = pytest.mark.usefixtures("quick_compiles")


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    directory = write(tmp_path_factory.mktemp("source"), SHAPE)
    vocabulary.save(vocabulary.build(), directory, 512)
    return directory


@pytest.fixture(scope="module")
def converted(source, tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("converted")
    for fmt in FORMATS:
        assert main(["convert", str(source), str(root / fmt), "--quantize", fmt]) == 0
    return {fmt: root / fmt for fmt in FORMATS}


@pytest.mark.parametrize("fmt", FORMATS)
def test_three_steps_and_two_canvases_as_with_the_numbers_as_arrays(fmt, source, converted):
    """The quantised model against one of plain arrays, from both formats' files, at every op at once."""
    original, model = dg.load(source), dg.load(converted[fmt])
    assert (model.config.quantization, model.dtype) == (fmt, "float32")
    numbers = dequantized_params(model.params, "float32")
    reference = Model(original.config, numbers, None, original.defaults)
    sampling = dg.Sampling(
        max_new_tokens=SHAPE.canvas + 5, max_denoising_steps=4, stability_threshold=None, stop_token_ids=None, seed=3
    )
    prompts = [[5, 9, 200, 31], [7] * 20]
    got, expected = (one.generate(prompts, sampling, slots=2) for one in (model, reference))
    for answer, wanted in zip(got, expected, strict=True):
        assert answer.steps == [4, 4]
        assert answer.tokens == wanted.tokens
    assert got[0].tokens != original.generate(prompts, sampling, slots=2)[0].tokens or fmt == "int8"
    how_far = [
        float(jnp.sqrt(jnp.mean((a - b) ** 2) / jnp.mean(b**2)))
        for a, b in zip(jax.tree.leaves(numbers), jax.tree.leaves(original.params), strict=True)
    ]
    assert max(how_far) < (0.01 if fmt == "int8" else 0.09)


@pytest.mark.parametrize("fmt", FORMATS)
def test_what_is_quantised_and_what_is_not(fmt, converted):
    config = json.loads((converted[fmt] / "config.json").read_text())
    assert config["quantization_config"]["bits"] == int(fmt[-1]) and config["dtype"] == "float32"
    opened = open_directory(converted[fmt])
    dtypes = {name: opened.weights.files.dtype(name) for name in opened.weights.files}
    number = "int8" if fmt == "int8" else "uint8"
    assert dtypes["layers/0/experts/gate_up/values"] == dtypes["layers/1/attention/o/values"] == number
    assert dtypes["layers/1/mlp/down/values"] == number and dtypes["embedder/table/values"] == "int8"
    kept = [name for name in dtypes if not name.endswith(("/values", "/scales"))]
    assert {dtypes[name] for name in kept} == {"float32"}
    for name in ("self_conditioning/mlp/gate", "layers/0/router/proj", "layers/1/encoder_scalar", "vision/projection"):
        assert name in kept
    paths = [tuple(int(key) if key.isdecimal() else key for key in name.split("/")) for name in kept]
    assert all(summed_axes(path) is None for path in paths)
    assert "layers/1/attention/v/values" not in dtypes  # its value is the key


def test_the_bytes_by_part(source, converted, capsys):
    parts = {}
    for name, path in {"source": source, **converted}.items():
        capsys.readouterr()
        assert main(["inspect", str(path), "--json", "--verify"][: None if name != "source" else 3]) == 0
        found = json.loads(capsys.readouterr().out)
        parts[name] = found["parts"]
        assert name == "source" or found["kind"] == f"converted (Orbax), quantised to {name}"
    for part in ("experts", "attention", "dense MLP", "embedding", "router", "vision"):
        counts = {name: found[part]["parameters"] for name, found in parts.items()}
        assert len(set(counts.values())) <= (2 if part == "attention" else 1), part
    whole, eight, four = (parts[name]["experts"]["bytes"] for name in ("source", "int8", "int4"))
    assert whole / 4 < eight < 1.1 * whole / 4 and whole / 8 < four < 1.13 * whole / 8
    assert parts["int4"]["embedding"] == parts["int8"]["embedding"]
    assert parts["int8"]["router"] == parts["source"]["router"]


def spoil(directory: Path, name: str, change) -> None:
    """Writes an item again with one tensor changed in place."""
    items = manifest(directory)["items"]
    (item,) = (item for item, entry in items.items() if name in entry["tensors"])
    names = list(items[item]["tensors"])
    arrays = orbax_files.restore(directory / "weights" / item, [orbax_files.keys_in_item(n) for n in names])
    tree: dict = {}
    for other, array in zip(names, arrays, strict=True):
        array = array.copy()
        if other == name:
            change(array)
        insert(tree, orbax_files.keys_in_item(other), array)
    shutil.rmtree(directory / "weights" / item)
    orbax_files.save(directory / "weights" / item, tree)


def test_bad_scales_are_refused_with_layer_and_experts(converted, tmp_path):
    directory = shutil.copytree(converted["int4"], tmp_path / "model")

    def zero_and_infinite(scales):
        scales[4, 0, 3] = 0
        scales[4, 1, 7] = 0
        scales[7, 1, 1] = np.inf
        scales[2, 0, 0] = np.nan

    def zero(scales):
        scales[3] = 0

    spoil(directory, "layers/1/experts/gate_up/scales", zero_and_infinite)
    spoil(directory, "embedder/table/scales", zero)
    with pytest.raises(WeightsError) as error:
        dg.load(directory)
    message = str(error.value)
    assert "layers/1/experts/gate_up/scales: 2 zero and 2 not finite, of experts 2, 4, 7;" in message
    assert "embedder/table/scales: 1 zero and 0 not finite, the first at [3, 0];" in message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.pop("layers/0/experts/down/scales"), "missing: layers/0/experts/down/scales"),
        (lambda tensors: tensors.pop("layers/0/mlp/up/values"), "missing: layers/0/mlp/up/values"),
        (
            lambda tensors: tensors["layers/0/mlp/up/values"].update(dtype="float32"),
            "layers/0/mlp/up/values: float32, expected int8",
        ),
    ],
)
def test_missing_and_mistaken_parts_are_named(change, words, converted, tmp_path):
    directory = shutil.copytree(converted["int8"], tmp_path / "model")
    found = manifest(directory)
    change(found["items"]["layer_000"]["tensors"])
    (directory / orbax_files.MANIFEST).write_text(json.dumps(found))
    with pytest.raises(WeightsError) as error:
        dg.load(directory)
    assert words in str(error.value)


def test_a_dtype_is_that_of_the_other_weights(source, converted, tmp_path):
    target = tmp_path / "half"
    convert_model(source, target, quantize="int8", dtype="bfloat16")
    model = dg.load(target)
    assert model.dtype == "bfloat16" and model.params["layers"][0]["router"]["proj"].dtype == jnp.bfloat16
    model = dg.load(converted["int8"], dtype="bfloat16")
    experts = model.params["layers"][1]["experts"]["down"]
    assert (experts["values"].dtype, experts["scales"].dtype, model.dtype) == (jnp.int8, jnp.float32, "bfloat16")
    assert leaf(model.params, ("final_norm", "scale")).dtype == jnp.bfloat16


def test_what_cannot_be_converted_is_refused(source, converted, tmp_path, capsys):
    target = tmp_path / "target"
    assert "quantised to int8; convert the model it was made from" in error_of(
        capsys, "convert", converted["int8"], target
    )
    assert "only written as Orbax items" in error_of(
        capsys, "convert", source, target, "--quantize", "int4", "--to", "hf"
    )
    narrow = write(tmp_path / "narrow", replace(SHAPE, expert_width=24))
    assert "moe_intermediate_size is 24; expected a multiple of 32 for int4" in error_of(
        capsys, "convert", narrow, target, "--quantize", "int4"
    )
    assert not target.exists()
    (source / "copy").mkdir()
    for file in ("config.json", "model.safetensors"):
        shutil.copy(source / file, source / "copy")
    fields = json.loads((source / "config.json").read_text())
    fields["quantization_config"] = json.loads((converted["int8"] / "config.json").read_text())["quantization_config"]
    (source / "copy" / "config.json").write_text(json.dumps(fields))
    assert "the weights are none of a converted model" in error_of(capsys, "inspect", source / "copy")


FOREIGN_TENSORS = {
    "layers.0.self_attn.q_proj.qweight": "gptq or awq",
    "layers.0.mlp.up_proj.weight.absmax": "bitsandbytes",
    "layers.0.mlp.up_proj.SCB": "bitsandbytes",
    "layers.1.experts.0.down_proj.weight_packed": "compressed-tensors",
    "layers.1.mlp.up_proj.weight_scale_inv": "fp8",
    "layers.1.experts.40.up_proj.input_scale": "fp8 or nvfp4",
}


@pytest.mark.parametrize("name", FOREIGN_TENSORS)
def test_foreign_tensors_are_refused_by_the_name_of_their_format(name, tmp_path):
    directory = write(tmp_path / "model", SHAPE)
    extra = {f"model.decoder.{name}": np.ones(3, np.float32)}
    save_file(random_tensors(SHAPE) | extra, directory / "model.safetensors")
    with pytest.raises(ValueError, match=f"is quantised as {FOREIGN_TENSORS[name]} .*{name}") as error:
        dg.load(directory)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("file", "kind"), [("quantize_config.json", "gptq"), ("hf_quant_config.json", "modelopt")])
def test_foreign_files_are_refused_by_the_name_of_their_format(file, kind, tmp_path):
    directory = write(tmp_path / "model", SHAPE)
    (directory / file).write_text("{}")
    with pytest.raises(ValueError, match=f"is quantised as {kind}"):
        dg.load(directory)


@pytest.mark.parametrize("method", ["bitsandbytes", "gptq", "awq", "fp8", "compressed-tensors", "gguf", "mxfp4"])
@pytest.mark.parametrize("field", ["quantization_config", "compression_config"])
def test_foreign_configs_are_refused_by_the_name_of_their_format(method, field, source):
    fields = json.loads((source / "config.json").read_text()) | {field: {"quant_method": method, "bits": 8}}
    with pytest.raises(ValueError, match=rf"^{field} \(quant_method '{method}'\) is not supported; .*--quantize"):
        dg.Config.from_hf(fields)


def test_the_report_against_the_source(source, converted, tmp_path, capsys):
    """A model is at no distance from itself, and with 8 bits nearer to its source than with 4."""
    prompts = tmp_path / "prompts.jsonl"
    sampling = {"max_denoising_steps": 3, "max_new_tokens": 40, "seed": 1}
    lines = [{"prompt": "Reverse 4 7", "sampling": sampling}, {"prompt": "Sort 9 3 8", "sampling": sampling}]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = {}
    for name, path in {"source": source, **converted}.items():
        assert main(["inspect", str(path), "--report", str(prompts), "--source", str(source), "--json"]) == 0
        found[name] = json.loads(capsys.readouterr().out)
        assert (found[name]["prompts"], found[name]["source"]) == (2, found["source"]["source"])
        assert 2 <= found[name]["steps"] <= 6 and 1 <= found[name]["source"]["steps_per_canvas"] <= 3
    assert found["source"]["rms_error"] == 0 and found["source"]["argmax_agreement"] == 1
    assert found["source"]["model"] == found["source"]["source"]
    assert 0 < 4 * found["int8"]["rms_error"] < found["int4"]["rms_error"] < found["int4"]["source_rms"]
    assert found["int4"]["argmax_agreement"] <= found["int8"]["argmax_agreement"] <= 1


def test_what_cannot_be_compared_is_refused(source, converted, tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "Sort 9"}\n{"prompt": ""}\n')
    report = ("inspect", converted["int8"], "--report", prompts)
    assert "--report PROMPTS and --source MODEL go together" in error_of(capsys, *report)
    assert "line 2: prompt is ''; expected text" in error_of(capsys, *report, "--source", source)
    prompts.write_text("\n")
    assert "there are no prompts" in error_of(capsys, *report, "--source", source)
    prompts.write_text('{"prompt": "Sort 9"}\n')
    assert "the models differ in hidden_size, " in error_of(capsys, *report, "--source", "tiny")
