"""What a canvas can be spread over, checked before anything is loaded."""

from collections.abc import Iterable

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
