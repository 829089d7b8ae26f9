"""What every task's generator gives: contexts of equal length, which tokens count, and the facets that cut results. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np


@dataclass(frozen=True)
class TaskBatch:
    """Contexts of one length, BOS first.

    `tokens [context, position]` int64; `scored [context, position]` bool: the tokens to be predicted, each from those
    before it; `facets` name -> [context, position] int64, read where `scored` is True.
    """

    tokens: np.ndarray
    scored: np.ndarray
    facets: dict[str, np.ndarray] = field(default_factory=dict)


class Generator(Protocol):
    """A task that makes its own contexts, in stages of rising difficulty."""

    @property
    def stages(self) -> int:
        """How many stages there are; the last one is the task itself."""
        ...

    def batch(self, rng: np.random.Generator, contexts: int, stage: int) -> TaskBatch:
        """Contexts drawn from stages 1 to `stage`."""
        ...

    def tokenizer_json(self) -> dict[str, Any]:
        """The task's word-level tokenizer, as `tokenizer.json` of the tokenizers library."""
        ...


SPECIAL = ("<bos>", "<eos>", "<pad>")


def word_level(words: tuple[str, ...]) -> dict[str, Any]:
    """`tokenizer.json` of a vocabulary of whole words between spaces; ids are places in `words`, special tokens first."""
    special = [
        {
            "id": index,
            "content": word,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for index, word in enumerate(SPECIAL)
    ]
    vocabulary = {word: index for index, word in enumerate((*SPECIAL, *words))}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<pad>"},
    }
