"""Answering a file of prompts: one JSON object per line in, one per line out, resumable after any interruption."""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING, Any, NamedTuple

from dgemma_jax.events import Canvas, Completion, Failed, Finished
from dgemma_jax.sampling import Sampling

if TYPE_CHECKING:
    from dgemma_jax.api import Model
    from dgemma_jax.engine.request import Request

FIELDS = ("id", "prompt", "images", "messages", "tools", "thinking", "sampling")
Id = str | int


class Conversation(NamedTuple):
    """What a line's `messages` were, to take the answer apart."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    thinking: bool


class Line(NamedTuple):
    """A line of the input, read. conversation: None for a plain prompt. images: files shown with that."""

    id: Id
    prompt: str
    conversation: Conversation | None
    sampling: Sampling
    images: list[str] = []  # noqa: RUF012  (never changed)


@dataclass(frozen=True)
class Shard:
    """Every `of`-th line, from line number `index` on."""

    index: int = 0
    of: int = 1

    @classmethod
    def parse(cls, text: str) -> Shard:
        """`i/n`. ValueError unless 0 <= i < n."""
        index, _, of = text.partition("/")
        numbers = index.isdecimal() and of.isdecimal() and len(text) < 20
        if not (numbers and int(index) < int(of)):
            raise ValueError(f"shard {text!r:.60}; expected i/n with 0 <= i < n, such as 0/4")
        return cls(int(index), int(of))


EVERYTHING = Shard()


def answers(
    model: Model,
    lines: Iterable[str],
    sampling: Sampling,
    *,
    seed: int | None = None,
    slots: int | None = None,
    raw: bool = False,
    shard: Shard = EVERYTHING,
    done: Iterable[Id] = (),
) -> Iterator[dict[str, Any] | Canvas]:
    """The result of every line as it finishes, {"id": ..., "error": ...} for one that cannot be answered; between them
    every Canvas. Lines are read as slots become free.

    sampling: of lines that choose nothing else. raw: a `prompt` is the model's input as it stands, not a user's turn.
    shard: which lines to answer. done: ids to leave out.
    """
    done = frozenset(done)
    failed: list[dict[str, Any]] = []

    def requests() -> Iterator[tuple[Line, Request]]:
        seen: set[Id] = set()
        for number, text in enumerate(lines):
            if number % shard.of != shard.index or not text.strip():
                continue
            found: Id = number
            try:
                entry = _parsed(text)
                found = entry.get("id", number)
                if found in seen:
                    raise ValueError(f"id {found!r} is on an earlier line, too; every line needs its own")
                seen.add(found)
                if found in done:
                    continue
                line = _line(found, entry, sampling)
                yield line, _request(model, line, seed, raw)
            except Exception as error:  # a line may hold anything, and must not end the others
                failed.append(_failure(found, error))

    for line, event in model.serve(requests(), slots):
        yield from _emptied(failed)
        if isinstance(event, Finished):
            yield _result(model, line, event.completion)
        elif isinstance(event, Failed):
            yield _failure(line.id, event.error)
        elif isinstance(event, Canvas):
            yield event
    yield from _emptied(failed)


def read_requests(model: Model, lines: Iterable[str], seed: int | None = None, raw: bool = False) -> list[Request]:
    """The checked requests of some lines, as `answers` would answer them. ValueError with the number of a bad line."""
    found = []
    for number, text in enumerate(lines):
        if text.strip():
            try:
                found.append(_request(model, _line(number, _parsed(text), Sampling()), seed, raw))
            except ValueError as error:
                raise ValueError(f"line {number + 1}: {error}") from None
    return found


def _failure(id: Id, error: Exception) -> dict[str, Any]:
    return {"id": id, "error": str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"}


def _emptied(results: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    while results:
        yield results.pop(0)


def _parsed(text: str) -> dict[str, Any]:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # the bytes that no UTF-8 has were escaped when the file was read
        raise ValueError(f"not UTF-8 (at character {error.start}); save the file as UTF-8") from None
    try:
        entry = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(entry, dict):
        raise ValueError(f"{text.strip():.60} is no JSON object; expected one with prompt or messages")
    if not isinstance(entry.get("id", 0), str | int) or isinstance(entry.get("id"), bool):
        raise ValueError(f"id is {entry['id']!r:.60}; expected text or an integer")
    return entry


def _line(id: Id, entry: dict[str, Any], sampling: Sampling) -> Line:
    if unknown := [name for name in entry if name not in FIELDS]:
        raise ValueError(f"the field {unknown[0]!r} is unknown; expected {', '.join(FIELDS)}")
    if ("prompt" in entry) == ("messages" in entry):
        raise ValueError("expected either prompt or messages")
    own = entry.get("sampling", {})
    if not isinstance(own, dict):
        raise ValueError(f"sampling is {own!r:.60}; expected an object")
    try:
        chosen = Sampling(**own).merged(sampling)
    except TypeError:
        unknown = [name for name in own if name not in Sampling.__dataclass_fields__]
        raise ValueError(f"sampling has no field {unknown[0]!r}") from None
    if "messages" not in entry:
        for name in ("tools", "thinking"):
            if name in entry:
                raise ValueError(f"{name} goes with messages, not with prompt")
        if not isinstance(entry["prompt"], str) or not entry["prompt"]:
            raise ValueError(f"prompt is {entry['prompt']!r:.60}; expected text")
        return Line(id, entry["prompt"], None, chosen, _images(entry.get("images", [])))
    if "images" in entry:
        raise ValueError("images go with prompt; those of messages are parts of them")
    thinking = entry.get("thinking", False)
    if not isinstance(thinking, bool):
        raise ValueError(f"thinking is {thinking!r}; expected true or false")
    return Line(id, "", Conversation(entry["messages"], entry.get("tools"), thinking), chosen)


def _request(model: Model, line: Line, seed: int | None, raw: bool) -> Request:
    if line.conversation is not None:
        messages, tools, thinking = line.conversation
        return model.request(_messages(messages), line.sampling, seed, tools, thinking)
    if raw:
        return model.request(line.prompt, line.sampling, seed, images=line.images)
    ids, images, _ = model.reader.user_turn(line.prompt, line.images)
    return model.request(ids, line.sampling, seed, images=images)


def _images(images: Any) -> list[str]:
    images = [images] if isinstance(images, str) else images
    if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
        raise ValueError(f"images is {images!r:.60}; expected a file, a data: URL, or a list of such")
    return images


def _messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise ValueError(f"messages is {messages!r:.60}; expected a list of messages")
    return messages


def _result(model: Model, line: Line, completion: Completion) -> dict[str, Any]:
    fields = {"id": line.id} | asdict(completion)
    for name in ("logprobs", "top_logprobs"):
        if fields[name] is None:
            del fields[name]
    if line.conversation is not None:
        message = model.message(completion, *line.conversation)
        fields |= {"message": message.as_message(), "finish_reason": message.finish_reason}
    return fields


def finished_ids(output: Path) -> set[Id]:
    """The ids answered in an earlier run's output, which is put in order first: a line cut short by the interruption
    and lines with errors, which are to be tried again, go.

    ValueError if a line is none of ours.
    """
    if not output.exists():
        return set()
    kept, ids = [], set()
    output = output.resolve()  # a link stays one
    try:
        text = output.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{output} is not UTF-8 (at byte {error.start}); choose another file") from None
    for number, line in enumerate(io.StringIO(text), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            if line.endswith("\n") and "error" not in entry:
                ids.add(entry["id"])
                kept.append(line)
        except (ValueError, KeyError, TypeError, RecursionError):
            if line.endswith("\n"):
                raise ValueError(f"{output}, line {number}: no result of an earlier run; choose another file") from None
    if (repaired := "".join(kept)) != text:
        with NamedTemporaryFile("w", encoding="utf-8", dir=output.parent, prefix=output.name, delete=False) as file:
            file.write(repaired)
        shutil.copymode(output, file.name)
        os.replace(file.name, output)
    return ids
