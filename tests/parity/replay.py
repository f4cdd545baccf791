"""transformers' ``generate()`` with its random draws answered from our stream, and a record of every decision.

``torch.randint`` and ``torch.multinomial`` are the only draws that it makes. The answers are per row; a row's margins
say how far each decision that reached its state lay from coming out differently, so that a test can tell a difference
from a rounding error.
"""

from dataclasses import dataclass, field
from unittest import mock

import numpy as np
import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
    EntropyBoundSampler,
    EntropyBoundSamplerConfig,
    LinearTemperatureScheduleLogitsProcessor,
)

from tests.margins import margins

from . import stream
from .oracle import Oracle, left_pad


@dataclass
class Replay:
    """What one ``generate()`` call did. ``steps[c][b]``: steps until row b froze in canvas c, all of them otherwise."""

    tokens: np.ndarray
    tokens_per_forward: np.ndarray
    steps: list[np.ndarray]
    margin: dict[str, float]


@dataclass
class Draws:
    """Stands in for torch's generator; notices from the order of the calls which canvas and step it is asked for."""

    seeds: list[int]
    canvas_length: int
    vocab: int
    canvas: int = -1
    step: int = -1
    proposed: bool = False
    proposal_margin: np.ndarray | None = None
    row_done: np.ndarray | None = None
    margin: dict[str, float] = field(default_factory=dict)

    def randint(self, low, high, size, device=None):
        assert (low, high, tuple(size)) == (0, self.vocab, (len(self.seeds), self.canvas_length))
        if self.proposed:
            rows = [stream.renoise_ids(s, self.canvas, self.step, self.canvas_length, high) for s in self.seeds]
        else:
            self.canvas, self.step = self.canvas + 1, -1
            rows = [stream.start_canvas(s, self.canvas, self.canvas_length, high) for s in self.seeds]
        self.proposed = False
        return torch.from_numpy(np.stack(rows).astype(np.int64))

    def multinomial(self, probabilities, num_samples):
        assert num_samples == 1
        self.step, self.proposed = self.step + 1, True
        rows = probabilities.numpy().astype(np.float64).reshape(len(self.seeds), self.canvas_length, self.vocab)
        drawn = []
        for seed, row in zip(self.seeds, rows, strict=True):
            uniforms = stream.proposal_uniforms(seed, self.canvas, self.step, self.canvas_length, self.vocab)
            drawn.append(stream.propose(row, uniforms))
        self.proposal_margin = np.stack([margin for _, margin in drawn])
        return torch.from_numpy(np.concatenate([ids for ids, _ in drawn])[:, None])

    def note(self, name: str, values: np.ndarray, rows: np.ndarray) -> None:
        """Lower the margin called ``name`` by ``values`` [B, ...] of the rows that still count."""
        if rows.any():
            self.margin[name] = min(self.margin.get(name, np.inf), float(np.min(values[rows])))


def step_margins(draws: Draws, logits: np.ndarray, accepted: np.ndarray, options: dict, active: np.ndarray) -> None:
    """Record how close the decisions of one step were, from the tempered logits [B, C, V] in float64."""
    bound, confidence = options["sampler_config"].entropy_bound, options.get("confidence_threshold")
    for name, values in margins(logits, accepted, bound, confidence, draws.proposal_margin).items():
        draws.note(name, values, active)


def generate(oracle: Oracle, prompts: list[list[int]], seeds: list[int], *, entropy_bound: float, **options) -> Replay:
    """Run ``generate()`` on left-padded ``prompts``; ``options`` are its keywords."""
    model = oracle.model
    draws = Draws(seeds, oracle.config.canvas_length, oracle.config.get_text_config().vocab_size)
    options["sampler_config"] = EntropyBoundSamplerConfig(entropy_bound=entropy_bound)
    done, steps, seen = np.zeros(len(prompts), bool), [], {}

    accept_canvas, denoising_step, finalize = (
        EntropyBoundSampler.accept_canvas,
        type(model)._denoising_step,
        type(model)._finalize_canvas,
    )

    def accept(sampler, current, proposal, logits, cur_step):
        result = accept_canvas(sampler, current, proposal, logits, cur_step)
        seen.update(logits=logits.numpy().astype(np.float64), accepted=sampler.accepted_token_mask.numpy())
        return result

    def step(self, *args, finished_denoising, **kwargs):
        active = ~(finished_denoising.numpy() | done)
        if draws.step < 0:
            steps.append(np.zeros(len(prompts), int))
        out = denoising_step(self, *args, finished_denoising=finished_denoising, **kwargs)
        step_margins(draws, seen["logits"], seen["accepted"], options, active)
        steps[-1] += active
        return out

    def finish(**kwargs):
        ids, finished = finalize(**kwargs)
        done[:] = finished.numpy()
        return ids, finished

    ids, mask = left_pad(prompts)
    with (
        mock.patch.object(torch, "randint", draws.randint),
        mock.patch.object(torch, "multinomial", draws.multinomial),
        mock.patch.object(torch.compiler, "cudagraph_mark_step_begin", lambda: None),  # would import torch's compiler
        mock.patch.object(EntropyBoundSampler, "accept_canvas", accept),
        mock.patch.object(type(model), "_denoising_step", step),
        mock.patch.object(model, "_finalize_canvas", finish),
    ):
        out = model.generate(input_ids=torch.from_numpy(ids), attention_mask=torch.from_numpy(mask), **options)
    return Replay(out.sequences[:, ids.shape[1] :].numpy(), out.tokens_per_forward.numpy(), steps, draws.margin)


def temperatures(t_min: float, t_max: float, steps: int) -> np.ndarray:
    """What the logits of each step are divided by, first step first."""
    schedule = LinearTemperatureScheduleLogitsProcessor(t_min, t_max, steps)
    left = [torch.tensor(steps - step, dtype=torch.int32) for step in range(steps)]
    return np.array([1 / schedule(None, torch.ones(1), cur_step=now).item() for now in left])


def processors(function):
    """A logits processor list of one function (input_ids, scores, cur_step) -> scores."""

    class Processor(LogitsProcessor):
        def __call__(self, input_ids, scores, cur_step):
            return function(input_ids, scores, cur_step)

    return LogitsProcessorList([Processor()])
