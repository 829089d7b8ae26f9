"""Kills a writer at random instants, resumes, and counts what was lost or wrong; a reader looks on all the while.

    python benchmarks/crash.py --kills 60 --out benchmarks/results/crash.json

A child process records a tiny random model and is killed (SIGKILL) after a random time; the next one goes on at the same
path until the recording is whole, and then at a new path. Acknowledged is what a manifest listed at any moment before a kill. Lost:
listed once and later gone or changed. Wrong: a finished recording whose tokens, experts or sums (to 1e-12) aren't those of an unbroken
one, or anything that the reader got that wasn't a beginning of the right tokens. Ends with an error if there was any.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer

from visitlens.errors import RecordingError
from visitlens.hooks.models.config import LoopedMoEConfig
from visitlens.hooks.models.looped_moe import LoopedMoE
from visitlens.hooks.recording.maintain.validate import validate
from visitlens.hooks.recording.read.recording import Recording
from visitlens.hooks.recording.write.record import RecordingOptions, record
from visitlens.hooks.text.documents import PackedTokens, pack
from visitlens.probe.measures.collector import StatisticsCollector
from visitlens.probe.measures.statistic import Geometry

MEASURES = ("resid_rms", "sink_mass", "expert_transitions")
OPTIONS = RecordingOptions(level="tokens", shard_tokens=60)


def main(
    kills: Annotated[int, typer.Option(help="how many")] = 60,
    out: Annotated[Path | None, typer.Option(help="JSON file for the result")] = None,
    seed: Annotated[int, typer.Option(help="of the instants")] = 0,
) -> None:
    """Kills, resumes, compares."""
    torch.set_num_threads(1)
    model, text = _model(), _text()
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        unbroken = _record(model, text, Path(folder) / "unbroken.vlens")
        result = _Trial(model, text, unbroken, Path(folder), random.Random(seed)).run(
            kills, time.perf_counter() - began
        )
    print(json.dumps(result, indent=2))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=2) + "\n")
    if result["acknowledged_shards_lost"] or result["wrong"]:
        sys.exit(1)


class _Trial:
    def __init__(
        self, model: LoopedMoE, text: PackedTokens, unbroken: Recording, folder: Path, random_: random.Random
    ) -> None:
        self.model, self.text, self.unbroken, self.folder, self.random = model, text, unbroken, folder, random_
        self.ids = text.tokens[text.segments >= 0]
        self.found = {"kills": 0, "recordings_finished": 0, "acknowledged_shards_lost": 0, "wrong": 0}
        self.found |= {"partial_files_left_by_kills": 0, "reads_meanwhile": 0, "acknowledged_shards_checked": 0}
        self.acknowledged: dict[str, str] = {}

    def run(self, kills: int, seconds: float) -> dict[str, int]:
        path = self.folder / "0.vlens"
        while self.found["kills"] < kills or not self.found["acknowledged_shards_checked"]:
            finished = self._once(path, self.random.uniform(0, 0.4 * seconds))
            self._check_acknowledged(path)
            self.found["partial_files_left_by_kills"] += len(list(path.rglob("*.tmp")))
            if not self.acknowledged:
                seconds *= 2  # a busier machine than before: what was never listed can't be lost
            elif finished:
                seconds /= 2  # or an idler one
            if finished:
                self._finish(path)
                path = self.folder / f"{self.found['kills']}.vlens"
        _record(self.model, self.text, path)
        self._check_acknowledged(path)
        self._finish(path)
        return self.found

    def _once(self, path: Path, seconds: float) -> bool:
        """A child that records until it's done or its time is up; whether it was done."""
        child = os.fork()
        if child == 0:
            try:
                _record(self.model, self.text, path)
                os._exit(0)
            except BaseException as error:
                print(repr(error), file=sys.stderr)
                os._exit(1)
        deadline = time.perf_counter() + seconds
        while time.perf_counter() < deadline:
            self._read(path)
            time.sleep(0.02)
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                self._read(path)
                self.found["wrong"] += status != 0
                return status == 0
        self._read(path)
        os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        self.found["kills"] += os.WIFSIGNALED(status)
        return status == 0

    def _read(self, path: Path) -> None:
        """As a notebook would, at any moment."""
        if not (path / "manifest.json").exists():
            return
        try:
            recording = Recording(path)
            ids = recording.token_table()["id"]
            right = len(ids) == recording.tokens and np.array_equal(ids, self.ids[: len(ids)])
            self.acknowledged |= {shard["name"]: shard["sha256"] for shard in recording.shards}
        except RecordingError as error:
            print(error, file=sys.stderr)
            right = False
        self.found["reads_meanwhile"] += 1
        self.found["wrong"] += not right

    def _check_acknowledged(self, path: Path) -> None:
        for name, digest in self.acknowledged.items():
            file = path / "shards" / name
            same = file.is_file() and hashlib.sha256(file.read_bytes()).hexdigest() == digest
            self.found["acknowledged_shards_lost"] += not same
            self.found["acknowledged_shards_checked"] += 1

    def _finish(self, path: Path) -> None:
        recording = Recording(path)
        right = validate(path).exit_code == 0 and recording.complete
        right &= np.array_equal(recording.token_table()["id"], self.ids)
        right &= np.array_equal(recording.experts(1, 2)[0], self.unbroken.experts(1, 2)[0])
        for name, totals in self.unbroken.totals.items():
            right &= np.allclose(recording.totals[name].total, totals.total, rtol=1e-12, atol=1e-12)
            right &= np.array_equal(recording.totals[name].count, totals.count)
        self.found["wrong"] += not right
        self.found["recordings_finished"] += 1
        self.acknowledged = {}
        shutil.rmtree(path)


def _record(model: LoopedMoE, text: PackedTokens, path: Path) -> Recording:
    groups = int(text.document_groups(OPTIONS.group_count).max()) + 1
    collector = StatisticsCollector(Geometry.of(model.plan, model.config.to_dict()), groups, MEASURES)
    record(model, text, path, collector, OPTIONS, provenance={}, attention_implementation="torch")
    return Recording(path)


def _model() -> LoopedMoE:
    sizes = {"vocab_size": 61, "hidden_size": 16, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4}
    sizes |= {"num_experts": 10, "expert_dim": 8, "experts_per_token": 3, "context_length": 64}
    model = LoopedMoE(LoopedMoEConfig(**sizes, loop_start=1, loop_stop=3, visits=2))
    model.init_weights(0)
    return model.eval().requires_grad_(False)


def _text() -> PackedTokens:
    rng = np.random.default_rng(0)
    documents = [np.array([0, *rng.integers(3, 61, n - 1)], np.int32) for n in rng.integers(2, 60, 24)]
    return pack(documents, 32, 0, 2)


if __name__ == "__main__":
    typer.run(main)
