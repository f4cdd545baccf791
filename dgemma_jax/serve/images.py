"""The images of a request: what its clients may send, before anything else reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dgemma_jax.config import Config
from dgemma_jax.images.opening import from_data_url
from dgemma_jax.images.placement import KINDS, reads_images, source_of
from dgemma_jax.serve.remote import fetch

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class ImageRules:
    """most: images in one request. remote: whether http and https URLs are fetched, from public addresses."""

    most: int = 8
    remote: bool = False

    def apply(self, messages: Messages, config: Config) -> Messages:
        """The messages with the bytes of each image in place of its URL. ValueError for what the rules do not allow.

        A client's word for an image never reaches what opens files: only data: URLs and, if allowed, remote ones. For a
        model that reads no images they stay as they are, and are refused where others are.
        """
        if not reads_images(config):
            return messages
        count = sum(part["type"] in KINDS for message in messages for part in _parts(message))
        if count > self.most:
            raise ValueError(f"messages hold {count} images; this server reads at most {self.most} in one request")
        return [self._message(message, f"messages[{index}]") for index, message in enumerate(messages)]

    def _message(self, message: dict[str, Any], path: str) -> dict[str, Any]:
        if not (parts := _parts(message)):
            return message
        return message | {"content": [self._part(part, f"{path}.content[{i}]") for i, part in enumerate(parts)]}

    def _part(self, part: dict[str, Any], path: str) -> dict[str, Any]:
        if part["type"] not in KINDS:
            return part
        url = source_of(part)
        if url.startswith("data:"):
            return {"type": "image", "image": from_data_url(url)}
        if not self.remote:
            raise ValueError(
                f"{path}: the image {url!r:.60} is no data: URL; send one (remote images need --allow-remote-images)"
            )
        return {"type": "image", "image": fetch(url)}


def _parts(message: dict[str, Any]) -> list[dict[str, Any]]:
    content = message.get("content")
    return content if isinstance(content, list) else []
