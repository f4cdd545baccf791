"""`dgemma bench step` and `dgemma train tiny`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dgemma_jax import cli_bench_step
from dgemma_jax.cli import main
from dgemma_jax.train import tiny
from tests.parity.checkpoints import write
from tests.test_cli import SMALL


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("model"), SMALL)


def step(capsys, *arguments: object) -> tuple[int, str, str]:
    code = main(["bench", "step", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_step_is_measured(directory):
    """In a process of its own: the checks of shapes that pytest switches on do not take the compiler's descriptions."""
    asked = ["--model", str(directory), "--slots", "2", "--prefix", "5", "--dtype", "float32", "--json"]
    command = [sys.executable, "-m", "dgemma_jax.cli", "bench", "step", *asked]
    told = subprocess.run([*command, "--attention-implementation", "reference"], capture_output=True, check=True)
    found = json.loads(told.stdout)
    chosen = {"model": str(directory), "slots": 2, "prefix": 5, "dtype": "float32", "device": "cpu"}
    assert {name: found[name] for name in chosen} == chosen
    assert (found["attention"], found["experts"]) == ("reference", "xla")
    assert 0 < found["fastest_ms"] <= found["median_ms"] < 60_000 and found["temporary_bytes"] > 0


def test_the_figures_are_a_table_for_people(directory, capsys, monkeypatch):
    figures = dict.fromkeys(("median_ms", "fastest_ms"), 1.5) | dict.fromkeys(("attention", "experts", "dtype"), "word")
    monkeypatch.setattr(
        cli_bench_step,
        "measure",
        lambda _, slots, prefix: figures | {"slots": slots, "prefix": prefix, "temporary_bytes": 4096},
    )
    code, out, _ = step(capsys, "--model", directory)
    lines = out.splitlines()
    assert code == 0 and len(lines) == 1 + len(cli_bench_step.ROWS)
    assert str(directory) in lines[0] and lines[1].split() == ["Canvases", "1"] and lines[-1].endswith("4,096")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--slots", 0), "slots is 0; expected 1"),
        (("--slots", -3), "slots is -3; expected 1"),
        (("--prefix", -1), "prefix is -1; expected 0 .. 4095"),
        (("--prefix", 4096), "prefix is 4096; expected 0 .. 4095"),
        (("--attention-implementation", "sdpa"), "attention_implementation is 'sdpa'"),
        (("--pipeline-parallel-size", 2), "pipeline_parallel_size is 2"),
    ],
)
def test_what_cannot_be_measured_is_one_line(capsys, arguments, expected):
    code, out, err = step(capsys, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("dgemma: error: ") and expected in err


def test_slots_that_memory_does_not_hold_are_refused(capsys, monkeypatch):
    monkeypatch.setattr("dgemma_jax.engine.capacity.free_bytes", lambda *_, **__: 1 << 20)
    code, _, err = step(capsys, "--slots", 8)
    assert code == 2 and "8 slots of 96 positions take" in err.splitlines()[-1]


def test_training_is_the_trainers(monkeypatch, tmp_path, capsys):
    runs = []
    monkeypatch.setattr(tiny, "train", lambda *paths: runs.append(paths))
    assert main(["train", "tiny", "--out", str(tmp_path), "--run", "state"]) == 0
    assert main(["train", "tiny"]) == 0
    tiny.main([])
    assert runs == [
        (tmp_path, Path("state")),
        (Path("runs/tiny/model"), Path("runs/tiny")),
        (tiny.OUT, Path("runs/tiny")),
    ]
    assert (tiny.OUT / "model.safetensors").exists()
    with pytest.raises(SystemExit) as leave:
        main(["train", "tiny", "--steps", "3"])
    assert leave.value.code == 2 and "dgemma train tiny --help" in capsys.readouterr().err


def test_without_the_trainers_packages_it_says_what_to_install():
    code = (
        "import sys; sys.modules['optax'] = None; from dgemma_jax.cli import main;assert main(['train', 'tiny']) == 2"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stderr == "dgemma: error: optax is not installed; pip install 'dgemma-jax[train]'\n"


@pytest.mark.parametrize("command", [["bench", "step"], ["train", "tiny"]])
def test_the_flags_need_nothing_heavy(command):
    code = (
        f"import sys; from dgemma_jax.cli import _parser; _parser().parse_args({command});"
        "assert not {'jax', 'flax', 'numpy', 'rich', 'optax', 'torch'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_step_needs_neither_torch_nor_the_tests():
    code = (
        "import sys; from dgemma_jax.cli import main; assert main(['bench', 'step', '--prefix', '-1']) == 2;"
        "import dgemma_jax.cli_bench_step; assert not {'torch', 'tests', 'transformers'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
