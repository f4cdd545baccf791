"""Requests of any shape: each is answered or refused in one line, and the server goes on."""

import json
import math

import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from dgemma_jax.serve.protocol import REFUSED, ChatRequest, CompletionRequest, Ignored
from tests.serve.harness import ScriptedEngine, serving

HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
STRICT = {"type": "function", "function": {"name": "g", "strict": True}}
ROUTES = {"/v1/chat/completions": ChatRequest, "/v1/completions": CompletionRequest}
VALID = {
    "/v1/chat/completions": {"messages": HELLO, "tools": [TOOL], "tool_choice": "auto", "n": 1, "max_tokens": 64},
    "/v1/completions": {"prompt": "hello", "n": 1, "max_tokens": 5},
}

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 130),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["", "none", "auto", "required", "user", "tool", "\ud800", "<|tool_call>", "f", 1e-30, 2**63]),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def http(tiny):
    engine = ScriptedEngine(tiny, lambda request: "fine<turn|>")
    with serving(engine) as url, httpx2.Client(base_url=url, timeout=60) as http:
        yield http


def check(response) -> None:
    """An answer, or an error in OpenAI's shape, in one line, that is the client's fault."""
    if response.status_code == 200:
        return
    assert response.status_code in (400, 404), response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error" and error["message"] and "\n" not in error["message"]


def fields(path: str) -> st.SearchStrategy:
    names = [*ROUTES[path].model_fields, *REFUSED, "frobnicate", "", "a\nb"]
    return st.dictionaries(st.sampled_from(names), values, max_size=3)


@pytest.mark.filterwarnings("ignore:tool schema")
@pytest.mark.parametrize("path", ROUTES)
def test_any_fields(http, path):
    @settings(max_examples=150, deadline=None)
    @given(fields(path))
    def run(changed):
        body = json.dumps(VALID[path] | changed).encode()
        check(http.post(path, content=body, headers={"Content-Type": "application/json"}))

    run()
    assert http.post(path, json=VALID[path]).status_code == 200


@pytest.mark.filterwarnings("ignore:tool schema")
@settings(max_examples=100, deadline=None)
@given(
    st.dictionaries(st.sampled_from(["role", "content", "name", "tool_calls", "tool_call_id", "reasoning"]), values),
    st.dictionaries(st.sampled_from(["name", "description", "parameters", "strict", "response"]), values),
)
def test_any_messages_and_tools(http, message, function):
    body = {
        "messages": [*HELLO, {"role": "assistant"} | message],
        "tools": [{"type": "function", "function": function}],
    }
    content = json.dumps(body).encode()
    check(http.post("/v1/chat/completions", content=content, headers={"Content-Type": "application/json"}))


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=40) | values.map(lambda value: json.dumps(value).encode()))
def test_any_body(http, content):
    check(http.post("/v1/chat/completions", content=content, headers={"Content-Type": "application/json"}))


def test_bodies_that_are_no_use(http):
    for content in (b"[" * 100_000, b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}", b"\xff", b""):
        response = http.post("/v1/chat/completions", content=content, headers={"Content-Type": "application/json"})
        assert response.status_code == 400
        check(response)
    response = http.post("/v1/chat/completions", content=json.dumps({"messages": HELLO}).encode())
    assert response.status_code == 400 and "Content-Type: application/json" in response.json()["error"]["message"]


@pytest.mark.parametrize("name", REFUSED)
def test_every_field_that_is_refused(http, name):
    for path in ROUTES:
        refusal = http.post(path, json=VALID[path] | {name: {"odd": 1}})
        assert refusal.status_code == 400
        error = refusal.json()["error"]
        assert error["param"] == name and REFUSED[name].why in error["message"]
        for neutral in (None, *REFUSED[name].neutral):
            assert http.post(path, json=VALID[path] | {name: neutral}).status_code == 200


def test_the_lists_of_fields_are_apart():
    for model in ROUTES.values():
        assert not set(REFUSED) & set(model.model_fields)
    for path, name in ((path, name) for path in ROUTES for name in Ignored.model_fields):
        assert ROUTES[path].model_validate(VALID[path] | {name: [1]}).ignored() == [name]
    part = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    body = {"messages": [{"role": "user", "content": [part, part]}], "stream": True}
    request = ChatRequest.model_validate(body | {"stream_options": {"include_obfuscation": False}})
    assert request.ignored() == ["messages.content.cache_control", "stream_options.include_obfuscation"]
    assert request.conversation() == [{"role": "user", "content": [{"type": "text", "text": "a"}] * 2}]


@pytest.mark.parametrize(
    ("changed", "param", "message"),
    [
        ({"messages": [{}] * 1000}, "messages[0].role", "messages[0].role is missing"),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            "messages[0].content[0].type",
            "'text'",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", "is missing"),
        ({"messages": [{"role": "user", "content": [1] * 1000}]}, "messages[0].content[0]", "is 1: "),
        ({"tools": [TOOL, STRICT]}, "tools[1].function.strict", "cannot be held to a schema"),
        ({"tool_choice": {"type": "function", "function": {}}}, "tool_choice.function.name", "is missing"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type", "should be 'function'"),
        ({f"odd{n}": 1 for n in range(1000)}, "odd0", "there is no such field"),
        ({"temperature": [[[[[[[[[[0]]]]]]]]]]}, "temperature", "is [[[[[[[...]]]]]]]: Input should be a valid number"),
        ({"stop": ["x"] * 17}, "stop", "at most 16 items"),
    ],
)
def test_the_first_fault_is_named(http, changed, param, message):
    """One of any number, where it is, and briefly."""
    answer = http.post("/v1/chat/completions", json=VALID["/v1/chat/completions"] | changed)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert message in error["message"] and len(error["message"]) < 300


@pytest.mark.parametrize(
    ("body", "thinking"),
    [
        ({}, False),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "low"}, True),
        ({"chat_template_kwargs": {"enable_thinking": True}}, True),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "high"}, True),
        ({"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "high"}, None),
    ],
)
def test_who_may_think(body, thinking):
    if thinking is None:
        with pytest.raises(ValidationError, match="give one of them"):
            ChatRequest.model_validate({"messages": HELLO} | body)
    else:
        assert ChatRequest.model_validate({"messages": HELLO} | body).thinking == thinking


def test_knobs_reach_the_engine_and_null_switches_off():
    knobs = {"max_denoising_steps": 7, "entropy_bound": 0.5, "t_min": None, "t_max": None, "top_k": 3, "top_p": 0.9}
    knobs |= {"stability_threshold": None, "confidence_threshold": 0.1, "temperature": 0, "stop": ["x"]}
    sampling = ChatRequest.model_validate({"messages": HELLO, "max_tokens": 9} | knobs).sampling()
    assert {name: getattr(sampling, name) for name in knobs} == knobs | {"stop": ("x",)}
    assert (sampling.max_new_tokens, sampling.logprobs) == (9, False)
    left = ChatRequest.model_validate({"messages": HELLO, "temperature": None}).sampling()
    assert "temperature" not in left._chosen() and "t_min" not in left._chosen()
    assert not math.isnan(left._chosen().get("entropy_bound", 0))


def test_the_document_describes_what_is_there(http):
    document = http.get("/openapi.json").json()
    chat = document["paths"]["/v1/chat/completions"]["post"]
    assert set(chat["responses"]) == {"200", "4XX", "5XX"}
    schemas = document["components"]["schemas"]
    assert set(schemas["ChatRequest"]["properties"]) == set(ChatRequest.model_fields)
    assert {"content", "reasoning_content", "tool_calls"} <= set(schemas["ChatMessage"]["properties"])
    assert schemas["ChatRequest"]["additionalProperties"] is False
    assert http.get("/docs").status_code == 200
