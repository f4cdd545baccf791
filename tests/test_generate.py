"""Generation on a small random model: cuts, seeds, independence of rows, bad input."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

import dgemma_jax as dg
from dgemma_jax.diffusion.policy import stable_and_confident
from dgemma_jax.diffusion.random import key_from_seed, start_canvas, step_keys
from dgemma_jax.engine.scheduler import Scheduler
from dgemma_jax.text.tokenizer import Tokenizer
from tests.compilations import Compilations
from tests.random_models import SMALL, random_model

PROMPTS = [[5, 6, 7], list(range(3, 43)), [9], [11] * 20, [2, 80], list(range(90, 50, -1)), [4, 4], [33, 1, 2, 3]]
C = SMALL.canvas_length


def small_tokenizer():
    """Words w0 .. w95 separated by blanks; <bos> and <|turn> are special."""
    words = {f"w{i}": i for i in range(SMALL.vocab_size)}
    words["<bos>"], words["<|turn>"] = words.pop("w2"), words.pop("w10")
    backend = tokenizers.Tokenizer(models.WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<bos>", "<|turn>"])
    return Tokenizer(backend)


@pytest.fixture(scope="module")
def model():
    return random_model(tokenizer=small_tokenizer(), max_model_len=200)


def run(model, prompt, seed=1, **chosen):
    return model.generate([prompt], dg.Sampling(**{"max_new_tokens": 2 * C} | chosen), seed=seed, slots=4)[0]


def variant(model, **changes):
    """The same model with another tokenizer or context, sharing the compiled programs."""
    parts = {"tokenizer": model.tokenizer, "max_model_len": model.max_model_len} | changes
    other = dg.Model(model.config, model.params, defaults=model.defaults, **parts)
    other._programs = model._programs
    return other


def test_the_same_seed_gives_the_same_answer_alone_and_among_others(model):
    sampling = dg.Sampling(max_new_tokens=2 * C)
    together = model.generate(PROMPTS, sampling=sampling, seed=5, slots=4)
    again = model.generate(PROMPTS[::-1], sampling=sampling, seed=5, slots=4)[::-1]
    alone = [model.generate([prompt], sampling=sampling, seed=5, slots=4)[0] for prompt in PROMPTS]
    assert together == again == alone
    assert len({tuple(answer.tokens) for answer in together}) == len(PROMPTS)


def test_a_seed_of_ones_own_wins_and_a_fresh_one_is_reported(model):
    fixed = run(model, PROMPTS[0], seed=7)
    assert fixed.seed == 7
    own = model.generate([PROMPTS[0]] * 2, dg.Sampling(max_new_tokens=2 * C, seed=7), seed=8, slots=4)
    assert own[0] == own[1] == fixed
    fresh = model.generate([PROMPTS[0]] * 2, dg.Sampling(max_new_tokens=2 * C), slots=4)
    assert fresh[0].seed != fresh[1].seed
    assert run(model, PROMPTS[0], seed=fresh[1].seed) == fresh[1]


@pytest.mark.parametrize("budget", [1, C - 1, C, C + 1, 2 * C + 3])
def test_the_output_is_cut_exactly(model, budget):
    answer = run(model, PROMPTS[0], max_new_tokens=budget)
    whole = run(model, PROMPTS[0], max_new_tokens=3 * C)
    assert answer.tokens == whole.tokens[:budget]
    assert (answer.finish_reason, answer.stop_id) == ("length", None)
    assert answer.steps == whole.steps[: -(-budget // C)]
    assert answer.tokens_per_step == budget / sum(answer.steps)


def test_a_stop_id_ends_the_answer_in_any_canvas(model):
    whole = run(model, PROMPTS[1], max_new_tokens=3 * C)
    for at in (0, 3, C, 2 * C + 5):
        stop = whole.tokens[at]
        first = whole.tokens.index(stop)
        answer = run(model, PROMPTS[1], max_new_tokens=3 * C, stop_token_ids=[stop, 95])
        assert answer.tokens == whole.tokens[:first]
        assert (answer.finish_reason, answer.stop_id) == ("stop", stop)
        assert len(answer.steps) == first // C + 1
    beyond = run(model, PROMPTS[1], max_new_tokens=first, stop_token_ids=[stop])
    assert (beyond.finish_reason, beyond.stop_id) == ("length", None)


def test_a_stop_string_is_found_across_a_canvas_border_and_not_returned(model):
    whole = run(model, PROMPTS[0], max_new_tokens=3 * C)
    words = [model.tokenizer.decode([id]) for id in whole.tokens]
    across = " ".join(words[C - 2 : C + 1])
    answer = run(model, PROMPTS[0], max_new_tokens=3 * C, stop=across)
    assert answer.raw_text == model.tokenizer.decode(whole.tokens).split(across)[0]
    assert answer.tokens == whole.tokens[: C - 2]
    assert (answer.finish_reason, answer.stop_id, len(answer.steps)) == ("stop", None, 2)
    inside = words[4][-1:] + " " + words[5][:1]  # begins and ends inside tokens
    cut = run(model, PROMPTS[0], stop=["never", inside])
    assert cut.raw_text == model.tokenizer.decode(whole.tokens).split(inside)[0]
    assert cut.tokens == whole.tokens[: len(cut.tokens)]


def test_text_that_may_begin_a_stop_string_is_held_back(model):
    whole = run(model, PROMPTS[0], max_new_tokens=3 * C)
    words = [model.tokenizer.decode([id]) for id in whole.tokens]
    across = " ".join(words[C - 2 : C + 1])
    for stop, told in ((across, [C - 2, 0]), (across + "!", [C - 2, C + 2, C])):
        sampling = dg.Sampling(max_new_tokens=3 * C, stop=[stop])
        events = list(model.stream(PROMPTS[0], sampling, seed=1))
        canvases = [event.tokens for event in events if isinstance(event, dg.Canvas)]
        completion = events[-1].completion
        assert list(map(len, canvases)) == told
        assert [id for tokens in canvases for id in tokens] == completion.tokens
        assert completion.stop == (across if stop == across else None)


def test_the_context_ends_the_answer_and_its_last_canvas_has_full_width(model):
    prompt = [3] * 190
    answer = model.generate([prompt], seed=1, slots=4)[0]
    assert (len(answer.tokens), answer.finish_reason) == (10, "length")
    longer = variant(model, max_model_len=256).generate([prompt], seed=1, slots=4)[0]
    assert answer.tokens == longer.tokens[:10]  # the same canvas, cut
    with pytest.raises(ValueError, match="200 tokens leaves no room in a context of 200"):
        model.generate([[3] * 200])


def test_chunks_of_a_long_prompt_do_not_show(model):
    prompt = list(range(3, 93)) + list(range(3, 83))
    whole = run(model, prompt)
    for chunk in (1024, 32, 7):
        scheduler = model.scheduler(4, prefill_chunk=chunk)
        job = scheduler.submit(model.request(prompt, dg.Sampling(max_new_tokens=2 * C), seed=1))
        while scheduler.busy:
            scheduler.advance()
        assert job.answer.completion() == whole


def test_rows_at_rest_and_a_used_cache_leave_no_trace(model):
    """Every number starts as NaN, also in a slot that rests beside others; none may reach an answer."""
    expected = model.generate(PROMPTS, sampling=dg.Sampling(max_new_tokens=2 * C), seed=2, slots=4)
    parts = (model.config, model.params, model._programs, model.tokenizer, model.max_model_len, 4)
    scheduler = Scheduler(*parts, policy=dg.Policy())
    spoil = lambda x: jnp.full_like(x, jnp.nan) if jnp.issubdtype(x.dtype, jnp.floating) else x  # noqa: E731
    scheduler.cache = jax.tree.map(spoil, scheduler.cache)
    scheduler.slots = replace(scheduler.slots, state=jax.tree.map(spoil, scheduler.slots.state))
    for count in (3, len(PROMPTS)):
        requests = model._requests(PROMPTS[:count], dg.Sampling(max_new_tokens=2 * C), 2)
        jobs = [scheduler.submit(request) for request in requests]
        while scheduler.busy:
            scheduler.advance()
        assert [job.answer.completion() for job in jobs] == expected[:count]


def test_suppressed_ids_never_appear(model):
    seen = set(run(model, PROMPTS[0]).tokens)
    answer = run(model, PROMPTS[0], suppress=seen)
    assert answer.tokens
    assert not seen & set(answer.tokens)


def test_temperature_zero_proposes_the_argmax_and_one_is_neutral(model):
    plain = run(model, PROMPTS[0], entropy_bound=30)
    assert run(model, PROMPTS[0], entropy_bound=30, temperature=1) == plain
    zero = run(model, PROMPTS[0], entropy_bound=30, temperature=0)
    assert zero == run(model, PROMPTS[0], entropy_bound=30, temperature=0)
    assert zero.tokens != plain.tokens


def test_top_k_and_top_p_cut_the_rows_that_ask_and_no_others(model):
    chosen = [{}, {"top_k": 3}, {"top_p": 0.3}, {"top_k": 96, "top_p": 1.0}]
    samplings = [dg.Sampling(max_new_tokens=2 * C, entropy_bound=30, seed=1, **fields) for fields in chosen]
    answers = model.generate([PROMPTS[0]] * 4, samplings, slots=4)
    plain, few, nucleus, everything = (answer.tokens for answer in answers)
    assert plain == everything and few != plain and nucleus != plain and few != nucleus
    assert answers == [model.generate([PROMPTS[0]], s, slots=4)[0] for s in samplings]


def test_every_prompt_has_its_own_sampling(model):
    samplings = [dg.Sampling(max_new_tokens=n, max_denoising_steps=n, seed=n) for n in (1, 3, 20)]
    answers = model.generate([PROMPTS[0]] * 3, sampling=samplings, slots=4)
    assert [len(answer.tokens) for answer in answers] == [1, 3, 20]
    assert [answer.steps for answer in answers] == [[1], [3], [20, 20]]
    single = [model.generate([PROMPTS[0]], sampling=s, slots=4)[0] for s in samplings]
    assert answers == single


def test_a_policy_runs_inside_the_loop(model):
    never = dg.Policy(stop=lambda streak, entropy, knobs: streak > 100)
    at_once = dg.Policy(stop=lambda streak, entropy, knobs: streak >= 0)
    sampling = dg.Sampling(max_new_tokens=C, max_denoising_steps=4)
    steps = [model.generate([PROMPTS[0]], sampling, seed=1, policy=p, slots=4)[0].steps for p in (never, at_once)]
    assert steps == [[4], [1]]
    with pytest.raises(ValueError, match="Policy"):
        model.generate([PROMPTS[0]], sampling, policy=stable_and_confident)


def test_a_stream_tells_every_step(model):
    sampling = dg.Sampling(max_new_tokens=C + 4, max_denoising_steps=3)
    events = list(model.stream(PROMPTS[0], sampling, seed=1))
    finished = events[-1].completion
    assert finished == model.generate([PROMPTS[0]], sampling, seed=1)[0]
    kinds = [type(event).__name__ for event in events]
    assert kinds == [*["Draft"] * 3, "Canvas"] * 2 + ["Finished"]
    canvases = [event for event in events if isinstance(event, dg.Canvas)]
    assert [id for canvas in canvases for id in canvas.tokens] == finished.tokens
    assert [event.step for event in events[:3]] == [1, 2, 3]
    for draft in events[:3]:
        assert 0 < sum(draft.accepted) <= len(draft.accepted) == C
        assert 0 < draft.entropy <= np.log(SMALL.vocab_size)
    assert events[2].tokens == canvases[0].tokens


def test_an_interrupt_leaves_the_model_usable(model, monkeypatch):
    expected = run(model, PROMPTS[0], seed=3)
    take = Scheduler._harvest

    def interrupted(self, *told):
        yield from take(self, *told)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "_harvest", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(model, PROMPTS[0], seed=3)
    assert run(model, PROMPTS[0], seed=3) == expected


def test_several_answers_to_a_prompt(model):
    sampling = dg.Sampling(max_new_tokens=C, n=3)
    answers = model.generate(PROMPTS[:2], sampling, seed=6, slots=4)
    assert len(answers) == 6
    assert answers[0] == run(model, PROMPTS[0], seed=6, max_new_tokens=C), "the first copy is the request itself"
    assert answers[3] == run(model, PROMPTS[1], seed=6, max_new_tokens=C)
    assert len({tuple(answer.tokens) for answer in answers}) == 6
    assert answers[4:] == model.generate([PROMPTS[1]], sampling, seed=6, slots=4)[1:], "the copies depend on no row"
    assert {answer.seed for answer in answers} == {6}
    with pytest.raises(ValueError, match="n is 3"):
        next(model.stream(PROMPTS[0], sampling))


def test_log_probabilities_of_the_committed_tokens(model):
    """Those of the soft-capped logits in a canvas' last step, without temperature or mask."""
    answer = run(model, PROMPTS[0], logprobs=True, max_denoising_steps=1, suppress=[5], t_min=0.1, t_max=0.3)
    assert run(model, PROMPTS[0]).logprobs is None
    encode = jax.jit(partial(dg.encode, model.graph, model.params))
    logits_of = jax.jit(partial(dg.denoise_logits, model.graph, model.params))
    cache, _ = encode(jnp.array([PROMPTS[0]]), jnp.array([3]), dg.init_cache(model.config, 1, 64))
    found = []
    for index in range(2):
        keys = step_keys(key_from_seed(1)[None], jnp.array([index]), jnp.array([0]))
        start = start_canvas(keys, C, model.config.vocab_size)
        logits = logits_of(start, cache)
        canvas = answer.tokens[index * C : (index + 1) * C]
        found += jax.nn.log_softmax(logits[0])[jnp.arange(C), jnp.array(canvas)].tolist()
        cache, _ = encode(jnp.array([canvas]), jnp.array([C]), cache)
    np.testing.assert_allclose(answer.logprobs, found, rtol=1e-4, atol=1e-5)


def test_a_pinned_canvas_keeps_its_ids_in_every_step(model):
    canvas = [7, -1, -1, 9, *range(30, 40), -1, 11]
    pinned = [id >= 0 for id in canvas]
    sampling = dg.Sampling(max_new_tokens=2 * C, canvas=canvas, pinned=pinned, suppress=[9])
    events = list(model.stream(PROMPTS[0], sampling, seed=1))
    first = next(i for i, event in enumerate(events) if isinstance(event, dg.Canvas))
    for draft in events[:first]:
        assert [id for id, keep in zip(draft.tokens, pinned, strict=True) if keep] == [id for id in canvas if id >= 0]
    answer = events[-1].completion
    assert [id for id, keep in zip(answer.tokens, pinned, strict=False) if keep] == [id for id in canvas if id >= 0]
    assert 9 not in {id for id, keep in zip(answer.tokens, pinned, strict=False) if not keep}
    other = run(model, PROMPTS[0], canvas=[8, *canvas[1:]], pinned=pinned, suppress=[9])
    assert other.tokens[C:] != answer.tokens[C:], "the commit sees the pinned ids"


def test_a_given_canvas_is_where_the_first_one_starts(model):
    sampling = {"max_denoising_steps": 1, "max_new_tokens": C}
    drawn = start_canvas(step_keys(key_from_seed(1)[None], jnp.array([0]), jnp.array([0])), C, 96)[0].tolist()
    plain = run(model, PROMPTS[0], **sampling)
    assert run(model, PROMPTS[0], canvas=drawn, **sampling).tokens == plain.tokens
    assert run(model, PROMPTS[0], canvas=[-1] * C, **sampling).tokens == plain.tokens
    assert run(model, PROMPTS[0], canvas=[5] * C, **sampling).tokens != plain.tokens


def test_text_prompts_get_one_bos(model):
    by_ids = run(model, [2, 5, 6])
    assert run(model, "w5 w6") == by_ids == run(model, "<bos> w5 w6")
    assert model.generate("w5 w6", dg.Sampling(max_new_tokens=2 * C), seed=1, slots=4) == [by_ids]
    assert by_ids.text == model.tokenizer.decode(by_ids.tokens, skip_special=True)
    assert model.generate([]) == []


def test_knobs_and_prompts_compile_nothing_new(model):
    """One program per shape: what differs between two requests of a bucket is data."""
    run(model, PROMPTS[0])
    run(model, PROMPTS[0], max_denoising_steps=2, stop_token_ids=[1])
    with Compilations() as compiled:
        for seed, chosen in enumerate(
            [
                {"t_max": 0.9},
                {"t_min": None},
                {"entropy_bound": 3.0},
                {"stability_threshold": 2},
                {"temperature": 0},
                {"top_k": 3},
                {"top_p": 0.5},
                {"canvas": [3, -1], "pinned": [True, False], "logprobs": True},
            ]
        ):
            run(model, PROMPTS[3][: seed + 1], seed=seed + 2**40, max_denoising_steps=seed + 1, **chosen)
        run(model, PROMPTS[0], suppress=[4, 5], confidence_threshold=None, max_new_tokens=30)
    assert compiled.names == []


@pytest.mark.parametrize(
    ("prompts", "chosen", "message"),
    [
        ([""], {}, "prompt '' is empty"),
        ([[]], {}, r"prompt \[\] is empty"),
        ([[1, 96]], {}, "token id 96; expected integers in 0 .. 95"),
        ([[1, -1]], {}, "token id -1"),
        ([[1, 2.5]], {}, "token id 2.5"),
        ([[1, True]], {}, "token id True"),
        ([[1, None]], {}, "token id None"),
        ([5, 6], {}, "prompt 5 is neither text nor a list"),
        ([b"w5"], {}, "neither text nor"),
        ([[1]], {"suppress": [96]}, "suppress holds token id 96"),
        ([[1]], {"suppress": range(96)}, "suppress holds all 96 ids"),
        ([[1]], {"stop_token_ids": [1, 400]}, "stop_token_ids holds token id 400"),
        ([[1]], {"canvas": [1, 96]}, "canvas holds token id 96"),
        ([[1]], {"canvas": [1] * 17}, "canvas has 17 ids; expected at most 16"),
    ],
)
def test_bad_requests_are_refused_in_one_line(model, prompts, chosen, message):
    with pytest.raises(ValueError, match=message) as error:
        model.generate(prompts, sampling=dg.Sampling(**chosen))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("prompts", [None, 5, b"w5", {"prompt": "w5"}, np.array(3)])
def test_prompts_of_another_kind_are_refused(model, prompts):
    with pytest.raises(ValueError, match="prompt"):
        model.generate(prompts)


@pytest.mark.parametrize("sampling", ["greedy", 5, {"max_new_tokens": 3}, [{}], [None, 3]])
def test_samplings_of_another_kind_are_refused(model, sampling):
    with pytest.raises(ValueError, match="sampling"):
        model.generate([[1]] if sampling != [None, 3] else [[1], [2]], sampling)


def test_ids_come_as_any_sequence_of_integers(model):
    by_list = run(model, [5, 6, 7])
    for ids in ((5, 6, 7), np.array([5, 6, 7]), np.array([5, 6, 7], np.uint8)):
        assert run(model, ids) == by_list


def test_a_tokenizer_beyond_the_vocabulary_is_noticed(model):
    words = {f"w{i}": i for i in range(200)}
    backend = tokenizers.Tokenizer(models.WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    with pytest.raises(ValueError, match=r"token id 150; expected integers in 0 .. 95"):
        variant(model, tokenizer=Tokenizer(backend)).generate("w150")


def test_bad_arguments_are_refused(model):
    with pytest.raises(ValueError, match="2 samplings for 1 prompts"):
        model.generate([[1]], sampling=[dg.Sampling()] * 2)
    with pytest.raises(ValueError, match="slots is 0"):
        model.generate([[1]], slots=0)
    with pytest.raises(ValueError, match="seed is -1"):
        model.generate([[1]], seed=-1)
    with pytest.raises(ValueError, match="max_model_len is 300"):
        random_model(max_model_len=300)


def test_without_a_tokenizer_ids_work_and_text_is_refused(model):
    bare = variant(model, tokenizer=None)
    answer = bare.generate([[5]], dg.Sampling(max_new_tokens=3), seed=1, slots=4)[0]
    assert (len(answer.tokens), answer.text, answer.raw_text) == (3, "", "")
    for call in (lambda: bare.generate("w5"), lambda: bare.generate([[5]], dg.Sampling(stop="w"))):
        with pytest.raises(ValueError, match="tokenizer"):
            call()


def test_the_cache_grows_by_buckets_without_changing_an_answer(model):
    """A row alone in a small cache, and beside a row whose length forces a larger one."""
    sampling = dg.Sampling(max_new_tokens=C)
    alone = model.generate([[5, 6]], sampling, seed=4, slots=4)[0]
    beside = model.generate([[5, 6], [7] * 150], sampling, seed=4, slots=4)[0]
    assert alone == beside
