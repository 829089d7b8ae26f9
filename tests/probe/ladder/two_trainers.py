"""Run by torchrun in two processes: a model divided by FSDP2 beside whole copies, over the same batches.

Fails unless the gradients of the first update are the same, and a state saved by one is the other's.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from tests.probe.ladder.test_train import CONFIG, RECIPE

from visitlens.hooks.models.checkpoint import load_tokenizer
from visitlens.probe.ladder.corpus import Corpus
from visitlens.probe.ladder.processes import processes
from visitlens.probe.ladder.stream import TrainingStream
from visitlens.probe.ladder.trainer import Trainer


def main(corpus: Path, out: Path) -> None:
    with processes("cpu"):
        text = Corpus.open(corpus)
        tokenizer, options = load_tokenizer(text.tokenizer_file), {"batch": 2, "dyck_share": 0.2, "seed": 0}
        whole, divided = (
            Trainer(
                CONFIG,
                RECIPE,
                TrainingStream(text.train, text.special, tokenizer, context=CONFIG.context_length, **options),
                sharded=sharded,
            )
            for sharded in (False, True)
        )
        for trainer, name in ((whole, "whole"), (divided, "divided")):
            trainer.step()
            trainer.save(out / name)
        torch.distributed.barrier()
        one, other = load_file(out / "whole"), load_file(out / "divided")
        assert one.keys() == other.keys()
        gradients = [name for name in one if name.startswith("exp_avg.")]  # a tenth of them, after one update
        assert len(gradients) == len(list(whole.model.parameters()))
        for name in gradients:
            torch.testing.assert_close(other[name], one[name], atol=1e-9, rtol=1e-4)
        divided.restore(out / "whole")
        again = divided.weights()
        assert all(torch.equal(again[name], value) for name, value in whole.weights().items())
        losses = [trainer.step()["loss"] for trainer in (whole, divided)]
        assert abs(losses[0] - losses[1]) < 1e-5, losses


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
