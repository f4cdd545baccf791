"""Malformed messages and tools are refused in one line that names the place; nothing else escapes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dgemma_jax.text import parse_response, render_chat

USER = {"role": "user", "content": "hi"}
CYCLE: dict = {}
CYCLE["a"] = CYCLE


def call(arguments):
    return [USER, {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": arguments}}]}]


@pytest.mark.parametrize(
    ("messages", "place"),
    [
        (call('{"a":' * 100_000), "nested too deeply"),
        (call(CYCLE), "nested too deeply"),
        ([*call({}), {"role": "tool", "tool_call_id": "1", "content": CYCLE}], "nested too deeply"),
        (call({"a": [b"x"]}), r"arguments.a\[0\]: expected a JSON value, got b'x'"),
        (call({"a": float("nan")}), "arguments.a: expected a JSON value, got nan"),
        (call({"a": float("-inf")}), "arguments.a: expected a JSON value, got -inf"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content"),
        ([{"role": "user", "content": b"x"}], r"messages\[0\].content"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], r"content\[0\].text: expected a string, got 5"),
        ([{"role": "user", "content": [{"type": ["text"]}]}], r"content\[0\].type"),
        ([{"role": "assistant", "tool_calls": 5}], "tool_calls: expected a list, got 5"),
        ([{"role": "assistant", "tool_calls": ["x"]}], r"tool_calls\[0\]: expected an object, got 'x'"),
        ([{"role": "assistant", "tool_calls": [{"function": {"name": {"x": 1}}}]}], r"tool_calls\[0\].function"),
        ([{"role": "assistant", "tool_responses": ["x"]}], r"tool_responses\[0\]: expected an object"),
        ([{"role": "assistant", "reasoning": ["a"]}], "reasoning: expected a string"),
        ([{"role": ["user"], "content": "x"}], "role: expected one of"),
        ([5], r"messages\[0\].role"),
        ("abc", r"messages\[0\].role"),
    ],
)
def test_malformed_messages_are_refused(messages, place):
    with pytest.raises(ValueError, match=place) as error:
        render_chat(messages)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "tool", [5, {}, {"name": 5}, {"name": "f", "description": 5}, {"name": "f", "parameters": [1]}]
)
def test_malformed_tools_are_refused(tool):
    for use in (lambda: render_chat([USER], [tool]), lambda: parse_response("x", [tool])):
        with pytest.raises(ValueError, match=r"tools\[0\]"):
            use()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text("ab", max_size=2),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=2),
    max_leaves=4,
)
KEYS = ["type", "properties", "required", "items", "enum", "anyOf", "allOf", "oneOf", "$ref", "const", "nullable"]
KEYS += ["additionalProperties", "description", "default"]


@pytest.mark.filterwarnings("ignore:tool schema")
@settings(max_examples=300, deadline=None)
@given(schema=st.recursive(JSON, lambda inner: st.dictionaries(st.sampled_from(KEYS), inner, max_size=4), max_leaves=6))
def test_any_schema_is_declared_and_parsed_with(schema):
    tools = [{"name": "f", "parameters": schema if isinstance(schema, dict) else {"properties": {"a": schema}}}]
    render_chat([USER], tools)
    assert parse_response("call:f{a:1,b:[x,{c:null}]}", tools).tool_calls
