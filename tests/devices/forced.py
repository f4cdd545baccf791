"""Denoising steps of one device, recorded with the margin of every decision, to be repeated elsewhere from each state.

Across meshes the last bits differ, and a draw that falls next to a border may then come out otherwise: what is compared
are the figures, and the decisions whose margin says that they cannot.
"""

from dataclasses import dataclass, replace
from functools import cached_property, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import dgemma_jax as dg
from dgemma_jax.cache import KVCache
from dgemma_jax.config import Config
from dgemma_jax.diffusion.policy import Knobs, Policy
from dgemma_jax.diffusion.random import key_from_seed
from dgemma_jax.diffusion.step import CanvasState, start, step
from dgemma_jax.kernels.vocab_head.types import TILE
from dgemma_jax.model.transformer import build
from dgemma_jax.sampling import BUILT_IN
from tests.parity import stream
from tests.random_models import SMALL, random_params

CONFIG = replace(SMALL, vocab_size=2 * TILE + 300, num_experts=8)
C, WIDTH = CONFIG.canvas_length, 20  # of all that is encoded, so that it is one program
ROWS, CANVASES, STEPS, MARGIN, POLICY = 2, 2, 3, 1e-5, Policy()
SAMPLINGS = (
    replace(BUILT_IN, max_denoising_steps=STEPS, entropy_bound=9.0),
    replace(BUILT_IN, top_k=300, temperature=0.7, entropy_bound=20.0),
)
KNOBS = Knobs.of(SAMPLINGS)
SUPPRESS = np.isin(np.arange(CONFIG.vocab_size), (5, 3000))[None].repeat(ROWS, 0)


def keys() -> jax.Array:
    return jnp.stack([key_from_seed(seed) for seed in range(ROWS)])


def index(canvas: int) -> np.ndarray:
    return np.full(ROWS, canvas, np.int32)


def place(params: dict, config: Config, mesh: Mesh) -> dict:
    """Parameters of one device, on a mesh."""

    def put(array: jax.Array, target: jax.ShapeDtypeStruct) -> jax.Array:
        missing = [(0, wanted - length) for length, wanted in zip(array.shape, target.shape, strict=True)]
        return jax.device_put(np.pad(array, missing) if missing else array, target.sharding)

    return jax.tree.map(put, params, build(config, mesh=mesh)[1])


class Programs:
    """What is compared: encoding and a step, compiled for one device or a mesh."""

    def __init__(self, mesh: Mesh | None = None):
        params = random_params(CONFIG)
        self.mesh, self.graph = mesh, build(CONFIG, mesh=mesh)[0]
        self.params = params if mesh is None else place(params, CONFIG, mesh)
        self._encode = jax.jit(partial(dg.encode, self.graph))

    def encode(self, tokens: np.ndarray, lengths: np.ndarray, cache: KVCache) -> KVCache:
        padded = np.zeros((ROWS, WIDTH), np.int32)
        padded[:, : tokens.shape[1]] = tokens
        return self._encode(self.params, padded, lengths, cache)[0]

    @cached_property
    def compiled_step(self) -> jax.stages.Compiled:
        cache, state = dg.init_cache(CONFIG, ROWS, 64, mesh=self.mesh), first_state(0)
        arguments = (self.params, cache, state, keys(), index(0), KNOBS, SUPPRESS, POLICY)
        return jax.jit(partial(step, self.graph), static_argnums=7).lower(*arguments).compile()

    def step(self, cache: KVCache, state: CanvasState, canvas: int) -> CanvasState:
        return jax.device_get(self.compiled_step(self.params, cache, state, keys(), index(canvas), KNOBS, SUPPRESS))


def first_state(canvas: int) -> CanvasState:
    return jax.device_get(start(CONFIG, keys(), jnp.asarray(index(canvas)), jnp.ones(ROWS, bool), "float32"))


@dataclass(frozen=True)
class Recorded:
    """A step of one device. best, accepted, proposal: where those decisions were clear, bool[B,C]."""

    canvas: int
    before: CanvasState
    after: CanvasState
    best: np.ndarray
    accepted: np.ndarray
    proposal: np.ndarray


@dataclass(frozen=True)
class Recording:
    """Prompts, and what one device made of them: the steps of every canvas, each committed before the next."""

    prompts: np.ndarray
    lengths: np.ndarray
    steps: list[Recorded]

    def repeat(self, programs: Programs, cache: KVCache) -> None:
        """AssertionError if the same prompts and states give anything else there. cache: empty."""
        cache, counted = programs.encode(self.prompts, self.lengths, cache), []
        for canvas in range(CANVASES):
            steps = [one for one in self.steps if one.canvas == canvas]
            for one in steps:
                counted += compare(one, programs.step(cache, one.before, canvas))
            cache = programs.encode(steps[-1].after.best, index(C), cache)
        assert np.mean(counted) >= 0.95, f"only {np.mean(counted):.1%} of the decisions were clear"


def record() -> Recording:
    """What one device does."""
    programs, rng = Programs(), np.random.default_rng(0)
    prompts, lengths = rng.integers(0, CONFIG.vocab_size, (ROWS, WIDTH), np.int32), np.array([WIDTH, 11], np.int32)
    cache = programs.encode(prompts, lengths, dg.init_cache(CONFIG, ROWS, 64))
    logits = jax.jit(partial(dg.denoise_logits, programs.graph))
    steps = []
    for canvas in range(CANVASES):
        state = first_state(canvas)
        for _ in range(STEPS):
            after = programs.step(cache, state, canvas)
            seen = np.asarray(logits(programs.params, state.canvas, cache, state.soft), np.float64)
            steps.append(Recorded(canvas, state, after, *clear(seen, canvas, state, after)))
            state = after
        cache = programs.encode(state.best, index(C), cache)
    return Recording(prompts, lengths, steps)


def clear(logits: np.ndarray, canvas: int, state: CanvasState, after: CanvasState) -> tuple[np.ndarray, ...]:
    """Which decisions of a step lie so far from another that no rounding changes them."""
    allowed = np.where(SUPPRESS[:, None], -np.inf, logits)
    ordered = np.sort(allowed, -1)[..., ::-1]
    best = (ordered[..., 0] - ordered[..., 1]) / CONFIG.final_logit_softcapping > MARGIN
    last = np.where(KNOBS.top_k > 0, KNOBS.top_k, CONFIG.vocab_size) - 1
    kth = np.take_along_axis(ordered, last[:, None, None], -1)
    temperature = np.asarray(POLICY.schedule(jnp.asarray(state.steps), KNOBS)) * KNOBS.draw_temperature
    weights = np.where(allowed >= kth, np.exp((allowed - ordered[..., :1]) / temperature[:, None, None]), 0)
    proposal = []
    for row, weight in enumerate(weights):
        draws = (row, canvas, int(state.steps[row]), C, CONFIG.vocab_size)
        proposal.append(stream.propose(weight, stream.proposal_uniforms(*draws))[1] > MARGIN)
    order = np.argsort(after.entropy, -1, kind="stable")
    entropy = np.take_along_axis(after.entropy, order, -1).astype(np.float64)
    border = np.abs(np.cumsum(entropy, -1) - entropy - KNOBS.entropy_bound[:, None]) > MARGIN
    border[:, 0] = True  # the surest position is always accepted
    accepted = np.zeros_like(border)
    np.put_along_axis(accepted, order, border, -1)
    return best, accepted, np.stack(proposal)


def compare(one: Recorded, got: CanvasState) -> list[bool]:
    """Which of the decisions counted; AssertionError where a figure or one of them differs."""
    after = one.after
    for name in ("entropy", "logprob", "soft"):
        ours, theirs = getattr(got, name), getattr(after, name)
        assert np.isfinite(ours).all(), name
        assert np.abs(ours - theirs).max() <= 1e-4 * np.abs(theirs).max(), name
    assert np.array_equal(got.best[one.best], after.best[one.best])
    assert np.array_equal(got.accepted[one.accepted], after.accepted[one.accepted])
    decided = one.accepted & (one.proposal | ~after.accepted)
    assert np.array_equal(got.canvas[decided], after.canvas[decided])
    for name in ("streak", "steps", "running"):
        sure = one.best.all(-1)
        assert np.array_equal(getattr(got, name)[sure], getattr(after, name)[sure]), name
    return [*one.best.ravel(), *one.accepted.ravel(), *decided.ravel()]
