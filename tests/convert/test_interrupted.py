"""Conversions that are killed, resumed, or find something else in their place."""

import fcntl
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from dgemma_jax.checkpoint import open_directory
from dgemma_jax.convert.conversion import OrbaxTarget
from dgemma_jax.convert.destination import JOURNAL, Destination
from dgemma_jax.convert.orbax_files import MANIFEST
from tests.convert.convert_helpers import (
    assert_same_params,
    contents,
    convert_model,
    convert_until,
    in_child,
    manifest,
    params_of,
)
from tests.parity.checkpoints import NARROW, WIDE, write

SMALL = replace(WIDE, layers="SF")
KILLS = 10


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("source"), SMALL)


@pytest.mark.parametrize("to", ["orbax", "hf"])
def test_killed_at_ten_points_and_resumed(source, tmp_path, to):
    whole, count = tmp_path / "whole", tmp_path / "count"
    assert in_child(convert_until, None, count, source, whole, {"to": to}) == 0
    before, events = contents(source), int(count.read_text())
    wanted, finished = params_of(whole), 0
    for number in range(KILLS):
        target = tmp_path / f"killed_{number}"
        kill_at = 1 + number * (events - 1) // (KILLS - 1)
        assert in_child(convert_until, kill_at, count, source, target, {"to": to}) == -9
        with pytest.raises(ValueError, match=r"unfinished conversion|no config\.json|there is no model directory"):
            open_directory(target)
        summary = convert_model(source, target, to=to)
        finished += summary.kept
        assert_same_params(params_of(target), wanted)
        assert contents(target).keys() == contents(whole).keys() if to == "hf" else manifest(target) == manifest(whole)
        assert not summary.damaged and not (target / JOURNAL).exists()
    assert finished > 0, "some of the runs must have got far enough to keep items"
    assert contents(source) == before


@pytest.fixture
def half(source, tmp_path, monkeypatch) -> Path:
    """A target whose conversion stopped after two items."""
    interrupt(source, tmp_path / "half", monkeypatch)
    return tmp_path / "half"


def interrupt(source, target, monkeypatch) -> None:
    write_item = OrbaxTarget.write

    def stops(self, item, arrays):
        if item == "layer_001":
            raise KeyboardInterrupt
        write_item(self, item, arrays)

    monkeypatch.setattr(OrbaxTarget, "write", stops)
    with pytest.raises(KeyboardInterrupt):
        convert_model(source, target)
    monkeypatch.undo()


def test_finished_items_are_kept(source, half):
    written = (half / "weights" / "layer_000" / "_METADATA").stat().st_mtime_ns
    summary = convert_model(source, half)
    assert (summary.kept, summary.damaged, summary.items) == (2, [], 4)
    assert (half / "weights" / "layer_000" / "_METADATA").stat().st_mtime_ns == written
    assert_same_params(params_of(half), params_of(source))


def spoil_bytes(path: Path) -> None:
    """Turns one byte in the middle of the largest file below `path`."""
    largest = max((file for file in path.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[len(data) // 2] ^= 1
    largest.write_bytes(data)


@pytest.mark.parametrize("spoil", [spoil_bytes, shutil.rmtree])
def test_items_are_not_trusted_blindly(source, half, spoil):
    spoil(half / "weights" / "layer_000")
    summary = convert_model(source, half)
    assert (summary.kept, summary.damaged) == (1, ["layer_000"])
    assert_same_params(params_of(half), params_of(source))


def test_what_is_half_written_is_cleared(source, half):
    (half / "weights" / "vision.orbax-checkpoint-tmp").mkdir()
    convert_model(source, half)
    assert {path.name for path in (half / "weights").iterdir()} == {"embedding", "layer_000", "layer_001", "vision"}


def test_an_unfinished_conversion_does_not_open(source, half):
    with pytest.raises(ValueError, match=f"unfinished conversion, 2 items .* `dgemma convert {source} {half}`"):
        open_directory(half)


def test_another_job_does_not_resume(source, half, tmp_path):
    with pytest.raises(ValueError, match=r"to orbax in its own dtype; run that one again, or add --overwrite"):
        convert_model(source, half, dtype="bfloat16")
    with pytest.raises(ValueError, match="unfinished conversion"):
        convert_model(source, half, to="hf")
    summary = convert_model(source, half, to="hf", overwrite=True)
    assert summary.kept == 0 and not (half / "weights").exists()
    assert_same_params(params_of(half), params_of(source))


def test_a_source_that_changed_does_not_resume(source, tmp_path, monkeypatch):
    copy = Path(shutil.copytree(source, tmp_path / "copy"))
    interrupt(copy, tmp_path / "target", monkeypatch)
    os.utime(copy / "model.safetensors", ns=(0, 0))
    with pytest.raises(ValueError, match=r"whose files have changed since, or add --overwrite"):
        convert_model(copy, tmp_path / "target")


@pytest.mark.parametrize("text", ["{", "[]", '{"items": 3}'])
def test_a_broken_journal(source, half, text):
    (half / JOURNAL).write_text(text)
    with pytest.raises(ValueError, match=f"{JOURNAL} is no journal"):
        convert_model(source, half)


def test_existing_targets(source, tmp_path):
    target = tmp_path / "target"
    convert_model(source, target)
    before = contents(target)
    with pytest.raises(ValueError, match="exists and is not empty; choose another directory, or add --overwrite"):
        convert_model(source, target)
    assert contents(target) == before
    other = write(tmp_path / "other", NARROW)
    (target / "tokenizer.json").write_text("of the old model")
    (target / "mine.txt").write_text("keep")
    convert_model(other, target, overwrite=True)
    assert_same_params(params_of(target), params_of(other))
    assert not (target / "tokenizer.json").exists() and (target / "mine.txt").read_text() == "keep"
    assert "vision" not in manifest(target)["items"]


def test_overwriting_another_layout(source, tmp_path):
    target = write(tmp_path / "target", NARROW)
    convert_model(source, target, overwrite=True)
    assert not list(target.glob("*.safetensors")) and (target / MANIFEST).exists()
    convert_model(source, target, to="hf", overwrite=True)
    assert not (target / MANIFEST).exists() and not (target / "weights").exists()
    assert_same_params(params_of(target), params_of(source))


def test_directories_that_are_no_models_are_not_overwritten(source, tmp_path):
    target = tmp_path / "home"
    (target / "weights").mkdir(parents=True)
    (target / "weights" / "of_mine").touch()
    with pytest.raises(ValueError, match="holds no model, and nothing else is overwritten"):
        convert_model(source, target, overwrite=True)
    assert (target / "weights" / "of_mine").exists()


def test_source_and_target_must_be_apart(source, tmp_path):
    before = contents(source)
    (tmp_path / "link").symlink_to(source)
    for target in (source, tmp_path / "link"):
        with pytest.raises(ValueError, match="is the source itself"):
            convert_model(source, target, overwrite=True)
    for target in (source / "inside", tmp_path / "link" / "inside", source.parent):
        with pytest.raises(ValueError, match="source and target must be apart"):
            convert_model(source, target, overwrite=True)
    assert contents(source) == before


def test_one_conversion_at_a_time(source, tmp_path):
    (tmp_path / "target").mkdir()
    descriptor = os.open(tmp_path / "target", os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with pytest.raises(ValueError, match="is being written by another conversion"):
        convert_model(source, tmp_path / "target")
    os.close(descriptor)
    convert_model(source, tmp_path / "target")


def test_the_journal_says_what_is_written(source, half):
    journal = json.loads((half / JOURNAL).read_text())
    assert list(journal["items"]) == ["embedding", "layer_000"]
    assert journal["source"]["directory"] == str(source)


def test_killed_while_the_old_model_is_cleared(source, tmp_path, monkeypatch):
    target = tmp_path / "target"
    convert_model(source, target)
    with monkeypatch.context() as patched:
        patched.setattr(Destination, "_clear", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            convert_model(source, target, to="hf", overwrite=True)
    convert_model(source, target, to="hf")
    assert not (target / MANIFEST).exists() and not (target / "weights").exists()
    assert_same_params(params_of(target), params_of(source))
