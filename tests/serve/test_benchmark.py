"""`python -m benchmarks.serve` asks what the bundled model has learnt."""

from benchmarks.serve import ASKED, prompts


def test_each_skill_is_asked_in_turn():
    asked = prompts(2 * len(ASKED))
    assert len(asked) == 2 * len(ASKED)
    assert all(prompt.messages[-1]["role"] == "user" for prompt in asked)
    assert "sudoku" in ASKED and asked[0].messages != asked[len(ASKED)].messages
