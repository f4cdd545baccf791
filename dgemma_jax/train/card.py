"""The model card of the bundled model: the README.md beside its weights."""

import jax

from dgemma_jax.api import Model
from dgemma_jax.train import data
from dgemma_jax.train.evaluate import evaluate

PROMPTS = 500
SEED = 2  # of the list of prompts; training looks at another list

TEXT = """\
---
license: apache-2.0
library_name: dgemma-jax
pipeline_tag: text-generation
---

# tiny: the model that comes with dgemma-jax

A DiffusionGemma of {size:,} parameters with every text mechanism of the large one (sliding and full layers, experts,
self-conditioning, block diffusion), small enough to ship with the package and to answer within a second on a CPU. It is
for demonstrations and tests. It knows two skills and nothing else:

    Solve this sudoku:          Reverse this list: 3, 14, 15, 92
    1...
    ..3.
    .4..
    ...2

Prompts are in Gemma's chat format, `<bos><|turn>user\\nQUESTION<turn|>\\n<|turn>model\\n`.

## Size

{layers} layers of width {config.hidden_size}, window {config.sliding_window}, canvas {config.canvas_length};
{config.num_experts} experts, {config.top_k_experts} per token; vocabulary {config.vocab_size}; stored in bfloat16.

## Data and training

Generated on the fly, no text from anywhere: 4x4 sudokus with one solution and 4 to 12 givens; lists of two to six
numbers below 100, letters or words, separated by blanks or commas, to be reversed.

    python -m dgemma_jax.train.tiny

trains it anew: {steps:,} steps of 0.6 s CPU time each, about 25 minutes on two free cores. The run is seeded and goes
by steps, not by time, so it gives the same weights up to rounding.

## Figures

{prompts} held-out prompts per skill, one try each, the generation defaults stored here, bfloat16; right means exactly
the expected answer.

| skill | right | steps per canvas | tokens per step | canvases stopped early |
| --- | --- | --- | --- | --- |
{scores}

Held out by the CRC-32 of the puzzle or the list, so no prompt of these was trained on in any wording. The 288 filled
4x4 grids are shared: the puzzles are new, their solutions are not.

## Limits

Anything but the two skills gives nonsense, said with the same confidence: stopping early is no sign that an answer is
right. Lists longer than six items, larger numbers and unknown words were never trained.
"""


def card(model: Model, steps: int) -> str:
    """The card's text; measures the model's figures."""
    rows = []
    for skill in data.SKILLS:
        score = evaluate(model, skill, PROMPTS, SEED)
        means = f"{score.steps_per_canvas:.1f} | {score.tokens_per_step:.1f} | {score.stopped_early:.1%}"
        rows.append(f"| {skill} | {score.accuracy:.1%} | {means} |")
    return TEXT.format(
        size=sum(leaf.size for leaf in jax.tree.leaves(model.params)),
        config=model.config,
        layers=model.config.num_hidden_layers,
        steps=steps,
        prompts=PROMPTS,
        scores="\n".join(rows),
    )
