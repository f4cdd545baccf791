"""Letting the model call Python functions: their schemas, the check of what it passes, and the loop around `chat`."""

import inspect
import json
import traceback
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from dgemma_jax.config import is_int
from dgemma_jax.events import ChatMessage
from dgemma_jax.sampling import Sampling
from dgemma_jax.text.response import ToolCall
from dgemma_jax.text.schema import Budget, function_of, normalise
from dgemma_jax.text.segments import Segments

if TYPE_CHECKING:
    from dgemma_jax.api import Model

_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


@dataclass(frozen=True)
class ToolRun(ChatMessage):
    """The model's last turn, and in messages the whole conversation with the calls and results that led to it."""

    messages: list[dict[str, Any]]


def run_tools(
    model: "Model",
    messages: Sequence[Mapping],
    functions: Mapping[str, Callable],
    *,
    tools: Sequence[Mapping] | None = None,
    thinking: bool = False,
    sampling: Sampling | None = None,
    seed: int | None = None,
    max_rounds: int = 8,
) -> ToolRun:
    """Chat, run the functions that the model calls, tell it the results, and go on until it answers without a call.

    functions: name -> Python callable, called with keyword arguments; what it returns goes to the model as JSON.
    tools: their declarations in OpenAI's format; None makes them from signatures, type hints and docstrings.
    A call that names no function, does not fit its declaration, or raises, is answered with the error, so that the
    model can try again. The turn number max_rounds is returned as it is; calls in it are not run.
    ValueError for a function without declaration, a declaration without function, or a missing type hint.
    """
    if not is_int(max_rounds, 1):
        raise ValueError(f"max_rounds is {max_rounds!r}; expected an integer of at least 1")
    if not isinstance(functions, Mapping) or not all(map(callable, functions.values())):
        raise ValueError(f"functions is {functions!r:.80}; expected a mapping from names to Python functions")
    tools = [declaration(name, function) for name, function in functions.items()] if tools is None else list(tools)
    budget = Budget()
    parameters = {f["name"]: normalise(f.get("parameters") or {}, budget=budget)[0] for f in map(function_of, tools)}
    if set(parameters) != set(functions):
        odd = sorted(set(parameters) ^ set(functions))
        raise ValueError(f"tools and functions differ in {', '.join(odd)}; every function needs its declaration")
    history, rounds = [dict(message) for message in messages], 1
    answer = model.chat(history, tools, thinking, sampling, seed)
    history.append(answer.as_message())
    while answer.tool_calls and rounds < max_rounds:
        for call in answer.tool_calls:
            result = _result(call, functions, parameters)
            history.append({"role": "tool", "tool_call_id": call.id, "name": call.name, "content": result})
        answer, rounds = model.chat(history, tools, thinking, sampling, seed), rounds + 1
        history.append(answer.as_message())
    return ToolRun(**{field.name: getattr(answer, field.name) for field in fields(answer)}, messages=history)


def _result(call: ToolCall, functions: Mapping[str, Callable], parameters: Mapping[str, dict]) -> dict[str, Any]:
    """What the function returns, or why it could not be called."""
    if call.name not in functions:
        return {"error": f"there is no function {call.name}; choose from {', '.join(functions)}"}
    problem = misfit(call.arguments, {"type": "object", "additionalProperties": False} | parameters[call.name])
    if problem:
        return {"error": problem}
    try:
        value = json.loads(json.dumps(functions[call.name](**call.arguments)))
        result = value if isinstance(value, dict) else {"value": value}
        Segments().value(result)  # what cannot be rendered is found here, not in the next turn
        return result
    except Exception as error:  # whatever the function raises is the model's to read
        return {"error": traceback.format_exception_only(error)[-1].strip()}


def declaration(name: str, function: Callable) -> dict[str, Any]:
    """A function's declaration in OpenAI's format: types from the hints, the description from the docstring.

    name: what the model calls it.

    ValueError for a parameter whose type is missing or is not one that JSON has.
    """
    try:
        hints = typing.get_type_hints(function)
    except (NameError, TypeError) as error:
        raise ValueError(f"the type hints of {name} cannot be read ({error}); mend them, or pass tools=") from None
    properties, required = {}, []
    for parameter in inspect.signature(function).parameters.values():
        where = f"parameter {parameter.name} of {name}"
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ValueError(f"{where} cannot be passed by name; write named parameters, or pass tools=")
        if parameter.name not in hints:
            raise ValueError(f"{where} has no type hint; add one, or pass tools=")
        properties[parameter.name] = _schema(hints[parameter.name], where)
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    description = (inspect.getdoc(function) or "").split("\n\n")[0].replace("\n", " ")
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _schema(hint: Any, where: str) -> dict[str, Any]:
    """The JSON schema of a type hint."""
    if hint in _TYPES:
        return {"type": _TYPES[hint]}
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return {"enum": list(inner)}
    if origin is list:
        return {"type": "array", "items": _schema(inner[0], where)}
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema(inner[1], where)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [{"type": "null"} if part is type(None) else _schema(part, where) for part in inner]}
    raise ValueError(f"{where} has the type {hint}, which JSON lacks; use str, int, float, bool, list, dict or Literal")


def misfit(value: Any, schema: Mapping[str, Any], path: str = "arguments") -> str | None:
    """Why a JSON value does not fit a normalised schema, as one line; None if it fits."""
    if value is None and schema.get("nullable"):
        return None
    if "anyOf" in schema and all(misfit(value, option, path) for option in schema["anyOf"]):
        return f"{path} is {value!r}, which fits none of its types"
    wanted = schema.get("type")
    if wanted and not any(_is(value, kind) for kind in ([wanted] if isinstance(wanted, str) else wanted)):
        return f"{path} is {value!r}; expected type {wanted}"
    if "enum" in schema and value not in schema["enum"]:
        return f"{path} is {value!r}; expected one of {schema['enum']}"
    if isinstance(value, list):
        return next(
            filter(None, (misfit(v, schema.get("items", {}), f"{path}[{i}]") for i, v in enumerate(value))), None
        )
    return _object_misfit(value, schema, path) if isinstance(value, dict) else None


def _object_misfit(value: dict, schema: Mapping[str, Any], path: str) -> str | None:
    properties, rest = schema.get("properties", {}), schema.get("additionalProperties", True)
    missing = [name for name in schema.get("required", ()) if name not in value]
    if missing:
        return f"{path} lacks {', '.join(map(str, missing))}"
    for name, inner in value.items():
        if name not in properties and rest is False:
            return f"{path} has no {name}; expected {', '.join(properties) or 'nothing'}"
        known = properties.get(name, rest if isinstance(rest, Mapping) else {})
        if problem := misfit(inner, known, f"{path}.{name}"):
            return problem
    return None


def _is(value: Any, kind: str) -> bool:
    if kind == "null":
        return value is None
    if kind in ("integer", "number") and isinstance(value, bool):
        return False
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    python = {"string": str, "boolean": bool, "integer": int, "number": int | float, "array": list, "object": dict}
    return isinstance(value, python[kind]) if kind in python else True
