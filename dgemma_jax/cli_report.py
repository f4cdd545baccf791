"""`dgemma inspect MODEL --report PROMPTS --source MODEL`: how far a model is from the one it was converted from."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path


def report(args: Namespace) -> None:
    """Prints what a parsed command line asks for. ValueError or OSError for what cannot be compared."""
    import dgemma_jax as dg
    from dgemma_jax.batch import read_requests
    from dgemma_jax.fidelity import compare

    lines = Path(args.report).read_text(encoding="utf-8").splitlines()
    source, model = dg.load(args.source), dg.load(args.model)
    found = compare(source, model, read_requests(source, lines, seed=0))
    if args.json:
        print(json.dumps(found._asdict() | {name: getattr(found, name)._asdict() for name in ("source", "model")}))
        return
    print(f"compared    {found.prompts} prompts, {found.steps} steps of their first canvases (all figures measured)")
    print(
        f"logits      RMS error {found.rms_error:.4f}, {found.rms_error / found.source_rms:.2%} of the source's own RMS"
    )
    print(f"argmax      the same at {found.argmax_agreement:.2%} of the positions")
    for name, runs in (("source", found.source), ("model", found.model)):
        print(f"{name:12}{runs.steps_per_canvas:.2f} steps a canvas, {runs.halting_rate:.1%} of canvases stopped early")
