"""Tool schemas: what their declaration carries, what is reported, what they normalise to."""

import time
import warnings

import pytest

from dgemma_jax.text import ResponseStream, render_chat
from dgemma_jax.text.schema import normalise
from tests.text.text_helpers import D


def declared(properties: dict, **more) -> str:
    """The properties in the declaration of a tool, with quotes for delimiters."""
    tool = {"function": {"name": "f", "parameters": {"type": "object", "properties": properties, **more}}}
    prompt = render_chat([], tools=[tool], add_generation_prompt=False)
    start = prompt.index("properties:{") + len("properties:{")
    return prompt[start : prompt.index(f"}},type:{D}OBJECT{D}}}}}<tool|>")].replace(D, '"')


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "string"}, 'type:"STRING"'),
        ({"type": ["string", "null"]}, 'nullable:true,type:"STRING"'),
        ({"type": ["string", "integer"]}, 'type:["STRING","INTEGER"]'),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, 'nullable:true,type:"STRING"'),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, 'type:["STRING","INTEGER"]'),
        ({"oneOf": [{"type": "string", "enum": ["a"]}, {"type": "integer"}]},
         'anyOf:[{enum:["a"],type:"STRING"},{type:"INTEGER"}]'),
        ({"allOf": [{"type": "integer"}, {"minimum": 0}]}, 'minimum:0,type:"INTEGER"'),
        ({"$ref": "#/$defs/city", "description": "mine"}, 'description:"mine",type:"STRING"'),
        ({"type": "integer", "enum": [1, 2]}, 'enum:[1,2],type:"INTEGER"'),
        ({"enum": ["a", "b"]}, 'enum:["a","b"],type:"STRING"'),
        ({"enum": ["a", None]}, 'enum:["a"],nullable:true,type:"STRING"'),
        ({"const": 3}, 'enum:[3],type:"INTEGER"'),
        ({"type": "array", "items": {"type": "array", "items": {"type": "number"}}},
         'items:{items:{type:"NUMBER"},type:"ARRAY"},type:"ARRAY"'),
        ({"type": "string", "default": "x", "format": "date", "title": "T"},
         'default:"x",format:"date",type:"STRING"'),
        ({"type": "integer", "default": None, "exclusiveMinimum": 0}, 'default:null,exclusiveMinimum:0,type:"INTEGER"'),
        ({"type": "object"}, 'properties:{},type:"OBJECT"'),
        ({"type": "object", "additionalProperties": {"type": "string"}},
         'additionalProperties:{type:"STRING"},properties:{},type:"OBJECT"'),
        ({"properties": {"b": {"type": "string"}, "A": True}}, 'properties:{A:{},b:{type:"STRING"}},type:"OBJECT"'),
        ({"description": "say <|turn> or <|\"|>"}, 'description:"say <|turn> or ""'),
    ],
)  # fmt: skip
def test_declared(schema, text):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert (
            declared({"p": schema}, **{"$defs": {"city": {"type": "string", "description": "city"}}}) == f"p:{{{text}}}"
        )


@pytest.mark.parametrize(
    ("schema", "report"),
    [
        ({"not": {"type": "string"}}, r"f\.p: not has no place"),
        ({"$ref": "#/$defs/none"}, r"f\.p: \$ref '#/\$defs/none' is not found"),
        ({"$ref": "https://example.org/x"}, r"is not found"),
        ({"$ref": "#/$defs/tree"}, r"f\.p\.child: \$ref '#/\$defs/tree' is recursive"),
        ("string", r"f\.p: 'string' is no schema"),
    ],
)
def test_what_cannot_be_declared_is_reported_once(schema, report):
    defs = {"tree": {"type": "object", "properties": {"child": {"$ref": "#/$defs/tree"}}}}
    with pytest.warns(UserWarning, match=report) as seen:
        declared({"p": schema}, **{"$defs": defs})
    assert len(seen) == 1


def test_response_schema():
    tool = {"name": "f", "description": "d", "response": {"type": "object", "description": "r", "properties": {}}}
    prompt = render_chat([], tools=[tool], add_generation_prompt=False).replace(D, '"')
    assert 'declaration:f{description:"d",response:{description:"r",type:"OBJECT"}}<tool|>' in prompt


def test_a_schema_that_doubles_at_each_level_ends():
    defs = {f"a{n}": {"properties": {name: {"$ref": f"#/$defs/a{n + 1}"} for name in "xy"}} for n in range(60)}
    schema, problems = normalise({"$ref": "#/$defs/a0", "$defs": defs})
    assert problems
    deep: dict = {}
    for _ in range(500):
        deep = {"type": "array", "items": deep}
    assert normalise(deep)[1] == ["parameters" + "[]" * 64 + ": nested more than 64 deep or 10000 schemas in all"]
    ResponseStream([{"function": {"name": "f", "parameters": schema}}])


@pytest.mark.filterwarnings("ignore:tool schema")
def test_many_such_schemas_cost_no_more_than_one():
    """They share a budget, in the prompt and where calls are read."""
    defs = {f"a{n}": {"properties": {name: {"$ref": f"#/$defs/a{n + 1}"} for name in "xy"}} for n in range(60)}
    function = {"name": "f", "description": "d", "parameters": {"$ref": "#/$defs/a0", "$defs": defs}}
    one, many = (render_chat([], tools=[{"function": function}] * n, add_generation_prompt=False) for n in (1, 40))
    assert len(many) < 1.5 * len(one)
    started = time.perf_counter()
    ResponseStream([{"function": function | {"name": f"f{n}"}} for n in range(400)])
    assert time.perf_counter() - started < 20  # minutes if each had a budget of its own


def test_a_schema_of_long_names_or_many_references_costs_little():
    """A client's schema: what is given up is told in a few short lines, and a reference costs what it copies."""
    inner = {f"a{i}": {"not": {}} for i in range(5000)}
    problems = normalise({"properties": {"x" * 10**6: {"properties": inner}}})[1]
    assert 0 < len(problems) <= 20
    assert max(map(len, problems)) < 250
    large = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(3)}} | dict.fromkeys(
        map(str, range(20_000))
    )
    found, problems = normalise({"$defs": {"d": large}, "allOf": [{"$ref": "#/$defs/d"}] * 200})
    assert len(found["properties"]) == 3
    assert "schemas in all" in problems[0]
