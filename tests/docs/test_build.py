"""The documentation builds without a warning."""

import subprocess
import sys

import pytest

from tests.docs.blocks import ROOT


@pytest.mark.slow
def test_the_documentation_builds_strictly(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    page = (tmp_path / "api/index.html").read_text()
    for wanted in ("dgemma_jax.Model.generate", "dgemma_jax.kernels.mixed_attention.mixed_attention"):
        assert f'id="{wanted}"' in page
