"""What servers of this model were publicly reported to get wrong, asked of this one with the official client.

How the text of an answer is taken apart is tested in tests/text; refused fields in test_protocol.py.
"""

import json

import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from dgemma_jax.serve import streaming
from tests.serve.harness import NAME
from tests.serve.wire import HELLO, PARIS, THOUGHT, TIME, WEATHER, ask, events, joined, whole

CALL = "call:weather"
CHOICES = ("auto", "required", {"type": "function", "function": {"name": "weather"}}, "none", None)  # None: no tools


def got_from(client, stream: bool, **options) -> dict:
    """The answer as a client has it, streamed or whole."""
    answer = ask(client, stream=stream, **options)
    return joined(list(answer)) if stream else whole(answer)


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_calls_are_read_whether_the_model_thinks_or_not(client, says, thinking, stream):
    """A call is a call where tools are offered and none is forbidden; no marker is left in any text."""
    for choice in CHOICES:
        says(THOUGHT * thinking + PARIS + "<turn|>", PARIS.partition("{")[2] if choice != "required" else PARIS[17:])
        tools = {"tools": openai.NOT_GIVEN} if choice is None else {"tool_choice": choice}
        got = got_from(client, stream, extra_body={"chat_template_kwargs": {"enable_thinking": thinking}}, **tools)
        called = [(name, json.loads(arguments)) for _, name, arguments in got["calls"]]
        if choice in ("none", None):
            assert (called, got["content"], got["finish"]) == ([], 'call:weather{"city": "Paris", "n": 3}', "stop")
        else:
            assert (called, got["content"]) == ([("weather", {"city": "Paris", "n": 3})], "")
            assert got["finish"] == "tool_calls"
        assert got["reasoning"] == "What is it?" * thinking


@pytest.mark.parametrize("stream", [False, True])
def test_a_burst_of_everything_in_one_answer(client, says, stream):
    """Each call once and whole, thoughts and text beside them."""
    says(f'{THOUGHT}A{PARIS}<|tool_call>call:time{{zone:<|"|>UTC<|"|>}}<tool_call|><|tool_response>')
    got = got_from(client, stream)
    assert (got["reasoning"], got["content"], got["finish"]) == ("What is it?", "A", "tool_calls")
    assert [(name, json.loads(text)) for _, name, text in got["calls"]] == [
        ("weather", {"city": "Paris", "n": 3}),
        ("time", {"zone": "UTC"}),
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_a_thought_behind_a_tool_result(client, says, engine, stream):
    """With thinking on the prompt opens it; with thinking off the model may leave out its opener."""
    says("The tool said 5.<channel|>It is 5.<turn|>")
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    talk = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]
    talk.append({"role": "tool", "tool_call_id": "a", "content": "5"})
    wanted = {"reasoning": "The tool said 5.", "content": "It is 5.", "calls": [], "finish": "stop"}
    assert got_from(client, stream, messages=talk, extra_body={"reasoning_effort": "high"}) == wanted
    says("thought\nThe tool said 5.<channel|>It is 5.<turn|>")
    assert got_from(client, stream, messages=talk) == wanted


@pytest.mark.parametrize("stream", [False, True])
def test_a_thought_that_does_not_end_is_not_silence(client, says, stream):
    says("<|channel>thought\n" + "and then? " * 90)
    got = got_from(client, stream, max_tokens=400, extra_body={"reasoning_effort": "high"})
    assert got["reasoning"].startswith("and then? and then?") and (got["content"], got["finish"]) == ("", "length")
    message = ask(client, max_tokens=400)
    assert message.choices[0].message.content == "" and message.usage.completion_tokens == 400
    assert 300 < message.usage.completion_tokens_details.reasoning_tokens <= 400


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "time"}}])
def test_a_forced_call_comes_once(client, says, choice):
    again = "time{}<tool_call|><|tool_call>call:" if choice == "required" else "}<tool_call|><|tool_call>call:time{"
    says("", again * 60)
    got = whole(ask(client, tool_choice=choice, max_tokens=300))
    assert [name for _, name, _ in got["calls"]] == ["time"] and got["finish"] == "tool_calls"


@pytest.mark.parametrize("text", ["BEGIN_ARG x END_ARG", "<|tool_call>call:weather{city:Paris", "<|tool_call>"])
def test_a_malformed_call_is_no_empty_answer(client, says, text):
    says(text + "<turn|>")
    got = whole(ask(client))
    assert (got["content"], got["calls"], got["finish"]) == (text, [], "stop")


def test_a_system_message_alone_is_answered(client, says):
    says("Yes.<turn|>")
    only = [{"role": "system", "content": "Say yes."}]
    got = whole(ask(client, messages=only, reasoning_effort="none", tools=openai.NOT_GIVEN))
    assert (got["content"], got["finish"]) == ("Yes.", "stop")


def test_what_evaluations_send_is_accepted(client, says, engine):
    says("42 and more<turn|>")
    options = {"seed": 1234, "temperature": 0, "top_p": 1, "stop": [" and"], "max_tokens": 32, "user": "me"}
    assert whole(ask(client, **options))["content"] == "42"
    completion = client.completions.create(model=NAME, prompt="6 * 7 is", logprobs=1, **options)
    assert completion.choices[0].text == "42"
    assert all(request.seed == 1234 and request.sampling.temperature == 0 for request in engine.requests)


def test_a_long_answer_comes_whole_and_canvas_by_canvas(url, says, tiny):
    """Without max_tokens, in no more than a chunk of content for each canvas; the usage is in the last chunk."""
    text = "one two three four five " * 40 + "six."
    tokens, width = len(tiny.tokenizer.encode(text)), tiny.config.canvas_length
    says(text + "<turn|>")
    body = {"messages": HELLO, "stream_options": {"include_usage": True}}
    *chunks, last = [ChatCompletionChunk.model_validate(data) for _, data in events(url, "/v1/chat/completions", body)]
    assert tokens > 256 and joined(chunks) == {"content": text, "reasoning": "", "calls": [], "finish": "stop"}
    assert sum(bool(chunk.choices[0].delta.content) for chunk in chunks) <= tokens // width + 1
    assert last.usage.completion_tokens == tokens + 1
    assert last.usage.diffusion["canvases"] == tokens // width + 1


def test_an_end_inside_the_limit_is_an_end(client, says, tiny):
    text = "one two three"
    says(text + "<turn|>")
    length = len(tiny.tokenizer.encode(text))
    for most in (1, length - 1, length, length + 1, 10**12):
        answer = ask(client, max_tokens=most)
        assert answer.usage.completion_tokens == min(most, length + 1)
        assert answer.choices[0].finish_reason == ("stop" if most > length else "length")


def test_silence_is_shorter_than_any_clients_patience():
    assert streaming.HEARTBEAT_SECONDS <= 10


def test_both_names_of_reasoning_hold_it(client, says):
    says(THOUGHT + "Fine.<turn|>")
    message = ask(client, tools=[WEATHER, TIME]).choices[0].message
    assert message.reasoning_content == message.reasoning == "What is it?"
