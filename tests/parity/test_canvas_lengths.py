"""Canvases of the lengths in use, token for token; `test_generate` compares short ones in all other respects.

Each length takes programs of its own: unoptimised ones, which compute the same.
"""

import pytest

from .test_generate import Case, ours, reference, steps_of

pytestmark = [pytest.mark.parity, pytest.mark.usefixtures("quick_compiles")]


@pytest.mark.parametrize(("length", "steps"), [(64, 3), (256, 2)])
def test_canvases_of_that_length(pair_of, length, steps):
    """Two of them, the second behind the committed first."""
    case = Case("long", model=f"calm_{length}", rows=1, canvases=2, steps=steps, seed=3)
    pair = pair_of(case.model)
    expected = reference(pair, case)
    (completion,) = ours(pair, case)
    assert pair.ours.config.canvas_length == length
    assert completion.tokens == expected.tokens[0].tolist()
    assert completion.steps == steps_of(expected, 0) and len(completion.steps) == 2
