"""One denoising step, its memory, prefill and the ops on a CPU, beside transformers: `python -m benchmarks.step`.

Both programs have the same random weights and take turns in one process, on 2 threads each, in fp32. A step is the
difference between many and few steps of one canvas, early stopping off, divided by their number, so that prefill and
overhead cancel; a prefill is the difference between a long and a short prompt.
"""

import argparse
import ctypes
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch
from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

import dgemma_jax as dg
from dgemma_jax.diffusion.policy import Knobs
from dgemma_jax.diffusion.random import key_from_seed
from dgemma_jax.kernels.grouped_matmul import experts
from dgemma_jax.kernels.mixed_attention import mixed_attention
from dgemma_jax.kernels.vocab_head import TILE, vocab_head
from dgemma_jax.sampling import BUILT_IN
from tests.full_size import Programs

RESULTS = Path(__file__).parent / "results" / "step.json"
THREADS, FEW, MORE, PROMPT, LONG = 2, 2, 6, 40, 4096
ROUNDS = {1: 5, 4: 2}  # by rows; the others get 2
PREFIXES = (64, 8192)
AIMS = {"step, 1 row": 0.45, "memory of a step, 1 row": 0.3, "prefill of 4096 tokens": 0.6}
LAYERS = ["full_attention" if (index + 1) % 6 == 0 else "sliding_attention" for index in range(6)]
TEXT = {
    "vocab_size": 32_768,
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "layer_types": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "global_head_dim": 128,
    "num_global_key_value_heads": 1,
    "sliding_window": 128,
    "num_experts": 16,
    "top_k_experts": 4,
    "moe_intermediate_size": 256,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
VISION = {  # transformers has no text-only model; this tower is never used
    "model_type": "gemma4_vision",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "position_embedding_size": 8,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.step", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4], help="batch sizes (%(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as directory:
        theirs = _transformers(directory)
        ours = dg.load(directory)
    report = {
        "command": f"python -m benchmarks.step --rows {' '.join(map(str, options.rows))}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {name: version(name) for name in ("dgemma-jax", "jax", "jaxlib", "torch", "transformers")},
        "machine": f"{platform.machine()}, {THREADS} threads, Python {platform.python_version()}",
        "model": {key: value for key, value in TEXT.items() if key != "layer_types"} | {"canvas_length": 256},
        "aims": AIMS,
        "beside transformers": {},
    }
    print(f"{'':28}{'transformers':>14}{'dgemma-jax':>12}{'ratio':>8}{'aim':>6}")
    for name, pair in _beside(theirs, ours, options.rows):
        report["beside transformers"][name] = pair
        aim = AIMS.get(name, "")
        print(
            f"{name:28}{pair['transformers']:14.4g}{pair['dgemma-jax']:12.4g}{pair['ratio']:8.3f}{aim!s:>6}", flush=True
        )
    report["seconds of a step by prefix"] = by_prefix(ours)
    report["seconds of an op, reference and xla"] = by_op(ours.config)
    for title in ("seconds of a step by prefix", "seconds of an op, reference and xla"):
        print(title, *(f"  {name}: {value}" for name, value in report[title].items()), sep="\n", flush=True)
    RESULTS.write_text(json.dumps(report, indent=2) + "\n")


def _beside(theirs, ours: dg.Model, batches: list[int]):
    """(name, figures) of everything that is measured on both sides."""
    for rows in batches:
        plural = f"{rows} row" + "s" * (rows > 1)
        yield f"step, {plural}", compare(theirs, ours, rows)
        yield f"memory of a step, {plural}", memory(theirs, ours, rows)
    yield f"prefill of {LONG} tokens", prefill(theirs, ours)


def compare(theirs, ours: dg.Model, rows: int) -> dict:
    """Median seconds a step of both, taking turns, and the median of the ratios of the rounds."""
    runs = _runs(theirs, ours, rows, PROMPT)
    for run in runs:
        run(FEW)  # compile and warm up
    return _pairs([tuple(_step(run) for run in runs) for _ in range(ROUNDS.get(rows, 2))])


def prefill(theirs, ours: dg.Model) -> dict:
    """Seconds by which LONG tokens of prompt take longer than PROMPT, with one denoising step in both."""
    short, long = _runs(theirs, ours, 1, PROMPT), _runs(theirs, ours, 1, LONG)
    for run in (*short, *long[1:]):
        run(1)
    return _pairs([tuple(_seconds(b, 1) - _seconds(a, 1) for a, b in zip(short, long, strict=True)) for _ in range(2)])


def memory(theirs, ours: dg.Model, rows: int) -> dict:
    """Bytes: how far the resident set rises during theirs, and the temporary memory of our compiled step."""
    run, _ = _runs(theirs, ours, rows, PROMPT)
    run(FEW)
    rise = peak_rise(lambda: run(FEW))
    function, arguments = _programs(ours, rows, 1024).step()
    temp = function.lower(*arguments).compile().memory_analysis().temp_size_in_bytes
    return {"transformers": rise, "dgemma-jax": temp, "ratio": temp / rise}


def peak_rise(run: Callable[[], None]) -> int:
    """Bytes by which the peak of this process' resident set during `run` exceeds what it was before."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = _status("VmRSS")
    run()
    return _status("VmHWM") - before


def by_prefix(ours: dg.Model) -> dict:
    """Seconds of one step behind prefixes of both lengths, and of the attention of each kind of layer alone."""
    capacity = 2 * max(PREFIXES)
    function, _ = _programs(ours, 1, capacity).step()
    result = {}
    for length in PREFIXES:
        cache = replace(dg.init_cache(ours.config, 1, capacity, "float32"), lengths=jnp.array([length], jnp.int32))
        arguments = (ours.params, cache, *_start(ours), dg.Policy())
        result[f"whole step, {length}"] = _fastest(function, *arguments)
    for layer in (ours.config.layers[0], ours.config.layers[-1]):
        for length in PREFIXES:
            op, arguments = _attention(ours.config, layer, length, capacity)
            result[f"attention of a {layer.kind} layer, {length}"] = _fastest(jax.jit(op), *arguments)
    return result


def by_op(config: dg.Config) -> dict:
    """(reference, xla) seconds of each op at the sizes of a step."""
    cases = {
        f"attention, {layer.kind} layer": _attention(config, layer, LONG, LONG)
        for layer in (config.layers[0], config.layers[-1])
    }
    cases |= {"experts": _experts(config), "vocabulary head": _head(config)}

    def measure(op: Callable, arguments: tuple, name: str) -> float:
        return _fastest(jax.jit(lambda *a: op(*a, implementation=name)), *arguments)

    return {case: [measure(*both, name) for name in ("reference", "xla")] for case, both in cases.items()}


def _attention(config: dg.Config, layer, length: int, capacity: int) -> tuple[Callable, tuple]:
    """The op of one layer over a canvas behind `length` cached positions, and its arguments."""
    C, N, K, H = config.canvas_length, config.num_attention_heads, layer.num_key_value_heads, layer.head_dim
    window = config.sliding_window if layer.kind == "sliding" else None
    normal = np.random.default_rng(0).standard_normal
    prefix = (1, min(capacity, window or capacity), K, H)
    arrays = [
        jnp.asarray(normal(shape), jnp.float32) for shape in ((1, C, N, H), (1, C, K, H), (1, C, K, H), prefix, prefix)
    ]
    rows = jnp.array([length], jnp.int32), jnp.array([C], jnp.int32), jnp.array([False])
    return lambda *a, **chosen: mixed_attention(*a, window=window, **chosen), (*arrays, *rows)


def _experts(config: dg.Config) -> tuple[Callable, tuple]:
    rng, E, D = np.random.default_rng(0), config.num_experts, config.hidden_size
    rows, inner, chosen = config.canvas_length, config.moe_intermediate_size, config.top_k_experts
    shapes = (rows, D), (E, D, 2 * inner), (E, inner, D)
    arrays = [jnp.asarray(rng.standard_normal(shape) * 0.05, jnp.float32) for shape in shapes]
    ids = np.argsort(rng.random((rows, E)), axis=1)[:, :chosen].astype(np.int32)
    return experts, (*arrays, jnp.full((rows, chosen), 1 / chosen, jnp.float32), jnp.asarray(ids))


def _head(config: dg.Config) -> tuple[Callable, tuple]:
    rng, C, D, V = np.random.default_rng(0), config.canvas_length, config.hidden_size, config.vocab_size
    hidden, table = (jnp.asarray(rng.standard_normal(shape) * 0.3, jnp.float32) for shape in ((1, C, D), (V, D)))
    uniforms = jnp.asarray(rng.random((1, 1 - (-V // TILE), C)), jnp.float32)
    arguments = (hidden, table, jnp.full(1, 0.6), jnp.ones(1), uniforms)
    return lambda *a, **chosen: vocab_head(*a, None, softcap=30.0, scale=D**0.5, **chosen), arguments


def _programs(ours: dg.Model, rows: int, capacity: int) -> Programs:
    return Programs("float32", rows, capacity, config=ours.config)


def _start(ours: dg.Model) -> tuple:
    """State, keys, canvas index, knobs and suppression of one row at its first step."""
    _, state, keys, index, knobs, suppress = _programs(ours, 1, 1024).inputs()
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (state, index, suppress))
    keys, knobs = key_from_seed(0)[None], Knobs.of([BUILT_IN])
    state = replace(zeros[0], running=jnp.ones(1, bool))
    return state, keys, zeros[1], knobs, zeros[2]


def _runs(theirs, ours: dg.Model, rows: int, prompt: int) -> tuple[Callable[[int], None], Callable[[int], None]]:
    """Functions of a number of steps: one canvas after the same prompts, by both programs."""
    ids = torch.randint(20, TEXT["vocab_size"], (rows, prompt))

    def run_theirs(steps: int) -> None:
        theirs.generate(
            input_ids=ids,
            max_new_tokens=256,
            max_denoising_steps=steps,
            stability_threshold=None,
            eos_token_id=None,
        )

    def run_ours(steps: int) -> None:
        sampling = dg.Sampling(
            max_new_tokens=256, max_denoising_steps=steps, stability_threshold=None, stop_token_ids=None
        )
        answers = ours.generate(ids.tolist(), sampling, seed=0, slots=rows)
        assert all(answer.steps == [steps] for answer in answers)

    return run_theirs, run_ours


def _pairs(rounds: list[tuple[float, float]]) -> dict:
    """Medians of (theirs, ours) in seconds."""
    return {
        "transformers": statistics.median(pair[0] for pair in rounds),
        "dgemma-jax": statistics.median(pair[1] for pair in rounds),
        "ratio": statistics.median(pair[1] / pair[0] for pair in rounds),
        "rounds": rounds,
    }


def _step(run: Callable[[int], None]) -> float:
    """Seconds per step."""
    return (_seconds(run, MORE) - _seconds(run, FEW)) / (MORE - FEW)


def _seconds(run: Callable[[int], None], steps: int) -> float:
    started = time.perf_counter()
    run(steps)
    return time.perf_counter() - started


def _fastest(function: Callable, *arguments) -> float:
    """Seconds of the fastest of five calls after the first."""
    jax.block_until_ready(function(*arguments))
    seconds = []
    for _ in range(5):
        started = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def _status(field: str) -> int:
    """A size in /proc/self/status, in bytes."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) * 1024


def _transformers(directory: str):
    """A random model of the reference, saved where ours is loaded from."""
    config = DiffusionGemmaConfig(
        text_config=TEXT,
        vision_config=VISION,
        image_token_id=15,
        boi_token_id=14,
        eoi_token_id=13,
        canvas_length=256,
    )
    model = DiffusionGemmaForBlockDiffusion._from_config(
        config, attn_implementation="sdpa", experts_implementation="grouped_mm"
    ).eval()
    model.save_pretrained(directory)
    return model


if __name__ == "__main__":
    main()
