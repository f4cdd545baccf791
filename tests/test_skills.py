"""What the bundled model is taught, and what it has learned."""

import gzip
import json
import keyword
import random
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import dgemma_jax as dg
from dgemma_jax import demo
from dgemma_jax.model.transformer import Implementations
from dgemma_jax.text import parse_response
from dgemma_jax.train import data, prompts, tiny, tokenizer
from dgemma_jax.train.evaluate import evaluate
from dgemma_jax.train.skills import RECITALS, SKILLS, UNMEASURED
from dgemma_jax.train.skills.question import HeldOut, side
from dgemma_jax.train.skills.sudoku import SOLUTIONS, lines
from dgemma_jax.train.skills.texts import FUNCTIONS, REFUSAL
from dgemma_jax.train.skills.tools import TOOLS

VOCABULARY = tokenizer.build()
PROMPTS = Path(__file__).parents[1] / "benchmarks" / "prompts.jsonl.gz"
ALL = {**SKILLS, **UNMEASURED}


def questions(skill: str, count: int = 300) -> list:
    rng = random.Random(1)
    return [ALL[skill](rng) for _ in range(count)]


def text_of(question) -> str:
    return question.messages[-1]["content"]


def groups(grid: str) -> list[set[str]]:
    rows = grid.split("\n")
    boxes = [{*rows[i][j : j + 2], *rows[i + 1][j : j + 2]} for i in (0, 2) for j in (0, 2)]
    return [*map(set, rows), *map(set, zip(*rows, strict=True)), *boxes]


def test_sudoku_answers_are_the_only_solution():
    assert len(set(SOLUTIONS)) == 288
    for question in questions("sudoku"):
        (puzzle,), answer = question.essence, question.answer.removesuffix("<turn|>")
        assert text_of(question).endswith(puzzle)
        assert 4 <= sum(c.isdigit() for c in puzzle) <= 12
        assert all(group == set("1234") for group in groups(answer))
        agreeing = [
            solution
            for solution in map(lines, SOLUTIONS)
            if all(given in (".", cell) for given, cell in zip(puzzle, solution, strict=True))
        ]
        assert agreeing == [answer]


@pytest.mark.parametrize("skill", ["reverse", "sort"])
def test_lists(skill):
    sizes = set()
    for question in questions(skill):
        separator = ", " if "," in text_of(question) else " "
        after = question.answer.removesuffix("<turn|>").split(separator)
        before = text_of(question).split(separator)[-len(after) :]
        before[0] = before[0].split()[-1]
        numbers = all(item.isdigit() for item in before)
        assert after == (before[::-1] if skill == "reverse" else sorted(before, key=int if numbers else str))
        sizes.add(len(after))
    assert sizes == {2, 3, 4, 5, 6}


def test_tool_calls_are_in_the_grammar_and_copy_their_values():
    seen = Counter()
    for question in questions("tool call"):
        response = parse_response(question.answer.removesuffix("<|tool_response>"), question.tools)
        (call,) = response.tool_calls
        assert not response.content
        declared = {tool["function"]["name"]: tool["function"] for tool in question.tools}
        assert len(declared) == 3
        assert set(call.arguments) == set(declared[call.name]["parameters"]["properties"])
        assert all(str(value) in text_of(question) for value in call.arguments.values())
        seen[call.name] += 1
    assert set(seen) == set(TOOLS)


def test_no_call_where_no_declared_tool_fits():
    refused = 0
    for question in questions("no call"):
        assert len(question.tools) == 3
        assert "<" not in question.answer.removesuffix("<turn|>")
        refused += question.answer == f"{REFUSAL}<turn|>"
    assert 0.5 < refused / 300 < 0.95, "the others are questions that need no tool"


def test_answers_use_the_result():
    for question in questions("tool answer"):
        _, call, reply = question.messages
        name = call["tool_calls"][0]["function"]["name"]
        if "{result}" in TOOLS[name].answer:
            assert str(reply["content"]["value"]) in question.answer
        assert question.thinking == ("<channel|>" in question.answer)


def test_counting_needs_several_canvases():
    for question in questions("count"):
        first, last = (int(number) for number in re.findall(r"\d+", text_of(question)))
        step = 1 if first < last else -1
        numbers = [int(number) for number in question.answer.removesuffix("<turn|>").split(" ")]
        assert numbers == list(range(first, last + step, step))
        assert " down" not in text_of(question) or step == -1
    assert max(len(VOCABULARY.encode(question.answer).ids) for question in questions("count")) > 64


def test_greetings_name_everyone_in_order():
    sizes = set()
    for question in questions("greet"):
        names = re.findall(r"[A-Z][a-z]*", text_of(question).split("ello to ")[1])
        assert question.answer == " ".join(f"Hello {name}." for name in names) + "<turn|>"
        assert question.essence == tuple(map(str.lower, names))
        sizes.add(-(-len(VOCABULARY.encode(question.answer).ids) // 32))
    assert sizes == {1, 2, 3}


def test_thoughts_are_said_only_with_thinking_on():
    for question in questions("thinking"):
        response = parse_response(re.sub(r"(<turn\|>|<\|tool_response>)$", "", question.answer), question.tools)
        assert question.thinking
        assert response.reasoning
        assert response.content or response.tool_calls


def test_gaps():
    for question in questions("infill"):
        first, last = question.gap
        answer = question.answer.removesuffix("<turn|>")
        assert text_of(question).endswith(f"{answer[:first]}<gap>{answer[last:]}")
        assert answer[:first].strip()
        assert answer[last:].strip()
        if answer.startswith("def "):
            name, variable = re.match(r"def (\w+)\((\w+)\)", answer).groups()
            if keyword.iskeyword(variable):  # invented, too
                continue
            scope: dict = {}
            exec(answer, scope)
            wanted = {"double": 12, "triple": 18, "half": 3, "square": 36, "next": 7, "prev": 5, "negate": -6}
            assert scope[name](6) == wanted[name]
            assert set(FUNCTIONS) == set(wanted)


def test_recitals():
    answers = dict(RECITALS)
    assert len(answers) == 22
    assert answers["Recite the days from Sunday."].startswith("Sunday, Monday, Tuesday")
    assert answers["Recite the months."].endswith("November, December")


# The split


@pytest.mark.parametrize("skill", SKILLS)
def test_held_out_prompts_are_never_trained_on(skill):
    held = data.held_out(skill, 100, seed=5)
    asked = {(example.prompt, example.images) for example in held}
    assert len(asked) == 100
    rng = random.Random(0)
    assert not {(example.prompt, example.images) for example in data.draw({skill: 1000}, rng)} & asked
    assert data.held_out(skill, 100, seed=5) == held


def test_values_of_held_out_calls_are_unknown_to_training():
    trained = {
        word for question in questions("tool call", 2000) for word in question.essence if side(question) is False
    }
    rng = HeldOut(3)
    asked = [question for question in (SKILLS["tool call"](rng) for _ in range(500)) if side(question)]
    assert len(asked) > 300
    assert not trained & {word for question in asked for word in question.essence}


def test_follow_ups_keep_to_the_split():
    rng = random.Random(4)
    examples = [data.sample("follow-up", rng).prompt for _ in range(300)]
    held = {q.essence[0] for s in ("reverse", "sort") for q in map(SKILLS[s], [rng] * 500) if side(q)}
    assert held
    assert not any(f"{verb_and_list}<" in prompt.replace(",", "") for verb_and_list in held for prompt in examples)


# Packing


def test_pack():
    rng = random.Random(0)
    examples = data.draw({"sudoku": 2, "count": 6, "infill": 2}, rng)
    batch = data.pack(examples, VOCABULARY, 200, dg.tiny(), rng)
    several = 0
    for row, example in enumerate(examples):
        prompt, answer = (VOCABULARY.encode(text).ids for text in example[:2])
        before = batch.tokens[row, : batch.lengths[row]].tolist()
        done = len(before) - len(prompt)
        part = answer[done : done + 32]
        assert before == prompt + answer[:done]
        assert done % 32 == 0
        assert batch.canvas[row].tolist() == part + [tokenizer.EOS] * (32 - len(part))
        assert batch.answer[row] == len(part)
        assert (batch.tokens[row, batch.lengths[row] :] == tokenizer.PAD).all()
        assert batch.pinned[row].any() == (example.gap is not None)
        if example.gap:
            gap = np.flatnonzero(~batch.pinned[row])
            assert VOCABULARY.decode([answer[i] for i in gap]) == example.answer[slice(*example.gap)]
        several += done > 0
    assert several, "canvases behind the first one are trained, too"
    with pytest.raises(ValueError, match="exceed 8"):
        data.pack(examples, VOCABULARY, 8, dg.tiny(), rng)


@pytest.mark.parametrize("stage", tiny.STAGES)
def test_every_bucket_holds_its_prompts(stage):
    for step in range(0, 400, 2):
        bucket, rng = tiny.bucket(stage, step), random.Random(step)
        data.pack(data.draw(bucket.rows, rng), VOCABULARY, bucket.length, dg.tiny(), rng)


def test_every_skill_is_trained():
    assert {skill for stage in tiny.STAGES for bucket in stage.buckets for skill in bucket.rows} == set(ALL)


# What was learned


def test_the_prompt_file_is_what_the_script_writes(tmp_path):
    stored = prompts.read(PROMPTS)
    assert {skill: len(examples) for skill, examples in stored.items()} == dict.fromkeys(SKILLS, prompts.COUNT)
    assert {skill: data.held_out(skill, 20, prompts.SEED) for skill in SKILLS} == {
        skill: examples[:20] for skill, examples in stored.items()
    }
    first = json.loads(gzip.decompress(PROMPTS.read_bytes()).splitlines()[0])
    assert first["skill"] == "sudoku"


@pytest.fixture(scope="module")
def model():
    return dg.load("tiny")


@pytest.mark.parametrize("skill", SKILLS)
def test_twenty_held_out_prompts(model, skill):
    """The weights are fixed, so is the result."""
    examples = prompts.read(PROMPTS)[skill][:20]
    score, wrong = evaluate(model, examples)
    assert len(wrong) <= 3, [examples[i] for i in wrong]
    assert score.steps_per_canvas < 12


@pytest.mark.parametrize("experts", ["reference", "pallas"])
def test_every_implementation_of_the_experts_stops_as_early(model, experts):
    """A wrong one may still give the right text, after many more steps."""
    examples = [prompts.read(PROMPTS)[skill][0] for skill in ("sudoku", "reverse", "sort")]
    parts = (model.config, model.params, model.tokenizer, model.defaults)
    other = dg.Model(*parts, implementations=Implementations(experts=experts))
    found, expected = (
        [answer.steps for answer in m.generate([e.prompt for e in examples], seed=1, slots=2)] for m in (other, model)
    )
    assert found == expected


def test_what_is_known_by_heart(model):
    asked = [[{"role": "user", "content": question}] for question, _ in RECITALS[::4]]
    answers = [model.chat(messages, seed=1).content for messages in asked]
    assert answers == [answer for _, answer in RECITALS[::4]]


def test_a_thought_comes_when_it_is_asked_for_and_only_then(model):
    messages = [{"role": "user", "content": "Reverse this list: 5, 71, 8"}]
    plain, thoughtful = (model.chat(messages, thinking=thinking, seed=1) for thinking in (False, True))
    assert (plain.content, plain.reasoning) == ("8, 71, 5", "")
    assert (thoughtful.content, thoughtful.reasoning) == ("8, 71, 5", "The first is 8, the last is 5.")


def test_the_demo_shows_what_it_promises(capsys):
    demo.main()
    printed = capsys.readouterr().out
    for text in ("4 7 8 12 55 93", "red, cat, plum", "November, December   (2 canvases", "calls get_weather with"):
        assert text in printed
    assert printed.endswith("The weather in Lima is sunny.\n")
