import jaxtyping
import pytest


def pytest_addoption(parser):
    parser.addoption(
        "--real-tokenizer", metavar="PATH", help="tokenizer.json of Gemma 4, for the tests of encodings stored from it"
    )
    parser.addoption("--screenshots", metavar="DIR", help="where the test of the canvas page leaves its pictures")
    parser.addoption("--soak", action="store_true", help="full counts where `make test` makes do with fewer")


@pytest.fixture(scope="session")
def soak(request) -> bool:
    """Whether to run the full counts."""
    return request.config.getoption("--soak")


@pytest.fixture(scope="module")
def abstract_arrays():
    """For programs that are compiled and not run: annotations speak of arrays, and what stands for them is none."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="module")
def quick_compiles():
    """For modules whose programs run for milliseconds: compiling is most of their time."""
    import jax

    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def pytest_generate_tests(metafunc):
    if "schedule" in metafunc.fixturenames:
        metafunc.parametrize("schedule", range(30 if metafunc.config.getoption("--soak") else 3))
