"""The server over a real engine on a small random model: its text makes no sense, but must be the library's."""

from __future__ import annotations

import contextlib
import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx2
import openai
import pytest
import tokenizers
from tokenizers import decoders, models

import dgemma_jax as dg
from dgemma_jax.api import _served
from dgemma_jax.serve import app as app_module
from dgemma_jax.text import Tokenizer
from tests.random_models import SMALL, SMALL_DEFAULTS, random_model
from tests.serve.harness import NAME, serving
from tests.test_engine import resident_bytes

CHAT = "/v1/chat/completions"
SLOTS, QUEUE, SOAK_QUEUE, CHUNK = 4, 8, 64, 64
SPECIAL = [
    *("<pad>", "<eos>", "<bos>", "<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool>", "<tool|>", "<|think|>"),
    *("<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>'),
]
LETTERS = "abcdefghijklmnopqrstuvwxyzNOBSTRIGEJC_0123456789 \n:{}[](),.?"
MOST = SMALL.canvas_length + 5
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("f", "g")]


def tokenizer() -> Tokenizer:
    """Letters, and the control tokens of a chat."""
    names = [*SPECIAL, *LETTERS]
    backend = tokenizers.Tokenizer(models.BPE({name: id for id, name in enumerate(names)}, [], unk_token="?"))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens(SPECIAL)
    return Tokenizer(backend)


@pytest.fixture(scope="module")
def model():
    words = tokenizer()
    stops = [words.token_id(name) for name in ("<turn|>", "<eos>")]
    return random_model(tokenizer=words, defaults=replace(SMALL_DEFAULTS, stop_token_ids=stops), max_model_len=256)


@pytest.fixture(scope="module")
def engine(model, abstract_arrays):
    with dg.Engine(model, SLOTS, prefill_chunk=CHUNK, prefix_cache_bytes=0) as engine:
        yield engine


@pytest.fixture(scope="module")
def queue(soak) -> int:
    """Answers that may wait for a slot."""
    return SOAK_QUEUE if soak else QUEUE


@pytest.fixture(scope="module")
def url(engine, queue):
    with serving(engine, max_queue=queue) as url:
        yield url


@pytest.fixture
def http(url):
    limits = httpx2.Limits(max_connections=None)  # by default requests beyond a hundred would wait here
    with httpx2.Client(base_url=url, timeout=300, limits=limits) as http:
        yield http


def body(number: int, **options) -> dict:
    words = ("hello", "what is it?", "reverse 9 4 7", "go on", "why")
    return {
        "messages": [{"role": "user", "content": words[number % len(words)]}],
        "max_tokens": MOST - number % 7,
        "seed": number,
    } | options


def alone(engine: dg.Engine, asked: dict, **sampling) -> list[dg.Completion]:
    """What `Model.generate` gives for the same request, by itself in as many slots, with the programs of the engine."""
    model = engine.model
    chosen = dg.Sampling(max_new_tokens=asked["max_tokens"], **sampling)
    requests = model._requests([model.chat_prompt(asked["messages"])], chosen, asked["seed"])
    scheduler = model.scheduler(SLOTS, fixed=True, prefill_chunk=CHUNK)
    events = _served(scheduler, iter(enumerate(requests)), None)
    found = {index: event.completion for index, event in events if isinstance(event, dg.Finished)}
    return [found[index] for index in range(len(requests))]


def content(model, completion: dg.Completion) -> str:
    """As a client sees it that offers no tools."""
    message = model.message(completion, [{"role": "user", "content": ""}])
    assert not message.tool_calls, "the seeds of these tests make no call"
    return message.content


def test_an_answer_is_the_librarys(model, engine, http):
    for number in range(5):
        (wanted,) = alone(engine, body(number))
        response = http.post(CHAT, json=body(number)).json()
        (choice,) = response["choices"]
        assert choice["message"]["content"] == content(model, wanted)
        assert choice["finish_reason"] == wanted.finish_reason
        assert response["usage"]["diffusion"] == {
            "canvases": len(wanted.steps),
            "denoising_steps": sum(wanted.steps),
            "tokens_per_step": response["usage"]["completion_tokens"] / sum(wanted.steps),
        }
        assert response["usage"]["completion_tokens"] == len(wanted.tokens) + (wanted.stop_id is not None)


def test_several_answers_are_the_librarys(model, engine, http):
    wanted = alone(engine, body(1), n=3)
    response = http.post(CHAT, json=body(1, n=3)).json()
    assert [choice["message"]["content"] for choice in response["choices"]] == [content(model, one) for one in wanted]
    assert len({choice["message"]["content"] for choice in response["choices"]}) == 3


def test_log_probabilities_are_the_librarys(model, engine, http):
    (wanted,) = alone(engine, body(2), logprobs=True, top_logprobs=3)
    entries = http.post(CHAT, json=body(2, logprobs=True, top_logprobs=3)).json()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [model.tokenizer.decode([id]) for id in wanted.tokens]
    assert [entry["logprob"] for entry in entries] == pytest.approx(wanted.logprobs, abs=1e-4)
    tops = [[(model.tokenizer.decode([id]), value) for id, value in top] for top in wanted.top_logprobs]
    for entry, top in zip(entries, tops, strict=True):
        assert [one["token"] for one in entry["top_logprobs"]] == [token for token, _ in top]
        assert [one["logprob"] for one in entry["top_logprobs"]] == pytest.approx([value for _, value in top], abs=1e-4)


def test_without_a_limit_the_answer_fills_the_context(engine, http, monkeypatch):
    model = engine.model
    monkeypatch.setattr(model, "defaults", replace(model.defaults, stop_token_ids=()))  # noise soon holds one
    asked = {"prompt": "hello", "seed": 3, "stability_threshold": None, "max_denoising_steps": 1}
    response = http.post("/v1/completions", json=asked).json()
    usage, (choice,) = response["usage"], response["choices"]
    assert (usage["total_tokens"], choice["finish_reason"]) == (model.max_model_len, "length")
    assert usage["diffusion"]["canvases"] == usage["diffusion"]["denoising_steps"]


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("name", ["g", None])
def test_the_opening_of_a_call_is_there(http, thinking, name):
    """What follows the opening is noise, which is no call, so it stays in the text."""
    choice = {"type": "function", "function": {"name": name}} if name else "required"
    asked = body(4, tools=TOOLS, tool_choice=choice, max_tokens=60, logprobs=True)
    asked["chat_template_kwargs"] = {"enable_thinking": thinking}
    response = http.post(CHAT, json=asked).json()
    (answer,) = response["choices"]
    tokens = [entry["token"] for entry in answer["logprobs"]["content"]]
    at = tokens.index("<|tool_call>")
    assert "".join(tokens[at : at + 8]) in [f"<|tool_call>call:{one}{{" for one in (name or "fg")]
    assert (at == 0) != thinking and len(tokens) <= 60
    assert ("<channel|>" in tokens[:at]) == thinking
    assert answer["message"].get("tool_calls") or answer["message"]["content"]
    assert http.post(CHAT, json=asked).json()["choices"] == response["choices"], "the seed repeats it"


def test_many_at_once(model, engine, http, queue, soak, monkeypatch):
    """As many as there is room for are answered, the others turned away, and each answer is that of its own run."""
    count, room = 200 if soak else 30, SLOTS + queue
    begin, turned_away = threading.Event(), threading.Semaphore(0)
    prepare = app_module.chat_answers
    monkeypatch.setattr(app_module, "chat_answers", lambda *a, **k: begin.wait(60) and prepare(*a, **k))

    def post(number: int) -> httpx2.Response:
        response = http.post(CHAT, json=body(number))
        if response.status_code == 429:
            turned_away.release()
        return response

    with ThreadPoolExecutor(count) as pool:
        pending = pool.map(post, range(count))
        every = all(turned_away.acquire(timeout=60) for _ in range(count - room))
        begin.set()
        responses = list(pending)
    codes = [response.status_code for response in responses]
    assert every and (codes.count(200), codes.count(429)) == (room, count - room)
    for number, response in enumerate(responses):
        if response.status_code == 200:
            (wanted,) = alone(engine, body(number))
            assert response.json()["choices"][0]["message"]["content"] == content(model, wanted)


def test_clients_that_leave_at_any_time(model, engine, http, url, soak):
    """The server goes on as if they had never been there."""
    rng = random.Random(0)
    endless = {"max_denoising_steps": 10_000, "stability_threshold": None, "max_tokens": 60}

    def leave(number: int) -> None:
        options = endless | {"stream": rng.random() < 0.5, "stream_drafts": None}
        with httpx2.Client(base_url=url) as client, contextlib.suppress(httpx2.TimeoutException):
            client.post(CHAT, json=body(number, **options), timeout=rng.uniform(0.01, 0.5))

    for _ in range(20 if soak else 4):
        threads = [threading.Thread(target=leave, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    (wanted,) = alone(engine, body(1))
    answer = http.post(CHAT, json=body(1))
    assert answer.json()["choices"][0]["message"]["content"] == content(model, wanted)
    stats = engine.stats
    assert stats.running + stats.waiting <= 1 and stats.cancelled > 0 and stats.failed == 0


def test_the_official_client_streams(model, engine, url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
        (wanted,) = alone(engine, body(3))
        text = ""
        with client.chat.completions.create(model=NAME, stream=True, **body(3)) as stream:
            for chunk in stream:
                text += chunk.choices[0].delta.content or ""
        assert text == content(model, wanted)


def test_metrics_count_what_was_answered(http, engine):
    before = engine.stats
    usage = http.post(CHAT, json=body(5)).json()["usage"]
    text = http.get("/metrics").text
    series = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    counted = float(series['dgemma_denoising_steps_total{model_name="scripted"}'])
    assert counted == before.denoising_steps + usage["diffusion"]["denoising_steps"]


def test_memory_stays_flat(http, soak):
    if not soak:
        pytest.skip("2,000 requests: --soak")
    sizes = []
    for number in range(2000):
        answer = http.post(CHAT, json=body(number % 50, stream=number % 2 == 0))
        assert answer.status_code == 200
        assert json.loads(answer.text) if number % 2 else answer.text.endswith("data: [DONE]\n\n")
        sizes.append(resident_bytes())
    assert sizes[-1] - sizes[500] < 30e6
