"""Recording of many tokens: CPU time and bytes a token, and whether memory grows with the run.

    python benchmarks/scale.py --tokens 100000,1000000 --out benchmarks/results/scale.json     # hours on a slow core
    python benchmarks/scale.py --tokens 1000000 --workers 2

The bundled looped model at level `tokens`; its sample is repeated until it is long enough. Each length is recorded in a process of its own,
which notes its resident memory at every shard: `memory_mb` are the medians over the first, second and last third of the run.
Then a fresh process opens the recording and reads its first statistics, without torch.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from visitlens.hooks.recording.read.recording import Recording
from visitlens.hooks.text.documents import read_documents
from visitlens.probe.jobs.prepared_run import PreparedRun
from visitlens.probe.jobs.request import RunRequest
from visitlens.probe.model.bundled import PAIR, SAMPLE

OPEN = "import sys, time, json\nt = time.perf_counter(); c = time.process_time()\nimport visitlens\n"
OPEN += "run = visitlens.open(sys.argv[1]); run.expert_overlap(); run.sink_mass().interval()\n"
OPEN += "assert 'torch' not in sys.modules\nprint(json.dumps([time.perf_counter() - t, time.process_time() - c]))"


def main(
    tokens: Annotated[str, typer.Option(help="lengths, comma-separated")] = "100000,1000000",
    workers: Annotated[int, typer.Option(help="processes")] = 1,
    shard_tokens: Annotated[int, typer.Option(help="tokens a shard")] = 16_384,
    out: Annotated[Path | None, typer.Option(help="JSON file for the results")] = None,
    run_one: Annotated[str, typer.Option(help="internal: records in this process, into this folder")] = "",
) -> None:
    """Records each length and compares."""
    lengths = [int(part) for part in tokens.split(",")]
    if run_one:
        print(json.dumps(_record(Path(run_one), lengths[0], workers, shard_tokens)))
        return
    report: dict[str, Any] = {"workers": workers, "shard_tokens": shard_tokens, "runs": []}
    for length in lengths:
        with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
            command = [sys.executable, __file__, "--tokens", str(length), "--workers", str(workers)]
            command += ["--shard-tokens", str(shard_tokens), "--run-one", folder]
            result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            opened = [
                json.loads(subprocess.check_output([sys.executable, "-c", OPEN, f"{folder}/r.vlens"], text=True))
                for _ in range(5)
            ]
            found = json.loads(result.stdout.splitlines()[-1])
            found["open_and_first_statistics_seconds"] = {
                "wall": round(statistics.median(wall for wall, _ in opened), 3),
                "cpu": round(statistics.median(cpu for _, cpu in opened), 3),
            }
            report["runs"].append(found)
    first, last = report["runs"][0], report["runs"][-1]
    report["cpu_per_token_last_to_first"] = round(last["cpu_us_per_token"] / first["cpu_us_per_token"], 3)
    print(json.dumps(report, indent=2))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report, indent=2) + "\n")


def _record(folder: Path, tokens: int, workers: int, shard_tokens: int) -> dict[str, Any]:
    text = folder / "text.jsonl"
    sample, size = [document.text for document in read_documents(SAMPLE)], 0
    with text.open("w") as file:
        while size < 8 * tokens:  # bytes; a token of this sample has about 3.5
            for document in sample:
                file.write(json.dumps({"text": document}) + "\n")
                size += len(document.encode())
    request = RunRequest.of(
        PAIR["looped"],
        text,
        folder / "r.vlens",
        level="tokens",
        shard_tokens=shard_tokens,
        max_tokens=tokens,
        workers=workers,
    )
    prepared = PreparedRun(request)
    if workers == 1:
        _ = prepared.model
    memory: list[int] = []
    began, before = time.perf_counter(), _cpu_seconds()
    prepared.record(lambda done, total: memory.append(_resident_mb()))
    spent, wall = _cpu_seconds() - before, time.perf_counter() - began
    recording = Recording(request.out)
    third = max(len(memory) // 3, 1)
    parts = (memory[:third], memory[third : 2 * third], memory[-third:])
    return {
        "tokens": recording.tokens,
        "cpu_us_per_token": round(1e6 * spent / recording.tokens, 1),
        "wall_seconds": round(wall, 1),
        "bytes_per_token": round(sum(shard["bytes"] for shard in recording.shards) / recording.tokens),
        "shards": len(recording.shards),
        "memory_mb": [round(statistics.median(part)) for part in parts],
        "peak_memory_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }


def _cpu_seconds() -> float:
    """Of this process and the workers that it has waited for."""
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def _resident_mb() -> int:
    with Path("/proc/self/statm").open() as file:
        return int(file.read().split()[1]) * resource.getpagesize() // 2**20


if __name__ == "__main__":
    typer.run(main)
