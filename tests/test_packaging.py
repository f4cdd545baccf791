"""What an installation contains, and what importing it costs."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = ("jax", "flax", "numpy", "tokenizers", "transformers", "rich")


def python(code, **options):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "code", ["import dgemma_jax; dir(dgemma_jax)", "from dgemma_jax import cli; cli._parser().format_help()"]
)
def test_importing_the_package_loads_nothing_heavy(code):
    loaded = python(f"import sys; {code}; print(*{{name.split('.')[0] for name in sys.modules}})").split()
    assert not set(HEAVY) & set(loaded)


def test_plain_data_and_the_text_layer_need_no_jax():
    python(
        "import sys, dgemma_jax as dg, dgemma_jax.text\n"
        "dg.Config, dg.Sampling, dg.UNSET, dg.Completion, dg.ChatMessage, dg.Draft, dg.Canvas, dg.Finished, dg.tiny()\n"
        "assert 'jax' not in sys.modules and 'flax' not in sys.modules"
    )


def test_every_public_name_exists():
    python("import dgemma_jax as dg; [getattr(dg, name) for name in dg.__all__]")
    with pytest.raises(AttributeError, match="nonsense"):
        import dgemma_jax

        dgemma_jax.nonsense  # noqa: B018


def test_the_top_level_folders_are_no_packages():
    """`kernels` and `convert` are names on PyPI; transformers imports the first."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert not (ROOT / "convert" / "__init__.py").exists()


@pytest.mark.slow
def test_the_wheel_runs_elsewhere(tmp_path):
    source = tmp_path / "source"  # a copy: setuptools leaves its build folder behind, and would pack what lies in it
    source.mkdir()
    for name in ("dgemma_jax", "kernels", "convert"):
        shutil.copytree(ROOT / name, source / name, symlinks=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"]
    subprocess.run([*command, "--wheel-dir", str(tmp_path), str(source)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(site)
    top = {name.split("/")[0] for name in names}
    assert top == {"dgemma_jax", next(name for name in top if name.endswith(".dist-info"))}
    assert "dgemma_jax/kernels/mixed_attention/reference.py" in names
    assert "dgemma_jax/convert/hf.py" in names
    assert "dgemma_jax/assets/tiny/model.safetensors" in names
    assert "dgemma_jax/serve/static/index.html" in names
    code = (
        "import dgemma_jax as dg; print(dg.__file__)\n"
        "model = dg.load('tiny')\n"
        "assert model.generate(['hi'], dg.Sampling(max_new_tokens=2, max_denoising_steps=1), seed=1)[0].steps == [1]"
    )
    environment = os.environ | {"PYTHONPATH": str(site), "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    where = python(code, cwd=tmp_path, env=environment)
    assert Path(where.splitlines()[0]).is_relative_to(site)
