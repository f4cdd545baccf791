"""What a canvas can be spread over, checked before anything is loaded."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jax.sharding import Mesh

PIPELINE_NAMES = ("pipe", "pipeline", "stage", "pp")


def check_parallel(axes: Iterable[str] = (), pipeline_parallel_size: int = 1) -> None:
    """ValueError if a model is to be cut into pipeline stages. axes: names of a mesh's axes.

    Each denoising step begins with the canvas that the sampler made of the step before, behind the last layer; so a
    stage would wait for all the others in every step.
    """
    named = next((axis for axis in axes if axis.lower() in PIPELINE_NAMES), None)
    if named is None and pipeline_parallel_size == 1:
        return
    what = f"pipeline_parallel_size is {pipeline_parallel_size!r}" if named is None else f"the mesh has an axis {named}"
    raise ValueError(
        f"{what}; the canvas state advances only where the sampler runs, and every pipeline stage would need it:"
        " use data, expert or tensor parallelism instead"
    )


def mesh_of(args: Namespace) -> Mesh | None:
    """The mesh that a command line asks for, None for one device. ValueError, before anything is loaded."""
    check_parallel(pipeline_parallel_size=args.pipeline_parallel_size)
    sizes = {name: getattr(args, f"{name}_parallel_size") for name in ("data", "expert", "tensor")}
    if set(sizes.values()) == {1}:
        return None
    from dgemma_jax.sharding import make_mesh

    return make_mesh(**sizes)
