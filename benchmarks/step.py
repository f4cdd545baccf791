"""Time of one denoising step beside transformers, on the same random weights: `python -m benchmarks.step`.

Both programs make a few and then more steps of one canvas, early stopping off; a step is the difference over the
number of steps, so that prefill and overhead cancel. The two take turns in one process, on 2 threads each, in fp32.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch
from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

import dgemma_jax as dg

RESULTS = Path(__file__).parent / "results" / "step.json"
THREADS, FEW, MORE, ROUNDS, PROMPT = 2, 2, 6, 5, 40
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
        "rows": {},
    }
    print(f"{'rows':>4}{'transformers s':>16}{'dgemma-jax s':>14}{'ratio':>8}")
    for rows in options.rows:
        result = compare(theirs, ours, rows)
        report["rows"][rows] = result
        print(
            f"{rows:4}{result['transformers_s']:16.3f}{result['dgemma_jax_s']:14.3f}{result['ratio']:8.3f}", flush=True
        )
    RESULTS.write_text(json.dumps(report, indent=2) + "\n")


def compare(theirs, ours: dg.Model, rows: int) -> dict:
    """Median seconds a step of both, taking turns, and the median of the ratios of the rounds."""
    ids = torch.randint(20, TEXT["vocab_size"], (rows, PROMPT))

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

    for run in (run_theirs, run_ours):
        run(FEW)  # compile and warm up
    pairs = [(_step(run_theirs), _step(run_ours)) for _ in range(ROUNDS)]
    return {
        "transformers_s": statistics.median(pair[0] for pair in pairs),
        "dgemma_jax_s": statistics.median(pair[1] for pair in pairs),
        "ratio": statistics.median(pair[1] / pair[0] for pair in pairs),
        "rounds": pairs,
    }


def _step(run) -> float:
    """Seconds per step, from the difference of a longer and a shorter run."""
    seconds = []
    for steps in (FEW, MORE):
        started = time.perf_counter()
        run(steps)
        seconds.append(time.perf_counter() - started)
    return (seconds[1] - seconds[0]) / (MORE - FEW)


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
