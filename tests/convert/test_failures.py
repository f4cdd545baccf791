"""Conversions that cannot be done and models that are damaged: one line that names what, and the source untouched."""

import json
import os
import re
import resource
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from dgemma_jax.checkpoint import open_directory
from dgemma_jax.cli import main
from dgemma_jax.convert import destination, orbax_files
from dgemma_jax.convert.conversion import verify
from dgemma_jax.convert.weights import WeightsError
from tests.convert.convert_helpers import contents, convert_model, in_child, params_of
from tests.parity.checkpoints import WIDE, random_tensors, write

SMALL = replace(WIDE, layers="SF")


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("original"), SMALL)


@pytest.fixture(scope="module")
def converted_once(original, tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("converted") / "model"
    convert_model(original, target)
    return target


@pytest.fixture
def source(original, tmp_path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "source"))


@pytest.fixture
def converted(converted_once, tmp_path) -> Path:
    return Path(shutil.copytree(converted_once, tmp_path / "converted"))


def error_of(capsys, *arguments: str) -> str:
    """The one line that a command which must fail writes to standard error."""
    capsys.readouterr()
    assert main([*map(str, arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("dgemma: error: ") and err.count("\n") == 1, err
    return err


def limited(size: int, arguments: list[str], errors: Path) -> None:
    """The command in a process that may not write files larger than `size`; its standard error goes to a file."""
    with open(errors, "w") as file:
        os.dup2(file.fileno(), 2)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    sys.exit(main(arguments))


@pytest.mark.parametrize("to", ["orbax", "hf"])
def test_a_write_that_fails_keeps_what_is_written(source, tmp_path, to):
    """A limit on the size of files, which the embedding's item alone exceeds, stands for a full disk."""
    before, errors = contents(source), tmp_path / "errors"
    arguments = ["convert", str(source), str(tmp_path / "target"), "--to", to]
    assert in_child(limited, 400_000, arguments, errors) == 2
    err = errors.read_text()
    assert err.startswith("dgemma: error: embedding cannot be written to") and err.count("\n") == 1, err
    assert "run the same command again" in err and re.search("too large|EFBIG|27", err)
    with pytest.raises(ValueError, match="unfinished conversion"):
        open_directory(tmp_path / "target")
    assert contents(source) == before
    convert_model(source, tmp_path / "target", to=to)


def test_too_little_room_is_told_before_anything_is_written(source, tmp_path, monkeypatch, capsys):
    usage = shutil.disk_usage(tmp_path)._replace(free=1_000_000)
    monkeypatch.setattr(destination.shutil, "disk_usage", lambda path: usage)
    err = error_of(capsys, "convert", source, tmp_path / "target")
    assert re.search(r"target needs 1\.3 MB more, 1\.0 MB are free; make room", err)


def test_targets_that_cannot_be_made(source, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    assert "is a file; expected a directory" in error_of(capsys, "convert", source, tmp_path / "file")
    assert "Not a directory" in error_of(capsys, "convert", source, tmp_path / "file" / "below")
    (tmp_path / "link").symlink_to(tmp_path / "nothing" / "there")
    (tmp_path / "nothing").touch()
    assert "Not a directory" in error_of(capsys, "convert", source, tmp_path / "link")

    def refuse(path, *arguments, **options):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(destination, "write_json", refuse)  # root may write everywhere
    assert re.search(r"Permission denied: .*target", error_of(capsys, "convert", source, tmp_path / "target"))


def test_a_wrong_config_names_both_shapes_and_makes_nothing(source, tmp_path, capsys):
    fields = json.loads((source / "config.json").read_text())
    fields["text_config"]["moe_intermediate_size"] = 17
    (source / "config.json").write_text(json.dumps(fields))
    assert main(["convert", str(source), str(tmp_path / "target")]) == 2
    err = capsys.readouterr().err
    assert "experts.gate_up_proj: [10, 32, 64], the config asks for [10, 34, 64]" in err
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize(("file", "text"), [("tokenizer.json", ""), ("generation_config.json", "[]")])
def test_what_is_only_copied_is_read_before_anything_is_replaced(source, tmp_path, capsys, file, text):
    (source / file).write_text(text)
    assert file in error_of(capsys, "convert", source, tmp_path / "target")
    assert not (tmp_path / "target").exists()


def shards(source: Path) -> None:
    """Splits the model into two files."""
    tensors = random_tensors(SMALL)
    names = sorted(tensors)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in files.items():
        save_file({name: tensors[name] for name in held}, source / file)
    index = {"weight_map": {name: file for file, held in files.items() for name in held}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    (source / "model.safetensors").unlink()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("read", [orbax_files.restore, orbax_files.headers])
def test_an_item_that_is_not_there_is_missing_whoever_asks(tmp_path, read):
    with pytest.raises(ValueError, match=r"weights/nothing is missing; "):
        read(tmp_path / "weights/nothing", [("a",)])


@pytest.mark.parametrize(("spoil", "words"), [(Path.unlink, "missing"), (cut, "cannot be read")])
def test_a_missing_or_cut_shard_is_named(source, tmp_path, capsys, spoil, words):
    shards(source)
    spoil(source / "b.safetensors")
    err = error_of(capsys, "convert", source, tmp_path / "target")
    assert re.search(rf"b\.safetensors: {words}.*download it again", err)
    assert not (tmp_path / "target").exists()


def test_values_that_are_not_finite_or_do_not_fit(source, tmp_path):
    tensors = random_tensors(SMALL)
    tensors["model.decoder.layers.0.mlp.up_proj.weight"][1, 2] = np.nan
    tensors["model.decoder.layers.1.router.scale"][3] = np.inf
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(WeightsError, match="2 problems") as error:
        convert_model(source, tmp_path / "target")
    assert [problem.kind for problem in error.value.problems] == ["not finite"] * 2
    tensors = random_tensors(SMALL)
    tensors["model.decoder.norm.weight"][0] = np.finfo(np.float32).max
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(WeightsError, match="1 of 64 values as bfloat16"):
        convert_model(source, tmp_path / "other", dtype="bfloat16")


def test_foreign_models_are_refused_by_name(source, tmp_path, capsys):
    fields = json.loads((source / "config.json").read_text())
    for changed, words in (
        ({"model_type": "gemma4"}, "model_type is 'gemma4'; expected 'diffusion_gemma'"),
        ({"quantization_config": {"quant_method": "nvfp4"}}, "quant_method 'nvfp4'"),
    ):
        (source / "config.json").write_text(json.dumps(fields | changed))
        assert words in error_of(capsys, "convert", source, tmp_path / "target")
        assert words in error_of(capsys, "inspect", source)
    assert "GGUF" in error_of(capsys, "convert", source / "model.gguf", tmp_path / "target")


def largest(directory: Path) -> Path:
    return max((path for path in directory.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def remove_metadata(item: Path) -> None:
    (item / "_METADATA").unlink()


def empty_metadata(item: Path) -> None:
    (item / "_METADATA").write_text("")


def remove_data(item: Path) -> None:
    largest(item).unlink()


def cut_data(item: Path) -> None:
    path = largest(item)
    path.write_bytes(path.read_bytes()[:100])


def remove_root(item: Path) -> None:
    (item / "manifest.ocdbt").unlink()


SPOILS: list[Callable[[Path], None]] = [
    shutil.rmtree,
    remove_metadata,
    empty_metadata,
    remove_data,
    cut_data,
    remove_root,
]


@pytest.mark.parametrize("spoil", SPOILS, ids=lambda spoil: spoil.__name__)
def test_a_damaged_item_is_named(converted, tmp_path, capsys, spoil):
    spoil(converted / "weights" / "layer_001")
    with pytest.raises(ValueError, match=r"weights/layer_001.*the item is damaged: convert again") as error:
        params_of(converted)
    assert "\n" not in str(error.value)
    assert "layer_001" in error_of(capsys, "convert", converted, tmp_path / "target", "--to", "hf")
    assert "layer_001" in error_of(capsys, "inspect", converted, "--verify")


def flip(item: Path) -> str:
    """Flips one bit of a stored matrix; the name of its tensor."""
    name, array = "layers/1/experts/down", np.asarray(params_of(item.parents[1])["layers"][1]["experts"]["down"])
    for path in item.rglob("*"):
        data = bytearray(path.read_bytes()) if path.is_file() else bytearray()
        at = data.find(array.tobytes()[:64])
        if at >= 0:
            data[at + 8] ^= 1
            path.write_bytes(data)
            return name
    raise AssertionError("the matrix is stored uncompressed in one piece")


def test_flipped_bits_are_found_by_their_checksum(converted, tmp_path, capsys):
    name = flip(converted / "weights" / "layer_001")
    err = error_of(capsys, "inspect", converted, "--verify")
    assert re.search(rf"1 of 4 items are damaged: .*weights/layer_001: {name} has other values", err)
    assert name in error_of(capsys, "convert", converted, tmp_path / "target", "--to", "hf")
    params_of(converted)  # loading compares no checksums


def test_an_intact_model_is_verified(converted, original):
    opened = open_directory(converted, verify=True)
    assert verify(opened.weights, opened.abstract) == len(opened.weights.rows)
    opened = open_directory(original, verify=True)
    with pytest.raises(ValueError, match="has no checksums; only directories written by dgemma convert"):
        verify(opened.weights, opened.abstract)


def test_a_manifest_that_says_something_else(converted):
    path = converted / orbax_files.MANIFEST
    manifest = json.loads(path.read_text())
    header = manifest["items"]["layer_000"]["tensors"]["layers/0/router/scale"]
    header["dtype"] = "bfloat16"
    path.write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"layers/0/router/scale is float32\[64\], recorded as bfloat16\[64\]"):
        params_of(converted)
    header["dtype"] = "int8"
    path.write_text(json.dumps(manifest))
    with pytest.raises(WeightsError, match="int8, expected one of bfloat16"):
        params_of(converted)
    for text, words in (("{", "is no manifest"), ("[]", "is no manifest"), ('{"version": 2}', "has version 2")):
        path.write_text(text)
        with pytest.raises(ValueError, match=words):
            params_of(converted)


def test_a_config_that_changed_after_the_conversion(converted):
    path = converted / "config.json"
    fields = json.loads(path.read_text())
    fields["text_config"] |= {"sliding_window": 13, "intermediate_size": 57}
    path.write_text(json.dumps(fields))
    with pytest.raises(WeightsError) as error:
        params_of(converted)
    message = str(error.value)
    assert "config: sliding_window: 13 in config.json, but 12 when converted; convert again" in message
    assert "[64, 56], the config asks for [64, 57]" in message


def test_options_that_do_not_exist(source, tmp_path):
    with pytest.raises(ValueError, match="dtype is 'int8'; expected one of bfloat16, float32"):
        convert_model(source, tmp_path / "target", dtype="int8")
    with pytest.raises(ValueError, match="to is 'gguf'; expected one of orbax, hf"):
        convert_model(source, tmp_path / "target", to="gguf")
