"""Every example of the README runs as printed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
COMMANDS = [
    line.split(" #")[0].strip()
    for block in re.findall(r"```bash\n(.*?)```", README, re.S)
    for line in block.splitlines()
    if "dgemma generate" in line and "--watch" not in line and "--model google" not in line
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
@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_run(command):
    assert len(COMMANDS) == 2
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env={"PATH": path})
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
