"""Filling a gap in a text: both sides stay, and the model writes what is between them."""

from collections.abc import Mapping

from dgemma_jax.config import is_int
from dgemma_jax.sampling import Resolved
from dgemma_jax.text import Tokenizer, encode_chat

GAP = "<gap>"
ASK = "Fill the gap:\n"
END_OF_TURN = "<turn|>"


def check_own_canvas(asked: Resolved) -> None:
    """ValueError for a sampling that wants another canvas, or several answers."""
    for name, value, plain in (("n", asked.n, 1), ("canvas", asked.canvas, ())):
        if value != plain:
            raise ValueError(f"{name} is {value!r:.60}; infill makes one answer on a canvas of its own: leave it out")


def infill_canvas(
    tokenizer: Tokenizer, text: str, gap_tokens: int, canvas_length: int, fill: int
) -> tuple[list[int], list[int], list[bool]]:
    """(prompt ids, canvas, pinned) for a text with one <gap> of `gap_tokens` tokens; -1 stands in the gap.

    The canvas holds the whole text, the end of the turn, and `fill` behind it; everything but the gap is pinned.
    ValueError if there is not exactly one gap, or the text does not fit the canvas.
    """
    if not isinstance(text, str) or text.count(GAP) != 1:
        raise ValueError(f"text {text!r:.60} must hold {GAP} exactly once")
    if not is_int(gap_tokens, 1):
        raise ValueError(f"gap_tokens is {gap_tokens!r}; expected a positive integer")
    specials: Mapping[str, int] = tokenizer.special_ids
    if END_OF_TURN not in specials:
        raise ValueError(
            f"the tokenizer has no {END_OF_TURN}, with which an infilled answer ends; pass canvas and pinned"
        )
    left, right = (tokenizer.encode(part, control=False) for part in text.split(GAP))
    if (length := len(left) + gap_tokens + len(right) + 1) > canvas_length:
        raise ValueError(
            f"text and gap take {length} tokens with the end of the turn; a canvas holds {canvas_length}: "
            "shorten the text around the gap"
        )
    canvas = [*left, *[-1] * gap_tokens, *right, specials[END_OF_TURN]]
    pinned = [id != -1 for id in canvas]
    rest = canvas_length - len(canvas)
    prompt = encode_chat([{"role": "user", "content": f"{ASK}{text}"}], tokenizer)
    return prompt, canvas + [fill] * rest, pinned + [True] * rest
