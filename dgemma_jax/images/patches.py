"""An image cut into the patches that the tower reads: resized to fill a budget of soft tokens, its aspect kept.

Source of the rules: transformers' Gemma4ImageProcessor, with Pillow as its backend.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from dgemma_jax.config import BUDGETS, VisionConfig, check
from dgemma_jax.image_batch import ImageBatch
from dgemma_jax.images.opening import open_image

PIXEL_VALUES = (np.arange(256) * (1 / 255)).astype(np.float32)  # of 0 .. 255, rounded from float64 as the reference


@dataclass(frozen=True, eq=False)
class PreparedImage:
    """An image as patches u8[P,3pp] in raster order, `columns` of them side by side.

    tokens: soft tokens that it becomes.
    """

    patches: np.ndarray
    columns: int
    tokens: int

    @cached_property
    def digest(self) -> bytes:
        """Tells images apart by what the model sees of them."""
        shape = f"{self.patches.shape} {self.columns} {self.tokens} ".encode()
        return hashlib.sha256(shape + self.patches.tobytes()).digest()

    @property
    def positions(self) -> np.ndarray:
        """Column and row of each patch, i32[P,2]."""
        rows, columns = np.divmod(np.arange(len(self.patches), dtype=np.int32), np.int32(self.columns))
        return np.stack([columns, rows], axis=1)


def prepare(source: Any, vision: VisionConfig, max_soft_tokens: int | None = None) -> PreparedImage:
    """The patches of a picture.

    source: what holds it, see `open_image`; a PreparedImage is given back as it is. vision: `Config.vision`.
    max_soft_tokens: the budget that the image is enlarged or shrunk to, one of BUDGETS; None is the model's. ValueError
    for what cannot be read or is too narrow for the model.
    """
    if isinstance(source, PreparedImage):
        _check_fits(source, vision)
        return source
    from PIL import Image

    pixels = open_image(source)
    height, width = target_size(pixels.shape[0], pixels.shape[1], vision, max_soft_tokens)
    if (height, width) != pixels.shape[:2]:
        pixels = np.asarray(Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC))
    side = vision.patch_size
    rows, columns = height // side, width // side
    patches = pixels.reshape(rows, side, columns, side, 3).swapaxes(1, 2).reshape(rows * columns, -1)
    return PreparedImage(np.ascontiguousarray(patches), columns, len(patches) // vision.pooling_kernel_size**2)


def _check_fits(image: PreparedImage, vision: VisionConfig) -> None:
    """A prepared image may come from elsewhere: ValueError for one of another model's patches."""
    k, (count, width) = vision.pooling_kernel_size, image.patches.shape
    wanted = 3 * vision.patch_size**2
    whole = image.columns > 0 and count % (image.columns * k) == 0 and image.columns % k == 0
    longest = max(image.columns, count // max(1, image.columns))
    fits = longest <= vision.position_embedding_size and 1 <= image.tokens <= max(BUDGETS)
    if width != wanted or image.patches.dtype != np.uint8 or image.tokens * k * k != count or not (whole and fits):
        raise ValueError(
            f"the prepared image has {count} patches of {width} numbers, {image.columns} in a row, for"
            f" {image.tokens} soft tokens; expected {k} x {k} patches of {wanted} for each: prepare it for this model"
        )


def target_size(height: int, width: int, vision: VisionConfig, max_soft_tokens: int | None = None) -> tuple[int, int]:
    """What an image of this height and width is resized to: multiples of a soft token's side, as the budget allows.

    vision: `Config.vision`. max_soft_tokens: the budget, None for the model's. ValueError for a budget that is none of
    BUDGETS, and for an image longer than the position table.
    """
    budget = vision.max_soft_tokens if max_soft_tokens is None else max_soft_tokens
    check(budget in BUDGETS, "max_soft_tokens", budget, "one of " + ", ".join(map(str, BUDGETS)))
    unit = vision.patch_size * vision.pooling_kernel_size
    factor = math.sqrt(budget * unit**2 / (height * width))
    rows, columns = math.floor(factor * height / unit), math.floor(factor * width / unit)
    if rows == 0:
        rows, columns = 1, min(width // height, budget)
    elif columns == 0:
        rows, columns = min(height // width, budget), 1
    longest = vision.position_embedding_size // vision.pooling_kernel_size
    if max(rows, columns) > longest:
        raise ValueError(
            f"an image of {width} x {height} pixels becomes {columns} x {rows} soft tokens; the model has positions"
            f" for {longest} in a row: cut it into parts"
        )
    return rows * unit, columns * unit


def image_batch(
    images: Sequence[Any], vision: VisionConfig, max_soft_tokens: int | None = None, patches: int | None = None
) -> ImageBatch:
    """What `dg.encode` takes, of images in the order of their places in the prompts.

    vision, max_soft_tokens: see `prepare`. patches: the number that each is padded to; None is what the budget allows.
    """
    prepared = [prepare(image, vision, max_soft_tokens) for image in images]
    budget = vision.max_soft_tokens if max_soft_tokens is None else max_soft_tokens
    length = budget * vision.pooling_kernel_size**2 if patches is None else patches
    pixels = np.zeros((len(prepared), length, 3 * vision.patch_size**2), np.float32)
    positions = np.full((len(prepared), length, 2), -1, np.int32)
    for index, image in enumerate(prepared):
        count = len(image.patches)
        if count > length:
            raise ValueError(f"images[{index}] has {count} patches; expected at most {length}")
        pixels[index, :count], positions[index, :count] = PIXEL_VALUES[image.patches], image.positions
    return ImageBatch(pixels, positions, np.array([image.tokens for image in prepared], np.int32))
