"""Quantised checkpoints of other tools, told by their files and tensors where config.json does not say it."""

from __future__ import annotations

from pathlib import Path

from dgemma_jax.config_hf import RELEASE
from dgemma_jax.convert.safetensors_files import TensorFiles

FILES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt (fp8 or nvfp4)",
}
SUFFIXES = {
    "qweight": "gptq or awq",
    "qzeros": "gptq or awq",
    "SCB": "bitsandbytes",
    "absmax": "bitsandbytes",
    "quant_map": "bitsandbytes",
    "bitsandbytes__nf4": "bitsandbytes",
    "bitsandbytes__fp4": "bitsandbytes",
    "weight_packed": "compressed-tensors",
    "weight_scale": "fp8 or compressed-tensors",
    "weight_scale_inv": "fp8",
    "weight_scale_2": "nvfp4",
    "input_scale": "fp8 or nvfp4",
}
DTYPES = {"F8_E4M3": "fp8", "F8_E5M2": "fp8", "F8_E8M0": "mxfp4", "F4": "fp4"}


def refuse_foreign(directory: Path, files: TensorFiles) -> None:
    """ValueError, naming the format and what shows it, if the weights are quantised in a way that is not read."""
    found = [(name, FILES[name]) for name in FILES if (directory / name).is_file()]
    for name in files:
        kind = SUFFIXES.get(name.rsplit(".", 1)[-1]) or DTYPES.get(files.dtype(name))
        found += [(name, kind)] if kind else []
    if found:
        sign, kind = found[0]
        raise ValueError(
            f"{directory} is quantised as {kind} ({sign}), which is not supported; use a checkpoint in bfloat16 or "
            f"float32, for instance {RELEASE}, and `dgemma convert --quantize` for 8 or 4 bits"
        )
