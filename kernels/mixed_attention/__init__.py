"""Attention of one layer over two pieces: the cached prefix (read only) and the keys of the pass itself."""

from typing import Literal

from dgemma_jax.kernels.mixed_attention import reference, xla
from dgemma_jax.shapes import Array, CachedKeys, Keys, Lengths, Queries, RowMask


def _pallas(*arguments: Array, window: int | None) -> Queries:
    """`pallas.mixed_attention`, whose backend is a fifth of a second to import: only for those who choose it."""
    from dgemma_jax.kernels.mixed_attention import pallas

    return pallas.mixed_attention(*arguments, window=window)


IMPLEMENTATIONS = {
    "reference": reference.mixed_attention,
    "xla": xla.mixed_attention,
    "pallas": _pallas,
}


def mixed_attention(
    q: Queries,
    k: Keys,
    v: Keys,
    prefix_k: CachedKeys,
    prefix_v: CachedKeys,
    prefix_length: Lengths,
    own_length: Lengths,
    causal: RowMask,
    *,
    window: int | None,
    implementation: Literal["auto", "reference", "xla", "pallas"] = "auto",
) -> Queries:
    """softmax(q . k) v over [cached prefix ; own keys], scale 1, causal row by row.

    q f[B,T,N,H]; k, v f[B,T,K,H]: the pass's own keys and values, of which the first own_length[b] of row b count.
    prefix_k, prefix_v f[B,S,K,H]: position p of row b lies in slot p % S, and prefix_length[b] positions were written
    (a full buffer never wraps, a ring holds the last S). causal[b] chooses the row's mask, see `reference.visible`.
    window: keys a query sees in a sliding layer, None in a full layer. Query head n reads K/V head n // (N // K).
    A query that sees no key gives zeros; slots never written are never read, whatever they hold.
    Source: transformers' DiffusionGemma, the masks of `generate()`.
    """
    name = "xla" if implementation == "auto" else implementation
    if name not in IMPLEMENTATIONS:
        raise ValueError(
            f"mixed_attention: implementation {name!r} is unknown; choose from auto, {', '.join(IMPLEMENTATIONS)}"
        )
    return IMPLEMENTATIONS[name](q, k, v, prefix_k, prefix_v, prefix_length, own_length, causal, window=window)
