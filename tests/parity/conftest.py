"""Random models and the reference's answers, made once per session."""

from functools import cache

import pytest

from . import checkpoints
from .ours import Ours
from .pairs import Pair

FORWARD = (checkpoints.NARROW, checkpoints.WIDE)
CALM = (checkpoints.CALM, checkpoints.CALM_WIDE, checkpoints.CALM_64, checkpoints.CALM_256)
OTHERS = (*CALM, checkpoints.PICTURES, checkpoints.CLIPPED)
SHAPES = {shape.name: shape for shape in (*FORWARD, *OTHERS)}


@pytest.fixture(scope="session")
def loaded(tmp_path_factory):
    """name -> (directory, Ours) of a random checkpoint, each made when it is first asked for."""
    root = tmp_path_factory.mktemp("checkpoints")

    @cache
    def get(name: str):
        directory = checkpoints.write(root / name, SHAPES[name])
        return directory, Ours.load(directory)

    return get


@pytest.fixture(scope="session")
def pair_of(loaded):
    """name -> Pair, each made when it is first asked for."""

    @cache
    def get(name: str):
        return Pair.make(SHAPES[name], *loaded(name))

    return get


@pytest.fixture(params=[shape.name for shape in FORWARD])
def pair(request, pair_of):
    """Both implementations of one random model, with the reference's answers."""
    return pair_of(request.param)
