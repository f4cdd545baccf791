"""Token ids from text and back, over a `tokenizer.json` of the `tokenizers` library."""

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

LONG_TEXT = 4096  # characters from which encoding takes long enough to be felt by other threads


class Tokenizer:
    """Text to ids and back.

    backend: a `tokenizers.Tokenizer`, or an object of transformers that carries one as `backend_tokenizer`.

    No token is added on either side: `<bos>` comes from the caller or from the chat rendering.
    """

    def __init__(self, backend: Any):
        self._control = getattr(backend, "backend_tokenizer", backend)
        added = self._control.get_added_tokens_decoder()
        self.special_ids: dict[str, int] = {token.content: id for id, token in added.items()}
        self._plain = _without_special(self._control, added.values())
        self._skipped = {id for id, token in added.items() if token.special}
        self._bytes = {id for n in range(256) if (id := self._control.token_to_id(f"<0x{n:02X}>")) is not None}

    @classmethod
    def from_file(cls, path: str | Path) -> "Tokenizer":
        """Reads a `tokenizer.json`. ValueError if there is none at `path` or it cannot be read."""
        if not Path(path).is_file():
            raise ValueError(f"tokenizer file {str(path)!r}: expected an existing tokenizer.json; check the path")
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)))
        except Exception as error:  # the library raises bare Exception on a malformed file
            raise ValueError(f"tokenizer file {str(path)!r}: expected a tokenizer.json; it gives: {error}") from None

    @property
    def vocab_size(self) -> int:
        """Ids it knows, added tokens included."""
        return self._control.get_vocab_size(with_added_tokens=True)

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token: a text of n characters has at least n / longest_token tokens."""
        return max(map(len, self._control.get_vocab(with_added_tokens=True)))

    def token_id(self, name: str) -> int:
        """The id of one token by its name, which is its string. ValueError if the vocabulary lacks it."""
        id = self._control.token_to_id(name)
        if id is None:
            raise ValueError(
                f"token {name!r}: expected one of the {self.vocab_size} tokens of this tokenizer; check the name"
            )
        return id

    def encode(self, text: str, control: bool = True) -> list[int]:
        """Ids of `text`. With `control=False` a special token written in the text is ordinary text.

        Lone surrogates, which UTF-8 cannot carry, become U+FFFD.
        """
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        backend = self._control if control else self._plain
        try:
            if len(text) < LONG_TEXT:
                return backend.encode(text, add_special_tokens=False).ids
            # A batch, because only for that the library lets other threads run.
            return backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except Exception as error:  # the library raises bare Exception where its vocabulary lacks a token
            raise ValueError(f"text {text!r:.60}: the tokenizer cannot encode it ({error}); use another one") from None

    def decode(self, ids: Iterable[int], skip_special: bool = False) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD, ids beyond the vocabulary give no text.

        skip_special: without the special tokens.
        """
        return self._control.decode([int(id) for id in ids], skip_special_tokens=skip_special)

    def decoder(self, skip_special: bool = False) -> "IncrementalDecoder":
        """For ids that come piece by piece; skip_special: see `decode`."""
        return IncrementalDecoder(self, skip_special)


class IncrementalDecoder:
    """Decodes ids as they come. The pieces join to `Tokenizer.decode` of all ids and never hold half a character.

    skip_special: without the special tokens. A run of byte tokens is held to its end, because one bad byte changes how
    the whole run decodes.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special: bool = False):
        self._tokenizer = tokenizer
        self._skipped = tokenizer._skipped if skip_special else frozenset()
        self._context: list[int] = []  # the last ids given out: some decoders strip the first blank of a sequence
        self._held: list[int] = []

    def feed(self, ids: Iterable[int]) -> str:
        """The text that `ids` complete; empty while a character is unfinished."""
        self._held += [id for id in map(int, ids) if id not in self._skipped]
        end = len(self._held)
        while end and self._held[end - 1] in self._tokenizer._bytes:
            end -= 1
        # Byte-level vocabularies spell a character in at most four tokens: three may be incomplete.
        for cut in range(end, max(end - 4, 0), -1):
            if not self._in_run(cut) and not (text := self._decode(cut)).endswith("\ufffd"):
                return self._give(cut, text)
        return ""

    def _in_run(self, cut: int) -> bool:
        """Whether the ids on both sides are bytes."""
        sides = self._held[cut - 1 : cut + 1]
        return len(sides) == 2 and all(id in self._tokenizer._bytes for id in sides)

    @property
    def held(self) -> int:
        """How many ids have not given their text yet."""
        return len(self._held)

    def finish(self) -> str:
        """The text still held."""
        return self._give(len(self._held), self._decode(len(self._held)))

    def _decode(self, end: int) -> str:
        known = len(self._tokenizer.decode(self._context))
        return self._tokenizer.decode(self._context + self._held[:end])[known:]

    def _give(self, end: int, text: str) -> str:
        if end:
            self._context, self._held = self._held[:end], self._held[end:]
        return text


def _without_special(backend, added) -> tokenizers.Tokenizer:
    """A twin of `backend` that shares its vocabulary and does not know the special tokens.

    The same ids as `encode_special_tokens = True`, which is a flag of the shared object and so no choice for threads.
    """
    twin = tokenizers.Tokenizer(backend.model)
    if backend.normalizer is not None:
        twin.normalizer = backend.normalizer
    if backend.pre_tokenizer is not None:
        twin.pre_tokenizer = backend.pre_tokenizer
    twin.add_tokens([token for token in added if not token.special])
    return twin
