from pathlib import Path

import jaxtyping
import pytest

# Each program that XLA compiles for a CPU takes up to hundreds of memory maps, of which Linux gives a process 65,530:
# a worker that runs half of the suite comes near, and XLA aborts where there is none left.
MAPS, MOST_MAPS = Path("/proc/self/maps"), 40_000


def pytest_addoption(parser):
    parser.addoption(
        "--real-tokenizer",
        metavar="PATH",
        help="tokenizer.json of Gemma 4, for the tests of encodings stored from it and of a checkpoint beside it",
    )
    parser.addoption("--screenshots", metavar="DIR", help="where the test of the canvas page leaves its pictures")
    parser.addoption("--soak", action="store_true", help="full counts where `make test` makes do with fewer")


@pytest.fixture(scope="session")
def soak(request) -> bool:
    """Whether to run the full counts."""
    return request.config.getoption("--soak")


@pytest.fixture(scope="module", autouse=True)
def maps_given_back():
    """Programs that earlier modules compiled make room when there are many."""
    yield
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > MOST_MAPS:
        import jax

        jax.clear_caches()


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
