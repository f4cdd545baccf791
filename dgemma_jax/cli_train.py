"""`dgemma train tiny`: train the bundled model."""

from __future__ import annotations

import argparse
from pathlib import Path

TINY = "Train the bundled model, four to five hours on two free cores. Started again it goes on where it was stopped."
OUT = Path(__file__).parent / "assets" / "tiny"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What can be trained."""
    models = parser.add_subparsers(dest="trained", required=True, metavar="MODEL")
    add_tiny(models.add_parser("tiny", help="the bundled model", description=TINY))


def add_tiny(parser: argparse.ArgumentParser) -> None:
    """The options of the bundled model's training, which are also those of `python -m dgemma_jax.train.tiny`."""
    add = parser.add_argument
    add("--out", type=Path, default=OUT, metavar="DIR", help="model directory to write (by default the bundled one)")
    add("--run", type=Path, default=Path("runs/tiny"), metavar="DIR", help="where its state lies (%(default)s)")


def run(args: argparse.Namespace) -> None:
    """Trains. ValueError or OSError for a state that does not fit or cannot be written."""
    try:
        from dgemma_jax.train import tiny
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is not installed; pip install 'dgemma-jax[train]'") from None
    tiny.train(args.out, args.run)
