import openai
import pytest

import dgemma_jax as dg
from tests.serve.harness import ScriptedEngine, serving


@pytest.fixture(scope="session")
def tiny() -> dg.Model:
    """The bundled model; most tests use its tokenizer and let a scripted engine speak for it."""
    return dg.load("tiny")


@pytest.fixture(scope="module")
def engine(tiny):
    return ScriptedEngine(tiny, lambda request: "")


@pytest.fixture(scope="module")
def url(engine):
    with serving(engine) as url:
        yield url


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture
def says(engine):
    """Sets what the engine says."""

    def set_text(text: str, behind_pins: str | None = None) -> None:
        engine.requests.clear()
        engine.script = lambda request: behind_pins if request.sampling.pinned and behind_pins is not None else text

    return set_text
