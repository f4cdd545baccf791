"""Images among token ids: placeholders spelled out, places found, what does not fit refused."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dgemma_jax.config import gemma_26b_a4b
from dgemma_jax.engine.soft_tokens import chunk_end
from dgemma_jax.images import PreparedImage
from dgemma_jax.images.placement import Placed, expand, placed, source_of

CONFIG = replace(gemma_26b_a4b(), vocab_size=100, image_token_id=90, boi_token_id=91, eoi_token_id=92)


def image(tokens: int) -> PreparedImage:
    return PreparedImage(np.zeros((9 * tokens, 3), np.uint8), 3, tokens)


def test_each_placeholder_becomes_its_image():
    images = [image(3), image(1)]
    ids = expand([5, 90, 6, 90], images, CONFIG)
    assert ids == [5, 91, 90, 90, 90, 92, 6, 91, 90, 92]
    assert placed(ids, images, CONFIG) == (Placed(2, images[0]), Placed(8, images[1]))
    assert [one.end for one in placed(ids, images, CONFIG)] == [5, 9]
    assert expand([5, 6], [], CONFIG) == [5, 6] and placed([5, 6], [], CONFIG) == ()


@pytest.mark.parametrize(("ids", "count"), [([5, 90], 2), ([5], 1), ([90, 90], 1), ([5, 90], 0)])
def test_as_many_placeholders_as_images(ids, count):
    with pytest.raises(
        ValueError, match=rf"holds \d placeholders of images and {count} images are given; write <\|image"
    ):
        expand(ids, [image(2)] * count, CONFIG)


@pytest.mark.parametrize("ids", [[90], [90] * 4, [90, 5, 90, 90], [], [5, 6, 7]])
def test_ids_hold_as_many_placeholders_as_the_image_has_soft_tokens(ids):
    with pytest.raises(ValueError, match=r"its 1 images take \[3\], those of each side by side"):
        placed(ids, [image(3)], CONFIG)


def test_images_without_anything_between_have_places_of_their_own():
    assert [one.start for one in placed([90, 90, 90], [image(2), image(1)], CONFIG)] == [0, 2]


@given(st.data())
def test_a_chunk_never_splits_an_image(data):
    images, place = [], 0
    for tokens in data.draw(st.lists(st.integers(1, 12), max_size=4)):
        images.append(Placed(place + data.draw(st.integers(0, 5)), image(tokens)))
        place = images[-1].end
    length = place + data.draw(st.integers(1, 5))
    chunk, begin, seen = data.draw(st.integers(1, 9)), 0, []
    while begin < length:
        end = chunk_end(images, begin, min(begin + chunk, length))
        inside = [one for one in images if begin < one.end and one.start < end]
        assert all(begin <= one.start and one.end <= end for one in inside)
        assert begin < end and (end - begin <= chunk or (len(inside) == 1 and inside[0].start == begin))
        seen, begin = seen + inside, end
    assert seen == images


def test_parts_of_messages_hold_their_image_in_either_format():
    assert source_of({"type": "image", "image": "a.png"}) == "a.png"
    assert source_of({"type": "image_url", "image_url": {"url": "data:x", "detail": "low"}}) == "data:x"
    assert source_of({"type": "image_url", "image_url": "data:x"}) == "data:x"
    for part in ({"type": "image"}, {"type": "image_url", "image_url": {}}):
        with pytest.raises(ValueError, match=f"a part of type '{part['type']}' holds no image; expected one under"):
            source_of(part)
