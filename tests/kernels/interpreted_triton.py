"""Runs the Triton kernel in Triton's interpreter, which only a process with TRITON_INTERPRET=1 has: `python -m` this.

Prints, as JSON, the errors of output and log-sum-exp by case. fp32 only: the interpreter's bfloat16 products are wrong.
"""

import json

import jax
import numpy as np
import torch

from dgemma_jax.kernels.mixed_attention.launch import Tile, merge
from dgemma_jax.kernels.mixed_attention.ranges import key_ranges
from dgemma_jax.kernels.mixed_attention.triton import attend, call_for
from tests.kernels.attention_cases import case, errors

# Name: arguments of `case`, tile (None: the one of a GPU), programs that share the prefix.
WINDOW, SMALL = 8, Tile(16, 16, 4, 1)
MIXED = (1, [11, 11, 0, 3, 20], [6, 6, 2, 1, 0], [True, False, True, True, False])
IMAGES = [[0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1], [3, 3, 0, 0, 4, 4, 5, 5, 0, 6, 6], [0, 0, 2, 2, 2, 2, 2, 2, 2, 2, 2]]
CASES = {
    "full": ((*MIXED, None, 32), {}, None, 1),
    "sliding, a ring gone round": ((*MIXED, WINDOW, WINDOW), {}, None, 1),
    "several tiles, the prefix in parts": ((2, [30, 57], [11, 9], [True, False], 24, 40), {"tokens": 11}, SMALL, 3),
    "images": ((3, [0, 5, 20], [11, 11, 9], [True] * 3, WINDOW, 24), {"tokens": 11, "blocks": IMAGES}, SMALL, 1),
    "no power of two": ((4, [3, 30], [9, 9], [True, False], None, 30), {"tokens": 9, "heads": (6, 2, 24)}, None, 1),
}


def interpret(inputs, window, tile, splits):
    """The op's output and log-sum-exp for arrays of numpy."""
    *arrays, length, own, causal, blocks = inputs
    q, k, _, prefix_k, _ = arrays
    launch, constants, outputs = call_for(q, k, prefix_k, tile, splits)
    ranges = key_ranges(length, own, causal, blocks, slots=prefix_k.shape[1], tokens=q.shape[1], window=window)
    given = [torch.tensor(np.asarray(x)) for x in (length, *jax.tree.leaves(ranges), *arrays)]
    results = [torch.full(x.shape, torch.nan) for x in outputs]
    attend[launch.grid](*given, *results, **constants)
    return merge(*(x.numpy() for x in results))


def main():
    found = {}
    for name, (arguments, shape, tile, splits) in CASES.items():
        inputs, expected = case(*arguments, **shape)
        found[name] = errors(interpret(inputs, arguments[4], tile, splits), inputs, expected).tolist()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
