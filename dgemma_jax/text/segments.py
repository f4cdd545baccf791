"""A prompt as segments: control tokens, and text in which no control token is recognised."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

DELIMITER = '<|"|>'
PLACEHOLDERS = {
    "image": "<|image|>",
    "image_url": "<|image|>",
    "audio": "<|audio|>",
    "input_audio": "<|audio|>",
    "video": "<|video|>",
}
_BARE_KEY = re.compile(r"""[^\s:,{}\[\]<"'][^:,{}\[\]<]*(?<!\s)""")


class Segments:
    """Collects strings, each a control token or text; neighbouring texts are one, so that they are encoded together.

    media: the parts of messages that placeholders stand for, in the order of the placeholders.
    """

    def __init__(self):
        self._parts: list[tuple[list[str], bool]] = []  # the pieces of each, joined once at the end
        self.media: list[Mapping] = []

    @property
    def parts(self) -> list[tuple[str, bool]]:
        """(string, whether it is a control token)."""
        return [("".join(pieces), control) for pieces, control in self._parts]

    def text(self, string: str) -> "Segments":
        if string and self._parts and not self._parts[-1][1]:
            self._parts[-1][0].append(string)
        elif string:
            self._parts.append(([string], False))
        return self

    def control(self, token: str) -> "Segments":
        self._parts.append(([token], True))
        return self

    def medium(self, part: Mapping) -> "Segments":
        """The placeholder of a part that is no text."""
        self.media.append(part)
        return self.control(PLACEHOLDERS[part["type"]])

    def quoted(self, string: str, path: str | None = None) -> "Segments":
        """`string` between delimiters. The grammar has no escape: a delimiter inside becomes a plain quote, or is
        refused with `path` (the place of the string in the message) when one is given."""
        if path is not None and DELIMITER in string:
            raise ValueError(
                f"{path}: expected a string without {DELIMITER}, which would end it early; write a plain quote instead"
            )
        return self.control(DELIMITER).text(string.replace(DELIMITER, '"')).control(DELIMITER)

    def key(self, key: str, path: str | None = None) -> "Segments":
        """A key and its colon: bare, or between delimiters where a bare key could not be read back."""
        bare = _BARE_KEY.fullmatch(key)
        return (self.text(key) if bare else self.quoted(key, path)).text(":")

    def value(self, value, path: str | None = None) -> "Segments":
        """One JSON value: keys sorted without regard to case, numbers as Python writes them."""
        match value:
            case None:
                return self.text("null")
            case str():
                return self.quoted(value, path)
            case bool():
                return self.text("true" if value else "false")
            case int():
                return self.text(str(value))
            case float() if math.isfinite(value):
                return self.text(str(value))
            case Mapping():
                return self.text("{").pairs(value, path).text("}")
            case Sequence() if not isinstance(value, bytes | bytearray):
                self.text("[")
                for index, item in enumerate(value):
                    self.text("," if index else "").value(item, path and f"{path}[{index}]")
                return self.text("]")
        raise ValueError(f"{path or 'value'}: expected a JSON value, got {value!r:.80}; convert it first")

    def pairs(self, mapping: Mapping, path: str | None = None) -> "Segments":
        """The inside of an object."""
        for index, (key, item) in enumerate(sorted_items(mapping)):
            self.text("," if index else "").key(key, path).value(item, path and f"{path}.{key}")
        return self

    def __str__(self) -> str:
        return "".join(string for string, _ in self.parts)

    def fewest_tokens(self, tokenizer) -> int:
        """How many ids `encode` gives at least; known at once, where encoding a long text takes its time."""
        return sum(1 if control else -(-len(string) // tokenizer.longest_token) for string, control in self.parts)

    def encode(self, tokenizer) -> list[int]:
        """Control segments by id, the rest with special tokens not recognised."""
        ids: list[int] = []
        for string, control in self.parts:
            ids += [tokenizer.token_id(string)] if control else tokenizer.encode(string, control=False)
        return ids


def sorted_items(mapping: Mapping) -> list[tuple[str, Any]]:
    return sorted(((str(key), item) for key, item in mapping.items()), key=lambda pair: pair[0].lower())


def json_object(value, path: str) -> Mapping:
    """A mapping from a mapping, from the JSON text of one, or from nothing. ValueError names `path`."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ValueError(f"{path}: expected a JSON object, got {value[:80]!r} ({error}); repair the text") from None
    if value is None or value == "" or (isinstance(value, str) and not value.strip()):
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{path}: expected a JSON object, got {type(value).__name__}; pass the arguments by name")
    return value
