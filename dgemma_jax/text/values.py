"""Types of the values that the model wrote without quotes: by the tool's schema, else by the rules of JSON; and
escapes of those that it quoted plainly.
"""

import json
import math
import re
from typing import Any

_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]*)?([eE][+-]?[0-9]+)?")
_LOOSE_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_WORDS = {"true": True, "false": False, "null": None, "none": None, "nil": None}
_LONGEST_NUMBER = 1000  # digits; Python refuses to read integers of more than 4300
_EXACT = 2**53


class Bare(str):
    """A value written without quotes: its type is still open."""


def typed(value: Any, schema: dict) -> Any:
    """`value` with each `Bare` in it typed; `schema` is normalised, {} where nothing is known."""
    if isinstance(value, Bare):
        return _bare(value, schema)
    if isinstance(value, dict):
        schema = _alternative(schema, "object")
        known, other = schema.get("properties", {}), schema.get("additionalProperties")
        other = other if isinstance(other, dict) else {}
        return {key: typed(item, known.get(key, other)) for key, item in value.items()}
    if isinstance(value, list):
        items = _alternative(schema, "array").get("items", {})
        return [typed(item, items) for item in value]
    return value


def _alternative(schema: dict, kind: str) -> dict:
    options = schema.get("anyOf")
    return next((option for option in options if option.get("type") == kind), schema) if options else schema


def _types(schema: dict) -> set[str]:
    names = schema.get("type", ())
    types = {names} if isinstance(names, str) else set(names)
    if schema.get("nullable"):
        types.add("null")
    return types.union(*(_types(option) for option in schema.get("anyOf", ())))


def _bare(text: str, schema: dict):
    value = _json(text)
    if not schema:
        return value
    types = _types(schema)
    if "number" in types or "integer" in types:
        value = _number(text, value)
    kind = _kind(value)
    if not types or kind in types or (kind == "integer" and "number" in types):
        return value
    return str(text) if "string" in types else value


def _json(text: str):
    """By the rules of JSON; a number may end with its point and the words may be capitalised as in Python."""
    word = text.lower()
    if word in _WORDS:
        return _WORDS[word]
    number = _NUMBER.fullmatch(text) if len(text) <= _LONGEST_NUMBER else None
    if number and (number[1] or number[2]):
        return float(text) if math.isfinite(float(text)) else str(text)
    return int(text) if number else str(text)


def _number(text: str, value):
    """A number where one is expected, an integral one as int."""
    if isinstance(value, str) and len(text) <= _LONGEST_NUMBER and _LOOSE_NUMBER.fullmatch(text):
        loose = float(text)
        value = loose if math.isfinite(loose) else value
    integral = isinstance(value, float) and value.is_integer() and abs(value) < _EXACT
    return int(value) if integral else value


def _kind(value) -> str:
    return {str: "string", bool: "boolean", int: "integer", float: "number"}.get(type(value), "null")


def unescaped(text: str, quote: str) -> str:
    """What stands between two plain quotes, without its backslashes: JSON's escapes, or that of a single quote."""
    if quote == "'":
        return text.replace("\\'", "'")
    try:
        plain = json.loads(f'"{text}"', strict=False)
        plain.encode()
    except ValueError:  # no escapes of JSON, or half of a surrogate pair
        return text
    return plain
