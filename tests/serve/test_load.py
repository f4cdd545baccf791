"""The load generator against a fake server on 127.0.0.1: what it asks, what it counts, what it makes of failures."""

import asyncio
import json
import re
import socket
import subprocess
import sys
import threading
from collections import Counter
from itertools import count as counting
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dgemma_jax.cli import main
from dgemma_jax.engine.stats import EngineStats
from dgemma_jax.serve import load as load_module
from dgemma_jax.serve.figures import Outcome, Work, diffusion, read_counters, report
from dgemma_jax.serve.load import Load, Prompt, measure, random_prompts, read_prompts
from dgemma_jax.serve.metrics import Metrics
from tests.serve.scripted_server import ANSWER, DONE, END, LAST, ROLE, TEXT, Fake, Handler, chunk

STANDARD = {"model", "messages", "seed", "stream", "stream_options", "max_tokens"}


def prompts(count: int) -> list[Prompt]:
    return [Prompt([{"role": "user", "content": f"prompt {n}"}], 7) for n in range(count)]


def run(fake: Fake, count: int = 1, **how) -> dict:
    return asyncio.run(measure(Load(fake.url, prompts(count), **(how if "rate" in how else {"concurrency": 1} | how))))


def command(capsys, *arguments: str) -> tuple[int, str, str]:
    """`dgemma bench serve` with its exit code, standard output and standard error."""
    try:
        code = main(["bench", "serve", *arguments])
    except SystemExit as end:  # argparse leaves this way
        code = end.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def exposition(vllm_names: bool, stats: EngineStats) -> str:
    """What our server shows; as vLLM's if its names are asked for."""
    text = Metrics(vllm_names, "fake", 32).exposition(stats).decode()
    return "".join(line for line in text.splitlines(keepends=True) if not vllm_names or "vllm:" in line)


BEFORE = EngineStats(denoising_steps=100, canvases=40, tokens=900, commits=9)
AFTER = EngineStats(denoising_steps=125, canvases=50, tokens=1100, commits=11)


# What is asked.


def test_every_prompt_is_asked_once_with_standard_fields():
    with Fake() as fake:
        found = asyncio.run(measure(Load(fake.url + "/v1/", prompts(5), concurrency=2, seed=3, api_key="secret")))
    assert Counter(body["messages"][0]["content"] for body in fake.bodies) == {f"prompt {n}": 1 for n in range(5)}
    for body in fake.bodies:
        assert body.keys() == STANDARD
        assert body["stream"] is True
        assert body["stream_options"] == {"include_usage": True}
        assert (body["model"], body["max_tokens"]) == ("fake", 7)
        assert body["messages"][0]["content"] == f"prompt {body['seed'] - 3}"
    assert {headers["Authorization"] for headers in fake.headers} == {"Bearer secret"}
    assert (found["completed"], found["failed"], found["total_input_tokens"], found["total_output_tokens"]) == (
        5,
        0,
        25,
        15,
    )


def test_concurrency_is_the_number_of_open_requests():
    three = threading.Barrier(3)

    def together(index, body):
        three.wait(timeout=30)
        yield from ANSWER

    with Fake(together) as fake:
        assert run(fake, 12, concurrency=3)["completed"] == 12
    assert fake.most_open == 3


def test_a_rate_does_not_wait_for_answers():
    everyone = threading.Barrier(8)

    def together(index, body):
        everyone.wait(timeout=30)  # nobody is answered before all have asked
        yield from ANSWER

    with Fake(together) as fake:
        assert run(fake, 8, rate=200.0)["completed"] == 8


def test_arrivals_are_a_poisson_process_of_the_seed(monkeypatch):
    pauses = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    async def ask(index: int) -> None:
        pass

    monkeypatch.setattr(load_module.asyncio, "sleep", sleep)
    monkeypatch.setattr(load_module, "time", SimpleNamespace(perf_counter=lambda: sum(pauses)))

    def arrivals(seed: int) -> list[float]:
        pauses.clear()
        load = Load("http://127.0.0.1", prompts(500), rate=4.0, seed=seed)
        asyncio.run(load_module._at_random(load, ask))
        return [*pauses]

    first = arrivals(0)
    assert first[0] == 0
    assert arrivals(0) == pytest.approx(first)
    assert arrivals(1) != pytest.approx(first)
    mean = sum(first[1:]) / 499
    assert mean == pytest.approx(0.25, rel=0.1)  # 4 a second
    assert sum((pause - mean) ** 2 for pause in first[1:]) / 499 == pytest.approx(mean**2, rel=0.25)  # exponential


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 30), st.integers(1, 40), st.integers(0, 40), st.integers(0, 2**32))
def test_random_prompts_keep_to_their_ranges_and_seed(count, low, more, seed):
    found = random_prompts(count, (low, low + more), (low, low + more), seed)
    assert found == random_prompts(count, (low, low + more), (low, low + more), seed)
    assert len(found) == count
    for prompt in found:
        words = prompt.messages[0]["content"].partition(": ")[2].split()
        assert low <= len(words) <= low + more
        assert low <= prompt.max_tokens <= low + more


def test_prompts_of_a_file_come_in_order_and_over_again(tmp_path):
    turns = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "b"}]
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"id": "x", "prompt": "a"}) + "\n\n" + json.dumps({"messages": turns}) + "\n")
    first, second = [{"role": "user", "content": "a"}], turns
    odd = tmp_path / "odd.jsonl"
    odd.write_text('{"prompt": "a\u2028b"}\n', encoding="utf-8")  # no end of a line in JSON Lines
    assert read_prompts(odd, None, None, 0)[0].messages[0]["content"] == "a\u2028b"
    assert read_prompts(file, None, None, 0) == [(first, None), (second, None)]
    assert [prompt.messages for prompt in read_prompts(file, 3, (4, 9), 0)] == [first, second, first]
    assert {prompt.max_tokens for prompt in read_prompts(file, 300, (4, 9), 0)} == {4, 5, 6, 7, 8, 9}


# What is counted.


def test_the_figures_of_known_outcomes():
    outcomes = [Outcome(n / 10, n / 20, 4, n) for n in range(1, 101)] + [Outcome(99.0, error="HTTP 500: x")] * 2
    found = report(outcomes, 50.0, {}, {})
    assert (found["duration"], found["completed"], found["failed"]) == (50.0, 100, 2)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (400, 5050)
    assert (found["request_throughput"], found["output_throughput"]) == (2.0, 101.0)
    assert found["mean_e2el_ms"] == pytest.approx(5050)
    assert found["median_e2el_ms"] == pytest.approx(5050)
    assert found["p99_e2el_ms"] == pytest.approx(9901)  # between the 99th and the 100th of 100
    assert [found[f"{kind}_ttft_ms"] for kind in ("mean", "median", "p99")] == pytest.approx([2525, 2525, 4950.5])
    assert found["errors"] == {"HTTP 500: x": 2}
    assert len(found["requests"]) == 102


@pytest.mark.parametrize("first", [TEXT, END, chunk(reasoning_content="hm"), chunk(tool_calls=[{"index": 0}])])
def test_the_first_canvas_is_the_first_chunk_that_says_something(monkeypatch, first):
    monkeypatch.setattr(load_module, "time", SimpleNamespace(perf_counter=counting().__next__))  # a second per event
    with Fake(lambda index, body: iter((ROLE, ": still denoising\n\n", ROLE, first, TEXT, LAST, DONE))) as fake:
        (outcome,) = run(fake)["requests"]
    assert (outcome["first_canvas"], outcome["latency"]) == (3, 6)


@pytest.mark.parametrize(("vllm_names", "naming"), [(False, "dgemma"), (True, "vllm")])
def test_both_namings_give_the_same_steps(vllm_names, naming):
    with Fake(metrics=[exposition(vllm_names, stats) for stats in (BEFORE, AFTER)]) as fake:
        found = run(fake)
    assert found["metrics"] == naming
    assert (found["diffusion_denoising_steps"], found["diffusion_steps_per_canvas"]) == (25, 2.5)
    committed = 320 if vllm_names else 200  # vLLM counts whole canvases
    assert found["diffusion_committed_tokens"] == committed
    assert found["diffusion_committed_per_step"] == committed / 25
    assert found["diffusion_committed_throughput"] == committed / found["duration"]
    assert found["diffusion_canvas_positions"] == (35 if vllm_names else 25) * 32


def test_our_counters_are_preferred_because_they_are_exact():
    texts = [Metrics(True, "fake", 32).exposition(stats).decode() for stats in (BEFORE, AFTER)]
    found = diffusion(*map(read_counters, texts), 2.0)
    assert (found["metrics"], found["diffusion_committed_throughput"]) == ("dgemma", 100.0)


def test_vllms_formula():
    work = Work.of_passes(passes=2, positions=8, committed=3)
    assert work.steps / work.canvases == pytest.approx(5 / 3)
    assert work.committed / work.steps == pytest.approx(2.4)


def test_counters_are_summed_over_engines():
    text = 'vllm:diffusion_num_denoising_steps_total{engine="0",model_name="a b"} 2.0\n'
    assert read_counters(text + text.replace('"0"', '"1"')) == {"vllm:diffusion_num_denoising_steps_total": 4.0}


@pytest.mark.parametrize(
    "metrics",
    [(), ["<html>a page</html>"] * 2, ["up 1.0\n"] * 2, [exposition(False, AFTER), exposition(False, BEFORE)]],
    ids=["none", "no Prometheus", "others", "started anew"],
)
def test_without_diffusion_counters_the_rest_is_reported(metrics):
    with Fake(metrics=metrics) as fake:
        found = run(fake)
    assert found["completed"] == 1
    assert found["diffusion_steps_per_canvas"] is found["diffusion_denoising_steps"] is None


def test_nothing_done_is_no_division_by_zero():
    idle = read_counters(exposition(True, BEFORE))
    found = diffusion(idle, idle, 1.0)
    assert (found["diffusion_denoising_steps"], found["diffusion_steps_per_canvas"]) == (0, None)


# What goes wrong.

BROKEN = {
    r"HTTP 500: on fire": lambda: iter((500, json.dumps({"error": {"message": "on fire"}}))),
    r"HTTP 429: a page": lambda: iter((429, "a\npage")),
    r"RemoteProtocolError: .*": lambda: iter((ROLE, TEXT, None)),
    r"the stream ended before \[DONE\]": lambda: iter((ROLE, TEXT, END, LAST)),
    r"the stream ended before the answer began": lambda: iter((ROLE, LAST, DONE)),
    r"usage of the stream is \{\}; expected prompt_tokens, completion_tokens": lambda: iter((ROLE, TEXT, END, DONE)),
    r"in the stream: the engine has failed": lambda: iter(
        (ROLE, 'data: {"error": {"message": "the engine has failed"}}\n\n', DONE)
    ),
    r"no chunk of a chat completion: nonsense": lambda: iter((ROLE, "data: nonsense\n\n", DONE)),
    r'no chunk of a chat completion: {"choices": 3}': lambda: iter((ROLE, 'data: {"choices": 3}\n\n', DONE)),
    r"no chunk of a chat completion: \[1\]": lambda: iter((ROLE, "data: [1]\n\n", DONE)),
}


@pytest.mark.parametrize("error", BROKEN)
def test_a_request_that_fails_is_counted_and_the_others_go_on(error):
    with Fake(lambda index, body: BROKEN[error]() if index == 1 else iter(ANSWER)) as fake:
        found = run(fake, 4)
    assert (found["completed"], found["failed"], found["total_output_tokens"]) == (3, 1, 9)
    assert re.fullmatch(error, found["requests"][1]["error"])
    assert found["errors"] == {found["requests"][1]["error"]: 1}


def test_an_answer_that_takes_too_long_is_given_up():
    release = threading.Event()

    def silent(index, body):
        yield ROLE
        if index == 0:
            release.wait(timeout=30)
        yield from ANSWER[1:]

    with Fake(silent) as fake:
        found = run(fake, 2, timeout=0.3)
        release.set()
    assert [outcome["error"] for outcome in found["requests"]] == ["no complete answer within 0.3 s", None]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("more", [(), ("--model", "m")])
def test_nobody_there_is_one_line(capsys, more):
    code, out, err = command(capsys, "--base-url", f"http://127.0.0.1:{free_port()}", *more)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert re.search(r"http://127.0.0.1:\d+ does not answer \(ConnectError: .*\); is the server running\?", err)


def test_a_server_without_models_wants_a_name(capsys, monkeypatch):
    monkeypatch.setattr(Handler, "do_GET", lambda self: self.send(401, '{"error": {"message": "no key"}}'))
    with Fake() as fake:
        code, _, err = command(capsys, "--base-url", fake.url)
        assert code == 2
        assert "/v1/models names no model (HTTP 401: no key); pass the model's name, or the API key" in err
        assert command(capsys, "--base-url", fake.url, "--model", "m", "--num-prompts", "1")[0] == 0


# The command.


def test_the_table_and_the_exit_code(capsys):
    def fourth_fails(index, body):
        return iter((500, "on fire") if index == 3 else ANSWER)

    with Fake(fourth_fails, [exposition(False, stats) for stats in (BEFORE, AFTER)]) as fake:
        code, out, err = command(capsys, "--base-url", fake.url, "--num-prompts", "10", "--max-concurrency", "4")
    assert (code, err) == (1, "")
    rows = dict(re.findall(r"^(\S.*?\S) {2,}(\S+)\s*$", out, re.M))
    assert (rows["Requests completed"], rows["Requests failed"], rows["Generated tokens"]) == ("9", "1", "27")
    assert (rows["Denoising steps per canvas"], rows["Denoising steps"]) == ("2.50", "25")
    assert out.splitlines()[-1] == "1 failed: HTTP 500: on fire"


def test_json_has_vllms_names(capsys):
    with Fake() as fake:
        code, out, err = command(
            capsys, "--base-url", fake.url, "--num-prompts", "3", "--request-rate", "500", "--json"
        )
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert (found["completed"], found["request_rate"], found["max_concurrency"]) == (3, 500.0, None)
    names = {"duration", "failed", "request_throughput", "output_throughput"}
    names |= {f"{kind}_{what}_ms" for kind in ("mean", "median", "p99") for what in ("ttft", "e2el")}
    names |= {f"diffusion_{name}" for name in ("committed_throughput", "steps_per_canvas", "committed_per_step")}
    names |= {f"diffusion_{name}" for name in ("committed_tokens", "denoising_steps", "canvas_positions")}
    assert names <= found.keys()


def test_no_metrics_is_said(capsys):
    with Fake() as fake:
        code, out, _ = command(capsys, "--base-url", fake.url, "--num-prompts", "1")
    assert code == 0
    assert out.splitlines()[-1] == "The server shows no diffusion counters at /metrics."


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--max-concurrency", "0"], "argument --max-concurrency: '0'; expected a positive number"),
        (["--num-prompts", "x"], "argument --num-prompts: 'x'; expected a positive number"),
        (["--request-rate", "inf"], "argument --request-rate: 'inf'; expected a positive, finite number"),
        (["--request-rate", "nan"], "argument --request-rate: 'nan'; expected a positive, finite number"),
        (["--timeout", "-1"], "argument --timeout: '-1'; expected a positive, finite number"),
        (["--seed", "-1"], "argument --seed: '-1'; expected a number from 0 on"),
        (["--input-words", "9-3"], "argument --input-words: '9-3'; expected a positive number, or two as in 16-64"),
        (["--output-tokens", "0-3"], "argument --output-tokens: '0-3'; expected a positive number, or two"),
        (["--output-tokens", "3-"], "argument --output-tokens: '3-'; expected a positive number, or two"),
        (["--request-rate", "2", "--max-concurrency", "2"], "drop it or --max-concurrency"),
        (["--prompts", "x", "--input-words", "2"], "drop it or --prompts"),
        (["--base-url", "localhost:8000"], "base URL 'localhost:8000'; expected one such as http://127.0.0.1:8000"),
        (["--base-url", "http://127.0.0.1:x"], "base URL 'http://127.0.0.1:x'"),
        (["--base-url", "http://127.0.0.1:99999"], "base URL 'http://127.0.0.1:99999' is none (Port out of range"),
        (["--prompts", "/nowhere"], "No such file or directory: '/nowhere'"),
    ],
)
def test_a_bad_flag_is_one_line(capsys, arguments, error):
    code, out, err = command(capsys, *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert error in err


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "holds no line; expected JSON objects with prompt or messages"),
        ("{}\n{", "line 1 is {}; expected an object with either prompt or messages"),
        ('{"prompt": "a"}\n{', "line 2 is not JSON"),
        ("[1]", r"line 1 is \[1\]; expected an object"),
        ('{"prompt": "a", "messages": []}', "expected an object with either prompt or messages"),
        ('{"prompt": 3}', "line 1: prompt is 3; expected text"),
        ('{"messages": "a"}', "line 1: messages is 'a'; expected a list"),
        ('{"prompt": "a", "thinking": true}', "line 1 has the field 'thinking'; expected id, prompt, messages"),
    ],
)
def test_a_bad_line_of_prompts_is_named(tmp_path, text, error):
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError, match=error):
        read_prompts(file, None, None, 0)


def test_the_flags_need_nothing_heavy():
    code = (
        "import sys; from dgemma_jax.cli import _parser; _parser().parse_args(['bench', 'serve']);"
        "assert not {'httpx2', 'prometheus_client', 'numpy', 'rich', 'jax', 'fastapi', 'asyncio'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
