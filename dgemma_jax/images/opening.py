"""Whatever holds a picture to its upright RGB pixels, or one line on why not."""

from __future__ import annotations

import base64
import binascii
import os
import threading
import warnings
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from PIL import Image

MOST_PIXELS = 89_478_485  # where Pillow, too, suspects a decompression bomb: 256 MiB of RGB
# Raster formats alone: others of Pillow's run programs or read further files.
FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
_opening = threading.Lock()  # warnings are caught for all threads of a process
SOURCES = "a path, the bytes of an image file, a data: URL, a PIL image or an array"


def open_image(source: Any) -> np.ndarray:
    """The pixels u8[H,W,3] of a picture, turned upright; of an animation its first frame.

    source: a path or data: URL, the bytes of an image file, a PIL image, or an array u8[H,W], u8[H,W,1], u8[H,W,3] or
    u8[H,W,4]. Transparency is laid on white, of pixels with 16 bits the upper 8 count. ValueError for what is damaged,
    cut short, empty, larger than MOST_PIXELS, or no picture.
    """
    try:
        from PIL import Image
    except ImportError:
        raise ValueError("images need Pillow; pip install 'dgemma-jax[images]'") from None
    if isinstance(source, Image.Image):
        return _decoded(source, "the PIL image")
    if isinstance(source, str | Path):
        if str(source).startswith("data:"):
            return _read(from_data_url(str(source)), "the image of the data: URL")
        if str(source).startswith(("http://", "https://")):
            raise ValueError(f"image {source!r:.100} is remote; fetch it and pass its bytes")
        return _read(Path(os.path.expanduser(source)), f"image {str(source)!r}")
    if isinstance(source, bytes | bytearray | memoryview):
        return _read(bytes(source), f"the image of {len(source):,} bytes")
    if hasattr(source, "__array__"):
        return _from_array(np.asarray(source))
    raise ValueError(f"image {source!r:.60} is a {type(source).__name__}; expected {SOURCES}")


def from_data_url(url: str) -> bytes:
    """The bytes of a `data:image/...;base64,` URL. ValueError for another kind."""
    head, comma, body = url.partition(",")
    if not comma or not head.endswith(";base64") or not head.startswith("data:image/"):
        raise ValueError(f"image {head!r:.60} is no data:image/TYPE;base64,... URL; expected an image in base64")
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"the image of the data: URL is not base64: {error}") from None


def _read(data: bytes | Path, name: str) -> np.ndarray:
    """Of an image file."""
    from PIL import Image, UnidentifiedImageError

    try:
        with _opening, warnings.catch_warnings(action="ignore"):  # its warning of a bomb; the size is checked below
            image = Image.open(BytesIO(data) if isinstance(data, bytes) else data, formats=FORMATS)
    except UnidentifiedImageError:
        raise ValueError(f"{name} is none that can be read; expected {', '.join(FORMATS)}") from None
    except Exception as error:  # headers of damaged files, too, see below; and what Pillow takes for a bomb
        raise ValueError(f"{name} cannot be opened: {_line(error)}") from None
    with image:
        return _decoded(image, name)


def _decoded(image: Image.Image, name: str) -> np.ndarray:
    from PIL import ImageOps

    _check_size(image.height, image.width, name)
    try:
        return np.asarray(_rgb(ImageOps.exif_transpose(image)))
    except Exception as error:  # decoders of damaged files raise whatever they stumble over
        raise ValueError(f"{name} ({image.width} x {image.height}) cannot be decoded: {_line(error)}") from None


def _rgb(image: Image.Image) -> Image.Image:
    from PIL import Image

    if image.mode in ("I", "F"):
        raise ValueError(f"its pixels have mode {image.mode}, 32 bits of unknown range; convert it to 8 bits")
    if image.mode.startswith("I;16"):  # Pillow would cut off what exceeds 255
        image = Image.fromarray((np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8))
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), image).convert("RGB")


def _from_array(array: np.ndarray) -> np.ndarray:
    shape: list[int] = list(array.shape)
    if array.dtype != np.uint8 or array.ndim not in (2, 3) or (array.ndim == 3 and array.shape[2] not in (1, 3, 4)):
        expected = "uint8 [H,W], [H,W,1], [H,W,3] or [H,W,4] with values 0 .. 255"
        raise ValueError(f"the image is an array {array.dtype}{shape}; expected {expected}")
    _check_size(shape[0], shape[1], f"the image array {shape}")
    array = array.reshape(*shape[:2], -1)
    if array.shape[2] == 1:
        return np.repeat(array, 3, axis=2)
    if array.shape[2] == 4:
        alpha = array[..., 3:] / 255
        return np.round(alpha * array[..., :3] + (1 - alpha) * 255).astype(np.uint8)
    return array


def _check_size(height: int, width: int, name: str) -> None:
    if not height or not width:
        raise ValueError(f"{name} is empty: {width} x {height} pixels")
    if height * width > MOST_PIXELS:
        size = f"{width} x {height} = {height * width:,} pixels"
        raise ValueError(f"{name} has {size}; at most {MOST_PIXELS:,} are read: make it smaller")


def _line(error: Exception) -> str:
    """What an error says, in one line."""
    return " ".join(str(getattr(error, "strerror", None) or error).split()) or type(error).__name__
