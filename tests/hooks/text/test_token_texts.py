"""How tokens are written: spaces of the piece itself, characters whole, right-to-left text in its order."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models

from visitlens.hooks.text.token_texts import CONTINUED, TokenTexts, byte_alphabet
from visitlens.probe.drawing.theme import token_text


def byte_level(*merged: str) -> Tokenizer:
    """One token a byte, and such pieces as are given by their bytes."""
    of = {byte: letter for letter, byte in byte_alphabet().items()}
    pieces = ["".join(of[byte] for byte in piece.encode()) for piece in merged]
    words = [*sorted(byte_alphabet()), *pieces]
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>"])
    return tokenizer


def ids(tokenizer: Tokenizer, *pieces: bytes) -> list[int]:
    of = {byte: letter for letter, byte in byte_alphabet().items()}
    found = [tokenizer.token_to_id("".join(of[byte] for byte in piece)) for piece in pieces]
    assert None not in found
    return found  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("character", ["🙂", "本", "é", "ש"], ids=["emoji", "Chinese", "Latin", "Hebrew"])
def test_a_character_of_several_tokens_stands_at_its_first(character: str) -> None:
    tokenizer = byte_level()
    single = [bytes([byte]) for byte in f"a{character}b".encode()]
    rest = len(character.encode()) - 1
    assert TokenTexts(tokenizer).sequence(ids(tokenizer, *single)) == ["a", character, *[CONTINUED] * rest, "b"]


def test_a_token_that_ends_one_character_and_goes_on_shows_both() -> None:
    tokenizer = byte_level("b c")
    spread = ids(tokenizer, b" ", b"\xc3") + ids(tokenizer, b"\xa9", b"b c")
    assert TokenTexts(tokenizer).sequence(spread) == [" ", "é", CONTINUED, "b c"]


def test_bytes_that_are_no_character_are_shown_as_bytes() -> None:
    tokenizer = byte_level()
    texts = TokenTexts(tokenizer)
    e6, x97, a = ids(tokenizer, b"\xe6", b"\x97", b"a")
    assert texts.sequence([e6, x97]) == ["⟨E6⟩", "⟨97⟩"] and texts.sequence([e6, a]) == ["⟨E6⟩", "a"]
    assert texts(e6) == "⟨E6⟩"


def test_special_tokens_and_ids_that_the_tokenizer_lacks_have_a_text_and_part_characters() -> None:
    tokenizer = byte_level()
    texts = TokenTexts(tokenizer)
    c3, a9 = ids(tokenizer, b"\xc3", b"\xa9")
    assert texts.sequence([256, c3, 256, a9]) == ["<bos>", "⟨C3⟩", "<bos>", "⟨A9⟩"]
    assert texts(999) == "⟨999⟩"


def sentencepiece() -> Tokenizer:
    """As Llama's: `▁` for a space, unknown characters as bytes."""
    words = ["<unk>", "▁the", "the", "▁", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def test_spaces_of_sentencepiece_come_from_the_piece_and_its_bytes_are_joined() -> None:
    tokenizer = sentencepiece()
    texts = TokenTexts(tokenizer)
    assert texts(1) == " the" and texts(2) == "the" and texts.sequence([1, 2, 3]) == [" the", "the", " "]
    emoji = [4 + byte for byte in "🙂".encode()]
    assert texts.sequence([2, *emoji, 1]) == ["the", "🙂", *[CONTINUED] * 3, " the"]
    assert texts(emoji[0]) == "⟨F0⟩"


def test_other_ways_of_writing_pieces() -> None:
    for decoder, piece, text in (
        (decoders.Metaspace(), "▁the", " the"),
        (decoders.BPEDecoder(suffix="</w>"), "the</w>", "the "),
        (decoders.WordPiece(), "##ing", "##ing"),
        (None, "the", "the"),
    ):
        tokenizer = Tokenizer(models.WordLevel({piece: 0}, unk_token=piece))
        if decoder is not None:
            tokenizer.decoder = decoder
        assert TokenTexts(tokenizer)(0) == text, decoder


def test_a_tokenizer_without_pieces_is_asked_to_decode() -> None:
    class Decodes:
        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            return f"w{ids[0]}"

    assert TokenTexts(Decodes()).sequence([1, 2]) == ["w1", "w2"]


def test_right_to_left_text_turns_nothing_beside_it() -> None:
    assert f"12 {token_text(' שלום')}" == "12 \u2068␣שלום\u2069"
    assert token_text(" a\n") == "␣a↵"
