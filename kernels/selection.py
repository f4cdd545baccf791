"""Which implementation of attention and experts runs on a device: decided from plain facts, before any weight is read.

`auto` takes on a CUDA GPU the first of pallas, triton and xla that can run there, and xla elsewhere. A name is taken at
its word: where it cannot run it is refused, never replaced.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec

import jax

from dgemma_jax.kernels.mixed_attention.launch import TILES, tile_for

CHOICES = ("auto", "reference", "xla", "pallas", "triton")
PREFERRED = ("pallas", "triton", "xla")  # by auto on a CUDA GPU
JAX_BELOW = {"pallas": (0, 13), "triton": (0, 12)}  # Pallas' Triton backend is deprecated; jax-triton 0.3 ends earlier
LEAST_CAPABILITY = (8, 0)
# Bytes that one program may ask for, by compute capability; the least that any since 8.0 has for those not listed.
SHARED = {(8, 0): 166_912, (8, 7): 166_912, (9, 0): 232_448, (10, 0): 232_448, (10, 3): 232_448}
LEAST_SHARED = 101_376
# The most that a tile takes, of Pallas or Triton, on any GPU of mixed_attention/README.md: by bytes of a number and
# widest head it serves.
TILE_BYTES = {2: {128: 82_944, 256: 98_848, 512: 67_584}, 4: {128: 53_248, 256: 67_712, 512: 98_304}}
EXPERT_BYTES = 73_760  # the same of grouped_matmul/README.md, for all its tiles
ELSEWHERE = ("flashinfer", "cudnn", "flash_attn", "flash_attention")  # kernels of others, asked for by these names


@dataclass(frozen=True)
class Device:
    """What a choice depends on. platform: "cpu", "cuda", or jax's name of another; kind: the device's own name.

    jax_version: as in `jax.__version_info__`. capability: CUDA's (major, minor). shared: bytes of shared memory that
    one program may ask for. jax_triton: whether it is installed.
    """

    platform: str
    kind: str = ""
    capability: tuple[int, int] = (0, 0)
    shared: int = 0
    jax_version: tuple[int, ...] = jax.__version_info__
    jax_triton: bool = False

    def __str__(self) -> str:
        return self.kind or self.platform


def this_device(device: jax.Device | None = None) -> Device:  # pyright: ignore[reportInvalidTypeForm]  jaxlib is untyped
    """What is known of a device of jax. device: None is the first of this process."""
    chosen = device or jax.local_devices()[0]
    if "cuda" not in chosen.client.platform_version.lower():
        return Device(chosen.platform)
    major, minor = map(int, chosen.compute_capability.split("."))
    shared = getattr(chosen, "shared_memory_per_block_optin", None) or SHARED.get((major, minor), LEAST_SHARED)
    return Device("cuda", chosen.device_kind, (major, minor), shared, jax_triton=find_spec("jax_triton") is not None)


def attention(wanted: str, device: Device, heads: Mapping[str, int], itemsize: int) -> str:
    """What to run on a device, or ValueError in one line: what was asked for, why it cannot be, what works.

    wanted: one of CHOICES. heads: head width by kind of layer. itemsize: bytes of a number, 2 for bfloat16.
    """
    able = [name for name in CHOICES[1:] if _obstacle(name, device, heads, itemsize) is None]
    if wanted == "auto":
        return next(name for name in PREFERRED if name in able) if device.platform == "cuda" else "xla"
    if (obstacle := _obstacle(wanted, device, heads, itemsize)) is not None:
        raise ValueError(f"attention_implementation is {wanted!r:.60}: {obstacle}; here auto, {', '.join(able)} work")
    return wanted


def experts(device: Device) -> str:
    """What auto takes on a device for the experts, and for dense products with quantised matrices."""
    able = device.capability >= LEAST_CAPABILITY and device.jax_version < JAX_BELOW["pallas"]
    return "pallas" if device.platform == "cuda" and able and device.shared >= EXPERT_BYTES else "xla"


def describe(name: str, device: Device, heads: Mapping[str, int], itemsize: int) -> str:
    """One line on the attention called name: the device it runs on, and in which tiles if it has any.

    heads, itemsize: see `attention`.
    """
    if name not in JAX_BELOW:
        return f"attention: {name} on {device}"
    if device.platform == "cpu":
        return f"attention: {name} on {device}, interpreted, which is slow"
    tiles = {kind: tile_for(width, itemsize) for kind, width in heads.items()}
    parts = (
        f"{kind} layers, heads {heads[kind]} wide: {tile.queries} queries x {tile.keys} keys, {tile.warps} warps, "
        f"{tile.stages} stages"
        for kind, tile in tiles.items()
    )
    return f"attention: {name} on {device} ({'; '.join(parts)})"


def _obstacle(name: str, device: Device, heads: Mapping[str, int], itemsize: int) -> str | None:
    """Why an implementation cannot run on the device, None if it can."""
    if name not in CHOICES:
        return _unknown(name)
    if name not in JAX_BELOW or (name == "pallas" and device.platform == "cpu"):
        return None
    if device.platform != "cuda":
        return f"it needs a CUDA GPU, and this is {device}"
    if device.jax_version >= JAX_BELOW[name]:
        below, version = (".".join(map(str, v)) for v in (JAX_BELOW[name], device.jax_version))
        return f"it needs jax below {below}, and this is {version}"
    if name == "triton" and not device.jax_triton:
        return "it needs jax-triton (pip install 'dgemma-jax[triton]')"
    if device.capability < LEAST_CAPABILITY:
        return f"it needs compute capability 8.0, and {device} has {device.capability[0]}.{device.capability[1]}"
    for kind, width in heads.items():
        if width > max(TILES):
            return f"it has tiles for heads up to {max(TILES)} wide, and those of {kind} layers are {width} wide"
        need = TILE_BYTES[max(2, itemsize)][next(widest for widest in TILES if width <= widest)]
        if need > device.shared:
            tile = f"its tile for heads {width} wide takes {need} bytes of shared memory"
            return f"{tile}, and a program has {device.shared} on {device}"
    return None


def _unknown(name: object) -> str:
    if isinstance(name, str) and name.lower().replace("-", "_").startswith(ELSEWHERE):
        return (
            "its heads are at most 256 wide and a call has one mask, and this model needs heads 512 wide and per-row "
            "causality"
        )
    return "there is no such implementation"
