"""Random models and the reference's answers, made once per session."""

import pytest

from . import checkpoints

try:
    from .pairs import Pair
except ImportError:  # no torch: the tests marked parity are skipped, the others need no oracle
    Pair = None

SHAPES = {shape.name: shape for shape in (checkpoints.NARROW, checkpoints.WIDE)}


@pytest.fixture(scope="session")
def directory(tmp_path_factory):
    """Where the checkpoints of this session lie."""
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="session")
def pair_of(directory):
    """name -> Pair, each made when it is first asked for."""
    made = {}

    def get(name: str):
        if Pair is None:
            pytest.skip("torch and transformers are not installed")
        if name not in made:
            made[name] = Pair.make(SHAPES[name], directory)
        return made[name]

    return get


@pytest.fixture(params=sorted(SHAPES))
def pair(request, pair_of):
    """Both implementations of one random model, with the reference's answers."""
    return pair_of(request.param)
