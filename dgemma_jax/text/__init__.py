"""Text in, text out: tokens, chat rendering and the parsing of model output. Pure Python; nothing here imports jax."""

from dgemma_jax.text.chat import encode_chat, render_chat
from dgemma_jax.text.response import (
    ArgumentsDelta,
    CallBegin,
    CallEnd,
    ContentDelta,
    Event,
    ReasoningDelta,
    Response,
    ResponseStream,
    ToolCall,
    opens_thought,
    parse_response,
)
from dgemma_jax.text.tokenizer import IncrementalDecoder, Tokenizer

__all__ = [
    "ArgumentsDelta",
    "CallBegin",
    "CallEnd",
    "ContentDelta",
    "Event",
    "IncrementalDecoder",
    "ReasoningDelta",
    "Response",
    "ResponseStream",
    "Tokenizer",
    "ToolCall",
    "encode_chat",
    "opens_thought",
    "parse_response",
    "render_chat",
]
