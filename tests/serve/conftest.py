import openai
import pytest

import dgemma_jax as dg
from tests.serve.fake_server import FakeServer
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


@pytest.fixture(scope="session")
def driver():
    """One browser for all that look at the page."""
    from tests.serve.browser import chromium  # selenium is for them alone

    with chromium() as driver:
        yield driver


@pytest.fixture
def server():
    """What the page is looked at with, unless it is the real one."""
    with FakeServer() as server:
        yield server


@pytest.fixture
def page(driver, server):
    """The page, to be opened by the test; at the end nothing may have gone wrong in it, or have left the server."""
    from tests.serve.browser import Page

    page = Page(driver)
    yield page
    assert page.problems() == []
    requested = page.requested()
    assert requested and all(url.startswith(server.url) for url in requested)
