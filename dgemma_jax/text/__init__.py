"""Text in, text out: tokens, chat rendering and the parsing of model output. Pure Python; nothing here imports jax."""

from dgemma_jax.text.chat import encode_chat, render_chat
from dgemma_jax.text.tokenizer import IncrementalDecoder, Tokenizer

__all__ = ["IncrementalDecoder", "Tokenizer", "encode_chat", "render_chat"]
