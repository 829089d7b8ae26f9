"""Head ablation against the loop of one forward a head, in one interleaved run on the bundled looped model.

    python benchmarks/ablation.py --out benchmarks/results/ablation.json

The loop runs the whole batch of prompts once for each head and choice of visits, with a hook that silences the head, and
takes the logits at the targets alone, so that it isn't charged for a vocabulary at every token. CPU time, one thread, the median of
interleaved ratios; that both give the same numbers is asserted.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from visitlens.hooks.loop_plan import visit_choices
from visitlens.hooks.models.checkpoint import load_model, load_tokenizer
from visitlens.hooks.models.looped_moe import LoopedMoE
from visitlens.probe.ablation import Task, ablate_heads, nll
from visitlens.probe.bundled import PAIR
from visitlens.probe.dyck_study import DyckSettings, dyck_task


def main(
    out: Annotated[Path, typer.Option(help="JSON file for the results")] = Path("ablation.json"),
    rounds: Annotated[int, typer.Option(help="interleaved rounds")] = 5,
    prompts: Annotated[int, typer.Option(help="Dyck prompts at 4 shots")] = 16,
) -> None:
    """Times both in turn."""
    torch.set_num_threads(1)
    model, tokenizer = load_model(PAIR["looped"]), load_tokenizer(PAIR["looped"])
    config = model.config
    task = dyck_task(DyckSettings(prompts=prompts).draw(tokenizer), config.bos_token_id, config.pad_token_id)
    seconds: dict[str, list[float]] = {"loop": [], "together": []}
    for _ in range(rounds):
        loop, took = timed(lambda: one_forward_a_head(model, task))
        seconds["loop"].append(took)
        together, took = timed(lambda: ablate_heads(model, task).change.sum(0))
        seconds["together"].append(took)
        np.testing.assert_allclose(loop, together, atol=1e-3)
    ratios = [a / b for a, b in zip(seconds["loop"], seconds["together"], strict=True)]
    report = {
        "machine": platform.processor() or platform.machine(),
        "date": datetime.now(UTC).date().isoformat(),
        "torch": torch.__version__,
        "prompts": prompts,
        "tokens": int((task.document >= 0).sum()),
        "runs": int(np.prod(together.shape)),
        "cpu_seconds_loop": statistics.median(seconds["loop"]),
        "cpu_seconds_together": statistics.median(seconds["together"]),
        "speed_up": statistics.median(ratios),
        "speed_up_range": [min(ratios), max(ratios)],
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=2))


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    began = time.process_time()
    result = work()
    return result, time.process_time() - began


@torch.inference_mode()
def one_forward_a_head(model: LoopedMoE, task: Task) -> np.ndarray:
    """[visits, layer, head] change of the summed loss."""
    tokens = torch.from_numpy(task.tokens).long()
    truth = tokens[task.context, task.position]
    last = model.plan.steps[-1]
    after: dict[str, torch.Tensor] = {}

    def keep(x: torch.Tensor, hook: Any) -> None:
        after["last"] = x

    def loss(hooks: list[Any]) -> float:
        hooks = [*hooks, (f"blocks.{last.layer}.visit.{last.visit}.hook_resid_post", keep)]
        with model.hooks(fwd_hooks=hooks):
            model(tokens[:, :-1], return_type="none")
        return float(nll(model.logits(after["last"][task.context, task.position - 1]), truth).double().sum())

    def silence(z: torch.Tensor, hook: Any, head: int) -> torch.Tensor:
        z = z.clone()
        z[:, :, head] = 0
        return z

    layers, heads = model.plan.looped_layers, range(model.config.num_heads)
    choices = visit_choices(max(model.plan.visits.values()))
    plain = loss([])
    change = np.zeros((len(choices), len(layers), len(heads)))
    for c, visits in enumerate(choices):
        for at, layer in enumerate(layers):
            for head in heads:
                hooks = [
                    (f"blocks.{layer}.visit.{v}.attn.hook_z", lambda z, hook, head=head: silence(z, hook, head))
                    for v in visits
                ]
                change[c, at, head] = loss(hooks) - plain
    return change


if __name__ == "__main__":
    typer.run(main)
