"""Run the notebooks and store what they print: `python notebooks/execute.py [NOTEBOOK ...]`, by default all."""

import os
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from dgemma_jax.program_cache import keep_programs

HERE = Path(__file__).parent
SECONDS = 60  # per cell, with room for a busy machine; nothing limits the whole notebook


def notebooks() -> list[Path]:
    return sorted(HERE.glob("*.ipynb"))


def execute(path: Path) -> nbformat.NotebookNode:
    """The notebook with fresh outputs, run in a kernel of this Python. nbclient's error if a cell raises."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=SECONDS, record_timing=False, coalesce_streams=True)
    client.execute(cwd=str(HERE), env=dict(os.environ))
    return notebook


def main(paths: list[str]) -> None:
    keep_programs()
    for path in map(Path, paths or notebooks()):
        nbformat.write(execute(path), path)
        print(path)


if __name__ == "__main__":
    main(sys.argv[1:])
