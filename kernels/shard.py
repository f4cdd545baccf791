"""An axis that several devices share: which part a device has, and how their results come together in `shard_map`."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Int32

from dgemma_jax.shapes import Array


@dataclass(frozen=True)
class Shard:
    """An axis of `size` entries in `count` parts of `length` each, over the mesh axes `axes`.

    Where the parts hold more than `size` entries the last ones end in padding. With count 1 the axis is whole on every
    device, and each method gives back what it is given.
    """

    size: int
    axes: tuple[str, ...] = ()
    count: int = 1
    length: int = 0

    @classmethod
    def whole(cls, size: int) -> "Shard":
        """An axis that is not cut."""
        return cls(size, length=size)

    @property
    def cut(self) -> bool:
        """Whether there is more than one part."""
        return self.count > 1

    @property
    def padded(self) -> bool:
        """Whether some part holds fewer than `length` entries."""
        return self.count * self.length > self.size

    @property
    def nowhere(self) -> int:
        """A position that lies on no part."""
        return self.count * self.length

    @property
    def first(self) -> int | Int32[Array, ""]:
        """Where this device's part begins."""
        return jax.lax.axis_index(self.axes) * self.length if self.cut else 0

    def part(self, x: Array, axis: int, length: int | None = None) -> Array:
        """This device's part of an array that every device has whole, `length` entries (None: the shard's own) of it.

        Zeros where the parts go beyond the array.
        """
        if not self.cut:
            return x
        length = length or self.length
        missing = [(0, 0)] * x.ndim
        missing[axis] = (0, self.count * length - x.shape[axis])
        return jax.lax.dynamic_slice_in_dim(jnp.pad(x, missing), jax.lax.axis_index(self.axes) * length, length, axis)

    def locate(self, position: Array) -> tuple[Array, bool | Bool[Array, "..."]]:
        """(place inside this device's part, whether it lies there); elsewhere the place is some valid one."""
        if not self.cut:
            return position, True
        place = position - self.first
        return jnp.clip(place, 0, self.length - 1), (place >= 0) & (place < self.length)

    def sum(self, x: Array) -> Array:
        """The sum over the parts."""
        return jax.lax.psum(x, self.axes) if self.cut else x

    def max(self, x: Array) -> Array:
        """The maximum over the parts."""
        return jax.lax.pmax(x, self.axes) if self.cut else x

    def min(self, x: Array) -> Array:
        """The minimum over the parts."""
        return jax.lax.pmin(x, self.axes) if self.cut else x

    def any(self, x: Bool[Array, "..."]) -> Bool[Array, ""]:
        """Whether anything is true on any part."""
        return self.sum(jnp.any(x).astype(jnp.int32)) > 0 if self.cut else jnp.any(x)

    def gather(self, x: Array, axis: int) -> Array:
        """The parts' arrays one behind the other."""
        return jax.lax.all_gather(x, self.axes, axis=axis, tiled=True) if self.cut else x
