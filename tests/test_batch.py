"""Files of prompts: every line has its result, whatever it holds and however often the run is interrupted."""

import json
import os
import random
import re
from dataclasses import replace
from itertools import chain, repeat
from types import SimpleNamespace

import pytest
from rich.console import Console

import dgemma_jax as dg
from dgemma_jax import cli
from dgemma_jax.batch import Shard, answers, finished_ids
from dgemma_jax.text.tokenizer import Tokenizer
from dgemma_jax.train import tokenizer as vocabulary
from tests.random_models import SMALL, random_model

SHORT = dg.Sampling(max_new_tokens=SMALL.canvas_length + 3, max_denoising_steps=2)
LINES = [
    {"prompt": "Sort 3 1 2"},
    {"id": "chat", "messages": [{"role": "user", "content": "Hi"}]},
    {"prompt": "Hello", "sampling": {"max_new_tokens": 2, "seed": 9, "logprobs": True}},
    {"id": "think", "messages": [{"role": "user", "content": "Hi"}], "thinking": True, "tools": []},
    {"prompt": "one two three " * 9},
]
WRONG = [
    ("{", "not JSON"),
    ("[1]", "no JSON object"),
    ('{"prompt": "a", "temprature": 1}', "field 'temprature' is unknown; expected id, prompt"),
    ('{"prompt": "a", "sampling": {"topk": 1}}', "sampling has no field 'topk'"),
    ('{"prompt": "a", "sampling": {"top_k": -1}}', "top_k is -1; expected"),
    ('{"prompt": "a", "sampling": 3}', "sampling is 3"),
    ('{"prompt": "a", "sampling": {"n": 2}}', "n is 2; one answer is given here"),
    ('{"prompt": ""}', "prompt is ''; expected text"),
    ('{"prompt": "a", "messages": []}', "either prompt or messages"),
    ("{}", "either prompt or messages"),
    ('{"prompt": "a", "thinking": true}', "thinking goes with messages"),
    ('{"messages": 5}', "messages is 5; expected a list of messages"),
    ('{"messages": [5]}', "messages is [5]; expected a list of messages"),
    ('{"messages": []}', "messages is []; expected a list of messages"),
    ('{"messages": [{"role": "user", "content": "x"}], "tools": 3}', "tools is 3; expected a list of functions"),
    ('{"messages": [{"role": "user", "content": "x"}], "tools": [3]}', ""),
    ('{"messages": [{"role": "robot", "content": "x"}]}', "robot"),
    ('{"id": [1], "prompt": "a"}', "id is [1]; expected text or an integer"),
    ('{"prompt": "' + "a" * 500 + '"}', "leaves no room in a context of 200"),
]


@pytest.fixture(scope="module")
def model():
    config = replace(SMALL, vocab_size=vocabulary.VOCAB_SIZE)
    return random_model(config, tokenizer=Tokenizer(vocabulary.build()), max_model_len=200)


def results(model, lines, **how) -> dict:
    lines = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    found = [r for r in answers(model, lines, SHORT, seed=1, slots=4, **how) if isinstance(r, dict)]
    assert len({r["id"] for r in found}) == len(found)
    return {r["id"]: r for r in found}


def test_every_line_is_answered_as_the_library_would(model):
    found = results(model, LINES)
    assert set(found) == {0, "chat", 2, "think", 4}
    prompt = model.chat_prompt([{"role": "user", "content": "Sort 3 1 2"}])
    (alone,) = model.generate([prompt], SHORT, seed=1, slots=4)
    assert found[0]["tokens"] == alone.tokens
    assert found[0]["text"] == alone.text
    assert "logprobs" not in found[0]
    assert len(found[2]["tokens"]) == len(found[2]["logprobs"]) == 2
    assert found[2]["seed"] == 9
    assert found["chat"]["message"]["role"] == "assistant"
    (raw,) = results(model, LINES[:1], raw=True).values()
    assert raw["tokens"] != found[0]["tokens"]


@pytest.mark.parametrize(("line", "message"), WRONG)
def test_a_wrong_line_has_its_error_and_harms_no_other(model, line, message):
    found = results(model, [LINES[0], line, LINES[4]])
    assert message in found.pop(1)["error"]
    assert set(found) == {0, 2}
    assert all("tokens" in result for result in found.values())


def test_a_line_whose_answer_cannot_be_told_has_its_error_and_harms_no_other(model, monkeypatch):
    expected, decode = results(model, LINES), Tokenizer.decode

    def broken(self, ids, *args, **kwargs):
        if len(ids) == 2:
            raise LookupError("no such word")
        return decode(self, ids, *args, **kwargs)

    monkeypatch.setattr(Tokenizer, "decode", broken)
    found = results(model, LINES)
    assert found.pop(2) == {"id": 2, "error": "LookupError: no such word"}
    assert found == {id: result for id, result in expected.items() if id != 2}
    (found,) = results(model, [{"prompt": "a", "sampling": {"n": 10**15}}]).values()
    assert "n is 1000000000000000; one answer is given here" in found["error"]


def test_an_id_is_used_once(model):
    found = [r for r in answers(model, [json.dumps(LINES[1])] * 2, SHORT, slots=4) if isinstance(r, dict)]
    assert sorted("error" in r for r in found) == [False, True]
    (again,) = results(model, [LINES[1]] * 2, done=["chat"]).values()
    assert "on an earlier line, too" in again["error"]


def test_a_stop_string_ends_the_text_of_a_prompt_as_it_comes(model):
    prompt = model.chat_prompt([{"role": "user", "content": "Sort 3 1 2"}])
    (whole,) = model.generate([prompt], SHORT, seed=1, slots=4)
    stop = whole.raw_text[len(whole.raw_text) // 2 :][:2]
    (alone,) = model.generate([prompt], replace(SHORT, stop=stop), seed=1, slots=4)
    (found,) = results(model, [{"prompt": "Sort 3 1 2", "sampling": {"stop": stop}}]).values()
    assert found["raw_text"] == alone.raw_text == whole.raw_text.split(stop)[0]
    assert found["stop"] == stop


def test_shards_are_the_whole(model):
    parts = [results(model, LINES, shard=Shard(i, 3)) for i in range(3)]
    assert {**parts[0], **parts[1], **parts[2]} == results(model, LINES)
    assert sum(map(len, parts)) == len(LINES)
    for text in ("3/3", "-1/2", "a/b", "1", "1/0"):
        with pytest.raises(ValueError, match="expected i/n"):
            Shard.parse(text)


def test_lines_are_read_as_slots_become_free(model):
    read = []

    def lines():
        for index in range(40):
            read.append(index)
            yield json.dumps({"prompt": f"Sort {index}"})

    first = next(r for r in answers(model, lines(), SHORT, seed=1, slots=4) if isinstance(r, dict))
    assert "tokens" in first
    assert len(read) < 20


@pytest.fixture
def command(model, monkeypatch, tmp_path):
    monkeypatch.setattr(dg, "load", lambda *_, **__: model)
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in LINES))

    def run(*more: str) -> int:
        options = ["--max-new-tokens", "19", "--max-denoising-steps", "2", "--seed", "1", "--slots", "4"]
        return cli.main(["generate", "--input", str(source), "--output", str(output), *options, *more])

    return run, source, output


def stored(output) -> dict:
    return {entry["id"]: entry for entry in map(json.loads, output.read_text().splitlines())}


def test_the_command_writes_what_the_function_gives(model, command, capsys):
    run, _, output = command
    assert run() == 0
    assert stored(output) == results(model, LINES)
    assert "5 of 5 answered, 0 failed" in capsys.readouterr().err


def test_on_a_terminal_a_bar_tells_how_far_it_is(model, command, capsys, monkeypatch):
    run, _, output = command
    clock = chain([0.0], repeat(2.0))  # so that all of it took two seconds
    monkeypatch.setattr("dgemma_jax.cli_batch.time", SimpleNamespace(monotonic=clock.__next__))
    terminal = {"force_terminal": True, "width": 120}
    monkeypatch.setattr("dgemma_jax.cli_batch.Console", lambda stderr: Console(stderr=stderr, **terminal))
    assert run() == 0
    found = stored(output)
    assert found == results(model, LINES)
    tokens = sum(len(entry["tokens"]) for entry in found.values())
    steps = [count for entry in found.values() for count in entry["steps"]]
    text = re.sub(r"\x1b\[[\d;?]*\w", "", capsys.readouterr().err)
    bars = re.findall(r"(\d+)/(\d+) (\d+) tokens/s (\d\.\d) steps a canvas (\S+)", text)
    assert bars[-1] == ("5", "5", f"{tokens / 2:.0f}", f"{sum(steps) / len(steps):.1f}", "0:00:00")


def test_the_command_answers_a_shard(command, tmp_path, capsys):
    run, _, output = command
    assert run() == 0
    capsys.readouterr()
    parts = [tmp_path / f"part-{index}.jsonl" for index in range(2)]
    for index, (part, count) in enumerate(zip(parts, (3, 2), strict=True)):
        assert run("--output", str(part), "--shard", f"{index}/2") == 0
        assert f"{count} of {count} answered, 0 failed" in capsys.readouterr().err
        assert len(stored(part)) == count
    assert stored(parts[0]) | stored(parts[1]) == stored(output)


def test_a_line_that_is_not_utf_8_has_its_error_and_harms_no_other(command):
    run, source, output = command
    source.write_bytes(source.read_bytes() + b'{"prompt": "caf\xe9"}\n')
    assert run() == 1
    found = stored(output)
    assert found.pop(len(LINES))["error"] == "not UTF-8 (at character 15); save the file as UTF-8"
    assert len(found) == len(LINES)
    assert not any("error" in entry for entry in found.values())


def test_a_run_that_was_killed_anywhere_goes_on_to_the_same_result(command):
    run, _, output = command
    run()
    whole, text = stored(output), output.read_bytes()
    rng = random.Random(0)
    for cut in [0, len(text) - 1, *(rng.randrange(len(text)) for _ in range(8))]:
        output.write_bytes(text[:cut])
        assert run("--resume") == 0
        assert stored(output) == whole
        assert len(output.read_text().splitlines()) == len(LINES)


def test_lines_with_errors_are_counted_and_tried_again(command, capsys):
    run, source, output = command
    good = source.read_text()
    source.write_text(good + '{"id": "last"}\n')
    assert run() == 1
    assert "5 of 6 answered, 1 failed" in capsys.readouterr().err
    assert "error" in stored(output)["last"]
    source.write_text(good + '{"id": "last", "prompt": "Hi"}\n')
    assert run("--resume") == 0
    assert "tokens" in stored(output)["last"]
    assert len(output.read_text().splitlines()) == 6


def test_a_link_to_the_output_stays_one_and_what_lies_beside_it_stays(command, tmp_path):
    run, _, output = command
    run()
    whole, text = stored(output), output.read_bytes()
    output.rename(tmp_path / "real.jsonl")
    output.symlink_to("real.jsonl")
    (tmp_path / "real.jsonl").write_bytes(text[:-5])
    (tmp_path / "out.jsonl.tmp").write_text("precious")
    assert run("--resume") == 0
    assert output.is_symlink() and stored(tmp_path / "real.jsonl") == whole
    assert (tmp_path / "out.jsonl.tmp").read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl", "out.jsonl.tmp", "real.jsonl"]


def test_lines_end_at_line_ends_alone(command):
    """Another tool may have written the results anew, with characters that Python takes for line ends."""
    run, _, output = command
    run()
    found = [json.loads(line) | {"note": "a\u2028b\x85c"} for line in output.read_text().splitlines()]
    output.write_text("".join(json.dumps(entry, ensure_ascii=False) + "\n\n" for entry in found))
    assert run("--resume") == 0
    assert [json.loads(line) for line in output.read_text().split("\n") if line] == found


def test_a_full_disk_is_told_with_the_file(command, capsys):
    run, _, output = command
    output.symlink_to("/dev/full")
    assert run() == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith(f"No space left on device: '{output}'")


def test_a_pipe_is_refused(command, capsys):
    """It could be read once only."""
    run, source, _ = command
    source.unlink()
    os.mkfifo(source)
    assert run() == 2
    assert "in.jsonl, which is no file; it is read twice, so store the lines in one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"[" * 100_000 + b"\n", "line 1: no result of an earlier run"), (b"\xff\n", "is not UTF-8 (at byte 0)")],
    ids=["deep", "binary"],
)
def test_an_output_of_something_else_is_refused(command, capsys, content, message):
    run, _, output = command
    output.write_bytes(content)
    assert run("--resume") == 2
    assert message in capsys.readouterr().err
    assert output.read_bytes() == content


def test_a_file_that_is_there_is_not_touched_unasked(command, capsys):
    run, source, output = command
    output.write_text("precious\n")
    assert run() == 2
    assert "pass --resume" in capsys.readouterr().err
    assert run("--resume") == 2
    assert "no result of an earlier run" in capsys.readouterr().err
    assert output.read_text() == "precious\n"
    assert run("--output", str(source), "--resume") == 2
    assert "the input itself" in capsys.readouterr().err
    source.unlink()
    assert run() == 2
    assert finished_ids(output.with_name("none")) == set()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--input", "a"], "--input needs --output"),
        (["--resume"], "--resume goes with --input"),
        (["--output", "b", "hello"], "--output goes with --input"),
        (["--output", "", "hello"], "--output goes with --input"),
        (["--shard", "", "hello"], "--shard goes with --input"),
        (["--input", "a", "--output", "b", "--shard", ""], "shard ''; expected i/n"),
        (["--input", "a", "--output", "b", "--shard", "0/" + "9" * 5000], "expected i/n"),
        (["--input", "a", "--output", ""], "--output is '', a directory"),
        (["--input", "a", "--output", "b", "hello"], "takes its prompts from the file"),
        (["--input", "a", "--output", "b", "--shard", "4/4"], "shard '4/4'; expected i/n"),
    ],
)
def test_options_that_do_not_go_together(options, message, capsys):
    assert cli.main(["generate", *options]) == 2
    assert message in capsys.readouterr().err
