"""Images on their way into the model, as plain arrays."""

from __future__ import annotations

from typing import Any, NamedTuple


class ImageBatch(NamedTuple):
    """The patches of n images, padded to a common number P; a pytree of arrays. `images.image_batch` makes it.

    patches f32[n,P,3pp]: pixels in 0 .. 1, in raster order of the patches, inside a patch by row, column, channel.
    positions i32[n,P,2]: column (x) and row (y) of each patch, both -1 for padding. counts i32[n]: soft tokens of each
    image, its patches over the square of the pooling kernel. P is a multiple of that square.
    """

    patches: Any
    positions: Any
    counts: Any
