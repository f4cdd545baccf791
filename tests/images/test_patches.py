"""Sizes, patches, positions and digests of prepared images, without the reference."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("PIL", reason="images need Pillow; pip install '.[images]'")

from dgemma_jax.config import BUDGETS, gemma_26b_a4b
from dgemma_jax.images import image_batch, prepare, target_size

VISION = gemma_26b_a4b().vision
SMALL = replace(VISION, patch_size=4, pooling_kernel_size=2, max_soft_tokens=70)
NOISE = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((480, 640), (672, 912)),
        ((224, 224), (768, 768)),
        ((50, 1000), (144, 3552)),
        ((2000, 10), (11328, 48)),
        ((1, 1), (768, 768)),
        ((20, 4000), (48, 11328)),
        ((1, 9000), (48, 280 * 48)),
    ],
)
def test_sizes_of_the_release(size, expected):
    assert target_size(*size, VISION) == expected


@given(height=st.integers(1, 10**5), width=st.integers(1, 10**5), budget=st.sampled_from(BUDGETS))
def test_any_size_fits_the_budget(height, width, budget):
    rows, columns = (side / 48 for side in target_size(height, width, VISION, budget))
    assert rows == int(rows) >= 1 and columns == int(columns) >= 1
    assert rows * columns <= budget


def test_patches_are_read_row_by_row():
    image = prepare(NOISE, SMALL)  # 64 x 64 pixels are 8 x 8 soft tokens, and stay as they are
    assert (image.patches.shape, image.columns, image.tokens) == ((256, 48), 16, 64)
    assert image.positions[:18].tolist() == [[x, 0] for x in range(16)] + [[0, 1], [1, 1]]
    for number in (0, 17, 255):
        x, y = image.positions[number] * 4
        assert np.array_equal(image.patches[number], NOISE[y : y + 4, x : x + 4].ravel())


def test_a_batch_is_padded():
    wide = np.zeros((8, 200, 3), np.uint8)
    batch = image_batch([NOISE, wide], SMALL)
    assert batch.patches.shape == (2, 280, 48) and batch.patches.dtype == np.float32
    assert batch.positions.shape == (2, 280, 2) and batch.positions.dtype == np.int32
    assert batch.counts.tolist() == [64, prepare(wide, SMALL).tokens]
    assert (batch.positions[0, 256:] == -1).all() and (batch.patches[0, 256:] == 0).all()
    assert batch.patches[0, :256].max() == 1 and np.isin(batch.patches, np.float32(np.arange(256) / 255)).all()
    assert image_batch([prepare(NOISE, SMALL)], SMALL, patches=256).patches.shape == (1, 256, 48)
    with pytest.raises(ValueError, match=r"images\[0\] has 256 patches; expected at most 70"):
        image_batch([NOISE], SMALL, patches=70)


def test_digests_tell_images_apart():
    image = prepare(NOISE, SMALL)
    assert image.digest == prepare(NOISE.copy(), SMALL).digest
    other = NOISE.copy()
    other[5, 5, 0] ^= 1
    turned = replace(image, columns=8)
    assert len({image.digest, prepare(other, SMALL).digest, turned.digest, prepare(NOISE, SMALL, 140).digest}) == 4


@pytest.mark.parametrize(
    "change",
    [
        {"patches": np.zeros((256, 768), np.uint8)},
        {"patches": np.zeros((256, 48), np.float32)},
        {"columns": 15},
        {"columns": 0},
        {"tokens": 63},
        {"patches": np.zeros((4, 48), np.uint8), "columns": 4, "tokens": 1},
        {"patches": np.zeros((4 * 1121, 48), np.uint8), "columns": 2, "tokens": 1121},
    ],
)
def test_an_image_prepared_for_another_model_is_refused(change):
    image = prepare(NOISE, SMALL)
    assert prepare(image, SMALL) is image
    with pytest.raises(ValueError, match="prepare it for this model"):
        prepare(replace(image, **change), SMALL)


def test_what_the_model_cannot_read_is_refused():
    with pytest.raises(ValueError, match="max_soft_tokens is 100; expected one of 70, 140, 280, 560, 1120"):
        prepare(NOISE, SMALL, 100)
    short = replace(SMALL, position_embedding_size=16)
    assert prepare(NOISE, short).tokens == 64
    with pytest.raises(ValueError, match=r"an image of 100 x 2 pixels becomes .* positions for 8 in a row"):
        prepare(np.zeros((2, 100), np.uint8), short)
