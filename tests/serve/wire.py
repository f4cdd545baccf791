"""What goes over the wire: asking with the official client, and putting an answer together as a client does."""

import json

import httpx2
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.serve.harness import NAME

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}
TIME = {"type": "function", "function": {"name": "time", "description": "now"}}
HELLO = [{"role": "user", "content": "hello"}]
THOUGHT = "<|channel>thought\nWhat is it?\n<channel|>"
PARIS = '<|tool_call>call:weather{city:<|"|>Paris<|"|>,n:3}<tool_call|>'
NOON = "<|tool_call>call:time{}<tool_call|>"


def ask(client, **options):
    return client.chat.completions.create(**{"model": NAME, "messages": HELLO, "tools": [WEATHER, TIME]} | options)


def events(url: str, path: str, body: dict) -> list[tuple[str, object]]:
    """(name, data) of every server-sent event; the format itself is checked."""
    with httpx2.Client(base_url=url) as http, http.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        text = response.read().decode()
    assert text.endswith("data: [DONE]\n\n")
    found = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        *name, data = block.split("\n")
        assert all(line.startswith("event: ") for line in name) and len(name) < 2 and data.startswith("data: ")
        found.append((name[0][7:] if name else "message", data[6:]))
    return [(name, json.loads(data)) for name, data in found[:-1]]


def joined(chunks: list[ChatCompletionChunk]) -> dict:
    """What a client puts together from the chunks of one choice."""
    out = {"content": "", "reasoning": "", "calls": {}, "finish": None}
    for chunk in chunks:
        for choice in chunk.choices:
            assert out["finish"] is None, "nothing follows the finish reason"
            out["finish"], delta = choice.finish_reason, choice.delta
            out["content"] += delta.content or ""
            assert getattr(delta, "reasoning_content", None) == getattr(delta, "reasoning", None)
            out["reasoning"] += getattr(delta, "reasoning_content", None) or ""
            for call in delta.tool_calls or []:
                if call.id:
                    out["calls"][call.index] = [call.id, call.function.name, ""]
                out["calls"][call.index][2] += call.function.arguments
    return out | {"calls": [tuple(call) for _, call in sorted(out["calls"].items())]}


def whole(response: ChatCompletion) -> dict:
    choice = response.choices[0]
    return {
        "content": choice.message.content,
        "reasoning": getattr(choice.message, "reasoning_content", None) or "",
        "calls": [(call.id, call.function.name, call.function.arguments) for call in choice.message.tool_calls or []],
        "finish": choice.finish_reason,
    }
