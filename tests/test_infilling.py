"""Filling a gap: what is pinned, what is asked, what is refused."""

from dataclasses import replace

import pytest

import dgemma_jax as dg
from dgemma_jax.infilling import infill_canvas
from dgemma_jax.text import Tokenizer
from dgemma_jax.train import tokenizer as vocabulary
from dgemma_jax.train.data import Example, gap_tokens
from dgemma_jax.train.skills.question import HeldOut
from dgemma_jax.train.skills.texts import infill
from tests.random_models import SMALL, random_model

TOKENIZER = Tokenizer(vocabulary.build())
TEXT = "def f(x):\n    <gap>\n    return y"


def test_both_sides_are_pinned_and_nothing_else_is_given():
    prompt, canvas, pinned = infill_canvas(TOKENIZER, TEXT, 5, 32, vocabulary.EOS)
    assert TOKENIZER.decode(prompt).endswith(f"Fill the gap:\n{TEXT}<turn|>\n<|turn>model\n")
    assert len(canvas) == len(pinned) == 32
    assert [id for id, keep in zip(canvas, pinned, strict=True) if not keep] == [-1] * 5
    filled = [id if id >= 0 else TOKENIZER.encode("a")[0] for id in canvas]
    assert TOKENIZER.decode(filled).startswith("def f(x):\n    aaaaa\n    return y<turn|><eos>")


def test_it_asks_what_the_bundled_model_is_taught():
    for seed in range(50):
        question = infill(HeldOut(seed))
        (message,) = question.messages
        text = message["content"].removeprefix("Fill the gap:\n")
        first, last = gap_tokens(Example("", question.answer, question.gap), vocabulary.build())
        _, canvas, pinned = infill_canvas(TOKENIZER, text, last - first, 32, vocabulary.EOS)
        answer = TOKENIZER.encode(question.answer)
        wanted = [-1 if first <= i < last else id for i, id in enumerate(answer)]
        assert canvas == wanted + [vocabulary.EOS] * (32 - len(answer))
        assert [i for i, keep in enumerate(pinned) if not keep] == list(range(first, last))


@pytest.mark.parametrize(
    ("text", "gap", "message"),
    [
        ("no gap", 3, "must hold <gap> exactly once"),
        ("<gap> <gap>", 3, "must hold <gap> exactly once"),
        (5, 3, "must hold <gap> exactly once"),
        (TEXT, 0, "gap_tokens is 0"),
        (TEXT, 2.0, "gap_tokens is 2.0"),
        (TEXT, 30, "a canvas holds 32: shorten the text"),
        (TEXT, 10**12, "a canvas holds 32: shorten the text"),  # which no memory would hold
    ],
)
def test_what_cannot_be_filled_is_refused(text, gap, message):
    with pytest.raises(ValueError, match=message):
        infill_canvas(TOKENIZER, text, gap, 32, 1)


def test_the_answer_is_the_whole_text():
    config = replace(SMALL, vocab_size=vocabulary.VOCAB_SIZE, canvas_length=32)
    defaults = replace(random_model().defaults, stop_token_ids=(vocabulary.EOS, vocabulary.END_OF_TURN))
    model = random_model(config, tokenizer=TOKENIZER, defaults=defaults)
    answer = model.infill(TEXT, 4, dg.Sampling(max_denoising_steps=2), seed=1)
    assert answer.raw_text.startswith("def f(x):\n    ")
    assert answer.raw_text.endswith("\n    return y")
    assert answer.stop_id == vocabulary.END_OF_TURN
    assert answer == model.infill(TEXT, 4, dg.Sampling(max_denoising_steps=2), seed=1)
    filled = answer.tokens[9:13]
    chosen = dg.Sampling(max_denoising_steps=2, suppress=filled)  # beside the ids that end a text
    other = model.infill(TEXT, 4, chosen, seed=1).tokens
    assert len(other) == len(answer.tokens)
    assert not set(filled) & set(other[9:13])
    for own, name in ((dg.Sampling(n=2), "n"), (dg.Sampling(canvas=[5], pinned=[True]), "canvas")):
        with pytest.raises(ValueError, match=f"{name} is .*infill makes one answer on a canvas of its own"):
            model.infill(TEXT, 4, own)
    with pytest.raises(ValueError, match="sampling is 5"):
        model.infill(TEXT, 4, 5)
    with pytest.raises(ValueError, match="no tokenizer"):
        random_model().infill(TEXT, 4)
