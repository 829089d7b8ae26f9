"""Run in each of two processes: a model divided by FSDP2 beside whole copies, over the same batches.

Fails unless the gradients of the first update are those of one process on the whole batch (computed in float64), and a state saved
by one is the other's.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from tests.probe.ladder.test_train import CONFIG, RECIPE
from torch.distributed.tensor import DTensor

from visitlens.hooks.models.checkpoint import load_tokenizer
from visitlens.hooks.models.looped_moe import _rotary_tables
from visitlens.probe.ladder.corpus import Corpus
from visitlens.probe.ladder.processes import processes
from visitlens.probe.ladder.stream import TrainingStream
from visitlens.probe.ladder.trainer import Trainer


def trainer_of(corpus: Path, *, sharded: bool = False, dtype: str = "float32") -> Trainer:
    """Over batches of two contexts; in float64, which a recipe refuses, and without clipping by a norm in float32,
    sums differ by less than what is looked for."""
    text, recipe = Corpus.open(corpus), replace(RECIPE, clip=1e9)
    object.__setattr__(recipe, "dtype", dtype)
    tokenizer, options = load_tokenizer(text.tokenizer_file), {"batch": 2, "dyck_share": 0.2, "seed": 0}
    stream = TrainingStream(text.train, text.special, tokenizer, context=CONFIG.context_length, **options)
    trainer = Trainer(CONFIG, recipe, stream, sharded=sharded)
    if sharded and dtype == "float64":  # FSDP casts parameters alone; a float64 model's rotary tables are float64 too
        trainer.model.rotary_cos, trainer.model.rotary_sin = _rotary_tables(CONFIG, torch.float64)
    return trainer


def gradients(trainer: Trainer) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """A tenth of those of an update, as the optimiser keeps them after the first one, and what is told of it."""
    told = trainer.step()
    del told["gradient_norm"]  # in float32
    states = {n: trainer.optimizer.state[p]["exp_avg"] for n, p in trainer._weights.items()}
    return {n: s.full_tensor() if isinstance(s, DTensor) else s for n, s in states.items()}, told


def main(corpus: Path, out: Path) -> None:
    with processes("cpu"):
        expected, one_told = torch.load(out / "one")
        for sharded in (False, True):
            found, told = gradients(trainer_of(corpus, sharded=sharded, dtype="float64"))
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                torch.testing.assert_close(found[name], value, atol=1e-12, rtol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
            assert all(abs(told[name] - value) <= 1e-6 * abs(value) for name, value in one_told.items()), (
                told,
                one_told,
            )
        whole, divided = (trainer_of(corpus, sharded=sharded) for sharded in (False, True))
        for trainer, name in ((whole, "whole"), (divided, "divided")):
            trainer.step()
            trainer.save(out / name)
        torch.distributed.barrier()
        one, other = load_file(out / "whole"), load_file(out / "divided")
        assert one.keys() == other.keys()
        divided.restore(out / "whole")
        again = divided.weights()
        assert all(torch.equal(again[name], value) for name, value in whole.weights().items())
        losses = [trainer.step()["loss"] for trainer in (whole, divided)]
        assert abs(losses[0] - losses[1]) < 1e-5, losses
