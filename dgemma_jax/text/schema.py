"""Tool schemas: brought to the form that the declaration grammar carries, declared in the prompt, and used to type
the bare values that the model writes."""

import warnings
from collections.abc import Mapping
from functools import reduce

from dgemma_jax.text.segments import Segments, sorted_items

_ANNOTATIONS = {"$schema", "$id", "$comment", "$defs", "definitions", "title"}
_UNCARRIED = {"not", "if", "then", "else", "patternProperties", "propertyNames", "dependentSchemas", "prefixItems"}
_UNCARRIED |= {"dependentRequired", "contains", "unevaluatedProperties", "unevaluatedItems", "$dynamicRef"}
_COMBINED = {"allOf", "anyOf", "oneOf"}
_KEPT_EMPTY = {"default", "additionalProperties"}
_SHAPES = {"properties": Mapping, "required": list | tuple, "enum": list | tuple, "description": str}
_MAX_DEPTH, _MAX_COUNT = 64, 10_000  # a schema of references can double at each level
_MOST_PROBLEMS, _LONGEST_PATH = 20, 120  # that are told; a path is cut at its beginning
_PYTHON_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


def function_of(tool: Mapping, path: str = "tools[]") -> Mapping:
    """The function of a tool, given as `{"type": "function", "function": {...}}` or as the function itself."""
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise ValueError(f"{path}: expected a function with a name, got {tool!r:.80}; see the OpenAI tool format")
    for key, kind, name in (("description", str, "text"), ("parameters", Mapping, "a schema")):
        if not isinstance(function.get(key), kind | None):
            raise ValueError(f"{path}.{key}: expected {name}, got {function[key]!r:.80}; see the OpenAI tool format")
    return function


class Budget:
    """How many schemas may still be read: of all tools of a prompt together, since each may be made of references."""

    def __init__(self) -> None:
        self.left = _MAX_COUNT


def normalise(schema: Mapping, path: str = "parameters", budget: Budget | None = None) -> tuple[dict, list[str]]:
    """A schema without $ref, allOf, oneOf, const and type lists that hold null; and a line for each thing given up.

    A lone alternative beside null is written in place with `nullable`, alternatives that are only types become a list
    of types, other alternatives stay under `anyOf`. Keys that only annotate (title, $schema, ...) are left out.
    """
    problems: list[str] = []
    return _Normaliser(schema, problems, budget or Budget()).schema(schema, path, ()), problems


def _below(path: str, name: str) -> str:
    return f"{path}.{name[:_LONGEST_PATH]}"[-_LONGEST_PATH:]


class _Normaliser:
    def __init__(self, root: Mapping, problems: list[str], budget: Budget):
        self.root, self.problems, self.budget = root, problems, budget
        self.depth, self.full = 0, False

    def give_up(self, path: str, why: str) -> None:
        """Notes a problem; a document with very many is told a few of them."""
        if len(self.problems) < _MOST_PROBLEMS:
            self.problems.append(f"{path}: {why}")

    def schema(self, schema, path: str, seen: tuple[str, ...]) -> dict:
        self.budget.left -= 1
        if self.depth == _MAX_DEPTH or self.budget.left <= 0:
            if not self.full:
                self.full = self.depth < _MAX_DEPTH
                self.give_up(path, f"nested more than {_MAX_DEPTH} deep or {_MAX_COUNT} schemas in all")
            return {}
        self.depth += 1
        out = self.read(schema, path, seen)
        self.depth -= 1
        return out

    def read(self, schema, path: str, seen: tuple[str, ...]) -> dict:
        if isinstance(schema, bool) or schema is None:
            return {}
        if not isinstance(schema, Mapping):
            self.give_up(path, f"{schema!r:.60} is no schema")
            return {}
        schema, seen = self.resolved(dict(schema), path, seen)
        parts = [self.schema(part, path, seen) for part in _list(schema.get("allOf"))]
        out = reduce(_merged, [*parts, self.plain(schema, path, seen)], {})
        options = [*_list(schema.get("anyOf")), *_list(schema.get("oneOf"))]
        if options:
            out = self.alternatives(out, [self.schema(option, path, seen) for option in options])
        return _with_type(out)

    def resolved(self, schema: dict, path: str, seen: tuple[str, ...]) -> tuple[dict, tuple[str, ...]]:
        """Follows $ref inside the document; what stands beside it wins."""
        while isinstance(ref := schema.pop("$ref", None), str):
            target = self.root
            for name in ref.removeprefix("#").strip("/").split("/") if ref != "#" else ():
                name = name.replace("~1", "/").replace("~0", "~")
                target = target.get(name) if isinstance(target, Mapping) else None
            if ref in seen or not ref.startswith("#") or not isinstance(target, Mapping):
                self.give_up(path, f"$ref {ref!r:.60} is {'recursive' if ref in seen else 'not found'}")
                break
            # Copied at every reference: a small document could ask for a large one often.
            self.budget.left -= len(target)
            seen, schema = (*seen, ref), {**target, **schema}
        return schema, seen

    def plain(self, schema: Mapping, path: str, seen: tuple[str, ...]) -> dict:
        out: dict = {}
        for key, value in schema.items():
            if key in _UNCARRIED:
                self.give_up(path, f"{key} has no place in a declaration")
            elif value is not None and not isinstance(value, _SHAPES.get(key, object)):
                self.give_up(path, f"{key} is {value!r:.60}, which no schema has there")
            elif key == "type":
                types = [str(name).lower() for name in _list(value)]
                out["nullable"] = out.get("nullable", False) or ("null" in types and len(types) > 1)
                types = [name for name in types if name != "null"] or types
                out["type"] = types[0] if len(types) == 1 else types
            elif key == "properties" and value:
                out[key] = {str(k): self.schema(v, _below(path, str(k)), seen) for k, v in value.items()}
            elif key == "items" and value:
                out[key] = self.schema(value, f"{path}[]", seen)
            elif key == "additionalProperties" and isinstance(value, Mapping):
                out[key] = self.schema(value, f"{path}.*", seen)
            elif key == "const":
                out["enum"] = [value]
            elif key == "nullable":
                out[key] = bool(value) or out.get(key, False)
            elif key not in _ANNOTATIONS and key not in _COMBINED:
                out[key] = value
        if None in _list(out.get("enum")) and out["enum"] != [None]:
            out["nullable"], out["enum"] = True, [value for value in out["enum"] if value is not None]
        return {key: value for key, value in out.items() if key in _KEPT_EMPTY or not _empty(value)}

    @staticmethod
    def alternatives(out: dict, options: list[dict]) -> dict:
        null = any(option.get("type") == "null" or option.get("nullable") for option in options)
        options = [{k: v for k, v in o.items() if k != "nullable"} for o in options if o.get("type") != "null"]
        if null:
            out = {**out, "nullable": True}
        if len(options) == 1:
            return _merged(options[0], out)
        if options and all(set(option) == {"type"} for option in options):
            types = [name for option in options for name in _list(option["type"])]
            return {**out, "type": list(dict.fromkeys(types))}
        return {**out, "anyOf": options} if options else out


def _empty(value) -> bool:
    return value is None or value is False or value in ("", [], {})


def _list(value) -> list:
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def _merged(a: dict, b: dict) -> dict:
    """Both schemas at once; where they disagree `b` wins."""
    out = {**a, **b}
    if "properties" in a and "properties" in b:
        out["properties"] = {**a["properties"], **b["properties"]}
    if "required" in a and "required" in b:
        out["required"] = list(dict.fromkeys([*a["required"], *b["required"]]))
    return out


def _with_type(schema: dict) -> dict:
    """The type that the other keys imply, where none is given."""
    if "type" in schema or "anyOf" in schema:
        return schema
    kinds = {_PYTHON_TYPES.get(type(value), "null") for value in _list(schema.get("enum"))}
    implied = "object" if "properties" in schema else "array" if "items" in schema else None
    implied = kinds.pop() if len(kinds) == 1 else implied
    return {**schema, "type": implied} if implied else schema


def declare(tool: Mapping, out: Segments, path: str, budget: Budget) -> None:
    """Appends the declaration of a tool. Warns of each part of its schema that the grammar cannot carry."""
    function = function_of(tool, path)
    out.control("<|tool>").text(f"declaration:{function['name'].strip()}{{description:")
    out.quoted(function.get("description") or "")
    if function.get("parameters"):
        parameters = _reported(function["parameters"], function["name"], budget)
        out.text(",parameters:")
        _declare_schema({"type": "object", **parameters}, out, top=True)
    if "response" in function:
        response = _reported(function["response"] or {}, f"{function['name']} response", budget)
        out.text(",response:")
        _declare_schema({key: response[key] for key in ("description", "type") if key in response}, out, top=True)
    out.text("}").control("<tool|>")


def _reported(schema: Mapping, path: str, budget: Budget) -> dict:
    schema, problems = normalise(schema, path, budget)
    for problem in problems:
        warnings.warn(f"tool schema, {problem}: left out of the prompt", stacklevel=2)
    return schema


def _declare_schema(schema: dict, out: Segments, top: bool = False) -> None:
    """Keys sorted, as the model was trained on. A nested object shows its properties even when it has none."""
    if schema.get("type") == "object" and not top:
        schema = {"properties": {}, **schema}
    out.text("{")
    for index, (key, value) in enumerate(sorted_items(schema)):
        out.text("," if index else "").key(key)
        match key, value:
            case "type", str() | list():
                out.value([name.upper() for name in value] if isinstance(value, list) else value.upper())
            case "properties", dict():
                out.text("{")
                for place, (name, inner) in enumerate(sorted_items(value)):
                    _declare_schema(inner, out.text("," if place else "").key(name))
                out.text("}")
            case "items" | "additionalProperties", dict():
                _declare_schema(value, out, top=True)
            case "anyOf", list():
                out.text("[")
                for place, inner in enumerate(value):
                    _declare_schema(inner, out.text("," if place else ""))
                out.text("]")
            case _:
                out.value(value)
    out.text("}")
