"""What notebooks hold, in a form that can be compared."""

import re

import nbformat

MOST_BYTES = 400_000  # of a notebook with its outputs
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
# Paths, times and addresses in memory, which differ from run to run.
PERSONAL = re.compile(r"/home/|/root/|/tmp/|/Users/|site-packages|\d\d:\d\d:\d\d|\b20\d\d-\d\d-\d\d\b|0x[0-9a-f]{8,}")


def outputs(cell: nbformat.NotebookNode) -> list[str]:
    """What a cell gave: printed text as it is, values by their text, pictures by their kind alone."""
    found = []
    for output in cell.get("outputs", ()):
        if output.output_type == "stream":
            found.append(f"{output.name}: {output.text}")
        elif output.output_type == "error":
            found.append("error: " + _ESCAPES.sub("", "\n".join(output.traceback)))
        else:
            data = output.data
            kinds = sorted(data.keys() - {"text/plain"})
            found.append(", ".join(kinds) if kinds else data["text/plain"])
    return found


def forms(cell: nbformat.NotebookNode) -> set[str]:
    """The lines that a cell gave, without their numbers and however often: what stays where figures vary."""
    lines = "\n".join(outputs(cell)).splitlines()
    return {" ".join(re.sub(r"[\d.]+", "#", line).split()) for line in lines}


def varies(cell: nbformat.NotebookNode) -> bool:
    """Whether the cell's figures are of decisions that may differ from one kind of processor to the next."""
    return "varies" in cell.metadata.get("tags", ())
