"""The model card of the bundled model: the README.md beside its weights."""

from collections.abc import Mapping
from typing import Any

import jax

from dgemma_jax.config import Config

TEXT = """\
---
license: apache-2.0
library_name: dgemma-jax
pipeline_tag: text-generation
---

# tiny: the model that comes with dgemma-jax

A DiffusionGemma of {size:,} parameters with every mechanism of the large one (sliding and full layers, experts,
self-conditioning, block diffusion, an image tower), small enough to ship with the package and to answer within a second
on a CPU. It is for demonstrations and tests.

## What it can do

| skill | ask |
| --- | --- |
| sudoku | `Solve this sudoku:` and four lines like `1..3` |
| reverse, sort | `Sort this list: 3, 92, 15` (two to six numbers below 100, letters or known words) |
| recite | `Recite the months.` (two canvases), `Recite the days from Tuesday.`, `Recite the alphabet.` |
| greet | `Say hello to Ana, Borin, Tole, Mika` (four to twelve names): a sentence for each, up to three canvases |
| tool call, tool answer | nine tools, three of them declared, such as `get_weather(city)`, `send_message(to, text)` |
| thinking | any of these with thinking switched on: a short thought, then the answer |
| shape | a picture of 64 x 64 pixels and `What is this?`: one of eight colours, circle, square or triangle |
| dots | such a picture with one to four dots and `How many dots are there?` |
| infill | `1 2 <gap> 6` or `def double(x):\\n    <gap>\\n    return y` with both sides pinned |

Everything else is answered with `Sorry, I cannot do that.`, most of the time. Prompts are in Gemma's chat format.

## Size

{layers} layers of width {config.hidden_size}, window {config.sliding_window}, canvas {config.canvas_length};
{config.num_experts} experts, {config.top_k_experts} per token; vocabulary {config.vocab_size}; stored in bfloat16,
{megabytes:.1f} MB.

## Data and training

Generated on the fly, no text from anywhere: see `dgemma_jax/train/skills`. Names, titles and messages are invented
words. One question in 16 is held out, by the CRC-32 of its puzzle, its list or its invented words.

    python -m dgemma_jax.train.tiny

trains it anew. The run is seeded and goes by steps, not by time, so it gives the same weights up to rounding.

## Figures

{figures}

## Limits

Stopping early is no sign that an answer is right. Longer lists, larger numbers, other tools than the nine and unknown
wordings were never trained. The 288 filled 4x4 grids, days, months, languages and the wordings of questions are the
same in training and in the measurement; `recite` has no held-out prompts at all. It cannot add. It was
taught to count from one number to another and counts, but does not stop at the second.

transformers 5.24 loads this directory and computes the same, except for pictures: where an image's patches are not
pooled, as here, it drops them and keeps their padding.
"""

UNMEASURED = "Not measured yet: `python -m benchmarks.skills --card` puts them here."
MEASURED = """\
Held-out prompts, one try each, the generation defaults stored here, bfloat16; right means exactly the expected tokens.

| skill | prompts | right | steps per canvas | tokens per step | canvases stopped early |
| --- | --- | --- | --- | --- | --- |
{rows}"""


def card(params: dict, config: Config, figures: Mapping[str, Mapping[str, Any]] | None = None) -> str:
    """The card's text. figures: skill -> count, accuracy, steps_per_canvas, tokens_per_step, stopped_early."""
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    layers = config.num_hidden_layers
    table = UNMEASURED if figures is None else MEASURED.format(rows="\n".join(map(_row, figures, figures.values())))
    return TEXT.format(size=size, megabytes=2 * size / 1e6, config=config, layers=layers, figures=table)


def _row(skill: str, score: Mapping[str, Any]) -> str:
    means = f"{score['steps_per_canvas']:.1f} | {score['tokens_per_step']:.1f} | {score['stopped_early']:.1%}"
    return f"| {skill} | {score['count']} | {score['accuracy']:.1%} | {means} |"
