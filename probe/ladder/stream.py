"""The training stream: batches of packed contexts of shuffled text, mixed with Dyck prompts; resumable anywhere. No torch.

What comes depends on the corpus, the tokenizer, the context length, the batch and the seed, never on the model, so both
models of a pair see the same sequences. A document longer than a context is cut into pieces of a context each (BOS leads
every piece) and the pieces are shuffled among all others; a piece that meets the end of a context goes on in the next.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any

import numpy as np

from visitlens.errors import InputError
from visitlens.hooks.text.documents import Packer
from visitlens.probe.ladder.corpus import SpecialTokens, TokenizedDocuments
from visitlens.probe.samples.dyck_prompts import dyck_prompt

DYCK_TRAINING, DYCK_VALIDATION, DYCK_DECAY = 1, 2, 3  # first word of a prompt's seed: they never meet
MAX_SHOTS = 8


@dataclass
class Position:
    """Where a stream is: enough to go on exactly there."""

    epoch: int = 0
    piece: int = 0
    text_tokens: int = 0
    dyck_tokens: int = 0
    prompts: int = 0
    remainder: list[int] = field(default_factory=list)


class TrainingStream:
    """`next_batch()` without end; a corpus too small for the run is read again in another order (`position.epoch`)."""

    def __init__(
        self,
        documents: TokenizedDocuments,
        special: SpecialTokens,
        tokenizer: Any,
        *,
        context: int,
        batch: int,
        dyck_share: float = 0.25,
        seed: int = 0,
        only: np.ndarray | None = None,
        prompts: int = DYCK_TRAINING,
    ) -> None:
        """`only`: indices of the documents to read, all by default. `prompts`: first word of the Dyck prompts' seeds."""
        if not 0 <= dyck_share < 1:
            raise InputError(f"the share of Dyck prompts must lie in [0, 1), got {dyck_share}")
        self._documents, self._special, self._tokenizer = documents, special, tokenizer
        self._batch, self._dyck_share, self._seed, self._prompts = batch, dyck_share, seed, prompts
        self._packer = Packer(context, special.bos)
        chosen = None if only is None else set(only.tolist())
        room = context - 1  # BOS leads a piece that isn't its document's first
        self._pieces = np.concatenate(
            [
                np.stack([np.full(-(-n // room), i), np.arange(0, n, room)], 1)
                for i, n in enumerate(documents.lengths)
                if chosen is None or i in chosen
            ]
        )
        self._position = Position()
        self._order = self._permutation(0)

    def next_batch(self) -> tuple[np.ndarray, np.ndarray]:
        """Token ids and segment ids [context, position], int64."""
        source = (self._next() for _ in count())
        rows = [self._packer.fill(source) for _ in range(self._batch)]
        tokens = np.array([[t for _, piece in row for t in piece] for row in rows])
        segments = np.array([[i for i, (_, piece) in enumerate(row) for _ in piece] for row in rows])
        return tokens, segments

    def state(self) -> dict[str, Any]:
        """As JSON; `restore` takes it."""
        return asdict(self._position) | {"remainder": [int(t) for t in self._packer.remainder]}

    def restore(self, state: dict[str, Any]) -> None:
        self._position = Position(**state)
        self._packer.remainder = list(self._position.remainder)
        self._order = self._permutation(self._position.epoch)

    def _permutation(self, epoch: int) -> np.ndarray:
        return np.random.default_rng((self._seed, epoch)).permutation(len(self._pieces))

    def _next(self) -> np.ndarray:
        """A Dyck prompt whenever their share of tokens has fallen behind, else the next piece of text."""
        at = self._position
        if at.dyck_tokens * (1 - self._dyck_share) < at.text_tokens * self._dyck_share:
            seed = (self._prompts, self._seed, at.prompts)
            prompt = dyck_prompt(seed, self._tokenizer, shots=at.prompts % (MAX_SHOTS + 1)).tokens
            at.prompts += 1
            at.dyck_tokens += len(prompt) + 2
            return np.array([self._special.bos, *prompt, self._special.eos], dtype=np.int32)
        if at.piece == len(self._order):
            at.epoch, at.piece = at.epoch + 1, 0
            self._order = self._permutation(at.epoch)
        document, start = self._pieces[self._order[at.piece]]
        at.piece += 1
        piece = self._documents[document][start : start + self._packer.context_length - 1]
        if start > 0:
            piece = np.concatenate([[self._special.bos], piece])
        at.text_tokens += len(piece)
        return piece
