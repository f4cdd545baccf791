"""The shape of a model as plain data: frozen, hashable, without jax, checked when it is made.

`Config.from_hf` reads a Hugging Face `config.json` (config_hf.py); `gemma_26b_a4b()` and `tiny()` are the two presets.
Field names are those of `config.json` wherever it has one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, TypeGuard

DTYPES = ("bfloat16", "float32", "float16")
QUANTIZATIONS = ("int8", "int4")
INT4_GROUP = 32  # numbers of a row of a weight that share a scale
BUDGETS = (70, 140, 280, 560, 1120)  # soft tokens that an image may be given
IMAGE_BLOCKS = ("all", "sliding", "none")


def check(ok: bool, name: str, value: object, expected: str) -> None:
    """Raises ValueError, naming the field, its value and what was expected, unless `ok`."""
    if not ok:
        raise ValueError(f"{name} is {value!r}; expected {expected}")


def is_int(value: object, low: int = 0) -> TypeGuard[int]:
    """An integer (a bool is none) of at least `low`."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= low


def is_number(value: object) -> TypeGuard[float]:
    """A finite real number (a bool is none)."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer that no float holds
        return False


def is_positive(value: object) -> TypeGuard[float]:
    """A finite number above 0."""
    return is_number(value) and value > 0


def _check_sizes(owner: object, prefix: str, names: str) -> None:
    for name in names.split():
        value = getattr(owner, name)
        check(is_int(value, 1), prefix + name, value, "a positive integer")


def _check_heads(prefix: str, heads: int, key_value_heads: int) -> None:
    if heads % key_value_heads:
        raise ValueError(
            f"num_attention_heads {heads} is not a multiple of {prefix}num_key_value_heads {key_value_heads}; "
            "every key/value head serves the same number of query heads"
        )


@dataclass(frozen=True)
class LayerConfig:
    """What differs from one text layer to the next.

    A "sliding" layer sees `sliding_window` tokens, uses `sliding_rope` and has its own value projection; a "full" layer
    sees everything, uses `full_rope` and takes its values from the key projection.
    """

    kind: Literal["sliding", "full"]
    num_key_value_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        check(self.kind in ("sliding", "full"), "layer kind", self.kind, '"sliding" or "full"')
        _check_sizes(self, f"{self.kind} layer ", "num_key_value_heads head_dim")
        check(self.head_dim % 2 == 0, f"{self.kind} layer head_dim", self.head_dim, "an even number (rotary halves)")


@dataclass(frozen=True)
class Rope:
    """Rotary positions of one kind of layer: pair j of H/2 turns by position * theta**(-2j/H) / factor.

    Only the first int(rotary_fraction * H // 2) pairs turn; the others keep their value.
    """

    theta: float
    rotary_fraction: float = 1.0
    factor: float = 1.0

    def __post_init__(self) -> None:
        check(is_positive(self.theta), "rope_theta", self.theta, "a positive number")
        check(is_positive(self.factor), "rope factor", self.factor, "a positive number")
        ok = is_positive(self.rotary_fraction) and self.rotary_fraction <= 1
        check(ok, "partial_rotary_factor", self.rotary_fraction, "a number above 0 and at most 1")


@dataclass(frozen=True)
class VisionConfig:
    """The image tower: square patches, `pooling_kernel_size` squared of which are averaged into one soft token.

    max_soft_tokens: what an image is resized to where nothing else is asked for, one of BUDGETS.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    patch_size: int
    pooling_kernel_size: int
    position_embedding_size: int
    standardize: bool = False
    use_clipped_linears: bool = False
    rms_norm_eps: float = 1e-6
    rope_theta: float = 100.0
    max_soft_tokens: int = 280

    def __post_init__(self) -> None:
        prefix = "vision_config."
        _check_sizes(
            self,
            prefix,
            "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
            "patch_size pooling_kernel_size position_embedding_size",
        )
        _check_heads(prefix, self.num_attention_heads, self.num_key_value_heads)
        check(self.head_dim % 4 == 0, prefix + "head_dim", self.head_dim, "a multiple of 4 (rotary halves of x and y)")
        for name in ("standardize", "use_clipped_linears"):
            check(isinstance(getattr(self, name), bool), prefix + name, getattr(self, name), "true or false")
        for name in ("rms_norm_eps", "rope_theta"):
            check(is_positive(getattr(self, name)), prefix + name, getattr(self, name), "a positive number")
        budgets = "one of " + ", ".join(map(str, BUDGETS))
        check(self.max_soft_tokens in BUDGETS, "max_soft_tokens", self.max_soft_tokens, budgets)


@dataclass(frozen=True)
class Config:
    """A DiffusionGemma model: text stack, canvas, special ids, stored dtype, and vision, its image tower or None.

    hidden_size: D. intermediate_size: F, of the dense MLP. num_attention_heads: N. layers: what differs from layer to
    layer. sliding_rope, full_rope: rotary positions of the two kinds. rms_norm_eps: of every norm.
    final_logit_softcapping c: logits become c * tanh(logits / c). num_experts: E, of which top_k_experts per token,
    moe_intermediate_size wide. canvas_length: tokens denoised together. sliding_window: keys a sliding layer sees, the
    query's own included. self_conditioning_size: width of the self-conditioning MLP. max_position_embeddings: the
    context, in tokens. pad_token_id; bos_token_id, image_token_id, boi_token_id, eoi_token_id: None where the model has
    none. dtype: how the weights are stored, and the dtype of the computation. quantization: None, "int8" or "int4": how
    those weights are stored that `dgemma convert --quantize` quantises, see `dgemma_jax.quantization`.
    image_blocks: where the tokens of an image see each other whatever their order. "all": in all layers, also beyond
    the window, as in transformers' generate(); "sliding": in sliding layers within the window, as in Gemma 4 of
    transformers and in google-deepmind/gemma; "none": they are causal like text.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    self_conditioning_size: int
    num_attention_heads: int
    layers: tuple[LayerConfig, ...]
    sliding_window: int
    sliding_rope: Rope
    full_rope: Rope
    rms_norm_eps: float
    final_logit_softcapping: float
    num_experts: int
    top_k_experts: int
    moe_intermediate_size: int
    max_position_embeddings: int
    canvas_length: int
    pad_token_id: int = 0
    bos_token_id: int | None = 2
    image_token_id: int | None = None
    boi_token_id: int | None = None
    eoi_token_id: int | None = None
    dtype: str = "bfloat16"
    vision: VisionConfig | None = None
    quantization: str | None = None
    image_blocks: Literal["all", "sliding", "none"] = "all"

    def __post_init__(self) -> None:
        _check_sizes(
            self,
            "",
            "vocab_size hidden_size intermediate_size self_conditioning_size num_attention_heads sliding_window "
            "num_experts top_k_experts moe_intermediate_size max_position_embeddings canvas_length",
        )
        check(len(self.layers) > 0, "num_hidden_layers", len(self.layers), "at least one layer")
        for index, layer in enumerate(self.layers):
            _check_heads(f"layer {index}'s ", self.num_attention_heads, layer.num_key_value_heads)
        for name in ("rms_norm_eps", "final_logit_softcapping"):
            check(is_positive(getattr(self, name)), name, getattr(self, name), "a positive number")
        for name, choices in (("dtype", DTYPES), ("image_blocks", IMAGE_BLOCKS)):
            check(getattr(self, name) in choices, name, getattr(self, name), "one of " + ", ".join(choices))
        self._check_pairs()
        self._check_quantization()

    def _check_pairs(self) -> None:
        """Fields that must fit each other."""
        if self.top_k_experts > self.num_experts:
            raise ValueError(f"top_k_experts {self.top_k_experts} is more than num_experts {self.num_experts}")
        if self.canvas_length > self.max_position_embeddings:
            raise ValueError(
                f"canvas_length {self.canvas_length} exceeds max_position_embeddings {self.max_position_embeddings}"
            )
        for kind in ("sliding", "full"):
            sizes = {(layer.num_key_value_heads, layer.head_dim) for layer in self.layers if layer.kind == kind}
            if len(sizes) > 1:
                raise ValueError(f"{kind} layers differ in (num_key_value_heads, head_dim): {sorted(sizes)}")
        check(self.pad_token_id is not None, "pad_token_id", None, f"an id below vocab_size {self.vocab_size}")
        for name in ("pad_token_id", "bos_token_id", "image_token_id", "boi_token_id", "eoi_token_id"):
            value = getattr(self, name)
            ok = value is None or (is_int(value) and value < self.vocab_size)
            check(ok, name, value, f"an id below vocab_size {self.vocab_size}")

    def _check_quantization(self) -> None:
        wanted = self.quantization
        check(wanted in (None, *QUANTIZATIONS), "quantization", wanted, "None or one of " + ", ".join(QUANTIZATIONS))
        if wanted == "int4":
            widths = ("hidden_size", "intermediate_size", "moe_intermediate_size")
            sizes = {name: getattr(self, name) for name in widths}
            sizes |= {f"{layer.kind} layer head_dim": layer.head_dim for layer in self.layers}
            for name, value in sizes.items():
                check(value % INT4_GROUP == 0, name, value, f"a multiple of {INT4_GROUP} for int4: quantize to int8")

    @property
    def num_hidden_layers(self) -> int:
        """L, the number of text layers."""
        return len(self.layers)

    @staticmethod
    def from_hf(config: Mapping[str, Any]) -> Config:
        """The Config of a parsed Hugging Face `config.json`.

        A missing field takes the default of transformers. Raises ValueError for another model type, for a feature the
        model does not have, and for sizes that contradict each other.
        """
        from dgemma_jax.config_hf import parse

        return parse(config)


def gemma_26b_a4b() -> Config:
    """google/diffusiongemma-26B-A4B-it: 25.2 B parameters, 3.8 B of them used per token."""
    pattern = (LayerConfig("sliding", 8, 256),) * 5 + (LayerConfig("full", 2, 512),)
    return Config(
        vocab_size=262_144,
        hidden_size=2816,
        intermediate_size=2112,
        self_conditioning_size=2112,
        num_attention_heads=16,
        layers=pattern * 5,
        sliding_window=1024,
        sliding_rope=Rope(1e4),
        full_rope=Rope(1e6, rotary_fraction=0.25),
        rms_norm_eps=1e-6,
        final_logit_softcapping=30.0,
        num_experts=128,
        top_k_experts=8,
        moe_intermediate_size=704,
        max_position_embeddings=262_144,
        canvas_length=256,
        image_token_id=258_880,
        boi_token_id=255_999,
        eoi_token_id=258_882,
        vision=VisionConfig(
            hidden_size=1152,
            intermediate_size=4304,
            num_hidden_layers=27,
            num_attention_heads=16,
            num_key_value_heads=16,
            head_dim=72,
            patch_size=16,
            pooling_kernel_size=3,
            position_embedding_size=10_240,
            standardize=True,
        ),
    )


def tiny() -> Config:
    """The bundled model: about a million parameters, every mechanism of the large one."""
    pattern = (LayerConfig("sliding", 2, 32),) * 2 + (LayerConfig("full", 1, 32),)
    return Config(
        vocab_size=800,
        hidden_size=128,
        intermediate_size=128,
        self_conditioning_size=128,
        num_attention_heads=4,
        layers=pattern * 2,
        sliding_window=48,
        sliding_rope=Rope(1e4),
        full_rope=Rope(1e6, rotary_fraction=0.25),
        rms_norm_eps=1e-6,
        final_logit_softcapping=30.0,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=32,
        max_position_embeddings=4096,
        canvas_length=32,
        image_token_id=795,
        boi_token_id=793,
        eoi_token_id=797,
        vision=VisionConfig(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=16,
            patch_size=8,
            pooling_kernel_size=1,
            position_embedding_size=140,
            max_soft_tokens=70,
        ),
    )
