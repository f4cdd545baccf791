"""Calling tools: three are declared, which differ from prompt to prompt; values are invented, so they must be copied.

The declarations are those of Python functions as `dgemma_jax.run_tools` writes them, with or without docstring.
"""

import random
from collections.abc import Callable
from typing import Any, NamedTuple

from dgemma_jax.text import render_chat
from dgemma_jax.train.skills.lists import reverse, sort
from dgemma_jax.train.skills.question import Question, split_invented
from dgemma_jax.train.skills.texts import REFUSAL
from dgemma_jax.train.tokenizer import DAYS, LANGUAGES, WEATHER

Values = dict[str, Any]


class Tool(NamedTuple):
    """asks: wordings of the question. answer: the sentence made of the arguments and {result}."""

    description: str
    types: dict[str, str]
    draw: Callable[[random.Random], Values]
    asks: tuple[str, ...]
    result: Callable[[random.Random], Any]
    answer: str


def _word(rng: random.Random) -> str:
    return split_invented(rng)


def _name(rng: random.Random) -> str:
    return split_invented(rng).capitalize()


def _short_text(rng: random.Random) -> str:
    return " ".join(split_invented(rng, 2, 5) for _ in range(rng.choice((1, 1, 2, 3))))


def _weather(rng: random.Random) -> Any:
    kind = rng.randrange(4)
    degrees = rng.randint(0, 40)
    return (rng.choice(WEATHER), f"{rng.choice(WEATHER)}, {degrees} degrees", f"{degrees} degrees", _word(rng))[kind]


def _clock(rng: random.Random) -> str:
    return f"{rng.randint(0, 23)}:{rng.randint(0, 59):02}"


TOOLS = {
    "get_weather": Tool(
        "The weather in a city.",
        {"city": "string"},
        lambda rng: {"city": _name(rng)},
        ("What is the weather in {city}?", "Weather in {city}?", "How is the weather in {city}?"),
        _weather,
        "The weather in {city} is {result}.",
    ),
    "get_time": Tool(
        "The time in a city.",
        {"city": "string"},
        lambda rng: {"city": _name(rng)},
        ("What time is it in {city}?", "Time in {city}?"),
        _clock,
        "It is {result} in {city}.",
    ),
    "get_price": Tool(
        "The price of an item.",
        {"item": "string"},
        lambda rng: {"item": _word(rng)},
        ("What is the price of {item}?", "How much is {item}?"),
        lambda rng: rng.choice((rng.randint(1, 99), f"{rng.randint(1, 99)} euros")),
        "The price of {item} is {result}.",
    ),
    "send_message": Tool(
        "Send a message to a person.",
        {"to": "string", "text": "string"},
        lambda rng: {"to": _name(rng), "text": _short_text(rng)},
        ("Send a message to {to}: {text}", "Tell {to}: {text}"),
        lambda rng: "sent",
        "I sent {text} to {to}.",
    ),
    "translate": Tool(
        "Translate a word into a language.",
        {"text": "string", "language": "string"},
        lambda rng: {"text": _word(rng), "language": rng.choice((*LANGUAGES, *LANGUAGES, _name(rng)))},
        ("Translate {text} into {language}.", "What is {text} in {language}?"),
        _word,
        "{text} is {result} in {language}.",
    ),
    "add_event": Tool(
        "Add an event to the calendar.",
        {"title": "string", "day": "string"},
        lambda rng: {"title": _short_text(rng), "day": rng.choice((*DAYS, _name(rng)))},
        ("Add {title} on {day}.", "Add the event {title} on {day}."),
        lambda rng: "added",
        "I added {title} on {day}.",
    ),
    "set_timer": Tool(
        "Set a timer.",
        {"minutes": "integer"},
        lambda rng: {"minutes": rng.randint(1, 999) if rng.random() < 0.3 else rng.randint(1, 99)},
        ("Set a timer for {minutes} minutes.", "Timer for {minutes} minutes."),
        lambda rng: "set",
        "The timer is set for {minutes} minutes.",
    ),
    "play_song": Tool(
        "Play a song.",
        {"title": "string"},
        lambda rng: {"title": _short_text(rng)},
        ("Play {title}.", "Play the song {title}."),
        lambda rng: "playing",
        "Now playing {title}.",
    ),
    "search": Tool(
        "Search for a text.",
        {"query": "string"},
        lambda rng: {"query": _short_text(rng)},
        ("Search for {query}.", "Find {query}."),
        _short_text,
        "I found {result}.",
    ),
}
# Two strings are harder to copy than one, so these are asked for more often.
WEIGHTS = [2 if len(tool.types) > 1 else 1 for tool in TOOLS.values()]


def declaration(name: str, described: bool) -> dict[str, Any]:
    """A tool as its Python function is declared, with its docstring or without."""
    tool = TOOLS[name]
    properties = {key: {"type": kind} for key, kind in tool.types.items()}
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    function = {"name": name, "description": tool.description if described else "", "parameters": parameters}
    return {"type": "function", "function": function}


class Case(NamedTuple):
    """A question that a tool answers, and the tools declared."""

    tool: str
    values: Values
    text: str
    tools: tuple[dict[str, Any], ...]

    @property
    def essence(self) -> tuple[str, ...]:
        """The invented words, which carry the split: other values (days, numbers) are too few."""
        words = [part for value in self.values.values() for part in str(value).lower().split()]
        known = {word.lower() for word in (*DAYS, *LANGUAGES)}
        return tuple(word for word in words if word not in known and not word.isdigit()) or (self.text,)


def draw_case(rng: random.Random, fitting: bool = True) -> Case:
    """A question and three tools in random order; unless `fitting`, the one that it needs is not among them."""
    name = rng.choices(list(TOOLS), WEIGHTS)[0]
    others = rng.sample([other for other in TOOLS if other != name], 2 if fitting else 3)
    names = [*others, *([name] if fitting else [])]
    rng.shuffle(names)
    described = rng.random() < 0.7
    values = TOOLS[name].draw(rng)
    text = rng.choice(TOOLS[name].asks).format(**values)
    return Case(name, values, text, tuple(declaration(other, described) for other in names))


def _call(case: Case) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": case.tool, "arguments": case.values}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def tool_call(rng: random.Random) -> Question:
    """The call in the exact grammar, up to the token that hands over to the tool."""
    case = draw_case(rng)
    messages = [{"role": "user", "content": case.text}]
    prompt = render_chat(messages, case.tools)
    rendered = render_chat([*messages, _call(case)], case.tools)
    return Question(case.essence, messages, rendered.removeprefix(prompt), case.tools)


def no_call(rng: random.Random) -> Question:
    """No tool fits: a plain sentence; or the question is of another skill, and answered as if there were no tools."""
    case = draw_case(rng, fitting=False)
    if rng.random() < 0.25:
        return rng.choice((reverse, sort))(rng)._replace(tools=case.tools)
    return Question(case.essence, [{"role": "user", "content": case.text}], f"{REFUSAL}<turn|>", case.tools)


def tool_answer(rng: random.Random) -> Question:
    """The conversation with a call and its result; the answer is a sentence that uses them."""
    case = draw_case(rng)
    result = TOOLS[case.tool].result(rng)
    reply = {"role": "tool", "tool_call_id": "1", "name": case.tool, "content": {"value": result}}
    messages = [{"role": "user", "content": case.text}, _call(case), reply]
    answer = TOOLS[case.tool].answer.format(**case.values, result=result)
    thinking = rng.random() < 0.1  # the rendered prompt then ends inside an open thought
    thought = "Answer with the result.<channel|>" if thinking else ""
    return Question(case.essence, messages, f"{thought}{answer}<turn|>", case.tools, thinking)
