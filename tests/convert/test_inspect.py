"""`dgemma inspect` and what `dgemma convert` prints."""

import io
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from rich.console import Console

from dgemma_jax import cli_convert, inspection
from dgemma_jax.cli import main
from dgemma_jax.config import gemma_26b_a4b
from dgemma_jax.convert import hf
from dgemma_jax.convert.table import leaf
from dgemma_jax.model.transformer import build
from tests.convert.convert_helpers import convert_model, manifest
from tests.convert.test_google import FORMS, tied_tensors, write_tree
from tests.parity.checkpoints import WIDE, tensor_shapes, write

SMALL = replace(WIDE, layers="SF")


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    directory = write(tmp_path_factory.mktemp("source"), SMALL)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<pad>"))
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    return directory


@pytest.fixture(scope="module")
def converted(source, tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("converted") / "model"
    convert_model(source, target, dtype="bfloat16")
    return target


def run(capsys, *arguments) -> str:
    """What a command that succeeds prints."""
    capsys.readouterr()
    assert main([*map(str, arguments)]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


def test_json(source, converted, capsys):
    first, second = (json.loads(run(capsys, "inspect", path, "--json")) for path in (source, converted))
    shapes = tensor_shapes(SMALL)
    parameters = sum(map(math.prod, shapes.values()))
    for found, width, dtype in ((first, 4, "float32"), (second, 2, "bfloat16")):
        assert found["parameters"] == parameters == sum(part["parameters"] for part in found["parts"].values())
        assert found["bytes"] == width * parameters == sum(part["bytes"] for part in found["parts"].values())
        assert found["dtype"] == dtype and found["dtypes"] == {dtype: len(shapes)}
        assert found["stop_ids"] == [{"id": 1, "token": "<eos>"}] and found["tokenizer"] is True
        assert found["template"]["file"] == "tokenizer_config.json" and found["template"]["characters"] == 14
        assert found["config"]["hidden_size"] == 64 and "tensors" not in found
    assert (first["kind"], second["kind"]) == ("Hugging Face (safetensors)", "converted (Orbax)")
    experts = sum(math.prod(shape) for name, shape in shapes.items() if ".experts." in name)
    assert first["parts"]["experts"]["parameters"] == experts
    vision = first["parts"]["vision"]["parameters"]
    assert first["active_parameters"] == parameters - vision - experts * 6 // 10


def test_tensors(source, converted, capsys):
    tensors = json.loads(run(capsys, "inspect", source, "--json", "--tensors"))["tensors"]
    assert {tensor["tensor"]: tuple(tensor["shape"]) for tensor in tensors}.keys() == tensor_shapes(SMALL).keys()
    out = run(capsys, "inspect", converted, "--tensors")
    assert "layers/1/experts/gate_up  bfloat16[10,64,32]  40,960 bytes  <- layers/1/experts/gate_up\n" in out


def test_text(source, converted, capsys):
    out = run(capsys, "inspect", source)
    for words in ("1 sliding (window 12), 1 full", "4 of 10 experts of 16", "stop ids    1 <eos>", "14 characters"):
        assert words in out
    assert "verified" not in out and f"verified    {len(tensor_shapes(SMALL))} tensors" in run(
        capsys, "inspect", converted, "--verify"
    )


def test_the_parts_of_the_26b_and_what_a_token_uses():
    config = gemma_26b_a4b()
    _, abstract = build(config)
    tensors = []
    for entry in hf.table(config).values():
        count = int(np.prod(leaf(abstract, entry.path).shape, dtype=np.int64))
        tensors.append({"part": inspection.part_of(entry.path), "parameters": count, "bytes": 2 * count})
    parts = {name: part["parameters"] for name, part in inspection._parts(tensors).items()}
    assert parts["experts"] == 30 * 128 * 3 * 704 * 2816 and parts["embedding"] == 262_144 * 2816
    assert sum(parts.values()) - parts["vision"] == 25_250_986_782 + 30, "the tree with one scalar a layer, and 30 more"
    assert round(inspection._active(tensors, config) / 1e9, 1) == 3.8


def test_a_template_file_comes_first_and_none_is_said(source, tmp_path, capsys):
    directory = write(tmp_path / "model", SMALL)
    assert "none in the directory" in run(capsys, "inspect", directory)
    (directory / "chat_template.jinja").write_text("{# ours #}")
    (directory / "tokenizer_config.json").write_text('{"chat_template": "other"}')
    assert "template    chat_template.jinja, 10 characters" in run(capsys, "inspect", directory)


def test_convert_says_what_it_did(source, tmp_path, capsys):
    out = run(capsys, "convert", source, tmp_path / "target")
    assert out.startswith(f"{tmp_path / 'target'}: 4 items, 0.001 GB in ") and out.count("\n") == 1
    assert len(manifest(tmp_path / "target")["items"]) == 4


def test_the_single_scalar_of_googles_tree_is_said(tmp_path, capsys):
    directory = write_tree(tmp_path / "google", FORMS["nested"](tied_tensors()))
    assert "one skip_scale per layer fills both" in run(capsys, "inspect", directory)
    assert main(["convert", str(directory), str(tmp_path / "target")]) == 0
    assert capsys.readouterr().err == "dgemma: one skip_scale per layer fills both encoder_scalar and decoder_scalar\n"


def test_progress_shows_bytes_rate_and_time_left_on_a_terminal(monkeypatch):
    for terminal in (True, False):
        out = io.StringIO()
        console = Console(file=out, force_terminal=terminal, width=100)
        monkeypatch.setattr(cli_convert, "Console", lambda console=console, **options: console)
        with cli_convert.byte_progress() as progress:
            progress(1_000_000, 4_000_000)
            progress(2_000_000, 4_000_000)
        assert ("2.0/4.0 MB" in out.getvalue()) is terminal
