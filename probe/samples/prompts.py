"""Prompts of tasks as packed tokens: which of their tokens are scored, what part each belongs to, and their corrupted twins. No torch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from visitlens.errors import InputError
from visitlens.hooks.text.encoder import TextEncoder
from visitlens.hooks.text.packed_tokens import PackedTokens
from visitlens.probe.samples.dyck_prompts import check_known, encode_with_offsets
from visitlens.probe.tasks.task_file import Example, Span

START, SCORED, OTHER = "start", "scored", "other"
"""Parts that a task file needn't name: BOS, scored tokens, and what belongs to no part."""


@dataclass(frozen=True)
class Prompt:
    """One prompt, without BOS; all arrays are [position]. `roles` are numbers from 1 on (0 is BOS's)."""

    tokens: np.ndarray
    counted: np.ndarray
    roles: np.ndarray
    corrupted: np.ndarray | None = None


@dataclass(frozen=True)
class PackedPrompts:
    """Prompts in contexts, each whole and a document of its own; arrays are [context, position], roles -1 for padding.

    `corrupted` is None if no prompt has a twin; one without has its own tokens there.
    """

    contexts: PackedTokens
    counted: np.ndarray
    roles: np.ndarray
    corrupted: np.ndarray | None


def pack_prompts(prompts: Sequence[Prompt], encoder: TextEncoder, length: int) -> PackedPrompts:
    """As many prompts in a context of `length` as fit, in order; before each what leads a text (BOS), where anything does. A token
    with nothing before it isn't predicted, so it never counts.

    Raises:
        InputError: a prompt longer than a context.
    """
    lead = [] if encoder.bos.id is None else [encoder.bos.id]
    rows: list[list[int]] = []
    room = 0
    for number, prompt in enumerate(prompts):
        need = len(prompt.tokens) + len(lead)
        if need > length:
            raise InputError(f"a prompt of {need} tokens is longer than the context of {length}; use shorter ones")
        if need > room:
            rows.append([])
            room = length
        rows[-1].append(number)
        room -= need
    used = max(2, *(sum(len(prompts[number].tokens) + len(lead) for number in row) for row in rows))
    shape = (len(rows), used)
    tokens, segments = np.full(shape, encoder.pad, dtype=np.int32), np.full(shape, -1, dtype=np.int32)
    counted, roles = np.zeros(shape, dtype=bool), np.full(shape, -1, dtype=np.int8)
    corrupted = tokens.copy()
    for row, numbers in enumerate(rows):
        at = 0
        for number in numbers:
            prompt = prompts[number]
            here = slice(at, at + len(lead) + len(prompt.tokens))
            twin = prompt.tokens if prompt.corrupted is None else prompt.corrupted
            tokens[row, here] = [*lead, *prompt.tokens]
            corrupted[row, here] = [*lead, *twin]
            segments[row, here] = number
            counted[row, here] = [*(False for _ in lead), *prompt.counted]
            counted[row, at] = False
            roles[row, here] = [*(0 for _ in lead), *prompt.roles]
            at = here.stop
    hashes = [int.from_bytes(hashlib.sha256(p.tokens.tobytes()).digest()[:8], "little") for p in prompts]
    owners = np.arange(len(prompts), dtype=np.int32)
    packed = PackedTokens(tokens, segments, owners, np.array(hashes, dtype=np.uint64))
    twins = any(prompt.corrupted is not None for prompt in prompts)
    return PackedPrompts(packed, counted, roles, corrupted if twins else None)


def role_names(examples: Sequence[Example]) -> tuple[str, ...]:
    """BOS first, the parts that the examples name in the order of their names, then what they needn't name."""
    named = sorted({name for example in examples for name in example.roles})
    return (START, *named, *(name for name in (SCORED, OTHER) if name not in named))


def tokenise(example: Example, tokenizer: Any, names: Sequence[str]) -> Prompt:
    """An example in tokens; a token counts if it holds a scored character, and belongs to the first part that it touches.

    Raises:
        InputError: the tokenizer doesn't know a part of the text, a token begins before a scored span and runs into it, or
            a corrupted twin differs in its number of tokens or in a scored token.
    """
    ids, offsets = encode_with_offsets(tokenizer, example.text)
    check_known(tokenizer, ids, offsets, example.text)
    counted = np.zeros(len(ids), dtype=bool)
    for span in example.scored:
        inside = _touching(offsets, span)
        if not inside or (offsets[inside[0]][0] < span[0] and example.text[offsets[inside[0]][0] : span[0]].strip()):
            raise InputError(
                f"the tokenizer merges {example.text[slice(*span)]!r}, which is scored, with the text before it in "
                f"{example.text[max(span[0] - 20, 0) : span[1]]!r}"
            )
        counted[inside] = True
    roles = np.full(len(ids), names.index(OTHER), dtype=np.int8)
    roles[counted] = names.index(SCORED)
    for name, spans in reversed(list(example.roles.items())):
        for span in spans:
            roles[_touching(offsets, span)] = names.index(name)
    tokens = np.array(ids, dtype=np.int32)
    return Prompt(tokens, counted, roles, _twin(example, tokenizer, tokens, counted))


def _twin(example: Example, tokenizer: Any, tokens: np.ndarray, counted: np.ndarray) -> np.ndarray | None:
    if example.corrupted is None:
        return None
    ids, offsets = encode_with_offsets(tokenizer, example.corrupted)
    check_known(tokenizer, ids, offsets, example.corrupted)
    twin = np.array(ids, dtype=np.int32)
    if len(twin) != len(tokens):
        raise InputError(
            f"a corrupted twin needs as many tokens as its text: {example.corrupted[-60:]!r} has {len(twin)}, "
            f"{example.text[-60:]!r} {len(tokens)}"
        )
    if (twin != tokens)[counted].any():
        raise InputError(
            f"a corrupted twin must end in the same scored tokens: {example.corrupted[-60:]!r} against {example.text[-60:]!r}"
        )
    return twin


def _touching(offsets: Sequence[Span], span: Span) -> list[int]:
    return [i for i, (start, stop) in enumerate(offsets) if start < span[1] and stop > span[0]]
