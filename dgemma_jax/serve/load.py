"""A load generator for servers with OpenAI's chat completions, ours or vLLM: sends prompts and measures the answers.

Requests hold standard fields only. How many denoising steps the answers took is read from the server's /metrics before
and after; whatever others asked of it in between is counted, too.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx2

from dgemma_jax.serve.figures import Outcome, Reading, read_counters, report

WORDS = (
    *("apple", "bird", "boat", "bread", "bridge", "child", "city", "cloud", "door", "dream", "farm", "fire", "forest"),
    *("friend", "garden", "horse", "house", "island", "key", "lamp", "letter", "moon", "mother", "mountain", "music"),
    *("night", "ocean", "paper", "path", "rain", "river", "road", "rose", "ship", "song", "star", "stone", "storm"),
    *("summer", "table", "tower", "train", "tree", "village", "voice", "wall", "water", "wind", "window", "winter"),
)
PATH = "/v1/chat/completions"
SPOKEN = ("content", "reasoning_content", "reasoning", "tool_calls")  # what a message's delta may add
Ask = Callable[[int], Coroutine[Any, Any, None]]  # sends the prompt of an index


class Prompt(NamedTuple):
    """A conversation to answer with at most max_tokens tokens; None sets no limit."""

    messages: list[dict[str, Any]]
    max_tokens: int | None


@dataclass(frozen=True)
class Load:
    """What to ask of whom, and how fast: `concurrency` requests at a time, or on average `rate` a second at random.

    base_url: with or without /v1. model: None for the server's first. seed: of the arrivals and of the requests, which
    get seed, seed + 1, ... timeout: seconds for a whole answer. ValueError where these do not fit.
    """

    base_url: str
    prompts: list[Prompt]
    concurrency: int | None = None
    rate: float | None = None
    model: str | None = None
    api_key: str | None = None
    seed: int = 0
    timeout: float = 600.0

    def __post_init__(self):
        if not self.base_url.startswith(("http://", "https://")):
            raise ValueError(f"base URL {self.base_url!r}; expected one such as http://127.0.0.1:8000")
        if (self.concurrency is None) == (self.rate is None):
            raise ValueError("expected either a concurrency or a rate of requests")
        if not self.prompts:
            raise ValueError("there are no prompts; expected at least one")


def random_prompts(count: int, words: tuple[int, int], tokens: tuple[int, int], seed: int) -> list[Prompt]:
    """Prompts of random words; how many, and how long the answer may be, is drawn from two inclusive ranges."""
    rng = random.Random(seed)

    def prompt() -> Prompt:
        text = "Tell a long story with these words: " + " ".join(rng.choices(WORDS, k=rng.randint(*words)))
        return Prompt([{"role": "user", "content": text}], rng.randint(*tokens))

    return [prompt() for _ in range(count)]


def read_prompts(path: Path, count: int | None, tokens: tuple[int, int] | None, seed: int) -> list[Prompt]:
    """The first `count` lines of a file, each a JSON object with prompt or messages; over again if it has fewer.

    count: None for every line once. tokens: range of the longest answer, None for no limit. ValueError for other lines.
    """
    lines = path.read_text(encoding="utf-8").split("\n")  # not splitlines(): JSON may hold U+2028
    found = [_messages(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise ValueError(f"{path} holds no line; expected JSON objects with prompt or messages")
    rng = random.Random(seed)
    return [Prompt(found[index % len(found)], tokens and rng.randint(*tokens)) for index in range(count or len(found))]


def _messages(line: str, where: str) -> list[dict[str, Any]]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {error}") from None
    if not isinstance(entry, dict) or ("prompt" in entry) == ("messages" in entry):
        raise ValueError(f"{where} is {line.strip():.60}; expected an object with either prompt or messages")
    if unknown := entry.keys() - {"id", "prompt", "messages"}:
        raise ValueError(f"{where} has the field {min(unknown)!r}; expected id, prompt, messages")
    name, wanted = ("prompt", str) if "prompt" in entry else ("messages", list)
    if not isinstance(entry[name], wanted) or not entry[name]:
        raise ValueError(f"{where}: {name} is {entry[name]!r:.60}; expected {'text' if wanted is str else 'a list'}")
    return [{"role": "user", "content": entry["prompt"]}] if wanted is str else entry["messages"]


async def measure(load: Load, on_outcome: Callable[[Outcome], None] = lambda outcome: None) -> dict[str, Any]:
    """Send all prompts and report, with the names that `vllm bench serve` gives to its figures.

    on_outcome: called as each request ends. ValueError if there is no server to ask.
    """
    outcomes: dict[int, Outcome] = {}
    async with _client(load) as client:
        model = await _model(client, load.model)
        before, began = await _counters(client), time.perf_counter()

        async def ask(index: int) -> None:
            outcomes[index] = await _ask(client, model, load.prompts[index], load.seed + index, load.timeout)
            on_outcome(outcomes[index])

        await (_in_lanes(load, ask) if load.rate is None else _at_random(load, ask))
        duration = time.perf_counter() - began
        after = await _counters(client)
    asked = {
        "base_url": load.base_url,
        "model_id": model,
        "num_prompts": len(load.prompts),
        "max_concurrency": load.concurrency,
        "request_rate": load.rate,
        "seed": load.seed,
    }
    return asked | report([outcomes[index] for index in sorted(outcomes)], duration, before, after)


def _client(load: Load) -> httpx2.AsyncClient:
    base = load.base_url.rstrip("/").removesuffix("/v1")
    headers = {"Authorization": f"Bearer {load.api_key}"} if load.api_key else {}
    limits = httpx2.Limits(max_connections=None)  # how many there are is the load's to say
    try:
        urlsplit(base).port  # which must be one  # noqa: B018
        return httpx2.AsyncClient(base_url=base, headers=headers, limits=limits, timeout=load.timeout)
    except (httpx2.InvalidURL, ValueError) as error:
        raise ValueError(f"base URL {load.base_url!r} is none ({error})") from None


async def _model(client: httpx2.AsyncClient, wanted: str | None) -> str:
    """The model to ask, by default the first that the server offers. ValueError if nobody answers."""
    try:
        response = await client.get("/v1/models")
    except httpx2.HTTPError as error:
        raise ValueError(f"{client.base_url} does not answer ({_told(error)}); is the server running?") from None
    if wanted is not None:
        return wanted
    try:
        return response.json()["data"][0]["id"]
    except (ValueError, LookupError, TypeError):
        problem = f"{response.url} names no model ({_refusal(response)})"
        raise ValueError(f"{problem}; pass the model's name, or the API key") from None


async def _counters(client: httpx2.AsyncClient) -> Reading:
    """What /metrics shows, nothing if it is not there."""
    try:
        response = await client.get("/metrics")
        return read_counters(response.text) if response.status_code == 200 else {}
    except (httpx2.HTTPError, ValueError):
        return {}


async def _in_lanes(load: Load, ask: Ask) -> None:
    """At most `concurrency` requests at a time, the next as soon as one has ended."""
    assert load.concurrency is not None
    indices = iter(range(len(load.prompts)))

    async def lane() -> None:
        for index in indices:
            await ask(index)

    async with asyncio.TaskGroup() as group:
        for _ in range(load.concurrency):
            group.create_task(lane())


async def _at_random(load: Load, ask: Ask) -> None:
    """A Poisson process: the first request at once, the others after exponential pauses, however many are open."""
    assert load.rate is not None
    rng, due = random.Random(load.seed), time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for index in range(len(load.prompts)):
            await asyncio.sleep(due - time.perf_counter())
            group.create_task(ask(index))
            due += rng.expovariate(load.rate)


async def _ask(client: httpx2.AsyncClient, model: str, prompt: Prompt, seed: int, timeout: float) -> Outcome:
    """One streamed chat completion; whatever goes wrong becomes the outcome's error."""
    body = {
        "model": model,
        "messages": prompt.messages,
        "seed": seed,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if prompt.max_tokens is not None:
        body["max_tokens"] = prompt.max_tokens
    began = time.perf_counter()
    try:
        async with asyncio.timeout(timeout), client.stream("POST", PATH, json=body, timeout=None) as response:
            if response.status_code != 200:
                await response.aread()
                raise ValueError(_refusal(response))
            return await _read(response, began)
    except TimeoutError:
        problem = f"no complete answer within {timeout:g} s"
    except httpx2.HTTPError as error:
        problem = _told(error)
    except ValueError as error:
        problem = str(error)
    return Outcome(time.perf_counter() - began, error=problem)


async def _read(response: httpx2.Response, began: float) -> Outcome:
    """The outcome of a stream. ValueError if it ends early or is none of a chat completion."""
    first = ended = None
    usage: dict[str, Any] = {}
    async for event in httpx2.EventSource(response):
        now = time.perf_counter() - began
        if event.data == "[DONE]":
            ended = now
            continue
        try:
            chunk = json.loads(event.data)
            if "error" in chunk:
                raise ValueError(f"in the stream: {_message(chunk)}")
            usage = chunk.get("usage") or usage
            if first is None and any(_speaks(choice) for choice in chunk["choices"]):
                first = now
        except (LookupError, TypeError, AttributeError, RecursionError, json.JSONDecodeError):
            raise ValueError(f"no chunk of a chat completion: {event.data:.60}") from None
    if ended is None or first is None:
        raise ValueError("the stream ended before " + ("[DONE]" if ended is None else "the answer began"))
    try:
        return Outcome(ended, first, int(usage["prompt_tokens"]), int(usage["completion_tokens"]))
    except (LookupError, TypeError, ValueError):
        raise ValueError(f"usage of the stream is {usage!r:.60}; expected prompt_tokens, completion_tokens") from None


def _speaks(choice: dict[str, Any]) -> bool:
    """Whether a chunk brings something of the answer; an empty answer's canvas shows by its end."""
    return any(choice["delta"].get(name) for name in SPOKEN) or choice.get("finish_reason") is not None


def _told(error: httpx2.HTTPError) -> str:
    return f"{type(error).__name__}: {error}".removesuffix(": ")


def _refusal(response: httpx2.Response) -> str:
    """An answer that is not the expected one, in a line."""
    try:
        text = _message(response.json())
    except ValueError:
        text = response.text
    return f"HTTP {response.status_code}: {' '.join(text.split()):.200}"


def _message(body: Any) -> str:
    """The message of an error in OpenAI's shape, or whatever is there."""
    try:
        return str(body["error"]["message"])
    except (LookupError, TypeError):
        return json.dumps(body)
