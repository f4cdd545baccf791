"""The lists of request fields that the page on serving prints are the server's."""

import re
from collections.abc import Iterator
from typing import Any, get_args

from dgemma_jax.serve.protocol import REFUSED, ChatRequest, CompletionRequest, Ignored, Strict
from tests.docs.blocks import ROOT

LISTS = re.findall(r"^\* \*\*(.*?):?\*\*(.*(?:\n  .*)*)", (ROOT / "docs/howto/serve.md").read_text(), re.MULTILINE)
PRINTED = {title: re.findall(r"`([\w.]+)`", text) for title, text in LISTS}


def without_effect(model: type[Strict], path: str = "") -> Iterator[str]:
    """Of a request and of all its parts, as the header names them."""
    for name, field in model.model_fields.items():
        if field.exclude:
            yield path + name
        for part in parts(field.annotation):
            yield from without_effect(part, f"{path}{name}.")


def parts(annotation: Any) -> Iterator[type[Strict]]:
    if isinstance(annotation, type) and issubclass(annotation, Strict):
        yield annotation
    for inner in get_args(annotation):
        yield from parts(inner)


def test_the_lists_of_the_page_are_the_servers():
    chat, text = (set(model.model_fields) - set(Ignored.model_fields) for model in (ChatRequest, CompletionRequest))
    wanted = {
        "Honoured": chat & text,
        "Honoured by chat completions alone": chat - text,
        "Honoured by completions alone": text - chat,
        "Refused": set(REFUSED),
        "Without effect": {*without_effect(ChatRequest), *without_effect(CompletionRequest)},
    }
    assert {title: set(names) for title, names in PRINTED.items()} == wanted
    assert all(len(set(names)) == len(names) for names in PRINTED.values())
