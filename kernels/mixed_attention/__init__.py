"""Attention of one layer over two pieces: the cached prefix (read only) and the keys of the pass itself."""

from typing import Any

from dgemma_jax.kernels.mixed_attention import reference, xla
from dgemma_jax.shapes import Blocks, CachedKeys, Keys, Lengths, LogSums, Queries, RowMask

Arguments = tuple[Queries, Keys, Keys, CachedKeys, CachedKeys, Lengths, Lengths, RowMask, Blocks | None]


def _pallas(*arguments: *Arguments, window: int | None, clip_blocks: bool = False) -> tuple[Queries, LogSums]:
    """`pallas.mixed_attention`, whose backend is a fifth of a second to import: only for those who choose it."""
    from dgemma_jax.kernels.mixed_attention import pallas

    return pallas.mixed_attention(*arguments, window=window, clip_blocks=clip_blocks)


def _triton(*arguments: *Arguments, window: int | None, clip_blocks: bool = False) -> tuple[Queries, LogSums]:
    """`triton.mixed_attention`, for those who have installed what it needs. ValueError for those who have not."""
    try:
        import jax_triton  # noqa: F401  # pyright: ignore[reportMissingImports]

        from dgemma_jax.kernels.mixed_attention.triton import mixed_attention as twin
    except ImportError as error:
        raise ValueError(
            "mixed_attention: implementation 'triton' needs jax-triton and jax for CUDA; "
            f"pip install 'dgemma-jax[triton,cuda13]' ({error})"
        ) from None
    return twin(*arguments, window=window, clip_blocks=clip_blocks)


IMPLEMENTATIONS: dict[str, Any] = {
    "reference": reference.mixed_attention,
    "xla": xla.mixed_attention,
    "pallas": _pallas,
    "triton": _triton,
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
    blocks: Blocks | None = None,
    clip_blocks: bool = False,
    return_lse: bool = False,
    implementation: str = "auto",
) -> Queries | tuple[Queries, LogSums]:
    """softmax(q . k) v over [cached prefix ; own keys], scale 1, causal row by row.

    q f[B,T,N,H]; k, v f[B,T,K,H]: the pass's own keys and values, of which the first own_length[b] of row b count.
    prefix_k, prefix_v f[B,S,K,H]: position p of row b lies in slot p % S, and prefix_length[b] positions were written
    (a full buffer never wraps, a ring holds the last S). causal[b] chooses the row's mask, see `reference.visible`.
    window: keys a query sees in a sliding layer, None in a full layer. Query head n reads K/V head n // (N // K).
    blocks i32[B,T]: the image that an own token belongs to, 0 for text; the tokens of one image are adjacent, those of
    the next have another id. In causal rows they see each other whatever their order and the window, in both kinds of
    layers; an image must lie in one pass. clip_blocks: there, too, a query sees no key older than the window.
    return_lse: also give the log-sum-exp f32[B,T,N] of each query's scores, natural, for merging with other keys.
    implementation: a name of IMPLEMENTATIONS, or auto for what runs everywhere. ValueError for any other.
    A query that sees no key gives zeros, and -inf; slots never written are never read, whatever they hold.
    Source: transformers' DiffusionGemma, the masks of `generate()`.
    """
    name = "xla" if implementation == "auto" else implementation
    if name not in IMPLEMENTATIONS:
        raise ValueError(
            f"mixed_attention: implementation {name!r} is unknown; choose from auto, {', '.join(IMPLEMENTATIONS)}"
        )
    rows = prefix_length, own_length, causal, blocks
    how = {"window": window, "clip_blocks": clip_blocks}
    out, log_sums = IMPLEMENTATIONS[name](q, k, v, prefix_k, prefix_v, *rows, **how)
    return (out, log_sums) if return_lse else out
