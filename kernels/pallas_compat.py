"""What the kernels use of Pallas and its Triton backend, in one place: that backend is deprecated since jax 0.11.

Names that exist unchanged in jax 0.10.2, 0.11 and 0.12 only. From 0.11 on lowering for CUDA gives a DeprecationWarning.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from dgemma_jax.shapes import Array

load, store = triton.load, triton.store


def triton_call(kernel: Callable[..., None], *args: Array, warps: int, stages: int, **pallas_call: Any) -> Any:
    """`pl.pallas_call(kernel, **pallas_call)(*args)`: a Triton kernel on CUDA, interpreted on CPU.

    The platform is that of the lowering, not of the process, so that a machine without a GPU lowers for one.
    Lowering for another platform is jax's NotImplementedError.
    """
    params = triton.CompilerParams(num_warps=warps, num_stages=stages)
    compiled = pl.pallas_call(kernel, compiler_params=params, **pallas_call)
    interpreted = pl.pallas_call(kernel, interpret=True, **pallas_call)
    return jax.lax.platform_dependent(*args, cpu=interpreted, cuda=compiled)


@contextmanager
def absent_gpu(kind: str) -> Iterator[None]:
    """Lowering for CUDA inside this context is for a GPU of this kind ("NVIDIA H200"), which need not be there.

    jax 0.10 assumes compute capability 9.0 whatever the kind; later versions refuse to guess.
    """
    if jax.__version_info__ < (0, 11):
        yield
        return
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=None, platform="gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        yield
