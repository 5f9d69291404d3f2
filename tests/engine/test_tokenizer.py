"""Ids against llama.cpp's own vectors, round trips, and vocabularies that must be refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quadjet.engine.chat import ModelError
from quadjet.engine.errors import ModelFileError
from quadjet.engine.gguf_file import GgufFile
from quadjet.engine.tokenizer import PRE_TOKENIZERS, Tokenizer
from small_vocabulary import CONTROL, USER_DEFINED, small_metadata

VECTORS = Path(__file__).parent / "data" / "llama.cpp"
TEXTS = (
    'def f(x: int) -> str:\n\treturn f"{x!r}"  # it\'s\n',
    "a\r\nb\r\n\r\nc\r",
    "\t\tif (a<b) {\n\t}\n",
    "cafe\u0301 n\u0303 \u0c15\u0c4d",
    "\U0001f469\u200d\U0001f4bb\U0001f3fd \U0001f1e8\U0001f1ed",
    " \u00a0\u3000\n\n\n   z ",
    "<|im_start|>system<tool_call>\"'",
    "\x00\x1b[0m\x7f\ufeff\ue000\U0010fffd",
    "",
)
SMALL = Tokenizer.from_gguf(small_metadata())
ModelPath = Callable[[str], Path]


@pytest.fixture(scope="module")
def qwen_metadata(model_path: ModelPath) -> dict[str, Any]:
    with GgufFile.open(model_path("qwen2.5-coder-0.5b")) as file:
        return file.metadata


@pytest.fixture(scope="module")
def qwen(qwen_metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_gguf(qwen_metadata)


@pytest.fixture(scope="module")
def smollm(model_path: ModelPath) -> Tokenizer:
    with GgufFile.open(model_path("smollm2-135m")) as file:
        return Tokenizer.from_gguf(file.metadata)


def vectors(texts: str, ids: str) -> list[tuple[str, list[int]]]:
    """Texts and ids of llama.cpp's own vocabulary tests (MIT, licence beside them); smollm.out is what its server answered."""
    parts = (VECTORS / texts).read_bytes().decode().split("\n__ggml_vocab_test__\n")
    lines = (VECTORS / ids).read_text().splitlines()
    assert len(parts) > 40
    return [(text, list(map(int, line.split()))) for text, line in zip(parts, [*lines, ""], strict=False)]


@pytest.mark.slow
@pytest.mark.parametrize("pre", ["qwen2", "qwen35"])
def test_qwen_ids_are_those_of_llama_cpp(qwen_metadata: dict[str, Any], pre: str) -> None:
    tokenizer = Tokenizer.from_gguf({**qwen_metadata, "tokenizer.ggml.pre": pre})
    assert [(text, tokenizer.encode(text)) for text, _ in vectors(f"{pre}.inp", f"{pre}.out")] == vectors(
        f"{pre}.inp", f"{pre}.out"
    )


@pytest.mark.slow
def test_smollm_ids_are_those_of_llama_cpp(smollm: Tokenizer) -> None:
    expected = vectors("qwen35.inp", "smollm.out")
    assert [(text, smollm.encode(text)) for text, _ in expected] == expected


@pytest.mark.slow
@pytest.mark.parametrize("text", TEXTS)
def test_qwen_round_trip(qwen: Tokenizer, text: str) -> None:
    assert qwen.decode(qwen.encode(text)) == text


@pytest.mark.slow
def test_smollm_writes_what_it_has_no_bytes_for_as_replacement(smollm: Tokenizer) -> None:
    assert smollm.decode(smollm.encode("a\x04b\U00050000c\x05")) == "a\ufffdb\ufffdc\x05"


@pytest.mark.slow
def test_properties_of_the_real_vocabularies(qwen: Tokenizer, smollm: Tokenizer) -> None:
    assert qwen.vocab_size == 151936
    assert qwen.eog_ids == {151643, 151645, 151662, 151663, 151664}
    assert qwen.unused_ids == set(range(151665, 151936))
    assert (qwen.special_ids["<tool_call>"], len(qwen.special_texts)) == (151657, 22)
    assert (smollm.vocab_size, len(smollm.special_texts), smollm.unused_ids) == (49152, 17, frozenset())
    assert smollm.eog_ids == {0, 2}
    assert not qwen.add_bos
    assert not smollm.add_bos


@pytest.mark.slow
def test_every_special_text_is_plain_text_unless_asked_for(qwen: Tokenizer, smollm: Tokenizer) -> None:
    for tokenizer in (qwen, smollm):
        special = set(tokenizer.special_ids.values())
        for text, token in tokenizer.special_ids.items():
            plain = tokenizer.encode(f"a{text}b")
            assert not special & set(plain)
            assert tokenizer.decode(plain) == f"a{text}b"
            assert tokenizer.encode(text, parse_special=True) == [token]


@settings(max_examples=300, deadline=None)
@given(st.text())
def test_any_text_comes_back_whole_and_streamed(text: str) -> None:
    ids = SMALL.encode(text)
    stream = SMALL.stream()
    assert SMALL.decode(ids) == text
    assert "".join(map(stream.push, ids)) + stream.flush() == text
    assert not set(ids) & (set(SMALL.special_ids.values()) | SMALL.unused_ids)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, SMALL.vocab_size - 1)))
def test_any_ids_stream_to_what_they_decode_to(ids: list[int]) -> None:
    stream = SMALL.stream()
    assert "".join(map(stream.push, ids)) + stream.flush() == SMALL.decode(ids)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([*CONTROL, *USER_DEFINED, "[PAD", "<", "|>", "a", " ", "\n", "é"])))
def test_special_and_plain_parts_come_back(parts: list[str]) -> None:
    text = "".join(parts)
    assert "".join(SMALL.split_special(text)) == text
    shown = "".join(part for part in SMALL.split_special(text) if part not in CONTROL)
    assert SMALL.decode(SMALL.encode(text, parse_special=True)) == shown


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(text=st.text())
def test_any_text_comes_back_from_a_real_vocabulary(qwen: Tokenizer, text: str) -> None:
    ids = qwen.encode(text)
    stream = qwen.stream()
    assert "".join(map(stream.push, ids)) + stream.flush() == qwen.decode(ids) == text
    assert not set(ids) & (set(qwen.special_ids.values()) | qwen.unused_ids)


def test_a_stream_holds_a_character_back_until_it_is_whole() -> None:
    stream = SMALL.stream()
    assert [stream.push(token) for token in SMALL.encode("é\U0001f642")] == ["", "é", "", "", "", "\U0001f642"]
    assert stream.flush() == ""


def test_a_stream_ends_an_incomplete_character_visibly() -> None:
    stream = SMALL.stream()
    assert [stream.push(token) for token in SMALL.encode("\U0001f642")[:3]] == ["", "", ""]
    assert stream.flush() == "\ufffd"
    assert stream.push(SMALL.encode("a")[0]) == "a"


def test_control_tokens_are_hidden_and_user_defined_ones_printed() -> None:
    ids = [SMALL.special_ids[text] for text in ("<|im_start|>", "<tool_call>", "<|im_end|>")]
    assert SMALL.decode(ids) == "<tool_call>"
    assert [SMALL.token_bytes(token) for token in ids] == [b"", b"<tool_call>", b""]


def test_the_longest_special_text_wins() -> None:
    tokenizer = Tokenizer.from_gguf(small_metadata(user_defined=("<a>", "<a><b>", "<b>")))
    assert tokenizer.encode("<a><b><a>", parse_special=True) == [tokenizer.special_ids["<a><b>"], tokenizer.special_ids["<a>"]]


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["1234", "5"]),
        ("smollm", ["1", "2", "3", "4", "5"]),
        ("qwen2", ["1", "2", "3", "4", "5"]),
        ("qwen35", ["1", "2", "3", "4", "5"]),
        ("llama-bpe", ["123", "4", "5"]),
    ],
)
def test_digits_are_cut_as_each_pre_tokenizer_says(pre: str, pieces: list[str]) -> None:
    tokenizer = Tokenizer.from_gguf(small_metadata(pre=pre, words=["1234"]))
    assert [tokenizer.decode([token]) for token in tokenizer.encode("12345")] == pieces


@pytest.mark.parametrize(("pre", "num_tokens"), [("qwen2", 4), ("qwen35", 1)])
def test_marks_belong_to_letters_in_qwen35_only(pre: str, num_tokens: int) -> None:
    word = "e\u0301x"
    spelled = "".join(byte_char(byte) for byte in word.encode())
    assert len(Tokenizer.from_gguf(small_metadata(pre=pre, words=[spelled])).encode(word)) == num_tokens


def byte_char(byte: int) -> str:
    tokens: list[str] = small_metadata()["tokenizer.ggml.tokens"]
    return tokens[byte]


@pytest.mark.parametrize(("pre", "num_tokens"), [("qwen2", 3), ("llama-bpe", 1)])
def test_llama_takes_a_piece_that_is_a_token_whatever_the_merges_say(pre: str, num_tokens: int) -> None:
    tokenizer = Tokenizer.from_gguf(small_metadata(pre=pre, whole=["xyz"]))
    assert len(tokenizer.encode("xyz")) == num_tokens


def test_padding_of_older_converters_is_unused() -> None:
    metadata = small_metadata()
    metadata["tokenizer.ggml.token_type"] = [4 if kind == 5 else kind for kind in metadata["tokenizer.ggml.token_type"]]
    assert Tokenizer.from_gguf(metadata).unused_ids == SMALL.unused_ids
    assert Tokenizer.from_gguf(metadata).special_texts == SMALL.special_texts


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(ModelError, match="lone surrogate at character 1"):
        SMALL.encode("a\ud800")


@pytest.mark.parametrize("text", [" ", "\n", " \t", "a", "'", "1"])
def test_long_runs_are_encoded_whole(text: str) -> None:
    long = text * 200_000 + "x"
    assert SMALL.decode(SMALL.encode(long)) == long


def test_align_keeps_ids_that_the_model_has_seen() -> None:
    im_end = SMALL.special_ids["<|im_end|>"]
    prompt = [SMALL.special_ids["<|im_start|>"], *SMALL.encode("assistant\n")]
    reply = [*SMALL.encode("\n"), *SMALL.encode("n"), *SMALL.encode("ame"), im_end]
    rendered = SMALL.encode("<|im_start|>assistant\n\nname<|im_end|>\n<|im_start|>user", parse_special=True)
    aligned = SMALL.align(rendered, [*prompt, *reply])
    assert rendered[: len(prompt)] != prompt
    assert aligned == [*prompt, *reply, *rendered[rendered.index(im_end) + 1 :]]
    assert SMALL.decode(aligned) == SMALL.decode(rendered)


def test_align_stops_where_the_texts_part() -> None:
    rendered, known = SMALL.encode("name the cat"), [*SMALL.encode("na"), *SMALL.encode("me the dog")]
    aligned = SMALL.align(rendered, known)
    assert aligned[: len(known) - 4] == known[:-4]
    assert SMALL.decode(aligned) == "name the cat"


def test_align_never_takes_text_for_a_special_token() -> None:
    rendered = SMALL.encode("<|im_end|>a", parse_special=True)
    assert SMALL.align(rendered, SMALL.encode("<|im_end|>a")) == rendered
    assert SMALL.align(SMALL.encode("<tool_call>"), [SMALL.special_ids["<tool_call>"]]) == SMALL.encode("<tool_call>")


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, SMALL.vocab_size - 1)), st.lists(st.integers(0, SMALL.vocab_size - 1)), st.integers(0, 20))
def test_align_never_changes_what_the_ids_stand_for(ids: list[int], other: list[int], shared: int) -> None:
    aligned = SMALL.align(ids, [*ids[:shared], *other])
    assert SMALL.decode(aligned) == SMALL.decode(ids)
    assert [token for token in aligned if token in SMALL.control_ids] == [token for token in ids if token in SMALL.control_ids]


def refused(**changes: Any) -> str:
    metadata = small_metadata()
    for key, value in changes.items():
        metadata[f"tokenizer.ggml.{key}"] = value
    with pytest.raises(ModelFileError) as caught:
        Tokenizer.from_gguf(metadata)
    return str(caught.value)


def test_unknown_kinds_are_refused_by_name() -> None:
    assert "tokenizer model 'llama'" in refused(model="llama")
    message = refused(pre="deepseek-v9")
    assert "'deepseek-v9'" in message
    assert all(name in message for name in PRE_TOKENIZERS)
    assert "None" in refused(pre=None)


def test_damaged_vocabularies_are_refused() -> None:
    tokens: list[str] = small_metadata()["tokenizer.ggml.tokens"]
    types = [int(kind) for kind in small_metadata()["tokenizer.ggml.token_type"]]
    assert "not a list of strings" in refused(tokens=None)
    assert "not a list of strings" in refused(tokens=[])
    assert "not a list of strings" in refused(tokens=[*tokens[:-1], 7])
    assert "not Unicode text" in refused(tokens=[*tokens[:-1], "\ud800"])
    assert "twice" in refused(tokens=[*tokens[:-1], tokens[0]])
    assert "no text" in refused(tokens=["", *tokens[1:]])
    assert "byte-level" in refused(tokens=["a b", *tokens[1:]])
    assert "single-byte" in refused(tokens=["zz", *tokens[1:33], "yy", *tokens[34:]])
    assert "token types" in refused(token_type=types[:-1])
    assert "token types" in refused(token_type=None)
    assert "known types" in refused(token_type=[6, *types[1:]])
    assert "known types" in refused(token_type=[-1, *types[1:]])
    assert "known types" in refused(token_type=3)
    assert "known types" in refused(token_type=["x"] * len(types))


def test_a_vocabulary_of_special_tokens_is_refused() -> None:
    with pytest.raises(ModelFileError, match="control and user-defined"):
        Tokenizer.from_gguf(small_metadata(user_defined=[f"<{i}>" for i in range(16_384)]))


@pytest.mark.parametrize("merge", ["zz yy", "a", "a ", " b", "", "n a m", "< |im_start|>", "\u2603 a"])
def test_merges_of_unknown_tokens_are_refused(merge: str) -> None:
    merges = small_metadata()["tokenizer.ggml.merges"]
    assert f"merge {len(merges)} " in refused(merges=[*merges, merge])


def test_merges_that_are_no_list_of_strings_are_refused() -> None:
    assert "tokenizer.ggml.merges" in refused(merges=None)
    assert "tokenizer.ggml.merges" in refused(merges=[1, 2])


@pytest.mark.parametrize("value", [-1, 10**9, True, "2", 1.0])
def test_special_ids_out_of_range_are_refused(value: object) -> None:
    assert "eos_token_id" in refused(eos_token_id=value)
    assert "bos_token_id" in refused(bos_token_id=value)


def test_a_vocabulary_without_an_end_is_refused() -> None:
    metadata = small_metadata()
    tokens = [text.replace("<|im_end|>", "<|x|>").replace("<|endoftext|>", "<|y|>") for text in metadata["tokenizer.ggml.tokens"]]
    assert "end-of-generation" in refused(tokens=tokens, eos_token_id=None)
