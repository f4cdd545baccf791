"""Inputs of mixed-causal attention and the answer by a loop over queries and positions, for every implementation."""

import numpy as np


def by_hand(q, k, v, past_k, past_v, own_length, causal, window, blocks, clip_blocks=False):
    """Output and log-sum-exp of one row, float64: past_k and past_v hold every earlier position, nothing is a ring."""
    length, (tokens, heads, width) = len(past_k), q.shape
    out, log_sums = np.zeros((tokens, heads, width)), np.full((tokens, heads), -np.inf)
    for t in range(tokens):
        first = 0 if window is None else max(0, length + (t if causal else 0) - window + 1)
        own = [j for j in range(own_length) if not causal or (j <= t and (window is None or j > t - window))]
        if causal and blocks[t]:
            image = {j for j in range(own_length) if (blocks[min(j, t) : max(j, t) + 1] == blocks[t]).all()}
            image = {j for j in image if not clip_blocks or j > t - window}
            own = sorted(image.union(own))
        keys, values = np.concatenate([past_k[first:], k[own]]), np.concatenate([past_v[first:], v[own]])
        for head in range(heads if len(keys) else 0):
            pair = head // (heads // k.shape[1])
            scores = keys[:, pair] @ q[t, head]
            weights = np.exp(scores - scores.max())
            out[t, head] = weights @ values[:, pair] / weights.sum()
            log_sums[t, head] = scores.max() + np.log(weights.sum())
    return out, log_sums


def case(
    seed,
    lengths,
    own,
    causal,
    window,
    slots,
    *,
    dtype=np.float32,
    tokens=6,
    heads=(4, 2, 16),
    blocks=None,
    clip_blocks=False,
):
    """Arguments of the op, in its order, and what it gives; slots that were never written hold NaN.

    heads: N, K, H. blocks: lists of image ids by row, or None for none at all; clip_blocks: as in the op.
    """
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.normal(0, 0.5, shape).astype(dtype)  # noqa: E731
    N, K, H = heads
    q, k, v = draw(len(lengths), tokens, N, H), draw(len(lengths), tokens, K, H), draw(len(lengths), tokens, K, H)
    prefix_k, prefix_v = np.full((2, len(lengths), slots, K, H), np.nan, dtype)
    ids = np.zeros((len(lengths), tokens), np.int32) if blocks is None else np.array(blocks, np.int32)
    expected = []
    for b, length in enumerate(lengths):
        past_k, past_v = draw(length, K, H), draw(length, K, H)
        kept = np.arange(max(0, length - slots), length)
        prefix_k[b, kept % slots], prefix_v[b, kept % slots] = past_k[kept], past_v[kept]
        exact = (x.astype(np.float64) for x in (q[b], k[b], v[b], past_k, past_v))
        expected.append(by_hand(*exact, own[b], causal[b], window, ids[b], clip_blocks))
    rows = (np.array(lengths, np.int32), np.array(own, np.int32), np.array(causal))
    out, log_sums = map(np.stack, zip(*expected, strict=True))
    return (q, k, v, prefix_k, prefix_v, *rows, None if blocks is None else ids), (out, log_sums)


def errors(got, inputs, expected):
    """The largest deviations of output and log-sum-exp, over the queries that mean something."""
    own, causal = inputs[6], inputs[7]
    worst = np.zeros(2)
    for b in range(len(own)):
        counted = slice(0, own[b] if causal[b] else None)  # queries of padding mean nothing
        for i in range(2):
            # -inf, of a query that sees nothing, as a number far from all others
            pair = (
                np.nan_to_num(np.asarray(x[i], np.float64)[b, counted], nan=np.nan, neginf=-1e9)
                for x in (got, expected)
            )
            worst[i] = np.maximum(worst[i], np.abs(np.subtract(*pair)).max(initial=0))  # NaN stays NaN
    return worst
