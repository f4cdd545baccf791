"""What callers pass as a prompt to the token ids and images of a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from dgemma_jax.config import Config, is_int
from dgemma_jax.images import PreparedImage, prepare
from dgemma_jax.images.placement import KINDS, NO_IMAGES, Placed, expand, placed, reads_images, source_of, vision_of
from dgemma_jax.text import Tokenizer, opens_thought
from dgemma_jax.text.chat import segments

NO_TOKENIZER = "this model has no tokenizer.json: pass token ids, or load with tokenizer=PATH"
Prompt = str | Sequence[int]


class Encoded(NamedTuple):
    """A prompt as the engine takes it."""

    ids: tuple[int, ...]
    images: tuple[Placed, ...]


class Conversation(NamedTuple):
    """A conversation up to where the model's turn begins. in_thought: that is inside an open thought."""

    ids: list[int]
    images: list[PreparedImage]
    in_thought: bool


@dataclass(frozen=True)
class PromptReader:
    """Reads prompts for a model; ValueError, in one line, for those that it cannot answer. context: in tokens."""

    config: Config
    tokenizer: Tokenizer | None
    context: int

    def encode(self, prompt: Prompt, images: Sequence[Any] = ()) -> Encoded:
        """Text, whose placeholders are spelled out for its images, or ids, which are used as they are."""
        prepared = self.prepare(images)
        if isinstance(prompt, str):
            ids = self._encode_text(prompt)
            if reads_images(self.config):
                ids = expand(ids, prepared, self.config)
        elif isinstance(prompt, Sequence | np.ndarray) and not isinstance(prompt, bytes):
            ids = prompt
        else:
            raise ValueError(
                f"prompt {prompt!r:.60} is neither text nor a list of token ids; one prompt of ids is [[1, 2]]"
            )
        if len(ids) == 0:
            raise ValueError(f"prompt {prompt!r} is empty; expected text or at least one token id")
        vocab = self.config.vocab_size
        for id in ids:
            if not is_int(id) or id >= vocab:
                raise ValueError(f"prompt holds token id {id!r:.60}; expected integers in 0 .. {vocab - 1}")
        places = placed(ids, prepared, self.config) if reads_images(self.config) else ()
        return Encoded(tuple(int(id) for id in ids), places)

    def conversation(
        self, messages: Sequence[Mapping], tools: Sequence[Mapping] | None = None, thinking: bool = False
    ) -> Conversation:
        """The prompt of messages, with the images among their parts."""
        if self.tokenizer is None:
            raise ValueError(NO_TOKENIZER)
        for index, message in enumerate(messages):
            parts = message.get("content") if isinstance(message, Mapping) else None
            for part in parts if isinstance(parts, list | tuple) else ():
                if isinstance(part, Mapping) and (why := self._refusal(part.get("type"))):
                    raise ValueError(f"messages[{index}] holds a part of type {part.get('type')!r:.60}; {why}")
        rendered = segments(messages, tools, thinking)
        # Before it is encoded, which takes its time, what is too long however that is done.
        self.room(rendered.fewest_tokens(self.tokenizer), " or more")
        ids, images = rendered.encode(self.tokenizer), self.prepare([source_of(part) for part in rendered.media])
        return Conversation(expand(ids, images, self.config) if images else ids, images, opens_thought(str(rendered)))

    def user_turn(self, text: str, images: Sequence[Any] = ()) -> Conversation:
        """The prompt of one turn of a user, its images before its text, up to where the model's turn begins."""
        parts = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": text}]
        return self.conversation([{"role": "user", "content": parts}])

    def prepare(self, images: Sequence[Any]) -> list[PreparedImage]:
        """The patches of images, see `images.prepare`."""
        return [prepare(image, vision_of(self.config)) for image in images]

    def room(self, tokens: int, or_more: str = "") -> int:
        """The tokens that an answer may have behind a prompt of so many."""
        if tokens >= self.context:
            raise ValueError(
                f"prompt of {tokens} tokens{or_more} leaves no room in a context of {self.context}; shorten it"
                " or load with a larger max_model_len"
            )
        return self.context - tokens

    def _encode_text(self, prompt: str) -> list[int]:
        if self.tokenizer is None:
            raise ValueError(NO_TOKENIZER)
        self.room(len(prompt) // self.tokenizer.longest_token, " or more")
        ids, bos = self.tokenizer.encode(prompt), self.config.bos_token_id
        return ids if not ids or bos is None or ids[0] == bos else [bos, *ids]

    def _refusal(self, kind: object) -> str | None:
        """Why a part of this type cannot be read, None if it can."""
        if kind == "text" or (kind in KINDS and reads_images(self.config)):
            return None
        return NO_IMAGES if kind in KINDS else "only text and images are read"
