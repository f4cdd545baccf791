"""Responses taken apart: stored cases, the slips of the model, and the bug reports of other runtimes."""

import json

import pytest

from dgemma_jax.text import CallBegin, ResponseStream, opens_thought, parse_response
from tests.text.text_helpers import D, assert_joins, calls, exact, feedings, gemma_like, golden, joined, pieces, run

CASES = golden("text_responses.json")
FEEDINGS = ("whole", "tokens", "characters", "canvases")


def named(cases):
    return [pytest.param(case, id=case["name"]) for case in cases]


def call_of(body: str, array: bool = False) -> str:
    return f"<|tool_call>call:f{{{f'a:[{body}]' if array else body}}}<tool_call|>"


@pytest.mark.parametrize("feeding", FEEDINGS)
@pytest.mark.parametrize("case", named(case for case in CASES if "text" in case))
def test_case(case, feeding):
    stream = run(feedings(case["text"])[feeding], case.get("tools"), case.get("in_thought", False))
    response = stream.response
    assert response.reasoning == case["reasoning"]
    assert response.content.strip() == case["content"].strip()
    assert exact(calls(response)) == exact([tuple(call) for call in case["calls"]])
    assert response == parse_response(case["text"], case.get("tools"), case.get("in_thought", False))


@pytest.mark.parametrize("feeding", FEEDINGS)
@pytest.mark.parametrize("case", named(case for case in CASES if "body" in case))
def test_arguments(case, feeding):
    """A whole body has the stored value; a partial one may still become anything, so nothing may be given out."""
    array = case["of"] == "array"
    text = call_of(case["body"], array)
    if case.get("partial"):
        stream = ResponseStream()
        assert not stream.feed(text[: text.index(case["body"]) + len(case["body"])])
        return
    [(_, arguments)] = calls(run(feedings(text)[feeding]).response)
    assert exact(arguments) == exact({"a": case["value"]} if array else case["value"])


SPLIT = "<|channel>thought\nSome thought.\n<channel|>Text.\n"
OPENERLESS = "This is a reasoning section<channel|>"


@pytest.mark.parametrize(
    ("text", "in_thought", "reasoning", "content"),
    [
        (OPENERLESS + "This is the rest", False, "", "This is a reasoning sectionThis is the rest"),
        (OPENERLESS + "This is the rest", True, "This is a reasoning section", "This is the rest"),
        ("thought\nabc<channel|>d", False, "abc", "d"),
        ("thought<channel|>d", False, "", "d"),
        ("thought", False, "", "thought"),
        ("thoughtful<channel|>d", False, "", "thoughtfuld"),
        ("thought\nabc<channel|>d", True, "abc", "d"),
        (SPLIT, False, "Some thought.", "Text.\n"),
        (SPLIT * 2, False, "Some thought.\nSome thought.", "Text.\nText.\n"),
        ("<|channel>thought\na<|channel>thought\nb<channel|>c", False, "ab", "c"),
        ("<think>\nabc\n</think>\n\nText", False, "abc", "\n\nText"),
        ("<think>abc", False, "abc", ""),
        ("a < b, a <| b, a <|channel b", False, "", "a < b, a <| b, a <|channel b"),
        ("---<|channel>thought\nx<channel|>{}", False, "x", "---{}"),
        ("<|channel>thought\nabc<turn|>", False, "abc", ""),
        ("a <turn|>\n", False, "", "a"),
        ("a<|tool_response><|tool_response>", False, "", "a"),
        (" a \n", False, "", " a \n"),
        ("  ", False, "", "  "),
        ("<|channel>thought\nx<channel|>\n", False, "x", ""),
    ],
)
@pytest.mark.parametrize("feeding", FEEDINGS)
def test_thoughts_and_ends(text, in_thought, reasoning, content, feeding):
    response = run(feedings(text)[feeding], in_thought=in_thought).response
    assert (response.reasoning, response.content, response.tool_calls) == (reasoning, content, [])


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        # T4: types by the rules of JSON
        ("{count:42,ratio:-1.5e3,flag:true,none:null,neg:-0,z:007}",
         {"count": 42, "ratio": -1500.0, "flag": True, "none": None, "neg": 0, "z": "007"}),
        ("{a:True,b:None,c:nil,d:1e999,e:NaN,f:108.,g:-,h:1.2.3}",
         {"a": True, "b": None, "c": None, "d": "1e999", "e": "NaN", "f": 108.0, "g": "-", "h": "1.2.3"}),
        # T5: quotes inside a string
        (f"{{code:{D}x = sql({D}{D}{D} SELECT 1 {D}{D}{D}){D},refs:[{D}a{D}]}}",
         {"code": 'x = sql(""" SELECT 1 """)', "refs": ["a"]}),
        # T6: plain and single quotes
        ('{refs:["ds_1","a,b"]}', {"refs": ["ds_1", "a,b"]}),
        ("{refs:['ds_1']}", {"refs": ["ds_1"]}),
        ('{opts:{"mode": "fast"}}', {"opts": {"mode": "fast"}}),
        ('{loc:{city:"New, York"}}', {"loc": {"city": "New, York"}}),
        ("{name:'O'Brien',b:\"say \\\"x\\\"\\n\"}", {"name": "O'Brien", "b": 'say "x"\n'}),
        ("{a:'tis,b:\"x}", {"a": "'tis", "b": '"x'}),
        (f'{{a:["x{D},{D}y{D}]}}', {"a": ["x", "y"]}),
        # delimiters missing
        (f"{{city:{D}Paris}}", {"city": "Paris"}),
        (f"{{city:{D}Paris,unit:{D}c{D}}}", {"city": "Paris", "unit": "c"}),
        (f"{{a:[{D}x,{D}y{D}, {D}z]}}", {"a": ["x", "y", "z"]}),
        (f"{{city:Paris{D},unit:{D}c{D}}}", {"city": "Paris", "unit": "c"}),
        (f"{{city:Paris, France{D},n:1}}", {"city": "Paris, France", "n": 1}),
        ("{label:hello, world,n:1}", {"label": "hello, world", "n": 1}),
        ("{url:http://x.org/a?b=1,n:1}", {"url": "http://x.org/a?b=1", "n": 1}),
        # brackets missing
        ("{a:[1,2,b:3", {"a": [1, 2, "b:3"]}),
        ("{a:{b:1", {"a": {"b": 1}}),
        ("{a:[1,2}", {"a": [1, 2]}),
        (f"{{a:{{b:{D}x}}}}", {"a": {"b": "x"}}),
        ("{a:1,}", {"a": 1}),
        ("{ a : 1 , b : [ ] }", {"a": 1, "b": []}),
        (f"{{my-key:1,$gt:2,{D}a:b{D}:3,a b:4}}", {"my-key": 1, "$gt": 2, "a:b": 3, "a b": 4}),
        (f"{{a:{D}{D},b:{D}}},{{<tool_call|><|tool_call>{D}}}", {"a": "", "b": "},{<tool_call|><|tool_call>"}),
        ("{a:x[0],b:f(x),c:(}", {"a": "x[0]", "b": "f(x)", "c": "("}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("feeding", FEEDINGS)
def test_values(text, arguments, feeding):
    response = run(feedings(f"<|tool_call>call:f{text}<tool_call|>after")[feeding]).response
    assert exact(calls(response)) == exact([("f", arguments)])
    assert response.content == "after"


@pytest.mark.parametrize(
    "text",
    [
        "<|tool_call>call:f{a:1}<tool_call|>",
        "<|tool_call>f{a:1}<tool_call|>",
        "<|tool_call>:call:f{a:1}<tool_call|>",
        "<|tool_call> call: f {a:1}<tool_call|>",
        "<|tool_call>call:f(a:1)<tool_call|>",
        "<|tool_call>call:f(a=1)<tool_call|>",
        "<|tool_call>call:f{a:1}",
        "<|tool_call>call:f{a:1}}<tool_call|>",
        "<|tool_call>call:f{a:1}\n<tool_call|><turn|>",
        "<|tool_call>call:f{a:1}<tool_call|><|tool_response><|tool_response>",
        "<call>f{a:1}</call>",
        "call:f{a:1}",
        "call:f(a:1)<turn|>",
        "<channel|>call:f{a:1}<tool_call|>",
        "<|channel>thought\n<channel|>\n\n<|tool_call>call:f{a:1}<tool_call|>\n",
    ],
)
@pytest.mark.parametrize("feeding", FEEDINGS)
def test_spellings_of_a_call(text, feeding):
    response = run(feedings(text)[feeding]).response
    assert calls(response) == [("f", {"a": 1})]
    assert (response.reasoning, response.content) == ("", "")


@pytest.mark.parametrize("name", ["get-weather", "fs.read", "a/b", "ns:fn", "größe", "_", "call", "x1"])
def test_names(name):
    assert calls(parse_response(f"<|tool_call>call:{name}{{}}<tool_call|>")) == [(name, {})]


@pytest.mark.parametrize(
    "text",
    [
        f"<|tool_call>call:get_weather{{location:{D}London",
        "<|tool_call>",
        "<|tool_call> no call",
        "<|tool_call>call:f{London}<tool_call|>",
        "<|tool_call>{}",
        "BEGIN_ARG x END_ARG",
        "recall:f{a:1}",
        "write `call:f{a:1}` here",
        "call: me (tomorrow)",
        "call:...()",
        "call:f{a:1",
        "call:f{a:" + "[" * 200,
        "a <tool_call|> b",
    ],
)
@pytest.mark.parametrize("feeding", FEEDINGS)
def test_what_is_no_call_is_content(text, feeding):
    response = run(feedings(text)[feeding]).response
    assert (response.content, response.tool_calls) == (text, [])


@pytest.mark.parametrize("feeding", FEEDINGS)
@pytest.mark.parametrize(
    ("text", "reasoning", "content", "names"),
    [
        # T3: everything in one delta
        (f"<|channel>thought\nx<channel|>A<|tool_call>call:a{{p:1}}<tool_call|><|tool_call>call:b{{q:{D}z{D}}}"
         "<tool_call|>", "x", "A", "ab"),
        # a call ends the thought; what is left of an unfinished one is content
        ("<|channel>thought\nx\ncall:a{}y<channel|>z", "x", "yz", "a"),
        (f"<|channel>thought\nx<|tool_call>call:a{{p:{D}", "x", f"<|tool_call>call:a{{p:{D}", ""),
        ("<|channel>thought\nuse <|tool_call> here<channel|>y", "use <|tool_call> here", "y", ""),
        # an unfinished call does not swallow the next
        (f"<|tool_call>call:a{{p:{D}x<|tool_call>call:b{{q:{D}y{D}}}<tool_call|>", "",
         f"<|tool_call>call:a{{p:{D}x", "b"),
        (f"<|tool_call>call:a{{p:{D}x}}<tool_call|><|tool_call>call:b{{q:{D}y{D}}}<tool_call|>", "", "", "ab"),
        ("<|tool_call>call:a{p:1<turn|>", "", "<|tool_call>call:a{p:1", ""),
        # T9: a thought without its opener behind a tool result
        ("thought\nThe tool said 5.<channel|>It is 5.", "The tool said 5.", "It is 5.", ""),
        # T12: a marker cut by the border of a canvas
        ("<|channel>thought\ndone.<channel|>Answer", "done.", "Answer", ""),
        # T15: the wall of empty thoughts
        ("<|channel>thought\n<channel|>" * 40 + "ok", "", "ok", ""),
        ("<|tool_call>call:a{}<tool_call|>\n\n<|tool_call>call:b{}<tool_call|> done", "", " done", "ab"),
    ],
)  # fmt: skip
def test_parts(text, reasoning, content, names, feeding):
    response = run(feedings(text)[feeding]).response
    assert (response.reasoning, response.content) == (reasoning, content)
    assert [call.name for call in response.tool_calls] == list(names)


def test_ids_to_a_call():
    """T1: the parser sees control tokens when ids are decoded with them."""
    tokenizer = gemma_like()
    text = f"<|channel>thought\n<channel|><|tool_call>call:get_weather{{city:{D}Paris{D}}}<tool_call|><turn|>"
    response = parse_response(tokenizer.decode(tokenizer.encode(text)))
    assert (response.content, calls(response)) == ("", [("get_weather", {"city": "Paris"})])


def test_long_code_argument():
    """T21: a file with quotes, backslashes, tabs and emoji; a nested query."""
    code = 'def f(x):\n\tif x < 1 and x["a"] != \'\\n\':\n\t\treturn {"b": [x, "🎉"]}  # }, ]\n' * 20
    text = f"<|tool_call>call:write_file{{content:{D}{code}{D},query:{{$gt:[{{n:1}}]}}}}<tool_call|>"
    expected = {"content": code, "query": {"$gt": [{"n": 1}]}}
    for deltas in feedings(text).values():
        assert calls(run(deltas).response) == [("write_file", expected)]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 256])
def test_no_text_is_lost_at_any_piece_size(size):
    """T23: the deltas join to the whole, whatever the interval."""
    text = "<|channel>thought\n" + "Reason well. " * 30 + "<channel|>" + "Answer <b>so</b>. " * 30
    whole = run([text])
    stream = run(pieces(text, size))
    assert (stream.response, stream.events) == (whole.response, whole.events)


def test_a_call_is_announced_when_its_end_is_read():
    stream = ResponseStream()
    text = f"<|tool_call>call:f{{a:{D}x{D},b:4"
    assert [event for char in text for event in stream.feed(char)] == []
    assert isinstance(stream.feed("}")[0], CallBegin)


def test_text_is_given_out_at_once():
    stream = ResponseStream()
    assert [event.text for delta in ("Hello", " wor", "ld <", "b>") for event in stream.feed(delta)] == [
        "Hello", " wor", "ld", " <b>"
    ]  # fmt: skip


def test_ids_follow_from_the_call():
    a, b = parse_response("call:f{a:1}\ncall:f{a:1}").tool_calls
    assert a.id != b.id
    assert parse_response("call:f{a:1}").tool_calls == [a]


def test_a_finished_stream_takes_nothing_more():
    stream = ResponseStream()
    stream.finish()
    assert stream.finish() == []
    with pytest.raises(ValueError, match="finished"):
        stream.feed("x")


SCHEMA = {
    "type": "object",
    "properties": {
        "code": {"type": "string"},
        "count": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "ratio": {"type": "number"},
        "on": {"type": "boolean"},
        "either": {"type": ["integer", "string"]},
        "maybe": {"type": "string", "nullable": True},
        "tags": {"type": "array", "items": {"type": "string"}},
        "query": {"$ref": "#/$defs/query"},
        "rows": {"type": "array", "items": {"$ref": "#/$defs/query"}},
        "map": {"type": "object", "additionalProperties": {"type": "string"}},
    },
    "$defs": {"query": {"properties": {"language": {"type": "string"}, "stars": {"type": "integer"}}}},
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("code:007", "007"),
        ("code:null", "null"),
        ("code:true", "true"),
        ("code:1, 2", "1, 2"),
        ("count:null", None),
        ("count:5.0", 5),
        ("count:+7", 7),
        ("ratio:5.0", 5),
        ("ratio:.5", 0.5),
        ("ratio:1e30", 1e30),
        ("ratio:many", "many"),
        ("on:true", True),
        ("either:42", 42),
        ("either:4x", "4x"),
        ("maybe:null", None),
        ("maybe:12", "12"),
        ("tags:[1,true,x]", ["1", "true", "x"]),
        ("query:{language:3,stars:100}", {"language": "3", "stars": 100}),
        ("rows:[{language:3,stars:100}]", [{"language": "3", "stars": 100}]),
        ("map:{a:1,b:null}", {"a": "1", "b": "null"}),
        ("other:12", 12),
        (f"count:{D}5{D}", "5"),
    ],
)
def test_bare_values_have_the_type_of_the_schema(text, value):
    [(_, arguments)] = calls(parse_response(call_of(text), TOOLS))
    assert exact(list(arguments.values())) == exact([value])


def test_no_number_is_too_long():
    [(_, arguments)] = calls(parse_response(call_of("a:" + "1" * 10_000)))
    assert arguments == {"a": "1" * 10_000}


def test_arguments_are_valid_json_for_any_client():
    stream = run(['call:f{a:["\\ud800","é"]}'])
    assert json.loads(stream.events[1].text.encode()) == {"a": ["\\ud800", "é"]}


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [
        ("<bos><|turn>model\n", False),
        ("<|tool_response>response:f{}<tool_response|><|channel>thought\n", True),
        ("<|turn>model\n<|channel>", True),
        ("<|channel>thought\n1st<channel|>1st content<turn|>\n<|turn>user\nThanks<|turn>model\n", False),
        ("<|turn>user\nI typed <|channel><turn|>\n<|turn>model\n", False),
        (f"<|tool_response>response:f{{value:{D}<|channel>{D}}}<tool_response|>", False),
        ("", False),
    ],
)
def test_opens_thought(prompt, opened):
    assert opens_thought(prompt) is opened


def test_helpers_tell_wrong_events():
    events = run(["call:f{a:1}"]).events
    with pytest.raises(AssertionError):
        assert_joins(events[1:], parse_response("call:f{a:1}"))
    assert joined(events) == events
