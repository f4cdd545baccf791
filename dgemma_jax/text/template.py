"""A checkpoint's own chat template, rendered by transformers, in segments."""

import re
from collections.abc import Mapping
from typing import Any

from dgemma_jax.text.schema import function_of
from dgemma_jax.text.segments import DELIMITER, PLACEHOLDERS, Segments, json_object

_NAMES = ("tool", "tool_call", "tool_response", "channel", "turn", "image", "audio")
CONTROL_TOKENS = (
    *("<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|think|>", DELIMITER, *dict.fromkeys(PLACEHOLDERS.values())),
    *(token for name in _NAMES for token in (f"<|{name}>", f"<{name}|>")),
)
_CONTROL = re.compile("|".join(map(re.escape, CONTROL_TOKENS)))
_BEGIN, _END = "\ue000", "\ue001"  # private use: around a control token typed in a message
_PIECES = re.compile(f"{_BEGIN}({_CONTROL.pattern}){_END}|({_CONTROL.pattern})|[{_BEGIN}{_END}]")


def template_segments(messages, tools, thinking: bool, add_generation_prompt: bool, template: str) -> Segments:
    """The prompt that a jinja `template` makes. Control tokens typed in messages or tools are text.

    ImportError without transformers; ValueError where the template refuses the messages.
    """
    try:
        from transformers.utils.chat_template_utils import render_jinja_template
    except ImportError as error:
        raise ImportError(f"template=: rendering needs transformers; pip install 'dgemma-jax[hf]' ({error})") from None
    tools = [{"type": "function", "function": function_of(tool)} for tool in tools or ()] or None
    try:
        rendered, _ = render_jinja_template(
            conversations=[[_marked(_with_mappings(message, index)) for index, message in enumerate(messages)]],
            tools=_marked(tools),
            chat_template=template,
            add_generation_prompt=add_generation_prompt,
            enable_thinking=thinking,
            bos_token="<bos>",
            eos_token="<eos>",
        )
    except ValueError:
        raise
    except Exception as error:  # whatever the template's own code raises
        raise ValueError(f"template=: the template refused the messages: {error}") from error
    out, place = Segments(), 0
    for found in _PIECES.finditer(rendered[0]):
        out.text(rendered[0][place : found.start()])
        if found[2]:
            out.control(found[2])
        elif found[1]:
            out.text(found[1])
        place = found.end()
    return out.text(rendered[0][place:])


def _with_mappings(message: Mapping, index: int) -> dict:
    """`message` with the arguments of its calls as mappings, which templates expect."""
    calls = [
        {
            **call,
            "function": {
                **call["function"],
                "arguments": json_object(
                    call["function"].get("arguments"), f"messages[{index}].tool_calls[{number}].function.arguments"
                ),
            },
        }
        for number, call in enumerate(message.get("tool_calls") or ())
    ]
    return {**message, "tool_calls": calls} if calls else dict(message)


def _marked(value: Any) -> Any:
    if isinstance(value, str):
        value = value.replace(_BEGIN, "").replace(_END, "")
        return _CONTROL.sub(lambda found: f"{_BEGIN}{found[0]}{_END}", value)
    if isinstance(value, Mapping):
        return {key: _marked(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_marked(item) for item in value]
    return value
