"""The public API is documented: every name is on the API page, and every docstring names what it takes."""

import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest

import dgemma_jax as dg
import dgemma_jax.text
from tests.docs.blocks import ROOT

TEXT = (ROOT / "docs/api.md").read_text()
PAGE = re.findall(r"^::: (\S+)$", TEXT, re.MULTILINE)
# Arguments that mean the same everywhere: the first column of the page's table; and the glossary's letters.
EXPLAINED = {name for row in re.findall(r"^\| (`.*?) \|", TEXT, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
EXPLAINED |= {*"BCTSV", "ax"}


def found(path: str) -> Any:
    """The object at a dotted path."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        try:
            thing = import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for name in parts[end:]:
            thing = getattr(thing, name)
        return thing
    raise LookupError(path)


def documented() -> Iterator[tuple[str, Any]]:
    """Every class and function of the page, with the public methods of the classes."""
    for path in PAGE:
        thing = found(path)
        if isinstance(thing, ModuleType):
            own = [(f"{path}.{n}", v) for n, v in vars(thing).items() if getattr(v, "__module__", None) == path]
            things = [(name, value) for name, value in own if not name.split(".")[-1].startswith("_")]
        else:
            things = [(path, thing)]
        for name, value in things:
            if inspect.isclass(value):
                yield name, value
                yield from ((f"{name}.{n}", m) for n, m in members(value))
            elif inspect.isfunction(value):
                yield name, value


def members(kind: type) -> Iterator[tuple[str, Any]]:
    for name, value in vars(kind).items():
        if isinstance(value, property):
            yield name, value.fget
        elif isinstance(value, classmethod | staticmethod):
            yield name, value.__func__
        elif inspect.isfunction(value) and not name.startswith("_"):
            yield name, value


THINGS = dict(documented())


def test_every_public_name_is_on_the_page():
    wanted = {f"dgemma_jax.{name}" for name in dg.__all__ if name != "__version__"}
    wanted |= {f"dgemma_jax.text.{name}" for name in dgemma_jax.text.__all__}
    assert wanted <= set(PAGE), wanted - set(PAGE)
    assert len(PAGE) == len(set(PAGE))


@pytest.mark.parametrize("path", PAGE)
def test_what_the_page_names_is_there_and_has_a_docstring(path):
    thing = found(path)
    assert thing is dg.UNSET or not isinstance(thing, ModuleType | type) or thing.__doc__


@pytest.mark.parametrize("name", THINGS)
def test_a_docstring_says_what_each_argument_is(name):
    thing = THINGS[name]
    text = thing.__doc__ or ""
    if inspect.isclass(thing):  # a field may be explained where it is inherited from
        text = " ".join(kind.__doc__ or "" for kind in thing.__mro__[:-1])
    assert text and not text.startswith(f"{getattr(thing, '__name__', '')}("), "no docstring"
    unknown = [argument for argument in arguments(thing) if argument not in EXPLAINED]
    missing = [argument for argument in unknown if not re.search(rf"\b{argument}\b", text)]
    assert not missing, f"{name} says nothing of {', '.join(missing)}"


def arguments(thing: Any) -> list[str]:
    """Of a function, its parameters; of a class, its fields or the parameters of its constructor."""
    names = list(inspect.signature(thing).parameters) if callable(thing) else []
    return [name for name in names if name not in ("self", "cls") and not name.startswith("_")]
