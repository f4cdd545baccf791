"""Requests made from the server's own OpenAPI document: every answer is one that the document has."""

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from tests.serve.harness import ScriptedEngine, serving

# The document cannot say which tools exist, which message may follow which, or which numbers go together.
EXCLUDED = [positive_data_acceptance]


@pytest.fixture(scope="module")
def document(tiny):
    with serving(ScriptedEngine(tiny, lambda request: "fine<turn|>")) as url:
        yield schemathesis.openapi.from_url(f"{url}/openapi.json")


@pytest.mark.filterwarnings("ignore:tool schema")
@pytest.mark.parametrize("mode", GenerationMode, ids=[mode.value for mode in GenerationMode])
def test_answers_are_as_the_document_says(document, mode, soak):
    """To requests that follow it and to such that do not, which are refused."""
    operations = [result.ok() for result in document.get_all_operations()]
    posts = [operation for operation in operations if operation.method == "post"]
    assert len(posts) == 2 and len(operations) == 7
    for operation in operations if mode == GenerationMode.POSITIVE else posts:

        @settings(max_examples=1000 if soak else 15, deadline=None, suppress_health_check=list(HealthCheck))
        @given(operation.as_strategy(generation_mode=mode))
        def run(case):
            case.call_and_validate(excluded_checks=EXCLUDED)

        run()
