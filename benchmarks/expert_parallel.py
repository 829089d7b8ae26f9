"""One model over several processes: what each of them holds while it loads, and whether they compute the same.

    python benchmarks/expert_parallel.py --out benchmarks/results/expert_parallel.json

A random native model, nearly all of it experts, is written to a checkpoint and loaded by 1, 2 and 4 ranks (gloo, CPU). Each notes its
anonymous memory (RssAnon: what isn't the mapped file) every few milliseconds from before loading on: `peak_mb` is the most, less what
the process had before. Then all run one context; `same` says that rank 0's residual stream has the bits of a single process.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

from visitlens.hooks.models.checkpoint import load_model, save_model
from visitlens.hooks.models.config import LoopedMoEConfig
from visitlens.hooks.models.expert_parallel import is_expert
from visitlens.hooks.models.looped_moe import LoopedMoE


def main(
    ranks: Annotated[str, typer.Option(help="numbers of processes, comma-separated")] = "1,2,4",
    layers: Annotated[int, typer.Option(help="layers of about 50 MB")] = 8,
    out: Annotated[Path | None, typer.Option(help="JSON file for the results")] = None,
    rank_of: Annotated[str, typer.Option(help="internal: this is a rank, of the model in that folder")] = "",
) -> None:
    """Loads by each number of processes."""
    torch.set_num_threads(1)
    if rank_of:
        print(json.dumps(_rank(Path(rank_of))))
        return
    sizes: dict[str, Any] = {"vocab_size": 512, "hidden_size": 256, "num_layers": layers, "num_heads": 4}
    sizes |= {"num_kv_heads": 2, "head_dim": 64, "num_experts": 64, "expert_dim": 256, "experts_per_token": 8}
    with tempfile.TemporaryDirectory() as folder:
        model = LoopedMoE(LoopedMoEConfig(**sizes, loop_start=2, loop_stop=layers - 2, visits=2, context_length=256))
        model.init_weights(0)
        save_model(model, Path(folder), torch.float32)
        shared_out = sum(p.nbytes for name, p in model.named_parameters() if is_expert(name))
        whole = sum(p.nbytes for p in model.parameters())
        del model
        report: dict[str, Any] = {"model_mb": round(whole / 1e6), "experts_mb": round(shared_out / 1e6), "ranks": {}}
        for size in map(int, ranks.split(",")):
            report["ranks"][size] = _load(folder, size)
    sums = {entry.pop("sum") for entry in report["ranks"].values()}
    report["same"] = len(sums) == 1
    print(json.dumps(report, indent=2))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(report, indent=2) + "\n")


def _load(folder: str, size: int) -> dict[str, Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(size)}
    command = [sys.executable, __file__, "--rank-of", folder]
    children = [
        subprocess.Popen(command, env={**os.environ, **where, "RANK": str(r)}, stdout=subprocess.PIPE, text=True)
        for r in range(size)
    ]
    found = [json.loads(child.communicate()[0]) for child in children]
    return {"peak_mb": [each["peak_mb"] for each in found], "sum": found[0]["sum"]}


def _rank(folder: Path) -> dict[str, Any]:
    distributed.init_process_group("gloo")
    size = distributed.get_world_size()
    mesh = init_device_mesh("cpu", (size,)) if size > 1 else None
    import torch.distributed.tensor

    before, ended, most = _anonymous_mb(), threading.Event(), [0.0]

    def watch() -> None:
        while not ended.wait(0.003):
            most[0] = max(most[0], _anonymous_mb())

    watcher = threading.Thread(target=watch)
    watcher.start()
    model = load_model(folder, mesh=mesh)
    time.sleep(0.02)
    ended.set()
    watcher.join()
    tokens = torch.arange(256).view(1, 256) % 512
    with torch.inference_mode():
        logits = model(tokens)
    assert logits is not None
    distributed.barrier()
    distributed.destroy_process_group()
    return {"peak_mb": round(most[0] - before), "sum": float(logits.double().square().sum()).hex()}


def _anonymous_mb() -> float:
    with Path("/proc/self/status").open() as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) / 1000


if __name__ == "__main__":
    typer.run(main)
