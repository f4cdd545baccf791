"""`dgemma train tiny`: train the bundled model."""

from __future__ import annotations

import argparse
from pathlib import Path

TINY = "Train the bundled model, four to five hours on two free cores. Started again it goes on where it was stopped."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What can be trained."""
    models = parser.add_subparsers(dest="trained", required=True, metavar="MODEL")
    # Not over the bundled model, which may be an installed one.
    add_tiny(models.add_parser("tiny", help="the bundled model", description=TINY), Path("runs/tiny/model"))


def add_tiny(parser: argparse.ArgumentParser, out: Path) -> None:
    """The options of the bundled model's training, which are also those of `python -m dgemma_jax.train.tiny`. out: of
    the first, what is written unless it is given."""
    add = parser.add_argument
    add("--out", type=Path, default=out, metavar="DIR", help="model directory to write (%(default)s)")
    add("--run", type=Path, default=Path("runs/tiny"), metavar="DIR", help="where its state lies (%(default)s)")


def run(args: argparse.Namespace) -> None:
    """Trains. ValueError or OSError for a state that does not fit or cannot be written."""
    try:
        from dgemma_jax.train import tiny
    except ModuleNotFoundError as error:
        raise ValueError(f"{error.name} is not installed; pip install 'dgemma-jax[train]'") from None
    tiny.train(args.out, args.run)
