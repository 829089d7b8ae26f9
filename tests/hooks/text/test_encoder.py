"""Texts to token ids: one rule for what leads a document, on a copy of the tokenizer without what it carries."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from visitlens.errors import CheckpointError, InputError
from visitlens.hooks.text.encoder import TextEncoder
from visitlens.hooks.text.tokenizer import own_tokenizer, read_tokenizer

WORDS = ["!", "<bos>", "<eos>", "<pad>", "a", "b", "c", "d"]


def words(special: bool = True) -> Tokenizer:
    """One id a word: `!` is 0, BOS 1, EOS 2, padding 3."""
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="!"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if special:
        tokenizer.add_special_tokens(["<bos>", "<eos>", "<pad>"])
    return tokenizer


def config(**ids: int | None) -> Any:
    return SimpleNamespace(**{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3, "vocab_size": 8, **ids})


NONE = config(bos_token_id=None, eos_token_id=None, pad_token_id=None)


def ids(encoder: TextEncoder, *texts: str) -> list[list[int]]:
    return [document.tolist() for document in encoder.documents(texts).ids]


# What a tokenizer carries


def carrying() -> Tokenizer:
    tokenizer = words()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(pad_id=3, pad_token="<pad>", length=6)
    return tokenizer


def test_truncation_and_padding_stored_in_a_file_act_on_no_text(tmp_path: Any) -> None:
    carrying().save(str(tmp_path / "tokenizer.json"))
    encoder = TextEncoder.of(read_tokenizer(tmp_path / "tokenizer.json"), config())
    assert ids(encoder, "a b c d", "a") == [[1, 4, 5, 6, 7, 2], [1, 4, 2]]
    assert encoder.prompt("a b c d") == [1, 4, 5, 6, 7]


def test_what_the_callers_tokenizer_carries_acts_on_no_text_and_stays_on_it() -> None:
    given = carrying()
    encoder = TextEncoder.of(given, config())
    assert encoder.prompt("a b c d") == [1, 4, 5, 6, 7]
    assert given.truncation["max_length"] == 2 and given.padding["length"] == 6
    given.enable_truncation(1)  # as a later call of one of transformers does
    assert encoder.prompt("a b c d") == [1, 4, 5, 6, 7]


def test_a_call_of_a_transformers_tokenizer_leaves_nothing_behind() -> None:
    fast = pytest.importorskip("transformers").PreTrainedTokenizerFast
    given = fast(tokenizer_object=words(), bos_token="<bos>", eos_token="<eos>", pad_token="<pad>")
    given(["a b c d", "a"], truncation=True, max_length=2, padding=True)
    assert TextEncoder.of(given, config()).prompt("a b c d") == [1, 4, 5, 6, 7]
    assert given("a b c d", truncation=True, max_length=2)["input_ids"] == [4, 5]


def test_what_is_no_tokenizer_is_refused(tmp_path: Any) -> None:
    with pytest.raises(InputError, match="expected the model's tokenizer"):
        own_tokenizer("gpt2")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="not a readable tokenizer file"):
        read_tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(CheckpointError, match="no such file"):
        read_tokenizer(tmp_path / "nothing.json")


# What leads and what closes


def test_the_configurations_tokens_stand_at_the_ends_of_a_document() -> None:
    encoder = TextEncoder.of(words(), config())
    assert ids(encoder, "a b") == [[1, 4, 5, 2]]
    assert str(encoder) == (
        "led by <bos> (1): the configuration's bos_token_id; closed by <eos> (2): the configuration's eos_token_id"
    )
    assert encoder.warnings == []


@pytest.mark.parametrize(
    ("given", "expected"),
    [(NONE, [4, 5]), (config(bos_token_id=None), [4, 5, 2]), (config(eos_token_id=None), [1, 4, 5])],
    ids=["neither", "EOS alone", "BOS alone"],
)
def test_a_token_that_neither_configuration_nor_tokenizer_knows_is_not_made_up(given: Any, expected: list[int]) -> None:
    encoder = TextEncoder.of(words(), given)
    assert ids(encoder, "a b") == [expected]
    missing = "bos" if encoder.bos.id is None else "eos"
    assert f"the configuration has no {missing}_token_id, and the tokenizer itself puts none" in str(encoder)


def test_token_0_leads_where_the_configuration_says_0() -> None:
    assert ids(TextEncoder.of(words(), config(bos_token_id=0, eos_token_id=0)), "a") == [[0, 4, 0]]


def test_what_the_tokenizer_itself_puts_around_a_text_is_taken_where_the_configuration_is_silent() -> None:
    tokenizer = words()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 2)]
    )
    encoder = TextEncoder.of(tokenizer, NONE)
    assert ids(encoder, "a b") == [[1, 4, 5, 2]] and "the tokenizer puts it in front" in encoder.bos.why
    other = TextEncoder.of(tokenizer, config(bos_token_id=3))
    assert ids(other, "a") == [[3, 4, 2]], "the configuration goes first"
    assert other.bos.why == "the configuration's bos_token_id, the tokenizer itself puts token 1 in front"


@pytest.mark.parametrize(
    ("bos", "expected"), [("none", [4, 2]), ("<pad>", [3, 4, 2]), ("0", [0, 4, 2]), (0, [0, 4, 2]), ("", [1, 4, 2])]
)
def test_what_leads_can_be_said(bos: str | int, expected: list[int]) -> None:
    assert ids(TextEncoder.of(words(), config(), bos=bos), "a") == [expected]


@pytest.mark.parametrize("bos", ["<s>", "8", -1, "-1"])
def test_what_leads_must_be_a_token(bos: str | int) -> None:
    with pytest.raises(InputError, match=r"expected a leading token as an id in 0\.\.7, the name"):
        TextEncoder.of(words(), config(), bos=bos)


def test_a_configurations_token_that_the_tokenizer_lacks_is_refused_and_can_be_said() -> None:
    with pytest.raises(
        InputError, match=r"bos_token_id 99 is no token of the tokenizer, which has 8: is it this model's\?"
    ):
        TextEncoder.of(words(), config(bos_token_id=99))
    assert ids(TextEncoder.of(words(), config(bos_token_id=99), bos="none"), "a") == [[4, 2]]
    encoder = TextEncoder.of(words(), config(eos_token_id=99))
    assert encoder.warnings == [
        "the closing token 99 (the configuration's eos_token_id) is no token of the tokenizer: is it this model's tokenizer?"
    ]


def test_an_ordinary_token_that_leads_is_warned_of() -> None:
    (warning,) = TextEncoder.of(words(), config(bos_token_id=0)).warnings
    assert warning == (
        "the leading token is '!' (0; the configuration's bos_token_id), an ordinary token of text: what is measured at segment "
        "starts is this token's; --bos says what leads"
    )
    assert TextEncoder.of(words(special=False), config()).warnings == [], "written as special tokens are"


@pytest.mark.parametrize("text", ["<bos> a b", "a b"])
def test_bos_stands_once_also_where_the_text_begins_with_it(text: str) -> None:
    encoder = TextEncoder.of(words(), config())
    assert encoder.prompt(text) == [1, 4, 5] and ids(encoder, text) == [[1, 4, 5, 2]]


# Texts


def test_empty_documents_are_left_out_counted_and_said() -> None:
    found = TextEncoder.of(words(), config()).documents(["a", "", " \n", "b", "c"])
    assert [d.tolist() for d in found.ids] == [[1, 4, 2], [1, 5, 2], [1, 6, 2]] and found.kept == [0, 3, 4]
    assert found.empty == 2 and found.notes == ["empty: 2 of 5 documents have no token and are left out"]


def test_more_documents_than_are_encoded_at_once_keep_their_order() -> None:
    found = TextEncoder.of(words(), config()).documents(["a"] * 1500 + ["", "b"])
    assert len(found.ids) == 1501 and found.ids[-1].tolist() == [1, 5, 2] and found.kept[-1] == 1501


def test_special_tokens_written_out_are_tokens_or_text_as_asked_and_said() -> None:
    tokenizer = words()
    found = TextEncoder.of(tokenizer, config()).documents(["a <eos> b", "c"])
    assert found.ids[0].tolist() == [1, 4, 2, 5, 2]
    assert found.notes == [
        "special tokens: 1 document holds some written out, taken as tokens; --special-as-text takes them as text"
    ]
    as_text = TextEncoder.of(tokenizer, config(), special_as_text=True)
    tokenizer_of_bytes = byte_level()
    literal = TextEncoder.of(tokenizer_of_bytes, config(), special_as_text=True)
    assert len(literal.ids("<eos>")) == 5 and TextEncoder.of(tokenizer_of_bytes, config()).ids("<eos>") == [257]
    assert as_text.documents(["a <eos>"]).notes == [] and as_text.to_dict()["special_as_text"] is True
    assert tokenizer.encode_special_tokens is False, "the caller's object stays as it is"


def byte_level() -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: at for at, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    return tokenizer


@pytest.mark.parametrize(
    "read", [lambda e, t: e.prompt(t), lambda e, t: e.documents(["a", t])], ids=["a prompt", "documents"]
)
def test_half_of_a_surrogate_pair_is_one_error_that_names_it(read: Callable[[TextEncoder, str], Any]) -> None:
    with pytest.raises(InputError, match=r"half of a surrogate pair \(\\ud83d at character 2\)"):
        read(TextEncoder.of(words(), config()), "a \ud83d")
