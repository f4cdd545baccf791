"""A small random model that reads images, its tokenizer, and images of few soft tokens."""

from dataclasses import replace

import numpy as np
import tokenizers
from tokenizers import models, pre_tokenizers

from dgemma_jax.api import Model
from dgemma_jax.config import VisionConfig
from dgemma_jax.images import PreparedImage
from dgemma_jax.text.tokenizer import Tokenizer
from tests.random_models import SMALL, random_model

VISION = VisionConfig(
    hidden_size=24,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    patch_size=4,
    pooling_kernel_size=2,
    position_embedding_size=300,
    standardize=True,
    max_soft_tokens=70,
)
CONFIG = replace(SMALL, layers=SMALL.layers[1:], vision=VISION, image_token_id=90, boi_token_id=91, eoi_token_id=92)
CONTROL = {"<bos>": 2, "<|turn>": 10, "<turn|>": 11, "<|image|>": 90, "<|image>": 91, "<image|>": 92}


def words() -> Tokenizer:
    """Words w0 .. w95; the control tokens of chats take the place of some, and w0 that of unknown words."""
    ids = {f"w{i}": i for i in range(SMALL.vocab_size) if i not in CONTROL.values()} | CONTROL
    backend = tokenizers.Tokenizer(models.WordLevel(ids, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(list(CONTROL))
    return Tokenizer(backend)


def vision_model() -> Model:
    """Random parameters and a context of 128."""
    return random_model(CONFIG, tokenizer=words(), max_model_len=128)


def small(seed: int, rows: int, columns: int) -> PreparedImage:
    """An image of rows x columns soft tokens."""
    patches = np.random.default_rng(seed).integers(0, 256, (4 * rows * columns, 48), dtype=np.uint8)
    return PreparedImage(patches, 2 * columns, rows * columns)


def spelled(*parts) -> list[int]:
    """Token ids; an image stands for what it is spelled as."""
    spell = lambda part: [91, *[90] * part.tokens, 92] if isinstance(part, PreparedImage) else [part]  # noqa: E731
    return [id for part in parts for id in spell(part)]
