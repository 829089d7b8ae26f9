"""Prompts for a live run: token ids within a limit, how a token is shown, few-shot Dyck presets. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from visitlens.errors import InputError
from visitlens.probe.samples.dyck_prompts import SHOTS, dyck_case

TOKEN_LIMIT = 512
"""Default limit of a live run, BOS included: the longest prompt whose maps are drawn cell by cell."""
CHARACTERS_PER_TOKEN = 64
"""A prompt above limit * this many characters is refused before it is tokenised."""


_MIXED = 11  # a seed whose query closes three different brackets


class TokenTexts:
    """Token id -> its text, as the tokenizer writes it; bytes that are no whole character show as `⟨E6 97⟩`."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, str] = {}

    def __call__(self, token: int) -> str:
        token = int(token)
        if token not in self._known:
            self._known[token] = self._read(token)
        return self._known[token]

    def _read(self, token: int) -> str:
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        if text and "\ufffd" not in text:
            return text
        written = self._tokenizer.id_to_token(token)
        if written is None:
            return f"⟨{token}⟩"  # an id that the model has and the tokenizer hasn't
        if set(written) <= set(byte_alphabet()):
            return f"⟨{' '.join(f'{byte_alphabet()[c]:02X}' for c in written)}⟩"
        return written


@cache
def byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE (GPT-2): printable Latin-1 stands for itself, the rest is moved to 256 and on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(moved)}


def encode(text: str, tokenizer: Any, bos: int, limit: int) -> np.ndarray:
    """Token ids [token] of a prompt, BOS first (and only once).

    Raises:
        InputError: an empty prompt, or one above the limit (the message says by how much).
    """
    if not text:
        raise InputError("the prompt is empty: type or paste some text")
    if len(text) > limit * CHARACTERS_PER_TOKEN:
        raise InputError(
            f"the prompt has {len(text):,} characters; at most {limit:,} tokens are run, which is about "
            f"{4 * limit:,} characters of English: paste a part of it"
        )
    ids = np.array(tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int64)
    if not len(ids) or ids[0] != bos:
        ids = np.concatenate([[bos], ids])
    if len(ids) > limit:
        raise InputError(
            f"the prompt has {len(ids):,} tokens with BOS; the limit is {limit:,}: shorten it by {len(ids) - limit:,}"
        )
    return ids


@dataclass(frozen=True)
class DyckPreset:
    """A Dyck prompt up to the first closing bracket of its answer.

    `target` is the token that closes it; `demonstrations` are the earlier answers, as token spans [start, stop) of the
    encoded prompt, BOS counted.
    """

    shots: int
    text: str
    target: int
    demonstrations: tuple[tuple[int, int], ...]

    @property
    def name(self) -> str:
        return f"Dyck, {self.shots} shot{'' if self.shots == 1 else 's'}"


def dyck_presets(tokenizer: Any, seed: int = _MIXED) -> tuple[DyckPreset, ...]:
    """One prompt each at 0, 1, 2, 4 and 8 shots, all with the same query; the same for the same seed.

    Raises:
        InputError: a tokenizer that merges answers with what stands before them.
    """
    presets = []
    for shots in SHOTS:
        prompt = dyck_case((seed,), tokenizer, shots=shots)
        at = prompt.targets[0]
        text = "".join(prompt.pieces[:at])
        if list(prompt.tokens[:at]) != tokenizer.encode(text, add_special_tokens=False).ids:
            raise InputError(f"the tokenizer reads {text[-20:]!r} differently at the end of a prompt")
        spans = tuple((start + 1, stop + 1) for start, stop in prompt.demonstrations)
        presets.append(DyckPreset(shots, text, int(prompt.tokens[at]), spans))
    return tuple(presets)
