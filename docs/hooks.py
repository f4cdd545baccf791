"""For mkdocs: lets the API reference be read from a copy in which kernels/ and convert/ are ordinary packages.

griffe, which reads docstrings for mkdocstrings, does not look into folders without `__init__.py`; the two must not have
one, see the design page.
"""

import shutil
import tempfile
from pathlib import Path

from mkdocs.plugins import event_priority

ROOT = Path(__file__).parents[1]
COPY = tempfile.TemporaryDirectory(prefix="dgemma-jax-docs-")  # gone with the process


@event_priority(100)  # before mkdocstrings
def on_config(config):
    """Called by mkdocs."""
    package = Path(COPY.name, "dgemma_jax")
    ignored = shutil.ignore_patterns("__pycache__", "assets")
    shutil.copytree(ROOT / "dgemma_jax", package, ignore=ignored, dirs_exist_ok=True)
    for folder in ("kernels", "convert"):
        (package / folder / "__init__.py").touch()
    config.plugins["mkdocstrings"].config.handlers["python"]["paths"] = [COPY.name]
    return config
