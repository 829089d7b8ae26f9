"""The recording's files against the plain file system and plain HDF5: commits, reads, the gate, first paint.

    python benchmarks/storage.py --out benchmarks/results/storage.json

Ratios of interleaved rounds on one machine, medians. Commits end in fsync, so they are wall-clock; reads are CPU time from a warm page
cache, "cold" meaning a recording that this process hasn't opened yet. Targets stand beside the figures.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import h5py
import numpy as np
import typer

from visitlens.hooks.recording.format import schema
from visitlens.hooks.recording.format.gate import open_gated, passed
from visitlens.hooks.recording.read.recording import Recording
from visitlens.hooks.recording.store.commit import committing

STEPS, TOKENS, HEADS, HEAD_DIM = 12, 4096, 8, 64
MATRIX = np.random.default_rng(0).standard_normal((512, 512)).astype(np.float32)
PAINT = "import sys, time, json\nt = time.perf_counter(); c = time.process_time()\nimport visitlens\n"
PAINT += "run = visitlens.open(sys.argv[1]); run.expert_overlap(); run.sink_mass().interval()\n"
PAINT += "assert 'torch' not in sys.modules\nprint(json.dumps([time.perf_counter() - t, time.process_time() - c]))"


def main(
    out: Annotated[Path | None, typer.Option(help="JSON file for the results")] = None,
    rounds: Annotated[int, typer.Option(help="interleaved rounds")] = 9,
    recording: Annotated[
        Path | None, typer.Option(help="a recording of level tokens, for first paint and its shards' gate")
    ] = None,
) -> None:
    """Measures; a synthetic shard of vectors (about 50 MB), and a real recording where one is given."""
    with tempfile.TemporaryDirectory() as folder:
        report = {"rounds": rounds, **_vectors(Path(folder), rounds)}
    if recording is not None:
        report |= _real(recording, rounds)
    print(json.dumps(report, indent=2))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report, indent=2) + "\n")


def _vectors(folder: Path, rounds: int) -> dict[str, object]:
    values = np.random.default_rng(0).integers(0, 2**16, (STEPS, TOKENS, HEADS, HEAD_DIM)).astype(np.uint16)
    shard, raw = folder / "w00-000000.h5", folder / "raw"
    plain: list[float] = []
    ours: list[float] = []
    stall: list[float] = []
    cpu: list[float] = []
    products = 1 + round(
        2 * _seconds(lambda: _commit(shard, values), time.perf_counter) / _seconds(_product, time.perf_counter)
    )
    for _ in range(rounds):
        plain.append(_seconds(lambda: _write_raw(raw, values), time.perf_counter))
        before = time.process_time()
        ours.append(_seconds(lambda: _commit(shard, values), time.perf_counter))
        cpu.append(time.process_time() - before)
        forward = _seconds(lambda: _run(products), time.perf_counter)
        stall.append(max(_seconds(lambda: _behind(shard, values, products), time.perf_counter) - forward, 1e-4))
    reads: dict[str, list[float]] = {"raw": [], "verified": [], "hdf5": []}
    for _ in range(rounds):
        reads["raw"].append(_seconds(lambda: raw.read_bytes(), time.process_time))
        reads["verified"].append(_seconds(lambda: _read_all(shard), time.process_time))
        reads["hdf5"].append(_seconds(lambda: _read_plainly(shard), time.process_time))
    gates = [_seconds(lambda: open_gated(shard).close(), time.process_time) for _ in range(rounds)]
    slices = [_seconds(lambda: _slice(shard), time.process_time) for _ in range(rounds)]
    with h5py.File(shard) as file:
        chunks = sum(d.id.get_num_chunks() for d in (file["vec/q"],))
    return {
        "shard_bytes": shard.stat().st_size,
        "chunks": chunks,
        "commit_to_raw_write_and_fsync (>= 0.20)": _ratio(plain, ours),
        "commit_cpu_ms": round(1e3 * statistics.median(cpu), 1),
        "in_a_thread_behind_a_forward, what the run waits (>= 0.35)": _ratio(plain, stall),
        "verified_read_to_raw_read (>= 0.5)": _ratio(reads["raw"], reads["verified"]),
        "verified_read_to_hdf5_read": _ratio(reads["hdf5"], reads["verified"]),
        "gate_ms (<= 50)": round(1e3 * statistics.median(gates), 1),
        "slice_of_1000_tokens_of_a_head_ms (<= 60)": round(1e3 * statistics.median(slices), 1),
    }


def _real(path: Path, rounds: int) -> dict[str, object]:
    recording = Recording(path)
    gates = {}
    for shard in recording.shards[:3]:
        file = path / schema.SHARDS / shard["name"]
        spent = [_seconds(lambda file=file: open_gated(file).close(), time.process_time) for _ in range(rounds)]
        gates[f"{shard['name']}, {shard['bytes'] / 1e6:.0f} MB"] = round(1e3 * statistics.median(spent), 1)
    paints = []
    for _ in range(rounds):
        result = subprocess.run([sys.executable, "-c", PAINT, str(path)], capture_output=True, text=True, check=True)
        paints.append(json.loads(result.stdout))
    return {
        "tokens": recording.tokens,
        "gate_ms_of_its_shards (<= 50)": gates,
        "open_and_first_statistics_seconds (< 0.5)": {
            "wall": round(statistics.median(p[0] for p in paints), 3),
            "cpu": round(statistics.median(p[1] for p in paints), 3),
        },
    }


def _commit(path: Path, values: np.ndarray) -> None:
    """As the recorder does, with a header."""
    config = {"model": {}, "data_sha256": "", "dtype": "bfloat16", "measures": []}
    config |= {"options": {"groups": 1, "level": "activations", "sites": ["Q"]}}
    run = {"run_uuid": "0", "config_sha256": "0", "config": config, "layers": list(range(STEPS))}
    run |= {"tokens": TOKENS, "documents": 1, "provenance": {}}
    numbers = dict.fromkeys(schema.SHARD_NUMBERS, 0) | {"token_count": TOKENS, "context_count": 4, "complete": 1}
    with committing(path, values.nbytes) as aside, h5py.File(aside, "w", libver=schema.LIBVER) as file:
        file.create_dataset("vec/q", data=values, chunks=(1, 256, HEADS, HEAD_DIM), **schema.VECTOR_FILTERS)
        schema.write_header(file, run, numbers)


def _behind(path: Path, values: np.ndarray, products: int) -> None:
    """A commit by the recorder's thread while this one has twice as much of its own to do, as a forward has."""
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(_commit, path, values)
        _run(products)
        pending.result()


def _run(products: int) -> None:
    for _ in range(products):
        _product()


def _product() -> np.ndarray:
    return MATRIX @ MATRIX


def _write_raw(path: Path, values: np.ndarray) -> None:
    with path.open("wb") as file:
        file.write(values.data)
        file.flush()
        os.fsync(file.fileno())


def _read_all(path: Path) -> None:
    with passed(path) as gated:
        gated.read("vec/q")


def _read_plainly(path: Path) -> None:
    with h5py.File(path) as file:
        file["vec/q"][()]


def _slice(path: Path) -> None:
    with passed(path) as gated:
        gated.read("vec/q", (7, slice(1500, 2500), 3))


def _seconds(run: Callable[[], object], clock: Callable[[], float]) -> float:
    began = clock()
    run()
    return clock() - began


def _ratio(reference: list[float], ours: list[float]) -> float:
    """Of speeds, so that 1 is as fast as the reference."""
    return round(statistics.median(a / b for a, b in zip(reference, ours, strict=True)), 3)


if __name__ == "__main__":
    typer.run(main)
