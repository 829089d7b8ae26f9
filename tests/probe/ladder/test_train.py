"""Training runs: schedules, exact resume, branches, precision, several processes, and what happens when a loss is NaN."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.support.meeting import meeting_place, of_rank

from visitlens.app.cli import main
from visitlens.errors import CheckpointError, InputError, VisitlensError
from visitlens.hooks.models.checkpoint import load_model
from visitlens.hooks.models.config import LoopedMoEConfig
from visitlens.hooks.text.documents import Document
from visitlens.probe.jobs.processes import context
from visitlens.probe.ladder.corpus import Corpus, prepare
from visitlens.probe.ladder.train import Cadence, train
from visitlens.probe.ladder.trainer import DECAYED_TO, Recipe, Trainer
from visitlens.probe.model.bundled import PAIR

TOKENIZER = PAIR["looped"] / "tokenizer.json"
CADENCE = Cadence(log_updates=2, checkpoint_updates=3, checkpoint_tokens=100, final_tokens=300, dyck_prompts=2)
CONFIG = LoopedMoEConfig(
    vocab_size=4096, hidden_size=16, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=4, num_experts=12, expert_dim=8,
    loop_start=1, loop_stop=3, visits=2, context_length=384,
)  # fmt: skip
RECIPE = Recipe((6000,), decay_tokens=2400, warmup_tokens=1500, batch=2, dyck_share=0.2)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    rng = np.random.default_rng(0)
    words = [f"w{i}" for i in range(50)]
    documents = [
        Document(" ".join(rng.choice(words, int(rng.integers(20, 300)))), category=("code", "web")[i % 2])
        for i in range(80)
    ]
    return prepare(documents, TOKENIZER, tmp_path_factory.mktemp("corpus"), validation_share=0.2)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


# The recipe


def test_the_rate_warms_up_stays_and_decays_on_a_branch_alone() -> None:
    recipe = Recipe((1000, 2000), decay_tokens=200, warmup_tokens=100, learning_rate=1.0)
    assert [recipe.rate_at(seen, None) for seen in (0, 50, 100, 1900)] == [0.01, 0.5, 1.0, 1.0]
    assert recipe.rate_at(800, 1000) == recipe.rate_at(1800, 2000) == 1.0
    assert recipe.rate_at(900, 1000) == pytest.approx((1 + DECAYED_TO) / 2)
    assert recipe.rate_at(1000, 1000) == pytest.approx(DECAYED_TO)
    assert recipe.rate_at(900, 2000) == 1.0


def test_evenly_spaced_horizons_share_one_decay() -> None:
    recipe = Recipe.of(300_000, horizons=3, decay_share=0.1)
    assert recipe.horizons == (100_000, 200_000, 300_000)
    assert recipe.decay_tokens == 10_000 and recipe.warmup_tokens == 30_000


@pytest.mark.parametrize(
    "change", [{"horizons": ()}, {"horizons": (5000, 4000)}, {"horizons": (2000,)}, {"dtype": "float16"}]
)
def test_a_recipe_that_makes_no_sense_is_refused(change: dict) -> None:
    with pytest.raises(InputError, match=r"expected rising horizons|train in float32 or bfloat16"):
        replace(RECIPE, **change)


# Runs


@pytest.fixture(scope="module")
def finished(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run")
    assert train(CONFIG, RECIPE, corpus, out, cadence=CADENCE) == [out / "tokens-6000"]
    return out


def test_a_run_learns_and_says_what(finished: Path) -> None:
    report = json.loads((finished / "tokens-6000" / "training.json").read_text())
    assert report["tokens"] >= 6000 and report["horizon"] == 6000
    assert set(report["validation_loss"]) == {"code", "web"}
    assert all(loss < 8.2 for loss in report["validation_loss"].values())  # a uniform guess has 8.3
    assert sum(bucket["documents"] for bucket in report["loss_by_length"].values()) >= 2
    assert set(report["dyck"]) == {"0", "1", "2", "4", "8"}
    rows = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert {row["branch"] for row in rows} == {0, 6000}
    assert any("validation_code" in row for row in rows) and any("gradient_norm" in row for row in rows)
    with (finished / "metrics.csv").open() as file:
        assert [int(row["tokens"]) for row in csv.DictReader(file)] == [row["tokens"] for row in rows]
    model = load_model(finished / "tokens-6000")
    assert model.config == CONFIG and (finished / "tokens-6000" / "tokenizer.json").is_file()


def test_a_finished_run_is_not_trained_again(finished: Path, corpus: Corpus) -> None:
    stamp = (finished / "tokens-6000" / "model.safetensors").stat().st_mtime_ns
    train(CONFIG, RECIPE, corpus, finished, cadence=CADENCE, on_progress=lambda *_: pytest.fail("it trained"))
    assert (finished / "tokens-6000" / "model.safetensors").stat().st_mtime_ns == stamp


class Stop(Exception):
    pass


@pytest.mark.parametrize("at", [1600, 4700])  # on the stable run; on the branch
def test_a_stopped_run_ends_bit_identical(at: int, finished: Path, corpus: Corpus, tmp_path: Path) -> None:
    def stop(done: int, total: int, loss: float) -> None:
        if done >= at:
            raise Stop

    with pytest.raises(Stop):
        train(CONFIG, RECIPE, corpus, tmp_path, cadence=CADENCE, on_progress=stop)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"branch": 0, "tok')  # as a kill may leave it
    (folder,) = train(CONFIG, RECIPE, corpus, tmp_path, cadence=CADENCE)
    assert same(weights(folder), weights(finished / "tokens-6000"))
    assert (tmp_path / "metrics.jsonl").read_text() == (finished / "metrics.jsonl").read_text()


def test_branches_fork_from_one_stable_run_and_may_be_added(finished: Path, corpus: Corpus, tmp_path: Path) -> None:
    """(6000, 9000) in one go, or 9000 added to a finished 6000: the same two models."""
    out = tmp_path / "both"
    both = train(CONFIG, replace(RECIPE, horizons=(6000, 9000)), corpus, out, cadence=CADENCE)
    assert same(weights(both[0]), weights(finished / "tokens-6000"))
    assert not same(weights(both[0]), weights(both[1]))
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    stable = [row["tokens"] for row in rows if row["branch"] == 0 and "loss" in row]
    assert stable == sorted(set(stable)) and max(stable) <= 9000 - 2400 + 768
    more = Path(shutil.copytree(finished, tmp_path / "more"))
    assert train(CONFIG, replace(RECIPE, horizons=(9000,)), corpus, more, cadence=CADENCE) == [more / "tokens-9000"]
    assert same(weights(both[1]), weights(more / "tokens-9000"))


def test_a_folder_of_another_run_is_refused(finished: Path, corpus: Corpus) -> None:
    with pytest.raises(InputError, match="holds a run with another config; choose another folder"):
        train(replace(CONFIG, num_experts=16), RECIPE, corpus, finished)
    with pytest.raises(InputError, match="holds a run with another recipe"):
        train(CONFIG, replace(RECIPE, learning_rate=1e-4), corpus, finished)


def test_a_damaged_state_is_said_by_name(corpus: Corpus, tmp_path: Path) -> None:
    (tmp_path / "stable.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0no state")
    with pytest.raises(CheckpointError, match=r"stable\.safetensors: not this model's training state"):
        train(CONFIG, RECIPE, corpus, tmp_path)


def test_a_corpus_too_small_for_the_tokens_is_refused(corpus: Corpus, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"10,000,000 tokens would read the corpus of .* times; add text"):
        train(CONFIG, replace(RECIPE, horizons=(10_000_000,)), corpus, tmp_path)


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_checkpoint(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Trainer.step

    def poisoned(self: Trainer, horizon: int | None = None) -> dict[str, float]:
        if self.seen > 3000:
            with torch.no_grad():
                next(iter(self.model.parameters())).fill_(float("nan"))
        return real(self, horizon)

    monkeypatch.setattr(Trainer, "step", poisoned)
    with pytest.raises(VisitlensError, match=r"the loss is nan.* after 3,072 tokens: training has diverged. The last"):
        train(CONFIG, RECIPE, corpus, tmp_path, cadence=CADENCE)
    kept = load_file(tmp_path / "stable.safetensors")
    assert all(bool(t.isfinite().all()) for t in kept.values())
    monkeypatch.undo()
    assert train(CONFIG, RECIPE, corpus, tmp_path, cadence=CADENCE)[0].is_dir()  # and goes on from it


def test_bfloat16_keeps_float32_weights_in_the_optimiser(corpus: Corpus, tmp_path: Path) -> None:
    recipe = replace(RECIPE, dtype="bfloat16", horizons=(4000,))
    (folder,) = train(CONFIG, recipe, corpus, tmp_path, cadence=CADENCE)
    assert all(loss < 8.2 for loss in json.loads((folder / "training.json").read_text())["validation_loss"].values())
    state = load_file(tmp_path / "stable.safetensors")
    assert all(t.dtype == torch.float32 for t in state.values())
    rounded = {k: v.bfloat16().float() for k, v in state.items()}
    assert not same(state, rounded)  # they hold more than bfloat16 could


def test_a_device_that_is_not_there_is_refused(corpus: Corpus, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="can't train on 'cuda:77'"):
        train(CONFIG, RECIPE, corpus, tmp_path, device="cuda:77")


# As processes of their own


def command(corpus: Corpus, config: Path, out: Path, *options: str) -> list[str]:
    return [
        *("-m", "visitlens", "ladder", "run", str(config), "--out", str(out), "--corpus", str(corpus.folder)),
        *("--tokens", "6000", "--decay-share", "0.4", "--warmup", "1500", "--batch", "2", "--dyck-share", "0.2"),
        *("--checkpoint-updates", "1", "--dyck-prompts", "2", *options),
    ]


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "config.json"
    path.write_text(json.dumps(CONFIG.to_dict()))
    return path


def command_line(*arguments: str) -> None:
    sys.argv = ["visitlens", *arguments]
    main()


def stop_after_two_states(saved: Any, *arguments: str) -> None:
    """`saved` hears of the second one, and nothing more is done."""
    save, states = Trainer.save, list[Path]()

    def stopping(self: Trainer, path: Path) -> None:
        save(self, path)
        states.append(path)
        if len(states) == 2:
            saved.send(path.name)
            threading.Event().wait()

    Trainer.save = stopping  # type: ignore[method-assign]  # in a process of its own
    command_line(*arguments)


def test_a_killed_process_resumes_to_the_same_bits(
    run: Callable[..., tuple[int, str, str]], corpus: Corpus, config_file: Path, finished: Path, tmp_path: Path
) -> None:
    out, beside = tmp_path / "run", context()
    asked = command(corpus, config_file, out)[2:]
    ours, theirs = beside.Pipe()
    killed: Any = beside.Process(target=stop_after_two_states, args=(theirs, *asked), daemon=True)
    killed.start()
    theirs.close()
    assert ours.poll(600) and ours.recv() == "stable.safetensors"
    killed.kill()
    killed.join()
    assert (out / "stable.safetensors").is_file() and not (out / "tokens-6000" / "training.json").is_file()
    code, said, err = run(*asked)
    assert code == 0, err
    assert said.strip() == str(out / "tokens-6000")
    assert same(weights(out / "tokens-6000"), weights(finished / "tokens-6000"))


def by_torchrun(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments],
        capture_output=True,
        text=True,
        timeout=900,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr


def as_rank(rank: int, port: int, work: Callable[..., object], *arguments: object) -> None:
    os.environ.update(of_rank(rank, 2, port))
    work(*arguments)


def in_two_processes(work: Callable[..., object], *arguments: object) -> None:
    """What torchrun makes of two processes, with torch loaded already."""
    beside: Any = context()
    meeting = meeting_place()
    ranks = [beside.Process(target=as_rank, args=(rank, meeting.port, work, *arguments)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(600)
        rank.kill()
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0, 0]


TWO_BRANCHES = ("--horizons", "2", "--decay-share", "0.8", "--checkpoint-updates", "4")
"""The decay is a share of the first horizon: as long as with one branch."""


@pytest.fixture(scope="module")
def trained_by_two(corpus: Corpus, config_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two branches of one stable run, so the second one begins with a state read from disk."""
    out = tmp_path_factory.mktemp("two") / "run"
    by_torchrun(*command(corpus, config_file, out, *TWO_BRANCHES))
    return out


def test_two_processes_train_the_model_that_one_trains(trained_by_two: Path, finished: Path) -> None:
    """Each takes one of the two contexts of a batch; sums of gradients differ in their last bits, on which Adam takes whole steps."""
    two, one = (json.loads((f / "tokens-6000" / "training.json").read_text()) for f in (trained_by_two, finished))
    assert two["tokens"] == one["tokens"]
    for category, loss in one["validation_loss"].items():
        assert two["validation_loss"][category] == pytest.approx(loss, abs=0.1)


def test_two_processes_have_the_gradients_of_one_whether_the_model_is_copied_or_divided(
    corpus: Corpus, tmp_path: Path
) -> None:
    """Of documents of uneven length, so that each context has another number of predicted tokens."""
    from tests.probe.ladder.two_trainers import gradients, trainer_of
    from tests.probe.ladder.two_trainers import main as two_trainers

    torch.save(gradients(trainer_of(corpus.folder, dtype="float64")), tmp_path / "one")
    in_two_processes(two_trainers, corpus.folder, tmp_path)


def test_a_divided_model_learns_as_whole_copies_do(
    corpus: Corpus, config_file: Path, trained_by_two: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    in_two_processes(command_line, *command(corpus, config_file, out, "--checkpoint-updates", "4", "--sharded")[2:])
    divided, copies = ((run / "tokens-6000") for run in (out, trained_by_two))
    mine, theirs = (json.loads((run / "training.json").read_text())["validation_loss"] for run in (divided, copies))
    assert mine == pytest.approx(theirs, abs=1e-2)
    for name, value in weights(copies).items():  # as vectors: Adam takes whole steps on the noise of tiny gradients
        assert (weights(divided)[name] - value).float().norm() <= 0.03 * value.float().norm(), name


def test_dividing_a_model_needs_several_processes(corpus: Corpus, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="start with torchrun"):
        train(CONFIG, RECIPE, corpus, tmp_path, sharded=True)
