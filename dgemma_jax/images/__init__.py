"""From a picture to the patches that the image tower reads: Pillow and NumPy, without jax.

`prepare` takes a path, encoded bytes, a PIL image or an array; `image_batch` makes of several what `dg.encode` takes.
Equal to transformers' Gemma4ImageProcessor (Pillow backend) bit for bit, for pixels of 8 bits.
"""

from dgemma_jax.images.opening import open_image
from dgemma_jax.images.patches import BUDGETS, PreparedImage, image_batch, prepare, target_size

__all__ = ["BUDGETS", "PreparedImage", "image_batch", "open_image", "prepare", "target_size"]
