"""`benchmarks/gpu.py --small` runs every case on a CPU, in a copy whose symlinks and small packages are missing."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(root: Path, output: Path, first: Path) -> tuple[subprocess.CompletedProcess, dict]:
    command = [sys.executable, str(root / "benchmarks/gpu.py"), "--small", "--output", str(output)]
    environment = os.environ | {"PYTHONPATH": str(first), "JAX_PLATFORMS": "cpu", "PYTHONDONTWRITEBYTECODE": ""}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=output.parent, env=environment)
    return done, json.loads(output.read_text())


@pytest.mark.slow
def test_every_case_runs_in_a_copy_without_symlinks(tmp_path):
    copy = tmp_path / "copy"
    for folder in ("benchmarks", "kernels", "convert"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__", "results"))
    skipped = shutil.ignore_patterns("__pycache__", "assets", "kernels", "convert")
    shutil.copytree(ROOT / "dgemma_jax", copy / "dgemma_jax", ignore=skipped)
    without = tmp_path / "without"
    without.mkdir()
    (without / "jaxtyping.py").write_text("raise ImportError('not here')\n")
    done, report = run(copy, tmp_path / "gpu.json", without)
    assert done.returncode == 0, done.stdout + done.stderr
    cases = [line["case"] for line in report["lines"]]
    assert not [line for line in report["lines"] if "failed" in line or "left out" in line]
    for start in ("device", "numerics, attention", "numerics, experts", "numerics, vocabulary head", "layer, sliding"):
        assert any(case.startswith(start) for case in cases), start
    for start in ("vocabulary head", "step, 1 rows, prefix", "step, 2 rows, prefix", "attention, full", "experts, 9"):
        assert any(case.startswith(start) for case in cases), start
    assert all(line["right"] for line in report["lines"] if line["case"].startswith("numerics"))
    assert "left out: attention_implementation is 'triton'" in done.stdout
    assert list(copy.glob("kernels/mixed_attention/__pycache__/*"))  # the copy was run, not this checkout
