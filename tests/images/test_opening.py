"""Whatever holds a picture becomes upright RGB pixels, or one line says why not."""

import base64
import io
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("PIL", reason="images need Pillow; pip install '.[images]'")
from PIL import Image

from dgemma_jax.images import open_image
from dgemma_jax.images.opening import MOST_PIXELS

# Colours that no rounding hides: every pixel of the 5 x 3 picture differs from its neighbours.
PIXELS = np.random.default_rng(0).integers(0, 256, (3, 5, 3), dtype=np.uint8)


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


PNG = encoded(Image.fromarray(PIXELS))


def test_every_kind_of_source_gives_the_same_pixels(tmp_path):
    path = tmp_path / "picture.png"
    path.write_bytes(PNG)
    url = "data:image/png;base64," + base64.b64encode(PNG).decode()
    image = Image.fromarray(PIXELS)
    for source in (path, str(path), PNG, bytearray(PNG), memoryview(PNG), url, image, Image.open(path), PIXELS):
        assert np.array_equal(open_image(source), PIXELS), type(source)


def test_modes():
    grey = PIXELS[..., 0]
    rgb = np.repeat(grey[..., None], 3, axis=2)
    assert np.array_equal(open_image(grey), rgb)
    assert np.array_equal(open_image(grey[..., None]), rgb)
    assert np.array_equal(open_image(Image.fromarray(grey)), rgb)
    assert np.array_equal(open_image(encoded(Image.fromarray(grey))), rgb)
    bits = grey > 127
    assert np.array_equal(open_image(Image.fromarray(bits)), np.repeat(bits[..., None] * np.uint8(255), 3, axis=2))
    palette = Image.fromarray(PIXELS).quantize(15)
    assert np.array_equal(open_image(encoded(palette)), np.asarray(palette.convert("RGB")))
    cmyk = Image.fromarray(PIXELS).convert("CMYK")
    assert np.array_equal(open_image(encoded(cmyk, "TIFF")), np.asarray(cmyk.convert("RGB")))


def test_transparency_lies_on_white():
    alpha = np.array([[0, 255, 128, 255, 0]] * 3, np.uint8)
    rgba = np.dstack([PIXELS, alpha])
    for source in (rgba, Image.fromarray(rgba), encoded(Image.fromarray(rgba))):
        pixels = open_image(source)
        assert np.array_equal(pixels[:, [0, 4]], np.full((3, 2, 3), 255))
        assert np.array_equal(pixels[:, [1, 3]], PIXELS[:, [1, 3]])
        between = (PIXELS[:, 2].astype(int) * 128 + 255 * 127) / 255
        assert np.abs(pixels[:, 2] - between).max() <= 1
    palette = Image.fromarray(PIXELS).quantize(4)
    clear = open_image(encoded(palette, transparency=0))
    assert np.array_equal(clear[np.asarray(palette) == 0], np.full_like(clear[np.asarray(palette) == 0], 255))
    assert not np.array_equal(clear, np.full_like(clear, 255))


def test_of_sixteen_bits_the_upper_eight_count():
    deep = np.array([[0, 255, 256, 32768, 65535]], np.uint16)
    pixels = open_image(encoded(Image.fromarray(deep)))
    assert pixels[0, :, 1].tolist() == [0, 0, 1, 128, 255]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_photograph_is_turned_upright(orientation):
    """The eight orientations of EXIF: what the camera stored, turned back."""
    stored = {
        1: PIXELS, 2: PIXELS[:, ::-1], 3: PIXELS[::-1, ::-1], 4: PIXELS[::-1], 5: PIXELS.swapaxes(0, 1),
        6: np.rot90(PIXELS, 1), 7: np.rot90(PIXELS, 2).swapaxes(0, 1), 8: np.rot90(PIXELS, -1),
    }[orientation]  # fmt: skip
    image = Image.fromarray(np.ascontiguousarray(stored))
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(image, exif=exif)
    assert np.array_equal(open_image(data), PIXELS)
    assert np.array_equal(open_image(Image.open(io.BytesIO(data))), PIXELS)


def test_of_an_animation_the_first_frame_counts():
    frames = [Image.fromarray(np.full((4, 4, 3), value, np.uint8)) for value in (10, 200)]
    data = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert Image.open(io.BytesIO(data)).n_frames == 2
    assert np.array_equal(open_image(data), np.full((4, 4, 3), 10))


def bomb(width: int, height: int) -> bytes:
    """A PNG of a few bytes that claims any size."""
    chunk = lambda kind, body: (  # noqa: E731
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
    )
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 99)) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (bomb(2_000, 1_000), r"the image of \d+ bytes \(2000 x 1000\) cannot be decoded: .*truncated"),
        (bomb(20_000, 5_000), rf"20000 x 5000 = 100,000,000 pixels; at most {MOST_PIXELS:,} are read"),
        (bomb(2**31 - 1, 2**31 - 1), "cannot be opened: .*exceeds limit of"),
        (np.zeros((1, MOST_PIXELS + 1), np.uint8), rf"= 89,478,486 pixels; at most {MOST_PIXELS:,} are read"),
        (PNG[: len(PNG) // 2], r"\(5 x 3\) cannot be decoded: .*"),
        (b"", "the image of 0 bytes is none that can be read; expected AVIF, BMP"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "is none that can be read"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "is none that can be read"),
        ("nowhere.png", "image 'nowhere.png' cannot be opened: No such file"),
        (".", "image '.' cannot be opened: Is a directory"),
        ("https://example.com/a.png", "is remote; fetch it"),
        ("data:text/plain;base64,aGk=", "is no data:image/TYPE;base64,"),
        ("data:image/png;base64,?", "is not base64"),
        (np.zeros((0, 4), np.uint8), r"the image array \[0, 4\] is empty: 4 x 0 pixels"),
        (np.zeros((4, 4, 3), np.float32), r"an array float32\[4, 4, 3\]; expected uint8"),
        (np.zeros((4, 4, 2), np.uint8), r"an array uint8\[4, 4, 2\]; expected uint8"),
        (np.zeros((2, 4, 4, 3), np.uint8), "expected uint8"),
        (Image.new("F", (4, 4)), "pixels have mode F, 32 bits of unknown range"),
        (17, "image 17 is a int; expected a path, the bytes"),
        (None, "image None is a NoneType; expected a path"),
    ],
)
def test_what_is_no_picture_gets_one_line(source, message):
    with pytest.raises(ValueError, match=message) as error:
        open_image(source)
    assert "\n" not in str(error.value)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_damage_gives_pixels_or_one_line(data):
    kind = data.draw(st.sampled_from(["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP"]))
    whole = bytearray(encoded(Image.fromarray(PIXELS), kind))
    for place in data.draw(st.lists(st.integers(0, len(whole) - 1), max_size=4)):
        whole[place] = data.draw(st.integers(0, 255))
    try:
        assert open_image(whole[: data.draw(st.integers(0, len(whole)))]).shape[2] == 3
    except ValueError as error:
        assert "\n" not in str(error)
