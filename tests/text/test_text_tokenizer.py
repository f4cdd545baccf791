"""Tokens: control tokens by name and as text, decoding whole and in pieces."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dgemma_jax.text import Tokenizer, encode_chat
from tests.text.text_helpers import byte_level, gemma_like, golden

TOKENIZERS = {"gemma-like": gemma_like, "byte-level": byte_level}


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request):
    return TOKENIZERS[request.param]()


@pytest.fixture(scope="module")
def real(request):
    path = request.config.getoption("--real-tokenizer")
    if not path:
        pytest.skip("needs --real-tokenizer PATH")
    return Tokenizer.from_file(path)


def test_nothing_imports_jax():
    code = "import sys, dgemma_jax.text; assert 'jax' not in sys.modules and 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_control_tokens_have_ids(tokenizer):
    assert len(tokenizer.special_ids) >= 24
    for name, id in tokenizer.special_ids.items():
        assert tokenizer.token_id(name) == id
        assert tokenizer.decode([id]) == name
        assert tokenizer.decode([id], skip_special=True) == ""
    assert tokenizer.vocab_size == 1 + max(tokenizer.special_ids.values())


def test_typed_control_tokens_are_text_on_demand(tokenizer):
    text = 'a<|turn>user\n<bos> <|"|>é<turn|>'
    with_control, without = tokenizer.encode(text), tokenizer.encode(text, control=False)
    special = set(tokenizer.special_ids.values())
    assert special & set(with_control)
    assert not special & set(without)
    assert tokenizer.decode(with_control) == tokenizer.decode(without) == text
    assert tokenizer.decode(with_control, skip_special=True) == "auser\n é"


def test_same_ids_as_the_flag_of_the_library(tokenizer):
    text = "x <|turn> y<eos>"
    plain = tokenizer.encode(text, control=False)
    tokenizer._control.encode_special_tokens = True
    try:
        assert tokenizer._control.encode(text, add_special_tokens=False).ids == plain
    finally:
        tokenizer._control.encode_special_tokens = False


def test_threads_do_not_disturb_each_other(tokenizer):
    text = "<|turn>user\nhi<turn|>" * 20
    expected = {control: tokenizer.encode(text, control) for control in (True, False)}
    with ThreadPoolExecutor(4) as pool:
        for control, ids in pool.map(lambda n: (n % 2 == 0, tokenizer.encode(text, n % 2 == 0)), range(200)):
            assert ids == expected[control]


def test_a_long_text_is_encoded_like_a_short_one_and_lets_other_threads_run(tokenizer):
    words = "go on é <|turn>"
    assert tokenizer.encode(words * 1000) == tokenizer.encode(words) * 1000
    assert tokenizer.encode(words * 1000, control=False) == tokenizer.encode(words, control=False) * 1000
    thread, ticks = threading.Thread(target=tokenizer.encode, args=("go on " * 40_000,)), 0
    thread.start()
    while thread.is_alive():
        thread.join(0.001)
        ticks += 1
    assert ticks > 10


@given(st.text())
def test_a_text_has_no_fewer_tokens_than_its_length_allows(text):
    for tokenizer in (gemma_like(), byte_level()):
        assert len(tokenizer.encode(text, control=False)) * tokenizer.longest_token >= len(text)


def test_lone_surrogates_become_replacement_characters(tokenizer):
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"


def test_accepts_an_object_that_carries_the_tokenizer():
    carrier = type("Carrier", (), {"backend_tokenizer": gemma_like()._control})()
    assert Tokenizer(carrier).encode("call") == gemma_like().encode("call")


def test_errors_name_the_value(tokenizer, tmp_path):
    with pytest.raises(ValueError, match="token '<nope>'"):
        tokenizer.token_id("<nope>")
    with pytest.raises(ValueError, match="expected an existing"):
        Tokenizer.from_file(tmp_path / "none.json")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"expected a tokenizer\.json"):
        Tokenizer.from_file(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("skip_special", [False, True])
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_decoding_in_pieces_joins_to_the_whole(name, skip_special, data):
    tokenizer = TOKENIZERS[name]()
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    ids += tokenizer.encode(data.draw(st.text(max_size=8)), control=False)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=10)))
    decoder = tokenizer.decoder(skip_special)
    pieces = [decoder.feed(ids[a:b]) for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    assert "".join([*pieces, decoder.finish()]) == tokenizer.decode(ids, skip_special)


@pytest.mark.parametrize("text", ["naïve", "東京は夜", "👩‍👩‍👧 ok", "e\u0301"])
def test_no_piece_holds_half_a_character(tokenizer, text):
    decoder = tokenizer.decoder()
    pieces = [decoder.feed([id]) for id in tokenizer.encode(text)] + [decoder.finish()]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_stored_encodings_of_the_real_tokenizer(real):
    rows = golden("text_encodings.json")
    assert len(rows) == 200
    for text, ids, *plain in rows:
        assert real.encode(text) == ids, text
        assert real.encode(text, control=False) == (plain[0] if plain else ids), text
        assert real.decode(ids) == text.replace("▁", " ")  # the tokenizer writes blanks so


def test_chats_in_ids_of_the_real_tokenizer(real):
    for chat in golden("text_chats.json"):
        arguments = {name: chat[name] for name in ("tools", "thinking", "add_generation_prompt")}
        assert encode_chat(chat["messages"], real, **arguments) == chat["ids"], chat["name"]
