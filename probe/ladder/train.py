"""A training run in a folder: the stable run, its decay branches, metrics; stopped and resumed anywhere.

    run/stable.safetensors      state of the stable run at its last checkpoint
    run/branch-N.safetensors    state of a branch in progress, to a horizon of N tokens
    run/metrics.jsonl, .csv     one row every few updates, and validation losses at checkpoints
    run/tokens-N/               a finished branch: a checkpoint folder with tokenizer.json and training.json

A finished branch is never trained again; later horizons may be added to a run, which then goes on from its stable state.
"""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from visitlens.errors import InputError
from visitlens.hooks.models.checkpoint import load_tokenizer, save_weights
from visitlens.hooks.models.config import LoopedMoEConfig
from visitlens.hooks.text.documents import pack
from visitlens.hooks.text.packed_tokens import PackedTokens
from visitlens.probe.ladder.corpus import Corpus
from visitlens.probe.ladder.evaluate import dyck_by_shots, loss_by_length, loss_by_part, token_losses
from visitlens.probe.ladder.stream import DYCK_DECAY, DYCK_TRAINING, DYCK_VALIDATION, TrainingStream
from visitlens.probe.ladder.trainer import Recipe, Trainer

Progress = Callable[[int, int, float], None]
"""Called with tokens done, tokens to do in all, and the last loss."""


MAX_EPOCHS = 4.0
"""Text read more often teaches much less than new text."""


@dataclass(frozen=True)
class Cadence:
    """What doesn't change the result: how often to log and save, how much to validate on."""

    log_updates: int = 20
    checkpoint_updates: int = 150
    checkpoint_tokens: int = 1_000
    """Validation tokens per category at a checkpoint."""
    final_tokens: int = 8_000
    """The same at the end of a branch."""
    dyck_prompts: int = 200


def train(
    config: LoopedMoEConfig,
    recipe: Recipe,
    corpus: Corpus,
    out: Path,
    *,
    device: str = "cpu",
    sharded: bool = False,
    cadence: Cadence = Cadence(),
    max_epochs: float = MAX_EPOCHS,
    on_progress: Progress = lambda done, total, loss: None,
) -> list[Path]:
    """Trains every branch that isn't finished; the checkpoint folders, by horizon.

    Raises:
        InputError: the corpus would be read more than `max_epochs` times, or has another vocabulary than the model.
        VisitlensError: the loss is no longer finite (the last checkpoint is kept), or `out` holds another run.
    """
    stable = recipe.horizons[-1] - (recipe.decay_tokens if recipe.decay_text else 0)
    epochs = stable * (1 - recipe.dyck_share) / (corpus.train.num_tokens * (1 - recipe.decay_text))
    if recipe.decay_text:
        epochs = max(
            epochs, recipe.decay_tokens * (1 - recipe.dyck_share) / (corpus.train.num_tokens * recipe.decay_text)
        )
    if epochs > max_epochs:
        raise InputError(
            f"{recipe.horizons[-1]:,} tokens would read the corpus of {corpus.train.num_tokens:,} tokens {epochs:.1f} times; "
            f"add text, train on fewer tokens, or allow more than {max_epochs:g} epochs"
        )
    return _Run(config, recipe, corpus, out, device, sharded, cadence, on_progress).finish()


class _Run:
    def __init__(
        self,
        config: LoopedMoEConfig,
        recipe: Recipe,
        corpus: Corpus,
        out: Path,
        device: str,
        sharded: bool,
        cadence: Cadence,
        on_progress: Progress,
    ) -> None:
        self.config, self.recipe, self.corpus, self.out = config, recipe, corpus, out
        self.cadence, self.on_progress = cadence, on_progress
        self.tokenizer = load_tokenizer(corpus.tokenizer_file)
        self._stable_text, self._decay_text = (
            corpus.train.set_apart(recipe.decay_text) if recipe.decay_text else (None, None)
        )
        self._stable_stream = self._stream()
        self.trainer = Trainer(config, recipe, self._stable_stream, device, sharded=sharded)
        self.metrics = _Metrics(out, writes=self.trainer.rank == 0)
        self._samples: dict[int, _Sample] = {}

    def _stream(self, decay: bool = False) -> TrainingStream:
        """Of the stable run; with `decay`, from the start of the text that is kept for branches."""
        recipe = self.recipe
        return TrainingStream(
            self.corpus.train,
            self.corpus.special,
            self.tokenizer,
            context=self.config.context_length,
            batch=recipe.batch,
            dyck_share=recipe.dyck_share,
            seed=recipe.seed,
            only=self._decay_text if decay else self._stable_text,
            prompts=DYCK_DECAY if decay else DYCK_TRAINING,
        )

    def finish(self) -> list[Path]:
        self._claim()
        return [self._branch(horizon) for horizon in self.recipe.horizons]

    def _claim(self) -> None:
        """Refuses a folder in which another model, recipe or corpus was trained; horizons may be added."""
        identity: dict[str, Any] = {
            "config": self.config.to_dict(),
            "recipe": {
                k: v for k, v in asdict(self.recipe).items() if k != "horizons" and (k, v) != ("decay_text", 0.0)
            },
            "corpus": {k: self.corpus.report[k] for k in ("tokenizer_sha256", "documents")},
        }
        file = self.out / "run.json"
        if file.is_file():
            before = json.loads(file.read_text(encoding="utf-8"))
            differs = [k for k in identity if before.get(k) != json.loads(json.dumps(identity[k]))]
            if differs:
                raise InputError(f"{self.out} holds a run with another {' and '.join(differs)}; choose another folder")
        elif self.trainer.rank == 0:
            partial = file.with_suffix(".tmp")  # in one step: other processes look at it
            partial.write_text(json.dumps(identity, indent=1) + "\n", encoding="utf-8")
            partial.replace(file)

    def _branch(self, horizon: int) -> Path:
        folder = self.out / f"tokens-{horizon}"
        if (folder / "training.json").is_file():
            return folder
        trainer, stable, branch = (
            self.trainer,
            self.out / "stable.safetensors",
            self.out / f"branch-{horizon}.safetensors",
        )
        separate = self._decay_text is not None
        if branch.is_file():
            if separate:
                trainer.stream = self._stream(decay=True)
            trainer.restore(branch)
        else:
            trainer.stream = self._stable_stream
            if stable.is_file():
                trainer.restore(stable)
            self.metrics.rewind(0, trainer.seen)
            self._advance(horizon - self.recipe.decay_tokens, None, stable)
            if separate:
                trainer.stream = self._stream(decay=True)
        self.metrics.rewind(horizon, trainer.seen)
        self._advance(horizon, horizon, branch)
        self._finish(folder, horizon)
        if trainer.rank == 0:
            branch.unlink(missing_ok=True)
        return folder

    def _advance(self, target: int, horizon: int | None, state: Path) -> None:
        """Updates up to `target` tokens, with checkpoints in `state`, the last one at the target of a stable run."""
        trainer, cadence = self.trainer, self.cadence
        saved = trainer.seen if state.is_file() else -1
        while trainer.seen < target:
            row = trainer.step(horizon)
            update = trainer.seen // (self.recipe.batch * self.config.context_length)
            if update % cadence.log_updates == 0:
                self.metrics.write(horizon, row)
                self.on_progress(trainer.seen, self.recipe.horizons[-1], row["loss"])
            if update % cadence.checkpoint_updates == 0:
                self._checkpoint(horizon, state)
                saved = trainer.seen
        if horizon is None and saved != trainer.seen:
            self._checkpoint(horizon, state)

    def _checkpoint(self, horizon: int | None, state: Path) -> None:
        losses = self._validation(self.cadence.checkpoint_tokens)["validation_loss"]
        self.metrics.write(horizon, {"tokens": self.trainer.seen} | {f"validation_{k}": v for k, v in losses.items()})
        self.trainer.save(state)
        self.metrics.to_csv()

    def _finish(self, folder: Path, horizon: int) -> None:
        """Writes the checkpoint folder; training.json last, since it marks the branch as finished."""
        trainer, cadence = self.trainer, self.cadence
        report = {
            "recipe": asdict(self.recipe),
            "horizon": horizon,
            "tokens": trainer.seen,
            **self._reading(horizon),
            "core_seconds": round(trainer.seconds),
            "training_documents": len(self.corpus.train),
            "corpus_tokens": self.corpus.train.num_tokens,
            **self._validation(cadence.final_tokens),
            "dyck": dyck_by_shots(
                trainer.evaluated,
                self.tokenizer,
                prompts=cadence.dyck_prompts,
                seed=DYCK_VALIDATION,
                device=trainer.device,
            ),
        }
        weights = trainer.weights()
        if trainer.rank == 0:
            save_weights(self.config, weights, folder)
            shutil.copyfile(self.corpus.tokenizer_file, folder / "tokenizer.json")
            self.metrics.to_csv()
            (folder / "training.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")

    def _reading(self, horizon: int) -> dict[str, Any]:
        """How often the text was read; of a run that keeps some for its branches, both parts."""
        tokens = self.trainer.stream.state()["text_tokens"]
        if self._decay_text is None or self._stable_text is None:
            return {"epochs": round(tokens / self.corpus.train.num_tokens, 4)}
        stable, decay = (
            int(self.corpus.train.lengths[at].sum(dtype=np.int64)) for at in (self._stable_text, self._decay_text)
        )
        share = (horizon - self.recipe.decay_tokens) * (1 - self.recipe.dyck_share)
        documents = {"stable": len(self._stable_text), "decay": len(self._decay_text)}
        return {
            "epochs": round(share / stable, 4),
            "decay_epochs": round(tokens / decay, 4),
            "documents_by_phase": documents,
        }

    def _validation(self, tokens: int) -> dict[str, Any]:
        """Loss by category, by document length and, where documents name one, by source; over the first documents of each."""
        sample = self._sample(tokens)
        samples = sample.packed
        losses = [
            token_losses(self.trainer.evaluated, packed, device=self.trainer.device) for packed in samples.values()
        ]
        joined, every = _joined(list(samples.values())), np.concatenate(losses)
        by_length = loss_by_length(every, joined, sample.lengths)
        by_source = loss_by_part(every, joined, sample.sources, self.corpus.sources)
        found = {name: asdict(mean) | {"category": sample.category[name]} for name, mean in by_source.items()}
        return {
            **({"loss_by_source": found} if found else {}),
            "validation_loss": {
                name: float(np.nanmean(mine, dtype=np.float64)) for name, mine in zip(samples, losses, strict=True)
            },
            "loss_by_length": {name: asdict(mean) for name, mean in by_length.items()},
        }

    def _sample(self, tokens: int) -> _Sample:
        """`tokens` of each category's documents, divided equally over its sources; of text without sources the first contexts."""
        if tokens not in self._samples:
            documents, config = self.corpus.validation, self.config
            sources = np.full(len(documents), -1) if documents.sources is None else documents.sources
            sample = _Sample({}, np.zeros(0, int), np.zeros(0, int), {})
            for index, name in enumerate(self.corpus.categories):
                mine = np.flatnonzero(documents.rows["category"] == index)
                named = np.unique(sources[mine])
                parts = [mine[sources[mine] == source] for source in named]
                share = tokens // max(len(parts), 1)
                chosen = [p[: int(np.searchsorted(np.cumsum(documents.lengths[p]), share)) + 1] for p in parts]
                if not chosen:
                    continue
                at = np.concatenate(chosen)
                whole = [np.array(documents[i]) for i in at]
                packed = pack(whole, config.context_length, config.bos_token_id, config.pad_token_id)
                sample.packed[name] = packed = packed if len(parts) > 1 else packed.first_contexts(tokens)
                at = at[: len(packed.document_hash)]
                sample.lengths = np.concatenate([sample.lengths, documents.lengths[at]])
                sample.sources = np.concatenate([sample.sources, sources[at]])
                sample.category |= {self.corpus.sources[source]: name for source in named if source >= 0}
            self._samples[tokens] = sample
        return self._samples[tokens]


@dataclass
class _Sample:
    """Contexts by category; of their documents in order the whole lengths and the sources' indices; each source's category."""

    packed: dict[str, PackedTokens]
    lengths: np.ndarray
    sources: np.ndarray
    category: dict[str, str]


def _joined(packs: list[PackedTokens]) -> PackedTokens:
    """One sample after another, segments and documents numbered through."""
    segments, documents = [], []
    first_segment = first_document = 0
    for p in packs:
        segments.append(np.where(p.segments >= 0, p.segments + first_segment, -1))
        documents.append(p.segment_document + first_document)
        first_segment, first_document = first_segment + len(p.segment_document), first_document + len(p.document_hash)
    return PackedTokens(
        np.concatenate([p.tokens for p in packs]),
        np.concatenate(segments),
        np.concatenate(documents),
        np.concatenate([p.document_hash for p in packs]),
    )


class _Metrics:
    """metrics.jsonl: rows of the stable run (`branch` 0) and of each branch (its horizon)."""

    def __init__(self, out: Path, writes: bool) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self._file, self._writes = out / "metrics.jsonl", writes

    def write(self, horizon: int | None, row: Mapping[str, float]) -> None:
        if self._writes:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"branch": horizon or 0, **row}) + "\n")

    def rewind(self, branch: int, seen: int) -> None:
        """Drops rows of a branch after `seen` tokens: the updates they tell of will be made again."""
        if self._writes and self._file.is_file():
            kept = [row for row in self._rows() if row["branch"] != branch or row["tokens"] <= seen]
            self._file.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")

    def to_csv(self) -> None:
        """The same rows for a spreadsheet; a column that a row doesn't have stays empty."""
        if not self._writes:
            return
        rows = self._rows()
        with self._file.with_suffix(".csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(dict.fromkeys(column for row in rows for column in row)))
            writer.writeheader()
            writer.writerows(rows)

    def _rows(self) -> list[dict[str, float]]:
        """All whole lines: a kill may have torn the last one."""
        *whole, _ = self._file.read_text(encoding="utf-8").split("\n")
        return [json.loads(line) for line in whole]
