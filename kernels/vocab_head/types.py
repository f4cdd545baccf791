"""What the vocabulary head returns, and the tile of its random stream."""

from dataclasses import dataclass

import jax
from jaxtyping import Float32, Int32

from dgemma_jax.shapes import Array, Canvas, CanvasHidden

TILE = 2048  # ids per tile of the proposal's random stream: part of the contract, see dgemma_jax.diffusion.random


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HeadStats:
    """All that denoising needs of the logits of a canvas.

    argmax: most probable allowed id, the lowest on ties. sample: the proposal. entropy: nats, of the tempered allowed
    distribution. logprob: of argmax, from the soft-capped logits without temperature or mask. soft: expected scaled
    embedding under the tempered allowed distribution, the next step's self-conditioning input.
    id_logprob: only where asked for, of given ids and like logprob without temperature or mask.
    """

    argmax: Canvas
    sample: Canvas
    entropy: Float32[Array, "B C"]
    logprob: Float32[Array, "B C"]
    soft: CanvasHidden
    id_logprob: Float32[Array, "B C"] | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Likeliest:
    """The n likeliest ids of every position, from the likeliest on, the lower first on ties, and their log-probability.

    Of the soft-capped logits, without temperature or mask.
    """

    ids: Int32[Array, "B C n"]
    logprobs: Float32[Array, "B C n"]
