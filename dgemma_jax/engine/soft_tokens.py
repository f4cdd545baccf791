"""Images of prompts on their way into prefill: each goes through the tower once and lies whole in one chunk."""

from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dgemma_jax.config import BUDGETS, Config
from dgemma_jax.engine.programs import Programs
from dgemma_jax.image_batch import ImageBatch
from dgemma_jax.images import PreparedImage, image_batch
from dgemma_jax.images.placement import Placed
from dgemma_jax.shapes import Array, Blocks, Hidden


def chunk_end(images: Sequence[Placed], begin: int, end: int) -> int:
    """Where a chunk of a prompt from `begin` ends, at most at `end` unless its first image is longer than that."""
    split = next((image for image in images if image.start < end < image.end), None)
    if split is None:
        return end
    return split.start if split.start > begin else split.end


class SoftTokens:
    """The soft tokens of images that prompts still need, by what the images are.

    The tower runs image by image, so that none's numbers depend on which others a prompt or a batch holds; its memory
    is that of one image.
    """

    def __init__(self, config: Config, programs: Programs, params: dict, dtype: str):
        assert config.vision is not None  # see `reads_images`
        self.vision = config.vision
        self.config, self.programs, self.params, self.dtype = config, programs, params, dtype
        self.seen = 0  # images that went through the tower
        self._features: dict[bytes, Array] = {}
        self._nothing: dict[int, Hidden] = {}  # by number of tokens

    def of_chunk(self, images: Sequence[Placed], begin: int, size: int) -> tuple[Hidden, Blocks]:
        """For `size` tokens of a prompt from place `begin` on: soft f[1,size,D], and blocks i32[1,size]."""
        soft, blocks = self._empty(size), np.zeros((1, size), np.int32)
        for number, (start, image) in enumerate(images, 1):
            if begin <= start < begin + size:
                # Padding behind an image's soft tokens lands on text, which is not read, or under the next image.
                soft = self.programs.place(soft, self._of(image), np.int32(start - begin))
                blocks[0, start - begin : start - begin + image.tokens] = number
        return soft, blocks

    def keep(self, images: Iterable[Placed]) -> None:
        """Forget all but these."""
        if self._features:
            wanted = {placed.image.digest for placed in images}
            self._features = {digest: found for digest, found in self._features.items() if digest in wanted}

    def calls(self, sizes: Iterable[int]) -> list[tuple]:
        """What to compile for chunks of these sizes, for `Programs.compile`."""
        vision, shape = self.vision, jax.ShapeDtypeStruct
        tokens = vision.max_soft_tokens
        patches = tokens * vision.pooling_kernel_size**2
        batch = ImageBatch(
            shape((1, patches, 3 * vision.patch_size**2), jnp.float32),
            shape((1, patches, 2), jnp.int32),
            shape((1,), jnp.int32),
        )
        features = shape((1, tokens, self.config.hidden_size), self.dtype)
        places = [("place", self._empty(size), features, np.int32(0)) for size in sizes]
        return [("features", self.params, batch), *places]

    def _of(self, image: PreparedImage) -> Array:
        if image.digest not in self._features:
            vision = self.vision
            budget = next(budget for budget in BUDGETS if budget >= image.tokens)  # few, so that few programs serve all
            batch = image_batch([image], vision, patches=budget * vision.pooling_kernel_size**2)
            self._features[image.digest] = self.programs.features(self.params, batch)
            self.seen += 1
        return self._features[image.digest]

    def _empty(self, size: int) -> Hidden:
        if size not in self._nothing:
            self._nothing[size] = jnp.zeros((1, size, self.config.hidden_size), self.dtype)
        return self._nothing[size]
