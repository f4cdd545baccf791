"""What an installation contains, and what importing it costs."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RUN = {"capture_output": True, "text": True, "check": True}
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
def test_the_wheel_that_is_made_of_the_sdist_runs_elsewhere(tmp_path):
    source = tmp_path / "source"  # a copy: setuptools leaves its build folder behind, and would pack what lies in it
    source.mkdir()
    for name in ("dgemma_jax", "kernels", "convert"):
        shutil.copytree(ROOT / name, source / name, symlinks=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    python(f"import setuptools.build_meta as build; build.build_sdist({str(tmp_path)!r})", cwd=source)
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    unpacked = tmp_path / sdist.name.removesuffix(".tar.gz")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--quiet"]
    subprocess.run([*command, "--wheel-dir", str(tmp_path), str(unpacked)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    top = {name.split("/")[0] for name in names}
    assert top == {"dgemma_jax", next(name for name in top if name.endswith(".dist-info"))}
    assert "dgemma_jax/kernels/mixed_attention/reference.py" in names
    assert "dgemma_jax/convert/hf.py" in names
    assert "dgemma_jax/assets/tiny/model.safetensors" in names
    assert "dgemma_jax/serve/static/index.html" in names
    home = installed(wheel, tmp_path / "env")
    where = {"cwd": tmp_path, "env": {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}}
    found = subprocess.run(
        [home / "python", "-c", "import dgemma_jax; print(dgemma_jax.__file__)"], **RUN, **where
    ).stdout
    assert Path(found).is_relative_to(home.parent)
    answer = subprocess.run(
        [home / "dgemma", "generate", "Reverse this list: 12 7 93 4", "--seed", "1"], **RUN, **where
    )
    assert answer.stdout == "4 93 7 12\n"


def installed(wheel: Path, home: Path) -> Path:
    """The programs of a virtual environment that has the wheel, and what it needs from the environment of the tests."""
    venv.create(home, with_pip=False)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)}))
    # By its path alone, so that the editable installation of the tests, which another .pth makes, is not seen.
    (site / "tests.pth").write_text(sysconfig.get_path("purelib") + "\n")
    command = [sys.executable, "-m", "pip", "--python", home / "bin" / "python", "install"]
    subprocess.run([*command, "--no-deps", "--no-index", "--force-reinstall", "--quiet", wheel], check=True)
    return home / "bin"
