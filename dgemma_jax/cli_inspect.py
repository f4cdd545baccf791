"""`dgemma inspect`: kind, config, sizes, stop ids and template of a model, for people or as JSON."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator
from typing import Any


def run(args: Namespace) -> None:
    """Prints what a parsed command line asks for. ValueError if the model does not fit together or is damaged."""
    _check_together(args)
    if args.report is not None:
        from dgemma_jax.cli_report import report

        report(args)
        return
    if args.plan:
        from dgemma_jax.cli_plan import plan

        plan(args)
        return
    import jax

    jax.config.update("jax_platforms", "cpu")  # only shapes are needed

    from dgemma_jax.checkpoint import open_directory
    from dgemma_jax.cli_convert import byte_progress
    from dgemma_jax.convert.conversion import verify
    from dgemma_jax.inspection import describe

    opened = open_directory(args.model, verify=args.verify)
    found = describe(opened)
    if args.verify:
        with byte_progress() as progress:
            found["verified_tensors"] = verify(opened.weights, opened.abstract, progress)
    told = found if args.tensors else {name: value for name, value in found.items() if name != "tensors"}
    if args.json:
        print(json.dumps(told))
        return
    for line in _lines(found):
        print(line)
    for tensor in found["tensors"] if args.tensors else ():
        shape = ",".join(map(str, tensor["shape"]))
        print(f"{tensor['parameter']}  {tensor['dtype']}[{shape}]  {tensor['bytes']:,} bytes  <- {tensor['tensor']}")


def _check_together(args: Namespace) -> None:
    """ValueError where options do not go together."""
    if (args.report is None) != (args.source is None):
        raise ValueError(
            "--report PROMPTS and --source MODEL go together: the prompts, and what to compare with on them"
        )
    for name in ("gpu", "slots", "max_model_len", "weights", "steps"):
        if getattr(args, name) is not None and not args.plan:
            raise ValueError(f"--{name.replace('_', '-')} goes with --plan")
    others = {"--plan": args.plan, "--report": args.report, "--verify": args.verify, "--tensors": args.tensors}
    asked = [name for name, value in others.items() if value]
    if len(asked) > 1 and asked != ["--verify", "--tensors"]:
        raise ValueError(f"{asked[0]} does not go with {asked[1]}")


def _lines(found: dict[str, Any]) -> Iterator[str]:
    config = found["config"]
    kinds = [layer["kind"] for layer in config["layers"]]
    yield f"directory   {found['directory']}"
    yield f"kind        {found['kind']}" + (f"; {found['note']}" if found["note"] else "")
    yield f"layers      {len(kinds)}: {kinds.count('sliding')} sliding (window {config['sliding_window']}), " + (
        f"{kinds.count('full')} full"
    )
    yield f"width       {config['hidden_size']}, {config['num_attention_heads']} heads, dense MLP " + (
        f"{config['intermediate_size']}, {config['top_k_experts']} of {config['num_experts']} experts "
        f"of {config['moe_intermediate_size']}"
    )
    yield f"tokens      vocabulary {config['vocab_size']}, canvas {config['canvas_length']}, " + (
        f"context {config['max_position_embeddings']}"
    )
    yield f"parameters  {found['parameters']:,}, of which a token uses {found['active_parameters']:,}"
    dtypes = ", ".join(f"{count} tensors in {dtype}" for dtype, count in found["dtypes"].items())
    yield f"bytes       {found['bytes']:,}: {dtypes}"
    for name, part in found["parts"].items():
        yield f"  {name:18}{part['parameters']:>16,}{part['bytes']:>17,} bytes{part['bytes'] / found['bytes']:>8.1%}"
    stops = ", ".join(" ".join(filter(None, (str(stop["id"]), stop["token"]))) for stop in found["stop_ids"])
    yield f"stop ids    {stops or 'none'}"
    yield f"tokenizer   {'tokenizer.json' if found['tokenizer'] else 'none'}"
    template = found["template"]
    text = (
        f"{template['file']}, {template['characters']:,} characters"
        if template
        else "none in the directory, chats are rendered as those of Gemma 4"
    )
    yield f"template    {text}"
    if "verified_tensors" in found:
        yield f"verified    {found['verified_tensors']} tensors are what was written"
