"""Images of prompts on their way into prefill: each goes through the tower once and lies whole in one chunk."""

from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dgemma_jax.config import BUDGETS, Config
from dgemma_jax.engine.programs import Programs
from dgemma_jax.image_batch import ImageBatch
from dgemma_jax.images import PreparedImage, image_batch
from dgemma_jax.images.placement import Placed, vision_of
from dgemma_jax.shapes import Blocks, Hidden


def chunk_end(images: Sequence[Placed], begin: int, end: int) -> int:
    """Where a chunk of a prompt from `begin` ends, at most at `end` unless its first image is longer than that."""
    split = next((image for image in images if image.start < end < image.end), None)
    if split is None:
        return end
    return split.start if split.start > begin else split.end


class SoftTokens:
    """The soft tokens of images that prompts still need, by what the images are; on the host, where a chunk's are put
    together without a program for each size.

    The tower runs image by image, so that none's numbers depend on which others a prompt or a batch holds; its memory
    is that of one image.
    """

    def __init__(self, config: Config, programs: Programs, params: dict, dtype: str):
        self.vision, self.width = vision_of(config), config.hidden_size
        self.programs, self.params, self.dtype = programs, params, jnp.dtype(dtype)
        self.seen = 0  # images that went through the tower
        self._features: dict[bytes, np.ndarray] = {}  # f[n,D] of n soft tokens
        self._nothing: dict[int, Hidden] = {}  # by number of tokens

    def of_chunk(self, images: Sequence[Placed], begin: int, end: int, size: int) -> tuple[Hidden, Blocks]:
        """For tokens `begin` to `end` of a prompt, filled up to `size`: soft f[1,size,D], blocks i32[1,size]."""
        shown = [placed for placed in enumerate(images, 1) if begin <= placed[1].start < end]
        blocks = np.zeros((1, size), np.int32)
        if not shown:
            return self._empty(size), blocks
        soft = np.zeros((1, size, self.width), self.dtype)
        for number, (start, image) in shown:
            place = slice(start - begin, start - begin + image.tokens)
            soft[0, place], blocks[0, place] = self._of(image), number
        return soft, blocks

    def keep(self, images: Iterable[Placed]) -> None:
        """Forget all but these."""
        if self._features:
            wanted = {placed.image.digest for placed in images}
            self._features = {digest: found for digest, found in self._features.items() if digest in wanted}

    def call(self) -> tuple:
        """What to compile for images of the usual size, for `Programs.compile`."""
        vision, shape = self.vision, jax.ShapeDtypeStruct
        patches = vision.max_soft_tokens * vision.pooling_kernel_size**2
        batch = ImageBatch(
            shape((1, patches, 3 * vision.patch_size**2), jnp.float32),
            shape((1, patches, 2), jnp.int32),
            shape((1,), jnp.int32),
        )
        return "features", self.params, batch

    def _of(self, image: PreparedImage) -> np.ndarray:
        if image.digest not in self._features:
            budget = next(budget for budget in BUDGETS if budget >= image.tokens)  # few shapes, few programs
            batch = image_batch([image], self.vision, patches=budget * self.vision.pooling_kernel_size**2)
            self._features[image.digest] = np.asarray(self.programs.features(self.params, batch))[0, : image.tokens]
            self.seen += 1
        return self._features[image.digest]

    def _empty(self, size: int) -> Hidden:
        if size not in self._nothing:
            self._nothing[size] = jnp.zeros((1, size, self.width), self.dtype)
        return self._nothing[size]
