import pytest


def pytest_addoption(parser):
    parser.addoption(
        "--real-tokenizer", metavar="PATH", help="tokenizer.json of Gemma 4, for the tests of encodings stored from it"
    )
    parser.addoption("--soak", action="store_true", help="full counts where `make test` makes do with fewer")


@pytest.fixture(scope="session")
def soak(request) -> bool:
    """Whether to run the full counts."""
    return request.config.getoption("--soak")


def pytest_generate_tests(metafunc):
    if "schedule" in metafunc.fixturenames:
        metafunc.parametrize("schedule", range(30 if metafunc.config.getoption("--soak") else 3))
