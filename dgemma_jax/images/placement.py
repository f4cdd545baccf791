"""Images among the token ids of a prompt: placeholders spelled out, and which image lies where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

from dgemma_jax.config import Config
from dgemma_jax.images.patches import PreparedImage

NO_IMAGES = "this model reads no images: its config.json has no vision_config, or no ids for images"
KINDS = ("image", "image_url")  # parts of a message that hold an image


class Placed(NamedTuple):
    """An image and the place of its first soft token in the prompt."""

    start: int
    image: PreparedImage

    @property
    def end(self) -> int:
        """The place behind its last soft token."""
        return self.start + self.image.tokens


def reads_images(config: Config) -> bool:
    """Whether a model has what images need."""
    return config.vision is not None and None not in (config.image_token_id, config.boi_token_id, config.eoi_token_id)


def source_of(part: Mapping[str, Any]) -> Any:
    """What holds the image of a message's part: {"type": "image", "image": source}, or OpenAI's
    {"type": "image_url", "image_url": {"url": source}}; see `open_image` for sources. ValueError if nothing does.
    """
    source = part.get(part["type"])
    if isinstance(source, Mapping):
        source = source.get("url")
    if source is None:
        raise ValueError(f"a part of type {part['type']!r} holds no image; expected one under {part['type']!r}")
    return source


def expand(ids: Sequence[int], images: Sequence[PreparedImage], config: Config) -> list[int]:
    """The ids with each placeholder as begin, an image's soft tokens, end. ValueError unless there is one for each."""
    count = sum(id == config.image_token_id for id in ids)
    if count != len(images):
        raise ValueError(
            f"the prompt holds {count} placeholders of images and {len(images)} images are given; "
            "write <|image|> where each belongs"
        )
    rest = iter(images)
    return list(chain.from_iterable(_spelled(id, rest, config) for id in ids))


def _spelled(id: int, images: Any, config: Config) -> list[int]:
    if id != config.image_token_id:
        return [id]
    begin, end = config.boi_token_id, config.eoi_token_id
    assert begin is not None and end is not None  # see `reads_images`
    return [begin, *[id] * next(images).tokens, end]


def placed(ids: Sequence[int], images: Sequence[PreparedImage], config: Config) -> tuple[Placed, ...]:
    """Where each image lies in ids that hold as many placeholders as it has soft tokens, side by side.

    ValueError if the placeholders are others than the images need.
    """
    holes = [place for place, id in enumerate(ids) if id == config.image_token_id]
    first = [0, *accumulate(image.tokens for image in images)]  # hole of each image
    together = first[-1] == len(holes) and all(
        holes[end - 1] - holes[begin] == end - 1 - begin for begin, end in pairwise(first)
    )
    if not together:
        raise ValueError(
            f"the prompt holds {len(holes)} placeholders (id {config.image_token_id}); its {len(images)} images take "
            f"{[image.tokens for image in images]}, those of each side by side"
        )
    return tuple(Placed(holes[begin], image) for begin, image in zip(first, images, strict=False))
