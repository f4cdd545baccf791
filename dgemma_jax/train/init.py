"""Random initial parameters for training from scratch."""

import math

import jax
import jax.numpy as jnp

from dgemma_jax.train.optim import MATRICES

# Starting values of the vectors that do not start at 1, as functions of their length. Attention has no 1/sqrt(H), so
# the query and key norms bring it; the norms after a block start low, so that a fresh block disturbs the stream little.
_VECTORS = {
    "q_norm": lambda n: n**-0.25,
    "k_norm": lambda n: n**-0.25,
    "post_attention_norm": lambda n: 0.5,
    "post_feedforward_norm": lambda n: 0.5,
    "post_mlp_norm": lambda n: 0.7,
    "post_experts_norm": lambda n: 0.7,
    "router": lambda n: n**0.5,
}


# Left to Adam: what is looked up, compared, or read from outside the model.
OTHER_MATRICES = ("table", "proj", "input_proj", "position_table", "projection")


def initial_params(abstract: dict, seed: int) -> dict:
    """fp32 params for a tree of shapes: matrices and embeddings N(0, 1 / fan-in), vectors and scalars constant.

    `abstract` is the second result of `dgemma_jax.model.transformer.build`. The numbers depend on seed and tree alone.
    """
    leaves, treedef = jax.tree.flatten_with_path(abstract)
    keys = jax.random.split(jax.random.key(seed, impl="threefry2x32"), len(leaves))
    values = []
    for key, (path, leaf) in zip(keys, leaves, strict=True):
        owner, name = (entry.key for entry in path[-2:])
        if name in MATRICES or name in OTHER_MATRICES:
            values.append(jax.random.normal(key, leaf.shape) * _fan_in(name, leaf.shape) ** -0.5)
        else:
            start = _VECTORS.get(owner, lambda n: 1.0) if name == "scale" else lambda n: 1.0
            values.append(jnp.full(leaf.shape, start(math.prod(leaf.shape)), jnp.float32))
    return jax.tree.unflatten(treedef, values)


def _fan_in(name: str, shape: tuple[int, ...]) -> int:
    """Inputs of one output: the width D for the table (it is the vocabulary head, transposed) and the router; for the
    position table its own width, so that its rows are small beside the patches.
    """
    if name in ("table", "position_table"):
        return shape[-1]
    axes = MATRICES[name].reduction_axis if name in MATRICES else 0
    return math.prod(shape[axis] for axis in ((axes,) if isinstance(axes, int) else axes))
