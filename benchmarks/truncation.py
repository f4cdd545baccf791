"""What top_k and top_p cost in the vocabulary head, in CPU seconds of a call.

    python -m benchmarks.truncation

Four rows, canvas 256, V 32,768, D 512, fp32. The programs take turns; the better of two rounds counts.
"""

import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from dgemma_jax.diffusion.random import key_from_seed, proposal_uniforms
from dgemma_jax.kernels.vocab_head import vocab_head

B, C, V, D = 4, 256, 32768, 512
OFF = {"top_k": jnp.zeros(B, jnp.int32), "top_p": jnp.ones(B)}
CASES = {
    "without the arguments": {},
    "no row asks": OFF,
    "one row asks for top_k": OFF | {"top_k": jnp.array([0, 40, 0, 0], jnp.int32)},
    "one row asks for top_p": OFF | {"top_p": jnp.array([1, 1, 0.9, 1])},
    "one row asks for both": OFF | {"top_k": jnp.array([40, 0, 0, 0], jnp.int32), "top_p": jnp.array([0.9, 1, 1, 1])},
    "every row asks for both": {"top_k": jnp.full(B, 40), "top_p": jnp.full(B, 0.9)},
}


def main() -> None:
    rng = np.random.default_rng(0)
    hidden, table = (jnp.asarray(rng.normal(0, 0.3, shape), jnp.float32) for shape in ((B, C, D), (V, D)))
    uniforms = proposal_uniforms(jnp.stack([key_from_seed(seed) for seed in range(B)]), C, V)
    head = jax.jit(partial(vocab_head, softcap=30.0, scale=D**0.5))
    ones, nothing = jnp.ones(B), jnp.zeros((B, V), bool)
    best = dict.fromkeys(CASES, float("inf"))
    for turn in range(3):
        for name, chosen in CASES.items():
            start = time.process_time()
            jax.block_until_ready(head(hidden, table, 0.6 * ones, ones, uniforms, nothing, **chosen))
            if turn:  # the first one compiles
                best[name] = min(best[name], time.process_time() - start)
    for name, seconds in best.items():
        print(f"{name:<24}{seconds:>8.3f} s{seconds / best['without the arguments']:>8.2f}")


if __name__ == "__main__":
    main()
