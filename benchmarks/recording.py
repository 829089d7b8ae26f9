"""What recording costs, as ratios to the plain forward, in one interleaved run; and its peak memory at T = 4096.

    python benchmarks/recording.py --out benchmarks/results/recording.json

The denominator is the same model's forward on the same contexts with per-document SDPA and without logits (the
recorder needs none), so the ratios are not flattered by work that recording leaves out. CPU time, one thread, medians
of interleaved rounds with their 95 % intervals. Memory is the peak resident set of processes that do only one of the two.
"""

from __future__ import annotations

import json
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from interleaved import interleaved, spread

from visitlens.hooks.models.checkpoint import load_model
from visitlens.hooks.models.config import LoopedMoEConfig
from visitlens.hooks.models.looped_moe import LoopedMoE
from visitlens.hooks.recording.write.record import RecordingOptions, record
from visitlens.hooks.text.documents import PackedTokens, pack
from visitlens.probe.jobs.prepared_run import pack_text
from visitlens.probe.jobs.request import RunRequest
from visitlens.probe.measures.collector import StatisticsCollector
from visitlens.probe.measures.statistic import Geometry
from visitlens.probe.model.bundled import PAIR, SAMPLE
from visitlens.probe.statistics.attended_tokens import AttendedTokens
from visitlens.probe.statistics.sink_mass import SinkMass

_MEMORY_RUNS = 5  # the allocator alone makes runs differ by 100 MB
ATTENTION = {m.name for statistic in (AttendedTokens, SinkMass) for m in statistic.measures}


def main(
    out: Annotated[Path, typer.Option(help="JSON file for the results")] = Path("recording.json"),
    rounds: Annotated[int, typer.Option(help="interleaved rounds")] = 7,
    tokens: Annotated[int, typer.Option(help="tokens of the sample per run")] = 8192,
    memory_of: Annotated[str, typer.Option(help="internal: prints the peak memory of one run")] = "",
) -> None:
    """Times plain forward and recording in turn on the bundled pair, then measures memory on a wider random model."""
    torch.set_num_threads(1)
    if memory_of:
        _long_context_run(memory_of)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000)
        return
    report = {
        "machine": platform.processor() or platform.machine(),
        "date": datetime.now(UTC).date().isoformat(),
        "torch": torch.__version__,
        "tokens": tokens,
        "rounds": rounds,
        "ratio_to_plain_forward": {name: _ratios(folder, tokens, rounds) for name, folder in PAIR.items()},
        "peak_memory_mb_at_4096": {what: _memory(what) for what in ("plain", "record, torch", "record, numba")},
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


def _ratios(checkpoint: Path, tokens: int, rounds: int) -> dict[str, dict[str, float]]:
    model = load_model(checkpoint)
    request = RunRequest.of(checkpoint, SAMPLE, "unused", max_tokens=tokens)
    contexts, _ = pack_text(request, model.config)
    names = list(_collector(model, contexts).measures)
    without_rows = [name for name in names if name not in ATTENTION]
    variants = {
        "plain": lambda: _plain(model, contexts),
        "summary without attention rows": lambda: _record(model, contexts, "summary", without_rows, "torch"),
        "summary, tiled torch": lambda: _record(model, contexts, "summary", names, "torch"),
        "summary, numba": lambda: _record(model, contexts, "summary", names, "numba"),
        "tokens, numba": lambda: _record(model, contexts, "tokens", names, "numba"),
    }
    _, ratios = interleaved(variants, rounds)
    return {name: spread(each) for name, each in ratios.items()}


def _plain(model: LoopedMoE, contexts: PackedTokens) -> None:
    with torch.inference_mode():
        for row in range(len(contexts.tokens)):
            tokens, segments = (torch.from_numpy(a[row : row + 1]) for a in (contexts.tokens, contexts.segments))
            model(tokens, segments, return_type="none")


def _collector(model: LoopedMoE, contexts: PackedTokens, measures: list[str] | None = None) -> StatisticsCollector:
    geometry = Geometry.of(model.plan, model.config.to_dict())
    return StatisticsCollector(geometry, int(contexts.document_groups(128).max()) + 1, measures)


def _record(model: LoopedMoE, contexts: PackedTokens, level: str, measures: list[str], implementation: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        collector = _collector(model, contexts, measures)
        path, options = Path(folder) / "run.vlens", RecordingOptions(level=level)
        record(model, contexts, path, collector, options, provenance={}, attention_implementation=implementation)


def _memory(what: str) -> float:
    command = [sys.executable, __file__, "--memory-of", what]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(_MEMORY_RUNS)]
    return statistics.median(float(run) for run in runs)


def _long_context_run(what: str) -> None:
    """Two contexts of 4096 tokens through a random model of H = 128, 8 layers of which 4 run twice."""
    config = LoopedMoEConfig(
        vocab_size=4096,
        hidden_size=128,
        num_layers=8,
        num_heads=12,
        num_kv_heads=4,
        head_dim=32,
        num_experts=96,
        expert_dim=48,
        loop_start=2,
        loop_stop=6,
        visits=2,
        context_length=4096,
    )
    model = LoopedMoE(config)
    model.init_weights(0)
    model.requires_grad_(False)
    rng = np.random.default_rng(0)
    documents = [rng.integers(3, 4096, 700).astype(np.int32) for _ in range(12)]
    contexts = pack(documents, 4096, 0, 2)
    if what == "plain":
        _plain(model, contexts)
    else:
        implementation = "numba" if what.endswith("numba") else "torch"
        _record(model, contexts, "summary", list(_collector(model, contexts).measures), implementation)


if __name__ == "__main__":
    typer.run(main)
