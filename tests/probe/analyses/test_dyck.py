"""Bracket prompts: balanced words, exact spans, the same prompt for the same seed."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from visitlens.errors import InputError
from visitlens.probe.samples.dyck_prompts import (
    LEADS,
    MARKERS,
    PAIRS,
    SEPARATORS,
    STOPS,
    AnswerStyle,
    draw_style,
    dyck_case,
    dyck_prompt,
    nested_brackets,
)

SIZES = st.integers(0, 12)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Byte-level BPE with brackets on their own, trained on a few words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[()\[\]{}<>]"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(
        ["Input: ( [\nOutput: ] )\n", "Answer: = | / + ; and end.\nResult: !\n"] * 20, trainer
    )
    return tokenizer


# Words


@given(seed=st.integers(0, 2**32), unclosed=SIZES, closed=SIZES, kinds=st.integers(2, 4))
def test_a_word_and_its_closers_are_balanced_and_the_word_lacks_exactly_them(
    seed: int, unclosed: int, closed: int, kinds: int
) -> None:
    word, closers = nested_brackets(np.random.default_rng(seed), unclosed, closed, kinds)
    symbols = word.split()
    assert word == " ".join(symbols) and all(len(s) == 1 for s in symbols)
    assert len(symbols) == unclosed + 2 * closed and len(closers) == unclosed
    stack: list[str] = []
    for symbol in symbols:
        if symbol in PAIRS:
            stack.append(symbol)
        else:
            assert PAIRS[stack.pop()] == symbol  # every closer closes the last that is open
    assert len(stack) == unclosed
    for closer in closers:
        assert PAIRS[stack.pop()] == closer
    assert not stack
    assert {s for s in symbols if s in PAIRS} <= set(list(PAIRS)[:kinds])


def test_words_vary_in_shape_and_kinds() -> None:
    rng = np.random.default_rng(0)
    words = [nested_brackets(rng, 2, 2, 4)[0] for _ in range(300)]
    assert len(set(words)) > 100
    assert {w[0] for w in words} == set(PAIRS)
    shapes = {"".join("o" if s in PAIRS else "c" for s in w.split()) for w in words}
    # 4 opens and 2 closes, no prefix with more closes than opens: C(6, 2) - C(6, 1) = 9 of them.
    assert len(shapes) == 9


# Prompts


@pytest.mark.parametrize("shots", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("style", [None, AnswerStyle(), AnswerStyle("Result:", "", "", ""), AnswerStyle(lead="\n")])
def test_spans_decode_to_exactly_the_answers(shots: int, style: AnswerStyle | None, tokenizer: Tokenizer) -> None:
    for index in range(15):
        prompt = dyck_prompt((5, index), tokenizer, shots=shots, style=style)
        used = style or draw_style(np.random.default_rng((5, index)))
        assert prompt.shots == shots == len(prompt.demonstrations)
        assert tokenizer.decode(prompt.tokens.tolist(), skip_special_tokens=False) == prompt.text
        blocks = prompt.text.split("Input: ")[1:]
        assert len(blocks) == shots + 1
        for block, span in zip(blocks, (*prompt.demonstrations, prompt.answer), strict=True):
            word, answer = block.split(f"\n{used.marker}", 1)
            stack: list[str] = []
            for symbol in word.split():
                stack.append(PAIRS[symbol]) if symbol in PAIRS else stack.pop()
            expected = used.lead + used.separator.join(reversed(stack)) + used.stop + "\n"
            assert answer == expected
            assert tokenizer.decode(prompt.tokens[slice(*span)].tolist()) == expected
        assert prompt.answer[1] == len(prompt.tokens)
        spans = [*prompt.demonstrations, prompt.answer]
        assert all(a[1] < b[0] for a, b in itertools.pairwise(spans))


def test_closer_positions_are_the_answers_closing_brackets_in_order(tokenizer: Tokenizer) -> None:
    for index in range(40):
        prompt = dyck_prompt((1, index), tokenizer, shots=index % 3)
        symbols = [tokenizer.decode([int(prompt.tokens[i])]).strip() for i in prompt.closers]
        answer = tokenizer.decode(prompt.tokens[slice(*prompt.answer)].tolist())
        assert symbols == [c for c in answer if c in PAIRS.values()]
        assert 2 <= len(symbols) <= 4
        assert all(prompt.answer[0] <= i < prompt.answer[1] for i in prompt.closers)


def test_the_same_seed_gives_the_same_prompt_and_another_seed_another(tokenizer: Tokenizer) -> None:
    def text(*seed: int, **options: Any) -> str:
        return dyck_prompt(seed, tokenizer, shots=2, **options).text

    assert text(1, 2) == text(1, 2)
    assert len({text(1, i) for i in range(50)}) == 50
    assert text(1, 2) != text(2, 1)


def test_a_given_style_changes_the_answers_only(tokenizer: Tokenizer) -> None:
    drawn, given_style = (dyck_prompt((3, 4), tokenizer, shots=3, style=s) for s in (None, AnswerStyle("Output:", " ")))
    words = [[line for line in p.text.split("\n") if line.startswith("Input:")] for p in (drawn, given_style)]
    assert words[0] == words[1]


def test_styles_vary_over_every_choice() -> None:
    styles = [draw_style(np.random.default_rng((0, i))) for i in range(400)]
    for name, choices in (("marker", MARKERS), ("lead", LEADS), ("separator", SEPARATORS), ("stop", STOPS)):
        assert {getattr(s, name) for s in styles} == set(choices), name


def test_sizes_are_inclusive_ranges(tokenizer: Tokenizer) -> None:
    prompts = [dyck_prompt((0, i), tokenizer, shots=0, unclosed=(1, 3), closed=(0, 2)) for i in range(120)]
    assert {len(p.closers) for p in prompts} == {1, 2, 3}
    words = [p.text.split("\n")[0].removeprefix("Input: ").split() for p in prompts]
    assert {sum(s not in PAIRS for s in w) for w in words} == {0, 1, 2}
    two_kinds = dyck_prompt((0, 0), tokenizer, shots=8, kinds=2)
    assert not set("{}<>") & set(two_kinds.text)


@pytest.mark.parametrize(
    "options", [{"shots": -1}, {"shots": 0, "kinds": 1}, {"shots": 0, "kinds": 5}, {"shots": 0, "unclosed": (0, 2)}]
)
def test_impossible_sizes_are_refused(options: dict, tokenizer: Tokenizer) -> None:
    with pytest.raises(InputError, match="expected 2 to 4 kinds, shots >= 0 and unclosed >= 1"):
        dyck_prompt((0,), tokenizer, **options)


def test_a_tokenizer_that_merges_the_answer_with_the_marker_is_refused() -> None:
    whole_words = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    whole_words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    with pytest.raises(InputError, match=r"merges the answer .* with the text before it"):
        dyck_prompt((0,), whole_words, shots=0, style=AnswerStyle(lead=""))


# The case study's prompts


@given(seed=st.integers(0, 2**32), shots=st.sampled_from([0, 1, 2, 4, 8]), kinds=st.integers(2, 4), drawn=st.booleans())
def test_each_target_closes_its_bracket_and_stands_in_the_nearest_demonstration(
    seed: int, shots: int, kinds: int, drawn: bool, tokenizer: Tokenizer
) -> None:
    style = None if drawn else AnswerStyle()
    prompt = dyck_case((seed,), tokenizer, shots=shots, kinds=kinds, style=style)
    assert prompt.shots == shots == len(prompt.demonstrations) and len(prompt.targets) == 3
    word = prompt.text.split("Input: ")[-1].split("\n")[0]
    stack: list[str] = []
    for symbol in word.split():
        stack.append(PAIRS[symbol]) if symbol in PAIRS else stack.pop()
    expected = list(reversed(stack))[:3]
    assert [prompt.pieces[at].strip() for at in prompt.targets] == expected
    if shots:
        nearest = "".join(prompt.pieces[slice(*prompt.demonstrations[-1])])
        assert set(expected) <= set(nearest) and max(prompt.demonstrations[-1]) < min(prompt.targets)
        assert all(closer in prompt.text[: prompt.text.rindex("Input:")] for closer in expected)


def test_the_query_and_the_nearest_demonstrations_are_the_same_for_every_number_of_shots(tokenizer: Tokenizer) -> None:
    texts = [dyck_case((4,), tokenizer, shots=k).text for k in (0, 1, 2, 4, 8)]
    assert all(longer.endswith(shorter) for shorter, longer in itertools.pairwise(texts))
    assert [text.count("Input:") for text in texts] == [1, 2, 3, 5, 9]


def test_depth_and_length_are_inclusive_ranges(tokenizer: Tokenizer) -> None:
    prompts = [dyck_case((i,), tokenizer, shots=1, depth=(3, 5), length=(3, 9)) for i in range(80)]
    words = [
        line.removeprefix("Input: ").split() for p in prompts for line in p.text.split("\n") if line[:6] == "Input:"
    ]
    assert {len(p.closers) for p in prompts} == {3, 4, 5}
    assert max(len(word) for word in words) <= 9 and min(len(word) for word in words) == 3


class Slow:
    """A tokenizer without offsets: characters, or runs of them; it can also lie."""

    def __init__(self, upper: bool = False) -> None:
        self.upper = upper

    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids)).upper() if self.upper else "".join(map(chr, ids))


def test_any_tokenizer_gives_the_same_answers(tokenizer: Tokenizer) -> None:
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    expected = dyck_case((9,), tokenizer, shots=2)
    for other in (fast, Slow()):
        prompt = dyck_case((9,), other, shots=2)
        assert prompt.text == expected.text
        for one, two in zip(
            (*expected.demonstrations, expected.answer), (*prompt.demonstrations, prompt.answer), strict=True
        ):
            assert "".join(expected.pieces[slice(*one)]) == "".join(prompt.pieces[slice(*two)])
        assert [prompt.pieces[at] for at in prompt.targets] == [expected.pieces[at] for at in expected.targets]
    with pytest.raises(InputError, match="no token for"):  # every word is `?`
        dyck_case((9,), words, shots=1)
    normalised = Tokenizer.from_str(tokenizer.to_str())
    normalised.normalizer = normalizers.Lowercase()
    with pytest.raises(InputError, match="offsets don't fit"):
        dyck_case((9,), normalised, shots=1, style=AnswerStyle(stop=" END"))
    with pytest.raises(InputError, match="it has no offsets"):
        dyck_case((9,), Slow(upper=True), shots=1)


def test_a_tokenizer_that_merges_closers_is_refused() -> None:
    merging = Tokenizer(models.BPE())
    merging.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    merging.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet)
    merging.train_from_iterator([")]}>", "])>}", "}])>"] * 50, trainer)
    with pytest.raises(InputError, match="merges"):
        for seed in range(40):
            dyck_case((seed,), merging, shots=1, style=AnswerStyle(lead=" ", separator=""))


@pytest.mark.parametrize(
    "options", [{"shots": -1}, {"shots": 0, "kinds": 5}, {"shots": 0, "depth": (2, 4)}, {"shots": 1, "length": (9, 3)}]
)
def test_impossible_cases_are_refused(options: dict, tokenizer: Tokenizer) -> None:
    with pytest.raises(InputError, match="a depth of at least 3"):
        dyck_case((0,), tokenizer, **options)
