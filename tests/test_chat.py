"""`Model.chat`, the tool loop and `dgemma chat`, on a model whose words are scripted."""

import io
import json
from dataclasses import replace
from typing import Literal

import pytest

import dgemma_jax as dg
from dgemma_jax import cli
from dgemma_jax.engine.request import Answer
from dgemma_jax.text import Tokenizer, encode_chat
from dgemma_jax.tools import declaration, misfit
from dgemma_jax.train import tokenizer as vocabulary
from tests.random_models import SMALL, random_model

CALL = "<|tool_call>call:add{a:2,b:3}<tool_call|>"
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
USER = [{"role": "user", "content": "What is 2 + 3?"}]


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def completion(raw_text, finish_reason="stop"):
    stop_id = 106 if finish_reason == "stop" else None
    return dg.Completion(raw_text, raw_text, [5] * 7, finish_reason, stop_id, [4, 2], 7 / 6, None, 1, 9, None)


@pytest.fixture
def scripted(monkeypatch):
    """script(*answers) -> a Model that says them in turn and records the prompts it was given."""

    def script(*answers):
        config = replace(SMALL, vocab_size=vocabulary.VOCAB_SIZE, max_position_embeddings=4096)
        model = random_model(config, tokenizer=Tokenizer(vocabulary.build()))
        model.prompts, waiting = [], list(answers)

        def serve(requests, slots=None, policy=None, drafts=None):
            for name, request in requests:
                model.prompts.append(list(request.ids))
                answer = waiting.pop(0)
                answer = completion(answer) if isinstance(answer, str) else answer
                yield name, dg.Finished(replace(answer, prompt_tokens=len(request.ids)))

        monkeypatch.setattr(model, "serve", serve)
        return model

    return script


def test_a_turn_is_taken_apart(scripted):
    model = scripted(f"<|channel>thought\nadd them<channel|>Let me see.{CALL}")
    answer = model.chat(USER, tools=[ADD], thinking=True)
    assert (answer.reasoning, answer.content, answer.finish_reason) == ("add them", "Let me see.", "tool_calls")
    assert [(call.name, call.arguments) for call in answer.tool_calls] == [("add", {"a": 2, "b": 3})]
    prompt = encode_chat(USER, model.tokenizer, [ADD], True)
    assert model.prompts == [prompt]
    assert answer.usage == dg.Usage(len(prompt), completion_tokens=8, canvases=2, denoising_steps=6)


def test_a_stop_string_ends_the_content_and_no_thought_or_call(scripted):
    """Found as canvases come; what was thought or passed to a function may hold it."""
    model = scripted()
    said = f"<|channel>thought\nEND it<channel|>Fine. {CALL.replace('2', 'END')}Now the END of it<turn|>"
    request = model.request(USER, dg.Sampling(stop=["END", "never"]), tools=[ADD], thinking=True)
    answer, ids = Answer(request, model.tokenizer), model.tokenizer.encode(said)
    while answer.finish_reason is None:
        answer.take(ids[:8], [0.0] * 8, 1)
        ids = ids[8:]
    found = answer.completion()
    assert (found.finish_reason, found.stop, found.stop_id) == ("stop", "END", None)
    assert model.message(found, USER, [ADD], True).content == "Fine. Now the "
    assert model.message(found, USER, [ADD], True).reasoning == "END it"


def test_what_stands_behind_a_stop_string_is_no_part_of_the_turn(scripted):
    """A call there was not asked for, and must not be made; nor is a thought told."""
    said = f"One END two{CALL}<|channel>thought\nmore<channel|>"
    answer = scripted(replace(completion(said), stop="END")).chat(USER, tools=[ADD])
    assert (answer.content, answer.tool_calls, answer.reasoning) == ("One ", [], "")
    assert answer.finish_reason == "stop"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (completion("Fine."), "stop"),
        (completion("Fine", "length"), "length"),
        (completion(CALL, "length"), "length"),
        (completion("<|channel>thought\nand so on", "length"), "length"),
    ],
)
def test_the_finish_reason_says_why_it_ended(scripted, answer, reason):
    assert scripted(answer).chat(USER).finish_reason == reason


def test_a_turn_goes_back_into_the_conversation(scripted):
    model = scripted(CALL, "It is 5.")
    first = model.chat(USER, tools=[ADD])
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": {"value": 5}}
    model.chat([*USER, first.as_message(), result], tools=[ADD])
    text = model.tokenizer.decode(model.prompts[1])
    assert text.endswith(CALL + "<|tool_response>response:add{value:5}<tool_response|>")


def test_a_model_without_tokenizer_cannot_chat():
    with pytest.raises(ValueError, match="tokenizer"):
        random_model().chat(USER)


def test_functions_are_called_until_there_is_an_answer(scripted):
    model = scripted(CALL, "It is 5.")
    answer = dg.run_tools(model, USER, {"add": add})
    assert (answer.content, answer.finish_reason) == ("It is 5.", "stop")
    assert [message["role"] for message in answer.messages] == ["user", "assistant", "tool", "assistant"]
    assert answer.messages[2]["content"] == {"value": 5}
    assert "declaration:add" in model.tokenizer.decode(model.prompts[0])


def raising(a: int, b: int) -> int:
    raise RuntimeError("out of order")


def deep(a: int, b: int) -> dict:
    value: dict = {}
    for _ in range(600):
        value = {"x": value}
    return value


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError


@pytest.mark.parametrize(
    ("call", "function", "error"),
    [
        (CALL.replace("add", "divide"), add, "there is no function divide; choose from add"),
        (CALL.replace("b:3", 'b:<|"|>x<|"|>'), add, "arguments.b is 'x'; expected type integer"),
        (CALL.replace(",b:3", ""), add, "arguments lacks b"),
        (CALL.replace("b:3", "b:3,c:1"), add, "arguments has no c; expected a, b"),
        (CALL, raising, "RuntimeError: out of order"),
        (CALL, lambda a, b: float("nan"), "ValueError: value: expected a JSON value, got nan; convert it first"),
        (CALL, lambda a, b: object(), "TypeError: Object of type object is not JSON serializable"),
    ],
)
def test_errors_go_back_to_the_model(scripted, call, function, error):
    answer = dg.run_tools(scripted(call, "Sorry."), USER, {"add": function}, tools=[ADD])
    assert answer.messages[2]["content"] == {"error": error}
    assert answer.content == "Sorry."


def unprintable(a: int, b: int) -> int:
    raise Unprintable


@pytest.mark.parametrize("function", [deep, unprintable])
def test_whatever_a_function_does_is_an_error_the_model_can_read(scripted, function):
    answer = dg.run_tools(scripted(CALL, "Sorry."), USER, {"add": function}, tools=[ADD])
    assert set(answer.messages[2]["content"]) == {"error"}


@pytest.mark.parametrize(
    ("kind", "why"), [("image", "this model reads no images"), ("input_audio", "only text and images are read")]
)
def test_parts_that_the_model_cannot_read_are_refused(scripted, kind, why):
    with pytest.raises(ValueError, match=rf"messages\[0\] holds a part of type '{kind}'; {why}"):
        scripted().chat([{"role": "user", "content": [{"type": kind}]}])


def test_the_loop_is_bounded(scripted):
    calls = []
    answer = dg.run_tools(scripted(*[CALL] * 3), USER, {"add": lambda a, b: calls.append(a)}, tools=[ADD], max_rounds=3)
    assert (answer.finish_reason, len(calls)) == ("tool_calls", 2)


def unresolved(x: "Nowhere") -> int: ...  # noqa: F821


@pytest.mark.parametrize(
    ("functions", "options", "message"),
    [
        ({"add": add}, {"max_rounds": 0}, "max_rounds is 0"),
        ({"add": add}, {"max_rounds": "3"}, "max_rounds is '3'"),
        ([add], {}, "functions is"),
        ({"add": 5}, {}, "functions is"),
        ({"f": lambda x: x}, {"tools": None}, "no type hint"),
        ({"f": unresolved}, {}, "type hints of f cannot be read"),
        ({"add": add, "sub": add}, {"tools": [ADD]}, "differ in sub"),
        ({"f": lambda x: x}, {}, "parameter x of f has no type hint"),
        ({"f": lambda *x: x}, {}, "cannot be passed by name"),
    ],
)
def test_functions_without_a_declaration_are_refused(scripted, functions, options, message):
    with pytest.raises(ValueError, match=message):
        dg.run_tools(scripted(), USER, functions, **options)


def test_a_signature_becomes_a_declaration():
    def search(query: str, limit: int | None = None, tags: list[str] = (), kind: Literal["a", "b"] = "a") -> dict:
        """Search the
        library.

        More words."""

    parameters = declaration("search", search)["function"]["parameters"]
    assert parameters["required"] == ["query"]
    assert parameters["properties"] == {
        "query": {"type": "string"},
        "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "kind": {"enum": ["a", "b"]},
    }
    assert declaration("search", search)["function"]["description"] == "Search the library."
    with pytest.raises(ValueError, match="parameter x of f has the type <class 'bytes'>"):
        declaration("f", bytes_function)


def bytes_function(x: bytes) -> None: ...


@pytest.mark.parametrize(
    ("value", "schema", "fits"),
    [
        (None, {"type": "string", "nullable": True}, True),
        (None, {"type": "string"}, False),
        (True, {"type": "integer"}, False),
        (2.0, {"type": "integer"}, True),
        (2.5, {"type": ["integer", "string"]}, False),
        (["a", 1], {"type": "array", "items": {"type": "string"}}, False),
        ({"x": {"y": 1}}, {"properties": {"x": {"type": "object", "required": ["z"]}}}, False),
        ({"x": 1}, {"type": "object", "additionalProperties": {"type": "string"}}, False),
        (3, {"anyOf": [{"type": "string"}, {"type": "array"}]}, False),
        ("b", {"enum": ["a", "b"]}, True),
    ],
)
def test_arguments_are_checked_against_the_schema(value, schema, fits):
    assert (misfit(value, schema) is None) == fits


def talk(monkeypatch, capsys, model, lines, *arguments):
    monkeypatch.setattr(dg, "load", lambda name, **_: model)
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    code = cli.main(["chat", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_terminal_chat_over_a_pipe(scripted, monkeypatch, capsys, tmp_path):
    tools = tmp_path / "tools.json"
    tools.write_text(json.dumps([ADD]))
    model = scripted("Hello.", CALL, "It is 5.", "<|channel>thought\nhm<channel|>Yes.")
    lines = f'Hi\n\n/tools {tools}\nWhat is 2 + 3?\n{{"sum": 5}}\n/reset\n/think on\nOnce more\n'
    code, out, _ = talk(monkeypatch, capsys, model, lines)
    assert code == 0
    assert out == 'Hello.\n{"name": "add", "arguments": {"a": 2, "b": 3}}\nIt is 5.\nhm\nYes.\n'
    prompts = [model.tokenizer.decode(prompt) for prompt in model.prompts]
    assert "Hello." in prompts[1]
    assert "response:add{sum:5}" in prompts[2]
    assert "Hello." not in prompts[3]
    assert "<|think|>" in prompts[3]


@pytest.mark.parametrize(
    ("lines", "message"),
    [("/think maybe\n", "/think maybe is no command"), ("/tools nowhere.json\n", "nowhere.json")],
)
def test_bad_commands_over_a_pipe_end_it_with_one_line(scripted, monkeypatch, capsys, lines, message):
    code, _, err = talk(monkeypatch, capsys, scripted(), lines)
    assert code == 2
    assert message in err
    assert err.startswith("dgemma: error: ")
    assert err.count("\n") == 1
