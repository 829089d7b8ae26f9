"""Trains one model of a pair on packed documents mixed with Dyck prompts; resumable.

    python -m visitlens.probe.ladder.train --config looped.json --corpus corpus/ --out runs/looped --tokens 12e6

AdamW, linear warm-up, constant rate, cosine decay over the last part. Both models of a pair see the same sequences: the
stream depends on the seed, the corpus, the tokenizer, the context length and the batch, never on the model.
`--tokens` may be changed on resuming, as long as the decay hasn't begun.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from safetensors import safe_open
from safetensors.torch import save_file

from visitlens.hooks.models.checkpoint import load_tokenizer, save_model
from visitlens.hooks.models.config import LoopedMoEConfig
from visitlens.hooks.models.looped_moe import LoopedMoE
from visitlens.kernels.errors import InputError, VisitlensError
from visitlens.kernels.memory import keep_freed_memory
from visitlens.probe.dyck import dyck_prompt
from visitlens.probe.ladder.documents import PackedTokens, Packer, encode, pack, read_documents
from visitlens.probe.ladder.evaluate import dyck_by_shots, text_loss

DYCK_TRAINING, DYCK_VALIDATION = 1, 2  # first word of a prompt's seed: the two never meet
MAX_SHOTS = 8


@dataclass(frozen=True)
class TrainingRecipe:
    """Everything but the model that decides what is learnt."""

    tokens: int
    batch: int = 4
    learning_rate: float = 3e-3
    warmup_tokens: int = 300_000
    decay_share: float = 0.25
    weight_decay: float = 0.1
    clip: float = 1.0
    dyck_share: float = 0.2
    late_dyck_share: float = 0.35
    late_dyck_from: int = 3_400_000
    """Tokens after which Dyck prompts take `late_dyck_share`: small models need text first, then many prompts."""
    whole_documents_until: int = 0
    """Tokens before which a long document fills consecutive contexts; from then on its pieces are shuffled among all
    others, without which neighbouring batches are alike and the model chases each document in turn."""
    seed: int = 0

    def rate_at(self, seen: int) -> float:
        decay_from = self.tokens * (1 - self.decay_share)
        if seen < self.warmup_tokens:
            return self.learning_rate * max(seen, 1) / self.warmup_tokens
        if seen < decay_from:
            return self.learning_rate
        progress = min((seen - decay_from) / (self.tokens * self.decay_share), 1.0)
        return self.learning_rate * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))


class TrainingStream:
    """Batches of packed contexts: shuffled documents, with Dyck prompts as fast as their share of tokens asks."""

    def __init__(
        self, documents: list[np.ndarray], tokenizer: Any, recipe: TrainingRecipe, context: int, bos: int, eos: int
    ):
        self._documents, self._tokenizer, self._recipe = documents, tokenizer, recipe
        self._bos, self._eos = bos, eos
        self._packer = Packer(context, bos)
        self._source = self._mixed()

    def next_batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and segment ids [context, position]."""
        rows = [self._packer.fill(self._source) for _ in range(self._recipe.batch)]
        tokens = [[t for _, piece in row for t in piece] for row in rows]
        segments = [[i for i, (_, piece) in enumerate(row) for _ in piece] for row in rows]
        return torch.tensor(tokens), torch.tensor(segments)

    def _mixed(self) -> Iterator[np.ndarray]:
        recipe = self._recipe
        text, dyck, owed, prompts = 0, 0, 0.0, 0
        pieces = self._whole_documents()
        while True:
            while dyck < owed:
                yield (prompt := self._dyck(prompts))
                dyck, prompts = dyck + len(prompt), prompts + 1
            piece = next(pieces)
            yield piece
            seen = text + dyck
            share = recipe.dyck_share if seen < recipe.late_dyck_from else recipe.late_dyck_share
            text += len(piece)
            owed += len(piece) * share / (1 - share)
            if seen < recipe.whole_documents_until <= text + dyck:
                pieces = self._shuffled_pieces()

    def _whole_documents(self) -> Iterator[np.ndarray]:
        if self._recipe.whole_documents_until == 0:
            yield from self._shuffled_pieces()
        for epoch in count():
            for index in np.random.default_rng((self._recipe.seed, epoch)).permutation(len(self._documents)):
                yield self._documents[index]

    def _shuffled_pieces(self) -> Iterator[np.ndarray]:
        room = self._packer.context_length - 1
        spans = [(i, start) for i, d in enumerate(self._documents) for start in range(0, len(d), room)]
        for epoch in count():
            for index in np.random.default_rng((self._recipe.seed, epoch)).permutation(len(spans)):
                document, start = spans[index]
                piece = self._documents[document][start : start + room]
                yield piece if start == 0 else np.concatenate([[self._bos], piece]).astype(np.int32)

    def _dyck(self, index: int) -> np.ndarray:
        prompt = dyck_prompt((DYCK_TRAINING, self._recipe.seed, index), self._tokenizer, shots=index % (MAX_SHOTS + 1))
        return np.array([self._bos, *prompt.tokens, self._eos], dtype=np.int32)


def corpus_tokens(
    corpus: Path, split: str, tokenizer: Any, tokenizer_file: Path, config: LoopedMoEConfig
) -> dict[str, list[np.ndarray]]:
    """Category -> encoded documents of `CATEGORY.split.jsonl[.xz|.gz]`; tokens are kept beside in a cache file."""
    files = sorted(corpus.glob(f"*.{split}.jsonl*"))
    if not files:
        raise InputError(f"{corpus}: no CATEGORY.{split}.jsonl[.xz|.gz] there")
    encoded = {}
    for file in files:
        key = hashlib.sha256(file.read_bytes() + tokenizer_file.read_bytes()).hexdigest()[:16]
        cache = Path.home() / ".cache" / "visitlens" / f"{file.name}.{key}.npz"
        if not cache.is_file():
            documents = encode(
                [d.text for d in read_documents(file)], tokenizer, config.bos_token_id, config.eos_token_id
            )
            cache.parent.mkdir(parents=True, exist_ok=True)
            partial = cache.with_suffix(".tmp.npz")
            np.savez(partial, tokens=np.concatenate(documents), lengths=[len(d) for d in documents])
            partial.replace(cache)
        with np.load(cache, allow_pickle=False) as data:
            encoded[file.name.split(".")[0]] = np.split(data["tokens"], np.cumsum(data["lengths"])[:-1])
    return encoded


class Trainer:
    """One model, its optimiser and its place in the stream."""

    def __init__(self, config: LoopedMoEConfig, recipe: TrainingRecipe, stream: TrainingStream, out: Path) -> None:
        self.recipe, self.stream, self.out = recipe, stream, out
        self.model = LoopedMoE(config)
        self.model.init_weights(recipe.seed)
        decayed = [p for p in self.model.parameters() if p.ndim > 1]
        plain = [p for p in self.model.parameters() if p.ndim == 1]
        groups = [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95), fused=True)
        self.seen = 0
        self.seconds = 0.0

    def step(self) -> dict[str, float]:
        """One update; raises on a loss that is not finite."""
        began = time.perf_counter()
        rate = self.recipe.rate_at(self.seen)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        tokens, segments = self.stream.next_batch()
        loss = self.model.training_loss(tokens, segments)
        if not torch.isfinite(loss.total):
            raise VisitlensError(
                f"the loss is {float(loss.total)} after {self.seen} tokens; the last checkpoint in {self.out} is good. Try a lower learning rate."
            )
        loss.total.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seen += tokens.numel()
        self.seconds += time.perf_counter() - began
        return {
            "tokens": self.seen,
            "loss": loss.cross_entropy.item(),
            "load_balance": loss.load_balance.item(),
            "router_z": loss.router_z.item(),
            "gradient_norm": norm.item(),
            "learning_rate": rate,
        }

    def save(self) -> None:
        """Weights, moments and position in one safetensors file, replaced atomically."""
        tensors = {f"model.{name}": p.detach() for name, p in self.model.named_parameters()}
        for name, p in self.model.named_parameters():
            for key, value in self.optimizer.state.get(p, {}).items():
                tensors[f"{key}.{name}"] = value
        partial = self.out / "training.safetensors.tmp"
        save_file(tensors, partial, metadata={"seen": str(self.seen), "seconds": str(self.seconds)})
        partial.replace(self.out / "training.safetensors")

    @torch.no_grad()
    def resume(self) -> None:
        """Continues from `training.safetensors`, drawing the stream forward to the same batch."""
        with safe_open(self.out / "training.safetensors", framework="pt") as file:
            metadata = file.metadata()
            for name, p in self.model.named_parameters():
                p.copy_(file.get_tensor(f"model.{name}"))
                state = {key: file.get_tensor(f"{key}.{name}") for key in ("step", "exp_avg", "exp_avg_sq")}
                self.optimizer.state[p] = state
        target, self.seconds = int(metadata["seen"]), float(metadata["seconds"])
        while self.seen < target:
            self.seen += self.stream.next_batch()[0].numel()


def main(
    config: Annotated[Path, typer.Option(help="config.json of the model")],
    corpus: Annotated[Path, typer.Option(help="folder with CATEGORY.train.jsonl.xz and CATEGORY.validation.jsonl.xz")],
    tokenizer: Annotated[Path, typer.Option(help="tokenizer.json")],
    out: Annotated[Path, typer.Option(help="folder for checkpoints and metrics.jsonl")],
    tokens: Annotated[float, typer.Option(help="tokens to train on, Dyck included")],
    learning_rate: float = 3e-3,
    batch: Annotated[int, typer.Option(help="contexts per update")] = 4,
    seed: int = 0,
    late_dyck_from: Annotated[int, typer.Option(help="tokens after which Dyck prompts take 35 %")] = 3_400_000,
    whole_documents_until: Annotated[int, typer.Option(help="tokens before which long documents stay in one run")] = 0,
    checkpoint_every: Annotated[int, typer.Option(help="updates between checkpoints")] = 250,
    validation_tokens: Annotated[int, typer.Option(help="per category at the end")] = 100_000,
    stop_after: Annotated[float, typer.Option(help="stop here, before the end, with a checkpoint")] = math.inf,
) -> None:
    """Trains one model on one core."""
    torch.set_num_threads(1)  # two processes of one thread beat one process of two
    keep_freed_memory()
    model_config = LoopedMoEConfig.from_dict(json.loads(config.read_text()))
    recipe = TrainingRecipe(
        int(tokens),
        batch,
        learning_rate,
        seed=seed,
        late_dyck_from=late_dyck_from,
        whole_documents_until=whole_documents_until,
    )
    out.mkdir(parents=True, exist_ok=True)
    tok = load_tokenizer(tokenizer)
    texts = corpus_tokens(corpus, "train", tok, tokenizer, model_config)
    documents = [d for category in texts.values() for d in category]
    stream = TrainingStream(
        documents, tok, recipe, model_config.context_length, model_config.bos_token_id, model_config.eos_token_id
    )
    trainer = Trainer(model_config, recipe, stream, out)
    if (out / "training.safetensors").is_file():
        trainer.resume()
        typer.echo(f"resumed at {trainer.seen} tokens")
    updates = 0
    with (out / "metrics.jsonl").open("a", encoding="utf-8") as log:
        while trainer.seen < min(recipe.tokens, stop_after):
            metrics = trainer.step()
            updates += 1
            if updates % 10 == 0:
                log.write(json.dumps(metrics) + "\n")
                log.flush()
                speed = trainer.seen / trainer.seconds
                typer.echo(
                    f"{trainer.seen:>10,} tokens  loss {metrics['loss']:.3f}  {speed:,.0f} tokens/s  {(recipe.tokens - trainer.seen) / speed / 60:.0f} min left"
                )
            if updates % checkpoint_every == 0:
                trainer.save()
                dyck = dyck_by_shots(trainer.model, tok, prompts=40, seed=DYCK_VALIDATION, shots=(0, 4))
                log.write(json.dumps({"tokens": trainer.seen, "dyck": dyck}) + "\n")
    trainer.save()
    if trainer.seen < recipe.tokens:
        return
    save_model(trainer.model, out)
    validation = corpus_tokens(corpus, "validation", tok, tokenizer, model_config)
    report = {
        "recipe": asdict(recipe),
        "tokens": trainer.seen,
        "core_seconds": round(trainer.seconds),
        "training_documents": len(documents),
        "corpus_tokens": sum(len(d) for d in documents),
        "validation_loss": {
            name: text_loss(trainer.model, _prefix(docs, validation_tokens, model_config))
            for name, docs in validation.items()
        },
        "dyck": dyck_by_shots(trainer.model, tok, prompts=400, seed=DYCK_VALIDATION),
    }
    (out / "training.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    typer.echo(json.dumps(report, indent=2))


def _prefix(documents: list[np.ndarray], tokens: int, config: LoopedMoEConfig) -> PackedTokens:
    """The first documents that together have `tokens` tokens, packed."""
    count = int(np.searchsorted(np.cumsum([len(d) for d in documents]), tokens)) + 1
    return pack(documents[:count], config.context_length, config.bos_token_id, config.pad_token_id)


if __name__ == "__main__":
    typer.run(main)
