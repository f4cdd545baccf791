"""The official client against the running server, whose engine says what the test wants to be read."""

import json

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from dgemma_jax.text import parse_response
from tests.serve.harness import NAME
from tests.serve.wire import HELLO, NOON, PARIS, THOUGHT, TIME, WEATHER, ask, events, joined, whole

WITH_USAGE = {True: {"include_usage": True}, False: openai.NOT_GIVEN}
TEXTS = {
    "plain": "It is fine.<turn|>",
    "several canvases": "one two three four five six seven eight nine ten.<turn|>",
    "thought": THOUGHT + "It is fine.<turn|>",
    "open thought": "<|channel>thought\nWhat is it? I wonder",
    "call": "See:" + PARIS + "<turn|>",
    "calls": THOUGHT + PARIS + NOON + "<|tool_response>",
    "no call": "<|tool_call>call:weather{city<turn|>",
    "nothing": "<turn|>",
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
@pytest.mark.parametrize("thinking", [False, True])
def test_whole_and_streamed_answers_say_the_same(client, url, says, tiny, text, thinking):
    says(text)
    extra = {"chat_template_kwargs": {"enable_thinking": thinking}}
    response = ask(client, extra_body=extra)
    ChatCompletion.model_validate(response.model_dump())
    wanted = parse_response(text, [WEATHER, TIME])
    got = whole(response)
    assert (got["content"], got["reasoning"]) == (wanted.content, wanted.reasoning)
    assert [(id, name, json.loads(arguments)) for id, name, arguments in got["calls"]] == [
        (call.id, call.name, call.arguments) for call in wanted.tool_calls
    ]
    stopped = text.endswith(("<turn|>", "<|tool_response>"))
    assert got["finish"] == ("tool_calls" if got["calls"] else "stop" if stopped else "length")

    body = {"messages": HELLO, "tools": [WEATHER, TIME], "stream_options": {"include_usage": True}} | extra
    *sent, last = [ChatCompletionChunk.model_validate(data) for _, data in events(url, "/v1/chat/completions", body)]
    assert joined(sent) == got
    assert sent[0].choices[0].delta.role == "assistant"
    assert last.choices == [] and last.usage == response.usage
    assert len({chunk.id for chunk in [*sent, last]}) == 1
    with ask(client, stream=True, extra_body=extra) as stream:
        assert joined(list(stream)) == got


def test_usage_counts_tokens_canvases_and_steps(client, says, tiny):
    text = TEXTS["several canvases"]
    says(THOUGHT + text)
    usage = ask(client, tools=openai.NOT_GIVEN).usage
    tokens = len(tiny.tokenizer.encode(THOUGHT + text))
    canvases = -(-tokens // tiny.config.canvas_length)
    assert usage.completion_tokens == tokens and usage.total_tokens == tokens + usage.prompt_tokens
    assert usage.prompt_tokens == len(tiny.chat_prompt(HELLO))
    assert usage.completion_tokens_details.reasoning_tokens == len(tiny.tokenizer.encode("What is it?"))
    assert usage.diffusion == {
        "canvases": canvases,
        "denoising_steps": 2 * canvases,
        "tokens_per_step": tokens / (2 * canvases),
    }


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_call_that_must_come(client, url, says, engine, choice, thinking):
    arguments = 'city:<|"|>Paris<|"|>,n:3}<tool_call|>' + NOON
    says(THOUGHT + "No.<turn|>", behind_pins=("weather{" if choice == "required" else "") + arguments)
    response = ask(client, tool_choice=choice, extra_body={"chat_template_kwargs": {"enable_thinking": thinking}})
    got = whole(response)
    assert [(name, json.loads(text)) for _, name, text in got["calls"]] == [("weather", {"city": "Paris", "n": 3})]
    assert (got["content"], got["finish"]) == ("", "tool_calls")
    assert got["reasoning"] == ("What is it?" if thinking else "")
    assert len(engine.requests) == 1 + thinking
    body = {"messages": HELLO, "tools": [WEATHER, TIME], "tool_choice": choice}
    body["chat_template_kwargs"] = {"enable_thinking": thinking}
    chunks = [ChatCompletionChunk.model_validate(data) for _, data in events(url, "/v1/chat/completions", body)]
    assert joined(chunks) == got


def test_no_call_may_come(client, says, engine, tiny):
    says("call:weather{n:3} is how I would call.<turn|>")
    for options in ({"tool_choice": "none"}, {"tools": openai.NOT_GIVEN}):
        message = ask(client, **options).choices[0].message
        assert message.tool_calls is None
        assert message.content == 'call:weather{"n": 3} is how I would call.'
    assert tiny.tokenizer.token_id("<|tool_call>") in engine.requests[0].sampling.suppress
    assert engine.requests[0].ids == engine.requests[1].ids, "the tools are not offered"


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_in_what_reads_like_a_call_and_is_none_ends_the_answer(client, says, stream):
    says("I call:weather{n:3}" + " and on" * 200)
    got = ask(
        client, tools=openai.NOT_GIVEN, stop=["never", '{"n": 3'], stream=stream, stream_options=WITH_USAGE[stream]
    )
    *chunks, last = got if stream else [got]
    got = joined(chunks) if stream else whole(last)
    assert (got["content"], got["finish"], got["calls"]) == ("I call:weather", "stop", [])
    assert last.usage.diffusion["canvases"] < 3, "the engine ends it too"


def test_one_call_at_a_time(client, says):
    says(PARIS + NOON + "<turn|>")
    assert len(ask(client).choices[0].message.tool_calls) == 2
    choice = ask(client, parallel_tool_calls=False).choices[0]
    assert [call.function.name for call in choice.message.tool_calls] == ["weather"]
    assert choice.finish_reason == "tool_calls"
    says("Just text.<turn|>")
    choice = ask(client, parallel_tool_calls=False, stop="text").choices[0]
    assert (choice.message.content, choice.finish_reason) == ("Just ", "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_of_every_token(client, says, tiny, stream):
    says("abc.<turn|>")
    answer = ask(client, logprobs=True, top_logprobs=2, stream=stream)
    if stream:
        entries = [e for chunk in answer if chunk.choices[0].logprobs for e in chunk.choices[0].logprobs.content]
    else:
        entries = answer.choices[0].logprobs.content
    assert [(entry.token, entry.logprob, bytes(entry.bytes)) for entry in entries] == [
        (letter, -0.25, letter.encode()) for letter in "abc."
    ]
    assert all([top.logprob for top in entry.top_logprobs] == [-0.25, -2.0] for entry in entries)
    assert ask(client).choices[0].logprobs is None


def test_several_answers(client, url, says, engine, tiny):
    tokens = tiny.tokenizer.encode
    says("")
    engine.script = lambda request: f"number {request.copy}.<turn|>"
    response = ask(client, n=3)
    assert [choice.message.content for choice in response.choices] == ["number 0.", "number 1.", "number 2."]
    assert response.usage.completion_tokens == 3 * len(tokens("number 0.<turn|>"))
    assert response.usage.prompt_tokens == len(tiny.chat_prompt(HELLO, [WEATHER, TIME]))
    chunks = list(ask(client, n=3, stream=True))
    for index in range(3):
        own = [chunk for chunk in chunks if chunk.choices[0].index == index]
        assert joined(own) == {"content": f"number {index}.", "reasoning": "", "calls": [], "finish": "stop"}


def test_stop_strings_end_the_content(client, says):
    says(THOUGHT.replace("it?", "END") + "one END two" + PARIS + "<turn|>")
    for stream in (False, True):
        got = ask(client, stop=["END", "nothing"], stream=stream)
        got = joined(list(got)) if stream else whole(got)
        assert got == {"content": "one ", "reasoning": "What is END", "calls": [], "finish": "stop"}


def test_the_answer_is_cut_exactly(client, says, tiny):
    says("one two three four five six seven eight nine ten")
    width = tiny.config.canvas_length
    for most in (1, width - 1, width, width + 1):
        for name in ("max_tokens", "max_completion_tokens"):
            response = ask(client, **{name: most})
            assert response.usage.completion_tokens == most
            assert response.choices[0].finish_reason == "length"


def test_plain_completions(client, url, says, engine, tiny):
    says("fine weather.<turn|>")
    got = client.completions.create(model=NAME, prompt="It is", logprobs=2)
    choice = got.choices[0]
    assert (choice.text, choice.finish_reason) == ("fine weather.", "stop")
    tokens = choice.logprobs.tokens
    assert "".join(tokens) == choice.text
    assert choice.logprobs.text_offset == [len("".join(tokens[:i])) for i in range(len(tokens))]
    assert choice.logprobs.token_logprobs == [-0.25] * len(tokens)
    assert len(choice.logprobs.top_logprobs) == len(tokens)
    engine.script = lambda request: f"{len(request.ids)} {request.copy}<turn|>"
    got = client.completions.create(model=NAME, prompt=[[5, 6], [7]], n=2)
    assert [choice.text for choice in got.choices] == ["2 0", "2 1", "1 0", "1 1"]
    assert got.usage.prompt_tokens == 3
    parts = [""] * 4
    with client.completions.create(model=NAME, prompt=[[5, 6], [7]], n=2, stream=True) as stream:
        for chunk in stream:
            parts[chunk.choices[0].index] += chunk.choices[0].text
    assert parts == [choice.text for choice in got.choices]


def test_the_draft_events(url, says, tiny):
    letters = " ".join("abcdefghijklmnopqrst")  # a token each
    says(f"{letters}<turn|>")
    sent = events(url, "/v1/chat/completions", {"messages": HELLO, "stream_drafts": True})
    width = tiny.config.canvas_length
    drafts = [data for name, data in sent if name == "draft"]
    canvases = [data for name, data in sent if name == "canvas"]
    assert [(draft["choice"], draft["canvas"], draft["step"]) for draft in drafts] == [
        (0, canvas, step) for canvas in (0, 1) for step in (1, 2)
    ]
    assert all(len(draft[key]) == width for draft in drafts for key in ("tokens", "accepted", "entropy"))
    assert drafts[0]["mean_entropy"] == 0.5 and drafts[2]["tokens"][-1] == "<pad>"
    assert [(canvas["canvas"], canvas["steps"]) for canvas in canvases] == [(0, 2), (1, 2)]
    text = "".join(token for canvas in canvases for token in canvas["tokens"])
    assert text == letters
    names = [name for name, _ in sent]
    assert names[:4] == ["draft", "draft", "canvas", "message"]


def test_a_conversation_goes_on_with_what_the_client_received(client, says, engine):
    says(THOUGHT + PARIS + "<turn|>")
    message = ask(client).choices[0].message
    says("It rains.<turn|>")
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain"}
    got = ask(client, messages=[*HELLO, message.model_dump(), result])
    assert got.choices[0].message.content == "It rains."
    prompt = engine.model.tokenizer.decode(engine.requests[0].ids)
    assert "<|tool_response>response:weather{value:" in prompt and "What is it?" in prompt


def test_errors_are_the_clients_own(client, says):
    says("fine<turn|>")
    with pytest.raises(openai.BadRequestError, match="response_format cannot be honoured") as refused:
        ask(client, response_format={"type": "json_object"})
    assert (refused.value.param, refused.value.type) == ("response_format", "invalid_request_error")
    with pytest.raises(openai.NotFoundError, match="gpt"):
        ask(client, model="gpt")
    with pytest.raises(openai.BadRequestError, match=r"tool_choice names 'nope'"):
        ask(client, tool_choice={"type": "function", "function": {"name": "nope"}})
    with pytest.raises(openai.BadRequestError, match="tool_choice is 'required'"):
        ask(client, tool_choice="required", tools=openai.NOT_GIVEN)
    with pytest.raises(openai.BadRequestError, match="max_tokens leaves 3"):
        ask(client, tool_choice="required", max_tokens=3)
    with pytest.raises(openai.BadRequestError, match="with 21 log-probabilities each; expected at most 99,864 tokens"):
        ask(client, logprobs=True, top_logprobs=20, n=32)
    with pytest.raises(openai.BadRequestError, match="stream_options needs stream: true"):
        ask(client, stream_options={"include_usage": True})
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME


def test_fields_without_effect_are_named(client, says):
    says("fine<turn|>")
    raw = client.chat.completions.with_raw_response.create(
        model=NAME,
        messages=[*HELLO, {"role": "assistant", "content": "a", "refusal": "no", "annotations": [{}]}, *HELLO],
        user="me",
        metadata={"a": "b"},
        presence_penalty=0,
        logit_bias={},
    )
    assert raw.headers["x-ignored-fields"] == "messages.annotations, messages.refusal, metadata, user"
    assert raw.parse().choices[0].message.content == "fine"
