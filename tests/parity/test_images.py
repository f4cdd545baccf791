"""Images against transformers: the tower, and what an encoder pass makes of it, alone and among rows of text."""

import jax
import numpy as np
import pytest
import torch

import dgemma_jax as dg
from dgemma_jax.images import PreparedImage, image_batch

from . import checkpoints, replay
from .oracle import image_inputs, left_pad
from .ours import Ours, rel
from .pairs import WIDTH
from .test_forward import assert_close, assert_logits
from .test_generate import DEFAULTS, MARGIN, steps_of

pytestmark = pytest.mark.parity

SHAPE = checkpoints.PICTURES
IMAGE, BEGIN, END = SHAPE.vocab - 10, SHAPE.vocab - 9, SHAPE.vocab - 8
PATCHES = 64
SMALL, WIDE, LONG = (4, 4), (2, 12), (6, 8)  # rows x columns of patches: 4, 6 and 12 soft tokens; the window is 8


def picture(seed: int, grid: tuple[int, int]) -> PreparedImage:
    size = (grid[0] * grid[1], 3 * checkpoints.VISION["patch_size"] ** 2)
    patches = np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)
    return PreparedImage(patches, grid[1], len(patches) // checkpoints.VISION["pooling_kernel_size"] ** 2)


def prompt(seed: int, *parts) -> list[int]:
    """Random text of the given lengths, images spelled out between."""
    rng = np.random.default_rng(seed)
    words = lambda count: rng.integers(3, IMAGE, count).tolist()  # noqa: E731
    spelled = lambda image: [BEGIN, *[IMAGE] * image.tokens, END]  # noqa: E731
    return [id for part in parts for id in (words(part) if isinstance(part, int) else spelled(part))]


A, B, C, D, E = (picture(seed, grid) for seed, grid in enumerate([SMALL, LONG, WIDE, LONG, WIDE]))
ROWS = {
    "one image": ([A], prompt(1, 5, A, 7)),
    "longer than the window": ([B], prompt(2, 3, B, 9)),
    "two images": ([C, D], prompt(3, 1, C, D, 20)),
    "text": ([], prompt(4, 11)),
    "at both ends": ([E, B], prompt(5, E, 2, B)),
}
PROMPTS = [ids for _, ids in ROWS.values()]


@pytest.fixture(autouse=True, scope="module")
def _quick_compiles():
    """Compiling is most of the time of these tests; their programs run for milliseconds."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def pair(pair_of):
    return pair_of(SHAPE.name)


@pytest.fixture(scope="module")
def images(pair):
    return image_batch(
        [image for images, _ in ROWS.values() for image in images], pair.ours.config.vision, patches=PATCHES
    )


@pytest.fixture(scope="module")
def encoded(pair, images):
    """(cache, hidden) of all rows in one right-padded batch."""
    return pair.ours.prompt(PROMPTS, WIDTH, images=images)


@pytest.mark.parametrize("name", [SHAPE.name, checkpoints.CLIPPED.name])
def test_features(pair_of, name):
    """Images of several shapes in one batch; and one's are the same without the others and their padding."""
    pair, several = pair_of(name), [A, B, C]
    batch = image_batch(several, pair.ours.config.vision, patches=PATCHES)
    found = pair.ours.features(batch)
    for image, ours, expected in zip(several, found, pair.oracle.features(batch), strict=True):
        assert_close(ours[: image.tokens], expected, f"features of {image.tokens} soft tokens")
    alone = image_batch([B], pair.ours.config.vision, patches=len(B.patches))
    assert rel(pair.ours.features(alone)[0], found[1, : B.tokens]) < 1e-5


def test_encoder_states_and_cache(pair, encoded, images):
    """Each row against the same prompt alone in transformers."""
    cache, hidden = encoded
    start = 0
    for row, (own, ids) in enumerate(ROWS.values()):
        batch = type(images)(*(part[start : start + len(own)] for part in images)) if own else None
        start += len(own)
        expected, prefix = pair.oracle.encode(np.array([ids]), images=batch)
        assert_close(hidden[row, : len(ids)], expected[0], f"hidden states of row {row}")
        for layer in range(len(SHAPE.layers)):
            for ours, reference in zip(pair.ours.unroll(cache, layer, row), prefix.layer(layer), strict=True):
                assert_close(ours, reference[0], f"cache of layer {layer}, row {row}")


def test_logits_of_left_padded_rows(pair, encoded, images):
    cache, hidden = encoded
    ids, mask = left_pad(PROMPTS)
    expected, prefix = pair.oracle.encode(ids, mask, images=images)
    for row, length in enumerate(map(len, PROMPTS)):
        assert_close(hidden[row, :length], expected[row][mask[row]], f"hidden states of row {row}")
    canvases = np.random.default_rng(6).integers(0, SHAPE.vocab, (len(PROMPTS), SHAPE.canvas))
    assert_logits(pair.ours.logits(canvases, cache), pair.oracle.logits(canvases, prefix), "logits")


@pytest.mark.parametrize("blocks", ["sliding", "none"])
def test_other_masks(pair, encoded, images, blocks):
    """Those of transformers' Gemma 4, and those without image blocks."""
    model = dg.load(pair.saved, image_blocks=blocks)
    ours = Ours(model.graph, model.params, model.config)
    hidden = ours.prompt(PROMPTS, WIDTH, images=images)[1]
    ids, mask = left_pad(PROMPTS)
    expected, _ = pair.oracle.encode(ids, mask, images=images, blocks=blocks)
    for row, length in enumerate(map(len, PROMPTS)):
        assert_close(hidden[row, :length], expected[row][mask[row]], f"hidden states of row {row}")
        if row != 3:
            assert rel(hidden[row, :length], encoded[1][row, :length]) > 1e-2
    assert rel(hidden[3, :11], encoded[1][3, :11]) < 1e-6


def test_the_same_tokens(pair, images):
    """`generate()` of rows with two images, one longer than the window, and none, under the same random draws."""
    names = ("two images", "longer than the window", "text")
    own, prompts = [ROWS[name][0] for name in names], [ROWS[name][1] for name in names]
    seeds = [2, 2**40 + 2, 10**6 + 2]
    settings = DEFAULTS | {"max_denoising_steps": 16, "max_new_tokens": 2 * SHAPE.canvas}
    batch = image_batch([image for row in own for image in row], pair.ours.config.vision, patches=PATCHES)
    types = torch.from_numpy((left_pad(prompts)[0] == IMAGE).astype(np.int64))
    expected = replay.generate(
        pair.oracle, prompts, seeds, eos_token_id=None, mm_token_type_ids=types, **settings, **image_inputs(batch)
    )
    assert min(expected.margin.values()) > MARGIN, f"choose another seed: {expected.margin}"
    assert len({step for steps in expected.steps for step in steps}) > 3, "rows stop at the same steps"
    fields = settings | {"suppress": (), "stop_token_ids": ()}
    with jax.default_matmul_precision("highest"):
        answers = pair.ours.model.generate(prompts, [dg.Sampling(seed=seed, **fields) for seed in seeds], images=own)
    for row, answer in enumerate(answers):
        assert answer.tokens == expected.tokens[row].tolist()
        assert answer.steps == steps_of(expected, row)
