"""`dgemma inspect MODEL --plan`: what a model takes of a GPU and the most it gives there, from its config.json."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from dgemma_jax.config import Config, check, is_int, is_positive

if TYPE_CHECKING:
    from dgemma_jax.engine.hardware import Estimate

GB, TERA, MIB = 1e9, 1e12, 1 << 20
STEPS = (8.0, 16.0, 48.0)


def plan(args: Namespace) -> None:
    """Prints the plan that a parsed command line asks for. ValueError if it does not fit, or for what cannot be."""
    import jax

    jax.config.update("jax_platforms", "cpu")  # only shapes are needed

    from dgemma_jax.engine.capacity import check_slots
    from dgemma_jax.engine.hardware import WEIGHTS, check_fits, estimate

    check(args.gpu is not None, "gpu", args.gpu, "the GPU to plan for, such as --gpu h200")
    config = _config(args.model)
    most = config.max_position_embeddings
    length = most if args.max_model_len is None else args.max_model_len
    check(is_int(length, 2) and length <= most, "max_model_len", length, f"2 .. {most}, the model's context")
    stored = next(name for name, quantization in WEIGHTS.items() if quantization == config.quantization)
    slots, steps = check_slots(1 if args.slots is None else args.slots), args.steps or STEPS
    for count in steps:
        check(is_positive(count), "steps", count, "a positive number of denoising steps per canvas")
    found = estimate(config, args.gpu, args.weights or stored, slots, length)
    check_fits(found, slots, length)
    if args.json:
        rates = {f"{count:g}": found.rate(count) for count in steps}
        told = asdict(found) | {"origin": found.origin, "left": found.left, "tokens_per_second_by_steps": rates}
        print(json.dumps(told))
        return
    for line in lines(found, args.weights or stored, slots, length, steps):
        print(line)


def _config(name: str) -> Config:
    """Of a config.json or a model directory, whose weights need not be there."""
    from dgemma_jax.checkpoint import read_config, resolve

    path = Path(name).expanduser()
    return read_config(path if path.suffix == ".json" else resolve(name) / "config.json")[1]


def lines(found: Estimate, weights: str, slots: int, length: int, steps: Sequence[float]) -> Iterator[str]:
    """The plan for people; every figure says where it comes from."""
    gpu, rate = found.gpu, "; ".join(f"{found.rate(count):,.0f} at {count:g} steps a canvas" for count in steps)
    yield f"gpu         {gpu.name}: {gpu.memory / GB:,.0f} GB, {gpu.bandwidth / TERA:.3g} TB/s, " + (
        f"{gpu.operations / TERA:,.4g} TFLOP/s dense in bf16 (data sheet)"
    )
    yield f"usable      {found.usable / GB:,.1f} GB, {gpu.fraction:.0%}: an engine's under XLA_CLIENT_MEM_FRACTION=" + (
        f"{gpu.fraction:g} with memory_fraction 1; else JAX takes 75 %, of which an engine fills 90 % (computed)"
    )
    yield f"weights     {found.weights / GB:,.2f} GB in {weights} (computed)"
    yield f"cache       {found.cache / slots / GB:,.3f} GB for {length:,} positions, " + (
        f"{found.cache / GB:,.2f} GB for {slots} slots, {found.prefixes / GB:,.2f} GB for encoded prompts, "
        f"{found.aside / GB:,.2f} GB to encode one in (computed)"
    )
    yield f"state       {found.states / MIB:,.1f} MiB of the slots (computed)"
    yield f"a step      {found.temporaries / MIB:,.0f} MiB of temporaries ({found.origin})"
    yield f"left        {found.left / GB:,.1f} GB (computed)"
    yield f"a pass      at least {1e3 * found.reading:.2f} ms to read {found.pass_bytes / GB:,.2f} GB, " + (
        f"{1e3 * found.computing:.2f} ms for {found.pass_operations / TERA:,.2f} TFLOP (computed)"
    )
    yield f"tokens/s    at most {rate} (computed from these floors; nothing was measured on a GPU)"
