"""The tokenizer of the bundled model: Gemma 4's control tokens at Gemma 4's ids around a small vocabulary.

A text splits into the words of `WORDS`, the syllables of `SYLLABLES` (one token each) and single characters; a
character outside printable ASCII is spelled in its UTF-8 bytes. There are no merges, so that an unknown word is always
read in the same few pieces, which is what a model this small can copy. Any Unicode text round-trips.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

VOCAB_SIZE = 800

PAD, EOS, BOS, TURN, END_OF_TURN, NEWLINE = 0, 1, 2, 105, 106, 107

# Gemma 4's ids, so that code and prompts written for the real tokenizer also fit this one.
CONTROL = {
    "<pad>": PAD, "<eos>": EOS, "<bos>": BOS, "<unk>": 3, "<mask>": 4,
    "<|tool>": 46, "<tool|>": 47, "<|tool_call>": 48, "<tool_call|>": 49,
    "<|tool_response>": 50, "<tool_response|>": 51, '<|"|>': 52, "<|think|>": 98,
    "<|channel>": 100, "<channel|>": 101, "<|turn>": TURN, "<turn|>": END_OF_TURN,
}  # fmt: skip

# Gemma 4's ids of these lie far beyond this vocabulary; the model never sees them, the chat format names them.
MEDIA = ("<|image>", "<|audio>", "<|image|>", "<|audio|>", "<image|>", "<audio|>", "<|video|>")

# Words that a list may hold: tokens of their own, so that six of them fit a canvas.
LIST_WORDS = (
    *("apple", "pear", "plum", "fig", "lemon", "cherry", "banana", "grape"),
    *("red", "green", "blue", "yellow", "black", "white", "pink", "brown"),
    *("cat", "dog", "cow", "fox", "hen", "owl", "horse", "sheep"),
    *("north", "south", "east", "west", "spring", "summer", "autumn", "winter"),
)  # fmt: skip

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)
LANGUAGES = ("French", "German", "Italian", "Spanish")
WEATHER = ("sunny", "cloudy", "rainy", "windy", "snowy")

# The fixed parts of declarations, calls and results, and the names in them.
GRAMMAR = (
    *("declaration:", "{description:", ",parameters:{properties:{", "parameters:{properties:{", ":{description:"),
    *(
        ":{type:",
        "},",
        "}},required:[",
        "],type:",
        "}}",
        "STRING",
        "INTEGER",
        "OBJECT",
        "call:",
        "response:",
        "{value:",
    ),
    *("get_weather", "get_time", "get_price", "send_message", "translate", "add_event", "set_timer", "play_song"),
    *("search", "city", "item", "to", "text", "language", "title", "day", "minutes", "query"),
)

# Two digits are one token, so that numbers below 100 are compared as wholes.
TWO_DIGITS = tuple(map(str, range(10, 100)))

SPEECH = (
    *("Solve", " this", " sudoku", "Reverse", "Sort", " list", "Count", " down", " in", "Recite"),
    *(" the", " from", " months", " days", " alphabet", "Fill", " gap", "<gap>", "def", "return", "    "),
    *("What", "How", " is", " weather", "Weather", " time", "Time", " price", " much", "Send", " a", " message", " to"),
    *("Tell", "Translate", " into", "Add", " on", " event", "Set", " timer", "Timer", " for", " minutes", "Play"),
    *(" song", "Search", "Find", " city", " item", " person", " word", " language", " calendar", " text", "The", "It"),
    *(" sent", " added", "Now", " playing", " found", " set", "sent", "added", "set", "playing", " degrees"),
    *(" euros", " it", "Sorry", " cannot", " do", " that", "Call", "No", " tool", " fits", " first", " last", "Answer"),
    *(" with", " result", " sudoku", " and", " call", " solve", " sort", " reverse", " know", " few", " skills"),
    *("Hello", "Hi", "Who", " are", " you", " can", "Thank", "Thanks", "You", " welcome", " am", " tiny", " model"),
    *("Ask", " me", " of", " an", " or", "Write"),
)

# A consonant and a vowel: an unknown name is copied in half as many pieces as it has letters.
VOWELS, CONSONANTS = "aeiou", "bcdfghjklmnpqrstvwxyz"
_LOWER = tuple(consonant + vowel for consonant in CONSONANTS for vowel in VOWELS)
SYLLABLES = (*_LOWER, *map(str.capitalize, _LOWER))

# What is read as one token, leading space included.
_ROLES = ("system", "user", "model", "thought")
_NAMES = (*LIST_WORDS, *DAYS, *MONTHS, *LANGUAGES, *WEATHER)
WORDS = tuple(dict.fromkeys((*_ROLES, *_NAMES, *GRAMMAR, *TWO_DIGITS, *SPEECH)))


def vocabulary(words: Iterable[str] = (*WORDS, *SYLLABLES), size: int = VOCAB_SIZE) -> dict[str, int]:
    """Token string -> id, complete: control ids as given, everything else at the lowest free ids, media tokens last.

    Raises ValueError if the words do not fit into `size` ids.
    """
    # Only bytes that occur in UTF-8 and are not printable ASCII or a newline: everything a character may need.
    byte_values = [b for b in range(0xF5) if not 32 <= b < 127 and b not in (ord("\n"), 0xC0, 0xC1)]
    free = [*map(chr, range(32, 127)), *(f"<0x{b:02X}>" for b in byte_values), *dict.fromkeys(words)]
    fixed = CONTROL | {"\n": NEWLINE} | {name: size - len(MEDIA) + i for i, name in enumerate(MEDIA)}
    taken = set(fixed.values())
    ids = [i for i in range(size) if i not in taken]
    if len(free) > len(ids):
        raise ValueError(f"{len(free)} characters, bytes and words do not fit into the {len(ids)} free ids of {size}")
    free += [f"<unused{i}>" for i in range(len(ids) - len(free))]
    return fixed | dict(zip(free, ids, strict=True))


def _bounded(word: str) -> str:
    """A pattern for `word` where it stands alone: no letter, digit or underscore continues it on either side."""
    left, right = (r"\b" if end.isalnum() else "" for end in (word[0], word[-1]))
    return left + re.escape(word) + right


def build(words: Iterable[str] = WORDS, syllables: Iterable[str] = SYLLABLES, size: int = VOCAB_SIZE) -> Tokenizer:
    """The tokenizer; it adds no `<bos>`, and every control and media token is special."""
    words, syllables = tuple(words), tuple(syllables)
    # No merges: a piece is a word that stands alone, a syllable anywhere or a character. Every character is a piece of
    # its own, so that text which merely looks like a byte or an unused token is never looked up as one.
    pieces = "|".join([*map(_bounded, sorted(words, key=len, reverse=True)), *syllables, r"[\s\S]"])
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary((*words, *syllables), size),
            merges=[],
            unk_token="<unk>",
            byte_fallback=True,
            ignore_merges=True,
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pieces), behavior="isolated")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in (*CONTROL, *MEDIA)])
    return tokenizer


def save(tokenizer: Tokenizer, directory: Path, max_length: int) -> None:
    """Writes tokenizer.json and tokenizer_config.json as Hugging Face lays them out."""
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "mask_token": "<mask>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
