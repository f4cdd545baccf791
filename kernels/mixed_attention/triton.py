"""The kernel of `pallas.py` written in Triton itself, called through jax-triton: for when Pallas drops its backend.

Importing this needs the `triton` wheel, calling it jax-triton (extra `triton`) and a CUDA GPU.
"""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from dgemma_jax.kernels.mixed_attention.launch import Launch, Tile, launch_for, merge
from dgemma_jax.kernels.mixed_attention.ranges import key_ranges
from dgemma_jax.shapes import Blocks, CachedKeys, Keys, Lengths, LogSums, Queries, RowMask

LOWEST = tl.constexpr(-1e30)  # below every score, yet finite: exp2(LOWEST - LOWEST) is no NaN
LOG2_E = tl.constexpr(1.4426950408889634)


def mixed_attention(
    q: Queries,
    k: Keys,
    v: Keys,
    prefix_k: CachedKeys,
    prefix_v: CachedKeys,
    prefix_length: Lengths,
    own_length: Lengths,
    causal: RowMask,
    blocks: Blocks | None = None,
    *,
    window: int | None,
    clip_blocks: bool = False,
    capability: int | None = None,
) -> tuple[Queries, LogSums]:
    """See `dgemma_jax.kernels.mixed_attention.mixed_attention`; ImportError without jax-triton, ValueError without GPU.

    capability: the compute capability to compile for, times ten; None for that of the GPU that jax runs on.
    """
    import jax_triton

    capability = capability or device_capability()
    slots, tokens = prefix_k.shape[1], q.shape[1]
    launch, constants, outputs = call_for(q, k, prefix_k)
    sizes = {"slots": slots, "tokens": tokens, "window": window, "clip_blocks": clip_blocks}
    ranges = key_ranges(prefix_length, own_length, causal, blocks, **sizes)
    parts = jax_triton.triton_call(
        *(prefix_length, ranges.cached, ranges.first, ranges.last, q, k, v, prefix_k, prefix_v),
        kernel=attend,
        name="mixed_attention",
        grid=launch.grid,
        out_shape=outputs,
        num_warps=launch.tile.warps,
        num_stages=launch.tile.stages,
        compute_capability=capability,
        **constants,
    )
    out, log_sums = merge(*parts)
    return out.astype(q.dtype), log_sums


def device_capability() -> int:
    """The compute capability, times ten, of the GPU that jax runs on. ValueError where that is no NVIDIA GPU."""
    device = jax.devices()[0]
    digits = str(getattr(device, "compute_capability", "")).replace(".", "")
    if not digits.isdigit():
        raise ValueError(
            f"mixed_attention: implementation 'triton' needs an NVIDIA GPU, and jax runs on {device.device_kind!r}; "
            "pip install 'dgemma-jax[cuda12]' or [cuda13] where there is one, or choose 'xla'"
        )
    return int(digits)


def call_for(
    q: Queries, k: Keys, prefix_k: CachedKeys, tile: Tile | None = None, splits: int | None = None
) -> tuple[Launch, dict[str, int], tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]]:
    """The programs, constants and outputs of `attend` for arrays of these shapes; tile, splits: as in `pallas`."""
    B, T, N, H = q.shape
    S, K = prefix_k.shape[1], k.shape[2]
    launch = launch_for(B, T, N, K, H, S, q.dtype.itemsize, tile, splits)
    constants = {"B": B, "T": T, "S": S, "K": K, "G": N // K, "H": H}
    constants |= {"TOKENS": launch.tokens, "HEADS": launch.heads, "WIDTH": launch.width}
    constants |= {"KEYS": launch.tile.keys, "SPLITS": launch.splits}
    dtype = q.dtype if launch.splits == 1 else jnp.float32
    part = jax.ShapeDtypeStruct((launch.splits, *q.shape), dtype)
    return launch, constants, (part, jax.ShapeDtypeStruct(part.shape[:-1], jnp.float32))


@triton.jit
def attend(
    length,
    cached,
    first,
    last,
    q,
    k,
    v,
    prefix_k,
    prefix_v,
    out,
    log_sum,
    B: tl.constexpr,
    T: tl.constexpr,
    S: tl.constexpr,
    K: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """One program, see `launch.Launch`; arrays as in `mixed_attention`, out [SPLITS,B,T,N,H], log_sum without H.

    Offsets are 64 bits wide: a prefix of 262,144 positions of 26B's full layers has 2**28 elements a row.
    """
    pair = tl.program_id(1)
    batch = (tl.program_id(2) // SPLITS).to(tl.int64)
    split = tl.program_id(2) % SPLITS
    row = tl.arange(0, TOKENS * HEADS)
    token = tl.program_id(0) * TOKENS + row // HEADS
    column = tl.arange(0, WIDTH)
    inside = (token < T) & (row % HEADS < G)
    element = inside[:, None] & (column < H)[None, :]
    place = (batch * T + token) * (K * G) + pair * G + row % HEADS  # of a query among all
    query = tl.load(q + place[:, None] * H + column[None, :], mask=element, other=0.0)
    cached = tl.load(cached + batch * T + token, mask=inside, other=0)
    first = tl.load(first + batch * T + token, mask=inside, other=T)
    last = tl.load(last + batch * T + token, mask=inside, other=0)

    peak = tl.full([TOKENS * HEADS], LOWEST, tl.float32)
    total = tl.zeros([TOKENS * HEADS], tl.float32)
    sums = tl.zeros([TOKENS * HEADS, WIDTH], tl.float32)

    reach = tl.max(cached, 0)  # cached positions that some query sees: the newest
    written = tl.load(length + batch)
    newest = (written - 1 + S) % S
    oldest = (written - reach) % S
    # The blocks from the oldest position on, round the ring; one that both ends lie in is met once.
    BLOCKS: tl.constexpr = (S + KEYS - 1) // KEYS
    begin = oldest // KEYS
    end = oldest + reach
    beyond = BLOCKS + (end - S + KEYS - 1) // KEYS
    count = tl.minimum(tl.where(end <= S, (end + KEYS - 1) // KEYS, beyond) - begin, BLOCKS)
    share = (count + SPLITS - 1) // SPLITS
    for index in range(split * share, tl.minimum((split + 1) * share, count)):
        slot = (begin + index) % BLOCKS * KEYS + tl.arange(0, KEYS)
        age = tl.where(slot <= newest, newest - slot, newest - slot + S)  # 0: the newest position
        age = tl.where(slot < S, age, S)  # beyond the ring: older than all
        used = (age < reach)[:, None] & (column < H)[None, :]
        offset = ((batch * S + slot) * K + pair)[:, None] * H + column[None, :]
        keys = tl.load(prefix_k + offset, mask=used, other=0.0).to(query.dtype)
        values = tl.load(prefix_v + offset, mask=used, other=0.0).to(query.dtype)
        peak, total, sums = _add(peak, total, sums, query, keys, values, age[None, :] < cached[:, None])

    stop = tl.where(split == 0, tl.max(last, 0), 0)  # the pass's own keys go to the first split
    for block in range(tl.min(first, 0) // KEYS, (stop + KEYS - 1) // KEYS):
        key = block * KEYS + tl.arange(0, KEYS)
        used = (key < stop)[:, None] & (column < H)[None, :]
        offset = ((batch * T + key) * K + pair)[:, None] * H + column[None, :]
        keys = tl.load(k + offset, mask=used, other=0.0).to(query.dtype)
        values = tl.load(v + offset, mask=used, other=0.0).to(query.dtype)
        seen = (key[None, :] >= first[:, None]) & (key[None, :] < last[:, None])
        peak, total, sums = _add(peak, total, sums, query, keys, values, seen)

    divisor = tl.where(total == 0, 1.0, total)
    result = (sums / divisor[:, None]).to(out.dtype.element_ty)
    place += split.to(tl.int64) * (B * T * K * G)
    tl.store(out + place[:, None] * H + column[None, :], result, mask=element)
    logarithm = tl.where(total == 0, -float("inf"), (peak + tl.log2(divisor)) / LOG2_E)
    tl.store(log_sum + place, logarithm, mask=inside)


@triton.jit
def _add(peak, total, sums, query, keys, values, seen):
    """The running sums with one more block of keys and values [s,WIDTH]; seen [rows,s]: which queries see which."""
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * LOG2_E
    scores = tl.where(seen, scores, -float("inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    keep = tl.exp2(peak - new_peak)
    weights = tl.exp2(scores - new_peak[:, None])
    sums = sums * keep[:, None] + tl.dot(weights.to(query.dtype), values, input_precision="ieee")
    return new_peak, total * keep + tl.sum(weights, 1), sums
