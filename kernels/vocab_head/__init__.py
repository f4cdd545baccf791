"""The vocabulary head: from the last hidden states of a canvas to everything that denoising needs of its logits."""

import jax.numpy as jnp
from jaxtyping import Bool, Float32

from dgemma_jax.kernels.quantized import Table
from dgemma_jax.kernels.shard import Shard
from dgemma_jax.kernels.vocab_head import reference, xla
from dgemma_jax.kernels.vocab_head.likeliest import likeliest
from dgemma_jax.kernels.vocab_head.types import TILE, HeadStats, Likeliest
from dgemma_jax.shapes import Array, Canvas, CanvasHidden, Lengths, PerRow, RowMask

__all__ = ["TILE", "HeadStats", "Likeliest", "likeliest", "vocab_head"]

IMPLEMENTATIONS = {"reference": reference.vocab_head, "xla": xla.vocab_head}


def vocab_head(
    hidden: CanvasHidden,
    table: Table,
    temperature: PerRow,
    draw_temperature: PerRow,
    uniforms: Float32[Array, "B U C"],
    suppress: Bool[Array, "B V"] | None,
    *,
    softcap: float,
    scale: float,
    top_k: Lengths | None = None,
    top_p: PerRow | None = None,
    ids: Canvas | None = None,
    active: RowMask | None = None,
    shard: Shard | None = None,
    implementation: str = "auto",
) -> HeadStats:
    """Soft-capped logits of every position, reduced to argmax, proposal, entropy, log-probability and soft embedding.

    hidden: the final-normed states. suppress: ids never produced, True.
    Order: softcap in fp32, suppressed ids to -inf, then what top_k[b] and top_p[b] cut off (`reference.floor`;
    0 and 1 leave a row whole, None all rows), temperature[b] > 0; the proposal's logits are divided by
    draw_temperature[b] once more (0: the proposal is the argmax). uniforms: U = 1 + ceil(V / TILE) numbers in [0, 1)
    per position, see `reference.draw`. scale: the embedding's factor, sqrt(D) rounded to the dtype of hidden, which is
    the table's unless that is quantised.
    ids: in 0 .. V - 1, whose log-probabilities to report. active: rows of which anything is asked, None: all; what is
    said of the others means nothing, and "xla" does not compute it. shard: inside `shard_map`, which part of the
    vocabulary the table holds, in whole tiles; every device then gets the figures of all. Only "xla" works on parts.
    implementation: a name of IMPLEMENTATIONS, or auto for what runs everywhere; ValueError for any other.
    """
    if top_k is not None or top_p is not None:
        rows = hidden.shape[0]
        top_k = jnp.zeros(rows, jnp.int32) if top_k is None else top_k
        top_p = jnp.ones(rows, jnp.float32) if top_p is None else top_p
    name = "xla" if implementation == "auto" else implementation
    if name not in IMPLEMENTATIONS:
        raise ValueError(
            f"vocab_head: implementation {name!r} is unknown; choose from auto, {', '.join(IMPLEMENTATIONS)}"
        )
    cut = shard is not None and shard.cut
    if cut and name != "xla":
        raise ValueError(f"vocab_head: implementation {name!r} needs the whole table, and devices share it; choose xla")
    inputs = (hidden, table, temperature, draw_temperature, uniforms, suppress, top_k, top_p)
    streamed = {"active": active, "shard": shard} if name == "xla" else {}
    return IMPLEMENTATIONS[name](*inputs, softcap=softcap, scale=scale, ids=ids, **streamed)
