"""Calls that must come, whatever the model would have said."""

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dgemma_jax as dg
from dgemma_jax.serve.tool_choice import FirstCall
from dgemma_jax.text import parse_response
from tests.serve.harness import ScriptedEngine

NAMES = ("weather", "time")
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in NAMES]
ASKED = [{"role": "user", "content": "hello"}]
CLOSE = "<channel|>"
pieces = st.sampled_from(
    [
        *("a", "b c", "{", "}", "city:", '<|"|>', "weather", "time{", "twenty letters or more", "call:", "no"),
        *("<|channel>thought\n", CLOSE, "<|tool_call>", "<tool_call|>", "<turn|>"),
    ]
)
texts = st.lists(pieces, max_size=12).map("".join)


def run(engine, names, thinking=False, sampling=None, drafts=None):
    """(events, completion) of a forced answer."""
    request = engine.model.request(ASKED, sampling or dg.Sampling(), 7, TOOLS, thinking)

    async def main():
        return [event async for event in FirstCall(engine, request, names, thinking, drafts).events()]

    *events, last = asyncio.run(main())
    assert isinstance(last, dg.Finished)
    return events, last.completion


@settings(deadline=None, max_examples=60)
@given(
    texts,
    texts,
    texts,
    st.sampled_from([NAMES, ("time",), ()]),
    st.booleans(),
    st.sampled_from([None, 40, 50, 64, 100]),
)
def test_whatever_the_model_says(tiny, free, pinned, named, names, thinking, most):
    def script(request):
        if not request.sampling.pinned:
            return free
        return pinned if len(engine.requests) == 1 + thinking else named

    engine = ScriptedEngine(tiny, script)
    sampling = dg.Sampling(max_new_tokens=most, logprobs=True, top_logprobs=1)
    events, completion = run(engine, names, thinking, sampling, drafts=1)
    assert [id for event in events if isinstance(event, dg.Canvas) for id in event.tokens] == completion.tokens
    assert len(completion.tokens) <= (most or 10_000)
    assert len(completion.tokens) == len(completion.logprobs) == len(completion.top_logprobs)
    assert len(completion.steps) == len([event for event in events if isinstance(event, dg.Canvas) and event.steps])
    response = parse_response(completion.raw_text, TOOLS)
    assert len(response.tool_calls) <= 1
    if names:
        openings = [f"<|tool_call>call:{name}" for name in names]
        assert any(opening in completion.raw_text for opening in openings)
        before = min(at for opening in openings if (at := completion.raw_text.find(opening)) >= 0)
        assert thinking == (CLOSE in completion.raw_text[:before])


def canvas_text(engine, number):
    """What was pinned in a request, with what went to its prompt."""
    first, own = engine.requests[0], engine.requests[number]
    return engine.model.tokenizer.decode([*own.ids[len(first.ids) :], *own.sampling.canvas])


def test_thinking_off_pins_the_opening_at_the_beginning(tiny):
    engine = ScriptedEngine(tiny, lambda request: "a:1}<tool_call|> and more<turn|>")
    _, completion = run(engine, ["time"])
    assert canvas_text(engine, 0) == "<|tool_call>call:time{"
    assert all(engine.requests[0].sampling.pinned) and engine.requests[0].seed == completion.seed == 7
    assert completion.raw_text == "<|tool_call>call:time{a:1}"
    assert (completion.finish_reason, completion.steps) == ("stop", [2])


def test_thinking_on_runs_the_canvas_again_that_closes_the_thought(tiny):
    thought = "<|channel>thought\n" + "A thought of more than one canvas, says it. " * 2
    engine = ScriptedEngine(
        tiny, lambda request: "a:1}" if request.sampling.pinned else thought + CLOSE + "Answer.<turn|>"
    )
    events, completion = run(engine, ["time"], thinking=True)
    assert canvas_text(engine, 1) == thought + CLOSE + "<|tool_call>call:time{"
    assert completion.raw_text == thought + CLOSE + "<|tool_call>call:time{a:1}"
    assert len(completion.steps) > len(tiny.tokenizer.encode(completion.raw_text)) // tiny.config.canvas_length
    assert engine.requests[1].seed not in (7, engine.requests[0].seed)
    assert engine.requests[0].sampling.canvas == ()
    told = tiny.tokenizer.decode([id for event in events[:-1] for id in event.tokens])
    assert completion.raw_text.startswith(told)


@pytest.mark.parametrize("text", ["<|channel>thought\n" + "and so on " * 40, "<|channel>thought\nWell.<turn|>"])
def test_a_thought_that_is_not_closed_is_closed(tiny, text):
    engine = ScriptedEngine(tiny, lambda request: "}" if request.sampling.pinned else text)
    _, completion = run(engine, ["time"], thinking=True, sampling=dg.Sampling(max_new_tokens=100))
    before, behind = completion.raw_text.split(CLOSE)
    assert behind == "<|tool_call>call:time{}"
    assert text.startswith(before) and len(tiny.tokenizer.encode(before)) <= 50


def test_a_call_in_the_thought_makes_room_for_the_right_one(tiny):
    text = "<|channel>thought\nI call<|tool_call>call:nothing{}<tool_call|><turn|>"
    engine = ScriptedEngine(tiny, lambda request: "}" if request.sampling.pinned else text)
    _, completion = run(engine, ["time"], thinking=True)
    assert completion.raw_text == "<|channel>thought\nI call" + CLOSE + "<|tool_call>call:time{}"


@pytest.mark.parametrize("said, wanted", [("timer{", "time"), ("waether{", "weather"), ("no name", "weather")])
def test_an_undeclared_name_gives_way_to_the_likeliest(tiny, said, wanted):
    """The scripted engine finds what it said likeliest: of the declared names the one most like it wins."""
    engine = ScriptedEngine(tiny, lambda request: said if len(engine.requests) == 1 else "}")
    events, completion = run(engine, NAMES)
    assert [canvas_text(engine, n) for n in (0, 1)] == ["<|tool_call>call:", f"<|tool_call>call:{wanted}{{"]
    assert completion.raw_text == f"<|tool_call>call:{wanted}{{}}"
    assert completion.steps == [2, 2] and events[0] == dg.Canvas([], 2)


def test_a_declared_name_stays(tiny):
    engine = ScriptedEngine(tiny, lambda request: "time{}")
    assert run(engine, NAMES)[1].raw_text == "<|tool_call>call:time{}"
    assert len(engine.requests) == 1


def test_a_turn_that_ends_inside_the_call_completes_it(tiny):
    engine = ScriptedEngine(tiny, lambda request: 'city:<|"|>Paris<turn|>')
    _, completion = run(engine, ["weather"])
    (call,) = parse_response(completion.raw_text).tool_calls
    assert (call.name, call.arguments, completion.finish_reason) == ("weather", {"city": "Paris"}, "stop")
    engine = ScriptedEngine(tiny, lambda request: "city:" + "x" * 200)
    _, completion = run(engine, ["weather"], sampling=dg.Sampling(max_new_tokens=60))
    assert (completion.finish_reason, len(completion.tokens)) == ("length", 60)


def test_there_must_be_room_for_the_opening(tiny):
    engine = ScriptedEngine(tiny, lambda request: "}")
    opening = len(tiny.tokenizer.encode("<|tool_call>call:weather{"))
    for thinking in (False, True):
        need = opening + 1 + 2 * thinking
        with pytest.raises(ValueError, match=f"max_tokens leaves {need - 1} tokens; expected at least {need}"):
            run(engine, NAMES, thinking, dg.Sampling(max_new_tokens=need - 1))
        run(engine, NAMES, thinking, dg.Sampling(max_new_tokens=need))


def test_leaving_cancels_what_runs(tiny):
    engine = ScriptedEngine(tiny, lambda request: "a" * 300, delay=0.05)
    request = engine.model.request(ASKED, None, 7, TOOLS)

    async def main():
        events = FirstCall(engine, replace(request), ["time"], False, None).events()
        async for _ in events:
            break
        await events.aclose()
        while not engine.cancelled:
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(main(), 30))
