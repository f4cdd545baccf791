"""Text while it comes is text as a whole."""

from hypothesis import given
from hypothesis import strategies as st

from dgemma_jax.serve.reading import StopStrings

letters = st.text("ab", max_size=12)


@given(st.lists(letters), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_text_ends_before_the_first_stop_string(pieces, strings):
    text = "".join(pieces)
    hits = [at for string in strings if (at := text.find(string)) >= 0]
    stop, told = StopStrings(strings), ""
    for piece in pieces:
        told += stop.feed(piece)
        assert text.startswith(told)
    assert stop.found == bool(hits)
    assert told + stop.finish() == text[: min(hits, default=len(text))]


@given(st.lists(letters))
def test_nothing_is_held_back_without_stop_strings(pieces):
    stop = StopStrings([])
    assert all(stop.feed(piece) == piece for piece in pieces)
