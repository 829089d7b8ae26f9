"""Few-shot Dyck prompts: complete a nested bracket string, in a style that only the demonstrations show.

A shot is `Input: ( [ { }` and, after the marker (`Output:`), the closers that are missing. The answer's *style* (what
stands between the marker and the closers, between closers, and at the end) is drawn once a prompt: without
demonstrations it can't be known, so exact match at 0 shots is bounded by guessing.

Two generators: `dyck_prompt` draws everything anew (what the bundled models were trained on); `dyck_case` makes the prompts
of the case study (SMELT 6.4): three targets whose right closer already stands in a demonstration, and one query for
every number of shots, so that shots are compared on the same targets. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from visitlens.errors import InputError
from visitlens.hooks.text.tokenizer import encoded

PAIRS = {"(": ")", "[": "]", "{": "}", "<": ">"}
SHOTS = (0, 1, 2, 4, 8)
TARGETS = 3


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
    the marker, up to and including the line end. `closers` are the positions of the answer's closing brackets,
    `targets` those that a case study asks for; `pieces [position]` is the text of each token, `lead` that of the token in
    front of them, at the segment start.
    """

    text: str
    tokens: np.ndarray
    answer: tuple[int, int]
    demonstrations: tuple[tuple[int, int], ...]
    closers: tuple[int, ...]
    shots: int
    pieces: tuple[str, ...] = ()
    targets: tuple[int, ...] = ()
    lead: str = "BOS"

    def led(self, bos: int | None) -> tuple[int, DyckPrompt]:
        """The token at the segment start, and the prompt behind it: BOS, or, of a model without one, the prompt's own first token."""
        if bos is not None:
            return bos, self

        def shifted(span: tuple[int, int]) -> tuple[int, int]:
            return span[0] - 1, span[1] - 1

        rest = replace(
            self,
            tokens=self.tokens[1:],
            answer=shifted(self.answer),
            demonstrations=tuple(map(shifted, self.demonstrations)),
            closers=tuple(at - 1 for at in self.closers),
            targets=tuple(at - 1 for at in self.targets),
            pieces=self.pieces[1:],
            lead=self.pieces[0],
        )
        return int(self.tokens[0]), rest


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
    blocks = [
        nested_brackets(
            rng, int(rng.integers(*unclosed, endpoint=True)), int(rng.integers(*closed, endpoint=True)), kinds
        )
        for _ in range(shots + 1)
    ]
    return _tokenised(blocks, drawn if style is None else style, tokenizer)


def dyck_case(
    seed: tuple[int, ...],
    tokenizer: Any,
    *,
    shots: int,
    style: AnswerStyle | None = AnswerStyle(),
    kinds: int = 4,
    depth: tuple[int, int] = (3, 4),
    length: tuple[int, int] = (3, 10),
) -> DyckPrompt:
    """One prompt of the case study. `targets` are the answer's first three closers, each of which stands in the answer of
    the demonstration next to the query; the query and the demonstrations nearest to it are the same for every `shots`.

    Args:
        style: how answers are written; None draws it.
        depth: brackets left open in each shot, which its answer closes; an inclusive range.
        length: symbols of each bracket string, as an inclusive range; never fewer than are left open.

    Raises:
        InputError: sizes out of range, or a tokenizer that merges an answer with what precedes it or closers with each other.
    """
    if not 2 <= kinds <= len(PAIRS) or shots < 0 or depth[0] < TARGETS or depth[1] < depth[0] or length[1] < length[0]:
        raise InputError(
            f"expected 2 to {len(PAIRS)} kinds, shots >= 0, a depth of at least {TARGETS} and rising ranges, "
            f"got {kinds}, {shots}, depth {depth}, length {length}"
        )
    rng = np.random.default_rng(seed)
    drawn = draw_style(rng)

    def block() -> tuple[str, str]:
        unclosed, symbols = (int(rng.integers(*bounds, endpoint=True)) for bounds in (depth, length))
        return nested_brackets(rng, unclosed, max(symbols - unclosed, 0) // 2, kinds)

    nearest = block()
    query = block()
    while not set(query[1][:TARGETS]) <= set(nearest[1]):  # at worst 1 in 64 draws fits
        query = block()
    demonstrations = [nearest, *(block() for _ in range(shots - 1))][:shots]
    prompt = _tokenised([*reversed(demonstrations), query], drawn if style is None else style, tokenizer)
    if len(prompt.closers) < len(query[1]):
        raise InputError(
            f"the tokenizer merges closing brackets of {prompt.text[-40:]!r}; choose a style with a separator that it keeps apart"
        )
    return replace(prompt, targets=prompt.closers[:TARGETS])


def missing_brackets(tokenizer: Any) -> tuple[str, ...]:
    """The brackets of `PAIRS` that the tokenizer can't spell; a Dyck prompt needs all of them."""
    brackets = [bracket for pair in PAIRS.items() for bracket in pair]
    return tuple(b for b in brackets if tokenizer.decode(encode_with_offsets(tokenizer, b)[0]).strip() != b)


def check_brackets(tokenizer: Any) -> None:
    """Raises InputError: the tokenizer has no token for some bracket, so that no Dyck prompt can be written in it."""
    if missing := missing_brackets(tokenizer):
        raise InputError(
            f"the model's tokenizer has no token for {' '.join(missing)}, so it can't read Dyck prompts: take text, or a task of "
            "your own (JSON lines; see the page on tasks)"
        )


def _tokenised(blocks: Sequence[tuple[str, str]], style: AnswerStyle, tokenizer: Any) -> DyckPrompt:
    """The shots as text and tokens, the last one the query."""
    text, spans = "", []
    for word, closers in blocks:
        text += f"Input: {word}\n{style.marker}"
        start = len(text)
        text += style.lead + style.separator.join(closers) + style.stop + "\n"
        spans.append((start, len(text)))
    ids, offsets = encode_with_offsets(tokenizer, text)
    token_spans = [_token_span(offsets, span, text) for span in spans]
    for first, stop in token_spans:
        decoded, expected = tokenizer.decode(ids[first:stop]), text[offsets[first][0] : offsets[stop - 1][1]]
        if "".join(decoded.split()) != "".join(expected.split()):
            check_brackets(tokenizer)
            check_known(tokenizer, ids, offsets, text)
            raise InputError(
                f"the tokenizer's offsets don't fit: tokens of {expected!r} decode to {decoded!r}; is its text normalised?"
            )
    *demonstrations, answer = token_spans
    pieces = tuple(text[start:stop] for start, stop in offsets)
    closing = set(PAIRS.values())
    closers_at = tuple(i for i in range(*answer) if pieces[i].strip() in closing)
    tokens = np.array(ids, dtype=np.int32)
    return DyckPrompt(text, tokens, answer, tuple(demonstrations), closers_at, len(blocks) - 1, pieces)


def encode_with_offsets(tokenizer: Any, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Token ids without special tokens, and the characters [start, stop) that each stands for.

    Takes a `tokenizers.Tokenizer`, a tokenizer of Hugging Face, or anything with `encode` and `decode`: where there are no
    offsets, they are found by decoding ever longer prefixes.

    Raises:
        InputError: the decoded prefixes don't spell the text.
    """
    if hasattr(tokenizer, "encode_batch") and hasattr(tokenizer, "get_vocab_size"):
        encoding = encoded(tokenizer, [text])[0]
        return list(encoding.ids), list(encoding.offsets)
    if getattr(tokenizer, "is_fast", False):
        batch = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return list(batch["input_ids"]), [tuple(span) for span in batch["offset_mapping"]]
    special = {"add_special_tokens": False} if hasattr(tokenizer, "bos_token_id") else {}
    ids = list(tokenizer.encode(text, **special))
    ends = [0]
    for count in range(1, len(ids) + 1):
        decoded = tokenizer.decode(ids[:count])
        if not text.startswith(decoded):
            raise InputError(
                f"the tokenizer's text {decoded[-20:]!r} isn't in {text[: len(decoded)][-20:]!r}: it has no offsets"
            )
        ends.append(len(decoded))
    return ids, list(pairwise(ends))


def check_known(tokenizer: Any, ids: Sequence[int], offsets: Sequence[tuple[int, int]], text: str) -> None:
    """Raises InputError: the tokenizer has no token but its unknown one for some part of the text."""
    unknown = getattr(getattr(tokenizer, "model", None), "unk_token", None) or getattr(tokenizer, "unk_token", None)
    if unknown is None:
        return
    find = tokenizer.token_to_id if hasattr(tokenizer, "token_to_id") else tokenizer.convert_tokens_to_ids
    number = find(str(unknown))
    missing = [text[start:stop] for token, (start, stop) in zip(ids, offsets, strict=True) if token == number]
    if missing:
        raise InputError(
            f"the model's tokenizer has no token for {', '.join(map(repr, dict.fromkeys(missing)))} in {text[:60]!r}: is "
            "this task the model's?"
        )


def _token_span(offsets: list[tuple[int, int]], span: tuple[int, int], text: str) -> tuple[int, int]:
    """Tokens whose characters lie within the span; refuses a token that straddles its start."""
    inside = [i for i, (start, stop) in enumerate(offsets) if start < span[1] and stop > span[0]]
    first, last = inside[0], inside[-1]
    if offsets[first][0] < span[0] or any(b != a + 1 for a, b in pairwise(inside)):
        raise InputError(f"the tokenizer merges the answer {text[span[0] : span[1]]!r} with the text before it")
    # A token may run on past the line end only if the answer's last character is in it.
    return first, last + 1
