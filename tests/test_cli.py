"""`dgemma generate`: what it prints, how it fails and how it is interrupted."""

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax
import pytest
import tokenizers
from rich.console import Console

import dgemma_jax as dg
from dgemma_jax import cli_watch
from dgemma_jax.cli import main
from dgemma_jax.events import Canvas, Completion, Draft, Finished
from dgemma_jax.text import Tokenizer, encode_chat
from tests.parity.checkpoints import NARROW, write

SMALL = replace(NARROW, name="small", vocab=128, experts=2, layers="SF")
SPECIAL = ["<pad>", "<eos>", "<bos>", "<|turn>", "<turn|>"]
FIELDS = [
    *("prompt", "text", "raw_text", "tokens", "finish_reason", "stop_id", "steps", "tokens_per_step", "seed"),
    *("prompt_tokens", "stop", "cached_tokens"),
]


def write_tokenizer(path: Path) -> None:
    """Words w5 ... w127 and the special tokens a chat needs."""
    vocabulary = {name: id for id, name in enumerate(SPECIAL)} | {f"w{id}": id for id in range(5, SMALL.vocab)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w5"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(path))


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    directory = write(tmp_path_factory.mktemp("model"), SMALL)
    write_tokenizer(directory / "tokenizer.json")
    return directory


@pytest.fixture(scope="module")
def model(directory) -> dg.Model:
    return dg.load(directory)


@pytest.fixture
def loaded(monkeypatch, model) -> dg.Model:
    """`dg.load` gives the one model of this file, so that its programs are compiled once."""
    monkeypatch.setattr(dg, "load", lambda name, **_: model)
    return model


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main(["generate", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


SHORT = ("--raw", "--max-new-tokens", "20", "--max-denoising-steps", "3", "--slots", "1")


@pytest.mark.parametrize("command", ["generate a", "bench serve"])
def test_an_unknown_option_points_to_the_help_of_its_command(capsys, command):
    with pytest.raises(SystemExit) as exit:
        main([*command.split(), "--stepz", "3"])
    prog = f"dgemma {command.removesuffix(' a')}"
    assert exit.value.code == 2
    assert capsys.readouterr().err == f"dgemma: error: unrecognized arguments: --stepz 3; see `{prog} --help`\n"


def test_json_is_what_the_library_gives_and_the_same_bytes_each_time(loaded, capsys):
    arguments = ("w5 w6 w7", "w8", *SHORT, "--json", "--seed", "1")
    code, out, err = run(capsys, *arguments)
    assert (code, err) == (0, "")
    answers = [json.loads(line) for line in out.splitlines()]
    assert [list(answer) for answer in answers] == [FIELDS, FIELDS]
    sampling = dg.Sampling(max_new_tokens=20, max_denoising_steps=3)
    wanted = loaded.generate(["w5 w6 w7", "w8"], sampling, seed=1, slots=1)
    for index, (answer, completion) in enumerate(zip(answers, wanted, strict=True)):
        assert answer == {name: index if name == "prompt" else getattr(completion, name) for name in FIELDS}
    assert run(capsys, *arguments)[1] == out


def test_a_prompt_has_the_same_answer_among_others(loaded, capsys):
    """Eight of them take turns in four slots."""
    prompts = [f"w{5 + index} w{index * index + 5}" for index in range(8)]
    arguments = (*SHORT, "--slots", "4", "--json", "--seed", "7")
    together = [json.loads(line)["tokens"] for line in run(capsys, *prompts, *arguments)[1].splitlines()]
    alone = [json.loads(run(capsys, prompt, *arguments)[1])["tokens"] for prompt in prompts]
    assert together == alone and len(set(map(tuple, together))) == 8


def test_text_answers_and_standard_input(loaded, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("w5 w6\n"))
    code, alone, _ = run(capsys, *SHORT, "--seed", "3")
    assert code == 0 and alone.strip()
    _, out, _ = run(capsys, "w5 w6", "w9", *SHORT, "--seed", "3")
    first, second = out.split("\n\n")
    assert first == "> w5 w6\n" + alone.rstrip("\n") and second.startswith("> w9\n")


def test_without_raw_the_prompt_is_a_user_turn(loaded, capsys):
    rendered = encode_chat([{"role": "user", "content": "w5 w6"}], loaded.tokenizer)
    wanted = loaded.generate([rendered], dg.Sampling(max_new_tokens=4, max_denoising_steps=2), seed=1, slots=1)[0]
    code, out, _ = run(capsys, "w5 w6", "--max-new-tokens", "4", "--max-denoising-steps", "2", "--seed", "1", "--json")
    assert code == 0 and json.loads(out)["tokens"] == wanted.tokens


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["w5", "--max-new-tokens", "0"], "max_new_tokens is 0; expected a positive integer"),
        (["w5", "--max-new-tokens", "-4"], "max_new_tokens is -4"),
        (["w5", "--t-min", "0.5", "--t-max", "0.5"], "t_max is 0.5; expected more than t_min, which is 0.5"),
        (["w5", "--t-max", "0.3"], "t_max is 0.3; expected more than t_min, which is 0.4"),
        (["w5", "--entropy-bound", "nan"], "entropy_bound is nan"),
        (["w5", "--temperature", "-1"], "temperature is -1.0"),
        (["w5", "--seed", "-1"], "seed is -1; expected an integer in 0"),
        (["w5", "--stop", ""], "stop is ['']; expected a non-empty string"),
        (["w5", "--slots", "0"], "slots is 0"),
        (["w5", "--watch"], "--watch needs a terminal"),
        (["w5", "--image", "a.png"], "this model reads no images"),
        (["w5", ""], "the prompt is empty"),
        (["w5 " * 600], "601"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(loaded, capsys, arguments, expected):
    code, out, err = run(capsys, "--raw", *arguments)
    assert code == 2 and out == ""
    assert err.startswith("dgemma: error: ") and err.count("\n") == 1 and expected in err


def test_models_that_are_not_there(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    code, _, err = run(capsys, "w5", "--model", "org/name")
    assert code == 2 and "hf download org/name" in err and err.count("\n") == 1
    code, _, err = run(capsys, "w5", "--model", str(tmp_path / "none.gguf"))
    assert code == 2 and "GGUF" in err


def test_damaged_weights(capsys, directory, tmp_path):
    (tmp_path / "config.json").write_bytes((directory / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes((directory / "model.safetensors").read_bytes()[:-1])
    code, _, err = run(capsys, "w5", "--model", str(tmp_path))
    assert code == 2 and err.count("\n") == 1 and "model.safetensors cannot be read" in err


def test_a_config_that_contradicts_the_tensors_is_one_line_however_many_do_not_fit(capsys, tmp_path):
    shutil.copytree(Path(dg.__file__).parent / "assets/tiny", tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["moe_intermediate_size"] = 31
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, _, err = run(capsys, "w5", "--model", str(tmp_path))
    assert code == 2 and err.count("\n") == 1 and "the weights do not fit" in err and "; " in err
    with pytest.raises(ValueError, match="\n  "):
        dg.load(tmp_path)


@pytest.mark.parametrize("arguments", [["--seed", "x"], ["--unknown"], []])
def test_usage_errors_are_one_line(arguments, capsys):
    with pytest.raises(SystemExit) as leave:
        main(["generate", "w5", *arguments] if arguments else [])
    err = capsys.readouterr().err
    assert leave.value.code == 2 and err.startswith("dgemma: error: ") and err.count("\n") == 1


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_help_imports_nothing_heavy(command):
    code = (
        "import sys\n"
        "from dgemma_jax.cli import main\n"
        f"try: main([{command!r}, '--help'])\n"
        "except SystemExit as leave: assert leave.code == 0\n"
        "assert not {'jax', 'flax', 'numpy', 'rich', 'tokenizers'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--max-new-tokens" in done.stdout


def completion(text: str) -> Completion:
    return Completion(text, text, [5], "stop", 1, [2], 0.5, None, 9, 4, None)


class Scripted:
    """Stands in for a Model: plays the given events, then presses Ctrl-C."""

    tokenizer = None

    def __init__(self, *events: tuple[int, Canvas | Finished]) -> None:
        self.played = events

    def events(self, prompts, sampling, seed, images, slots) -> Iterator[tuple[int, Canvas | Finished]]:
        self.asked = (prompts, sampling, seed, slots)
        yield from self.played
        raise KeyboardInterrupt


def test_after_ctrl_c_the_finished_answers_are_printed(monkeypatch, capsys):
    script = Scripted(
        (0, Canvas([5], 2)), (2, Finished(completion("third"))), (0, Finished(completion("first"))), (1, Canvas([5], 2))
    )
    monkeypatch.setattr(dg, "load", lambda name, **_: script)
    code, out, err = run(capsys, "a", "b", "c", "--json")
    assert code == 130 and err == ""
    assert [(answer["prompt"], answer["text"]) for answer in map(json.loads, out.splitlines())] == [
        (0, "first"),
        (2, "third"),
    ]


def test_every_choice_reaches_the_model(monkeypatch, capsys):
    script = Scripted()
    monkeypatch.setattr(dg, "load", lambda name, **_: script)
    options = "--slots 4 --seed 5 --max-new-tokens 6 --max-denoising-steps 7 --entropy-bound 0.5 --t-min 0.1 --t-max 2"
    run(capsys, "a", "b", *options.split(), "--temperature", "0", "--stop", "x", "--stop", "y")
    wanted = dg.Sampling(
        max_new_tokens=6,
        max_denoising_steps=7,
        entropy_bound=0.5,
        t_min=0.1,
        t_max=2,
        temperature=0,
        stop=["x", "y"],
    )
    assert script.asked == (["a", "b"], wanted, 5, 4)
    run(capsys, "a")
    assert script.asked == (["a"], dg.Sampling(), None, None)


def test_ctrl_c_while_loading(monkeypatch, capsys):
    def interrupted(name, **_):
        raise KeyboardInterrupt

    monkeypatch.setattr(dg, "load", interrupted)
    assert run(capsys, "a") == (130, "", "")


def test_an_interrupted_process_leaves_with_130():
    code = (
        "import sys, dgemma_jax as dg\n"
        "from dgemma_jax.cli import main\n"
        "def load(name, **_): raise KeyboardInterrupt\n"
        "dg.load, sys.argv = load, ['dgemma', 'generate', 'a']\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def draft(tokens: list[int], step: int) -> Draft:
    return Draft(tokens, step, [True] * len(tokens), 0.5)


def test_the_screen_sets_off_what_the_step_changed(directory):
    screen = cli_watch.Screen(Tokenizer.from_file(directory / "tokenizer.json"))
    assert screen.draw(draft([5, 6, 1], step=1)).plain == "canvas 1, step 1\nw5 w6"
    second = screen.draw(draft([5, 7, 1], step=2))
    assert second.plain == "canvas 1, step 2\nw5 w7"
    styles = {second.plain[span.start : span.end].strip(): span.style for span in second.spans}
    assert "cyan" in styles["w5"] and "magenta" in styles["w7"]
    assert screen.draw(Canvas([5, 7], steps=2)).plain == "canvas 1 done after 2 steps\nw5 w7"
    assert screen.draw(draft([8], step=1)).plain == "canvas 2, step 1\nw5 w7 w8"


def test_watching_ends_in_the_same_answer(loaded, capsys, monkeypatch):
    arguments = ("w5 w6", *SHORT, "--json", "--seed", "1")
    _, plain, _ = run(capsys, *arguments)
    monkeypatch.setattr("dgemma_jax.cli_generate.Console", lambda stderr: Console(stderr=stderr, force_terminal=True))
    code, watched, err = run(capsys, *arguments, "--watch")
    assert code == 0 and watched == plain
    assert "canvas 1, step 1" in err and "canvas 2 done after" in err
    code, _, err = run(capsys, *arguments, "--watch", "--slots", "2")
    assert code == 2 and "--slots is 2; expected 1 with --watch" in err


def test_progress_on_a_terminal_stays_out_of_standard_output(loaded, capsys, monkeypatch):
    arguments = ("w5 w6", "w7", *SHORT, "--json", "--seed", "1")
    _, plain, _ = run(capsys, *arguments)
    monkeypatch.setattr("dgemma_jax.cli_generate.Console", lambda stderr: Console(stderr=stderr, force_terminal=True))
    code, out, err = run(capsys, *arguments)
    assert code == 0 and out == plain and "2/2" in err and "40 tokens" in err


@pytest.mark.parametrize("closed", ["<&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_are_empty(closed):
    program = "import sys; from dgemma_jax.cli import main; sys.exit(main(['generate', '--max-new-tokens', '0']))"
    done = subprocess.run(
        ["bash", "-c", f'"$0" -c "$1" {closed}', sys.executable, program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == (0 if "2>&-" in closed else 1)


@pytest.mark.parametrize("command", [["inspect", "tiny"], ["--version"]])
def test_a_reader_that_has_enough_is_not_an_error(command):
    program = f"import sys; from dgemma_jax.cli import main; sys.exit(main({command}))"
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as unread:
        done = subprocess.run([sys.executable, "-c", program], stdout=unread, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (141, b"")


def test_the_version_says_what_there_is_and_where_it_would_run(capsys):
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    lines = capsys.readouterr().out.splitlines()
    assert left.value.code == 0
    assert lines[0] == f"dgemma-jax {dg.__version__}"
    assert lines[1].startswith(f"jax {jax.__version__}, ") and lines[1].endswith(" x cpu")
    assert lines[2:] == ["attention: xla on cpu", "experts: xla"]
