"""Few-shot Dyck prompts: complete a nested bracket string, in a style that only the demonstrations show.

A shot is `Input: ( [ { }` and, after the marker (`Output:`), the closers that are missing. The answer's *style* (what
stands between the marker and the closers, between closers, and at the end) is drawn once a prompt: without
demonstrations it can't be known, so exact match at 0 shots is bounded by guessing.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from visitlens.kernels.errors import InputError

PAIRS = {"(": ")", "[": "]", "{": "}", "<": ">"}
SHOTS = (0, 1, 2, 4, 8)


@dataclass(frozen=True)
class AnswerStyle:
    """How an answer is written: `marker + lead + separator.join(closers) + stop`."""

    marker: str = "Output:"
    lead: str = " "
    separator: str = " "
    stop: str = ""


MARKERS = ("Output:", "Answer:", "Result:")
LEADS = ("", " ", "\n", " = ")
SEPARATORS = ("", " ", ", ", " | ", "/", " + ", "; ", " and ")
STOPS = ("", ".", " end", "!")


@dataclass(frozen=True)
class DyckPrompt:
    """A tokenised prompt, its answer included.

    `tokens [position]` without BOS; `answer` and each of `demonstrations` are token spans [start, stop): what follows
    the marker, up to and including the line end. `closers` are the positions of the answer's closing brackets.
    """

    text: str
    tokens: np.ndarray
    answer: tuple[int, int]
    demonstrations: tuple[tuple[int, int], ...]
    closers: tuple[int, ...]
    shots: int


def nested_brackets(rng: np.random.Generator, unclosed: int, closed: int, kinds: int) -> tuple[str, str]:
    """A prefix of a Dyck word with `unclosed` open brackets and `closed` matched pairs, and the closers it lacks."""
    stack: list[str] = []
    word: list[str] = []
    opens, closes = unclosed + closed, closed
    openers = list(PAIRS)[:kinds]
    while opens or closes:
        # Closing is possible while the stack is not empty; the draw is by what is left of each.
        if closes and stack and rng.random() < closes / (opens + closes):
            word.append(PAIRS[stack.pop()])
            closes -= 1
        elif opens:
            stack.append(openers[rng.integers(kinds)])
            word.append(stack[-1])
            opens -= 1
        else:
            word.append(PAIRS[stack.pop()])
            closes -= 1
    return " ".join(word), "".join(PAIRS[opener] for opener in reversed(stack))


def draw_style(rng: np.random.Generator) -> AnswerStyle:
    return AnswerStyle(*(str(rng.choice(choices)) for choices in (MARKERS, LEADS, SEPARATORS, STOPS)))


def dyck_prompt(
    seed: tuple[int, ...],
    tokenizer: Any,
    *,
    shots: int,
    style: AnswerStyle | None = None,
    kinds: int = 4,
    unclosed: tuple[int, int] = (2, 4),
    closed: tuple[int, int] = (0, 3),
) -> DyckPrompt:
    """One prompt, the same for the same seed. `style=None` draws it; `unclosed` and `closed` are inclusive ranges.

    Raises:
        InputError: sizes out of range, or a tokenizer that merges the answer with what precedes its span.
    """
    if not 2 <= kinds <= len(PAIRS) or shots < 0 or unclosed[0] < 1:
        raise InputError(
            f"expected 2 to {len(PAIRS)} kinds, shots >= 0 and unclosed >= 1, got {kinds}, {shots}, {unclosed}"
        )
    rng = np.random.default_rng(seed)
    drawn = draw_style(rng)
    style = drawn if style is None else style
    text, spans = "", []
    for _ in range(shots + 1):
        word, closers = nested_brackets(
            rng, int(rng.integers(*unclosed, endpoint=True)), int(rng.integers(*closed, endpoint=True)), kinds
        )
        text += f"Input: {word}\n{style.marker}"
        start = len(text)
        text += style.lead + style.separator.join(closers) + style.stop + "\n"
        spans.append((start, len(text)))
    encoding = tokenizer.encode(text, add_special_tokens=False)
    offsets = encoding.offsets
    token_spans = [_token_span(offsets, span, text) for span in spans]
    *demonstrations, answer = token_spans
    closing = set(PAIRS.values())
    closers_at = tuple(i for i in range(*answer) if text[offsets[i][0] : offsets[i][1]].strip() in closing)
    tokens = np.array(encoding.ids, dtype=np.int32)
    return DyckPrompt(text, tokens, answer, tuple(demonstrations), closers_at, shots)


def _token_span(offsets: list[tuple[int, int]], span: tuple[int, int], text: str) -> tuple[int, int]:
    """Tokens whose characters lie within the span; refuses a token that straddles its start."""
    inside = [i for i, (start, stop) in enumerate(offsets) if start < span[1] and stop > span[0]]
    first, last = inside[0], inside[-1]
    if offsets[first][0] < span[0] or any(b != a + 1 for a, b in pairwise(inside)):
        raise InputError(f"the tokenizer merges the answer {text[span[0] : span[1]]!r} with the text before it")
    # A token may run on past the line end only if the answer's last character is in it.
    return first, last + 1
