"""Preprocessing against transformers' Gemma4ImageProcessor with Pillow as its backend: every bit."""

import numpy as np
import pytest
from PIL import Image
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

from dgemma_jax.config import BUDGETS, gemma_26b_a4b
from dgemma_jax.images import image_batch, prepare

pytestmark = pytest.mark.parity

VISION = gemma_26b_a4b().vision
SIZES = [(1, 1), (2, 3), (48, 48), (768, 768), (20, 4000), (4000, 20), (1, 500), (480, 640), (31, 33), (1000, 70)]
MODES = ["RGB", "RGBA", "L", "LA", "P", "P with a clear colour", "1", "CMYK", "array", "array with alpha"]


def picture(number: int):
    """One of 50: every mode five times, sizes from a pixel to more than the budget."""
    rng = np.random.default_rng(number)
    height, width = SIZES[number // 5] if number % 5 == 0 else rng.integers(1, 400, 2)
    mode = MODES[number % len(MODES)]
    noise = rng.integers(0, 256, (height, width, 4), dtype=np.uint8)
    if mode.startswith("array"):
        return noise[..., : 4 if "alpha" in mode else 3]
    if mode.startswith("P"):
        image = Image.fromarray(noise[..., :3]).quantize(16)
        if "clear" in mode:
            image.info["transparency"] = 3
        return image
    return Image.fromarray(noise[..., :3]).convert(mode) if "A" not in mode else Image.fromarray(noise).convert(mode)


@pytest.mark.parametrize("number", range(50))
def test_the_same_patches(number):
    image, budget = picture(number), BUDGETS[number % 3]
    reference = Gemma4ImageProcessorPil(max_soft_tokens=budget)(image, return_tensors="np")
    ours = image_batch([image], VISION, budget)
    assert np.array_equal(ours.patches, reference["pixel_values"]) and ours.patches.dtype == np.float32
    assert np.array_equal(ours.positions, reference["image_position_ids"])
    assert ours.counts.tolist() == list(reference["num_soft_tokens_per_image"])


@pytest.mark.parametrize("budget", BUDGETS[3:])
def test_large_budgets_and_other_patches(budget):
    image = picture(36)
    small = {"patch_size": 4, "pooling_kernel_size": 2}
    for own, sizes in ((VISION, {}), (VISION.__class__(**VISION.__dict__ | small), small)):
        reference = Gemma4ImageProcessorPil(max_soft_tokens=budget, **sizes)(image, return_tensors="np")
        assert np.array_equal(image_batch([image], own, budget).patches, reference["pixel_values"])


def test_an_image_of_the_right_size_stays_as_it_is():
    pixels = np.random.default_rng(0).integers(0, 256, (768, 768, 3), dtype=np.uint8)
    reference = Gemma4ImageProcessorPil()(Image.fromarray(pixels), return_tensors="np")["pixel_values"]
    assert np.array_equal(image_batch([pixels], VISION).patches, reference)
    assert prepare(pixels, VISION).patches.sum() == pixels.sum(dtype=np.int64)
