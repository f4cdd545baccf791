import pytest

import dgemma_jax as dg


@pytest.fixture(scope="session")
def tiny() -> dg.Model:
    """The bundled model; most tests use its tokenizer and let a scripted engine speak for it."""
    return dg.load("tiny")
