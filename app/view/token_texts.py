"""Token ids as text: by the tokenizer of a checkpoint that fits the recording, else as numbers. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

from visitlens.errors import CheckpointError
from visitlens.hooks.models.checkpoint_files import read_json, weights_sha256
from visitlens.hooks.text.token_texts import TokenTexts
from visitlens.hooks.text.tokenizer import Tokenizer, read_tokenizer
from visitlens.probe.model.bundled import PAIR
from visitlens.probe.reading.recorded_run import RecordedRun


class TextsOfRecordings:
    """Of the given checkpoint, and of the bundled models for recordings of them."""

    def __init__(self, checkpoint: Path | None = None) -> None:
        folders = ([checkpoint] if checkpoint else []) + list(PAIR.values())
        self._sources = [_Source(folder) for folder in folders]
        self._given = checkpoint

    def of(self, run: RecordedRun) -> Tokenizer | None:
        """The tokenizer of the run's own weights; else the given checkpoint's, if the vocabularies have one size."""
        weights = run.provenance["weights_sha256"]
        for source in self._sources:
            alike = source.vocabulary == run.recording.config.get("vocab_size")
            if alike and source.folder == self._given:
                return source.tokenizer
            if (
                alike or source.vocabulary is None
            ) and source.weights == weights:  # a folder with its own loader says no size
                return source.tokenizer
        return None

    def texts(self, run: RecordedRun, ids: Iterable[int]) -> list[str]:
        """The text of each token, of tokens that follow one another; `#17` where no tokenizer fits."""
        tokenizer = self.of(run)
        return [f"#{int(i)}" for i in ids] if tokenizer is None else TokenTexts(tokenizer).sequence(ids)


class _Source:
    """A checkpoint folder; its files are read when they are asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def vocabulary(self) -> int | None:
        config = self._json("config.json")
        size = config.get("vocab_size") if isinstance(config, dict) else None
        return size if isinstance(size, int) else None

    @cached_property
    def weights(self) -> str:
        try:
            return weights_sha256(self.folder)
        except (OSError, CheckpointError):
            return ""

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        try:
            return read_tokenizer(self.folder / "tokenizer.json")
        except (
            CheckpointError,
            ImportError,
        ):  # no file, damaged, or tokenizers isn't installed: numbers are shown instead
            return None

    def _json(self, name: str) -> Any:
        try:
            return read_json(self.folder / name)
        except (OSError, ValueError):
            return None
