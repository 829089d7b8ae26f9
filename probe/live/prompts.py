"""Prompts for a live run: token ids within a limit, few-shot Dyck presets. No torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from visitlens.errors import InputError
from visitlens.hooks.text.encoder import TextEncoder
from visitlens.hooks.text.tokenizer import Tokenizer, encoded
from visitlens.probe.samples.dyck_prompts import SHOTS, dyck_case

TOKEN_LIMIT = 512
"""Default limit of a live run, BOS included: the longest prompt whose maps are drawn cell by cell."""
CHARACTERS_PER_TOKEN = 64
"""A prompt above limit * this many characters is refused before it is tokenised."""
_MIXED = 11  # a seed whose query closes three different brackets


def prompt_ids(prompt: str, encoder: TextEncoder, limit: int) -> np.ndarray:
    """Token ids [token] of a prompt within a limit, led as every text is.

    Raises:
        InputError: an empty prompt, one above the limit (the message says by how much), half of a surrogate pair.
    """
    if not prompt:
        raise InputError("the prompt is empty: type or paste some text")
    if len(prompt) > limit * CHARACTERS_PER_TOKEN:
        raise InputError(
            f"the prompt has {len(prompt):,} characters; at most {limit:,} tokens are run, which is about "
            f"{4 * limit:,} characters of English: paste a part of it"
        )
    ids = np.array(encoder.prompt(prompt), dtype=np.int64)
    if not len(ids):
        raise InputError("the prompt has no token, and this model has none that leads a text: type or paste some text")
    if len(ids) > limit:
        raise InputError(
            f"the prompt has {len(ids):,} tokens{' with BOS' * (encoder.bos.id is not None)}; the limit is {limit:,}: shorten it by "
            f"{len(ids) - limit:,}"
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


def dyck_presets(tokenizer: Tokenizer, seed: int = _MIXED, *, led: bool = True) -> tuple[DyckPreset, ...]:
    """One prompt each at 0, 1, 2, 4 and 8 shots, all with the same query; the same for the same seed. `led`: whether a
    token leads a prompt, which spans count.

    Raises:
        InputError: a tokenizer that merges answers with what stands before them.
    """
    presets = []
    for shots in SHOTS:
        prompt = dyck_case((seed,), tokenizer, shots=shots)
        at = prompt.targets[0]
        text = "".join(prompt.pieces[:at])
        if list(prompt.tokens[:at]) != encoded(tokenizer, [text])[0].ids:
            raise InputError(f"the tokenizer reads {text[-20:]!r} differently at the end of a prompt")
        spans = tuple((start + led, stop + led) for start, stop in prompt.demonstrations)
        presets.append(DyckPreset(shots, text, int(prompt.tokens[at]), spans))
    return tuple(presets)
