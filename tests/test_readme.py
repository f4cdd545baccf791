"""Every example of the README runs as printed."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
NOT_RUN = ("--watch", "dgemma chat", "--model google")  # a terminal, a conversation, a checkpoint of 50 GB
COMMANDS = [
    line.split(" #")[0].strip()
    for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
    if ("dgemma " in line or line.startswith("printf ")) and not any(part in line for part in NOT_RUN)
]


@pytest.mark.slow
def test_the_python_blocks_run_one_after_the_other(capsys):
    scope = {}
    for block in re.findall(r"```python\n(.*?)```", README, re.S):
        exec(compile(block, "README.md", "exec"), scope)
    printed = capsys.readouterr().out
    assert printed.startswith("4 93 7 12\n")
    assert "Finished(" in printed
    assert scope["logits"].shape == (1, scope["model"].config.canvas_length, scope["model"].config.vocab_size)


@pytest.mark.slow
def test_the_commands_run_one_after_the_other(tmp_path):
    assert len(COMMANDS) >= 7
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    for command in COMMANDS:
        done = subprocess.run(
            ["bash", "-c", command], capture_output=True, text=True, cwd=tmp_path, env={"PATH": path}, check=False
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        assert done.stdout.strip() or "jsonl" in command, command
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert {answer["id"]: answer["text"] for answer in answers} == {0: "7 4 9", "b": "e w q"}
