"""Head ablation against whole forwards, in interleaved runs: on the bundled looped model, and on adapted models.

    python benchmarks/ablation.py --out benchmarks/results/ablation.json

The native model against the loop that runs the whole batch of prompts once for each head and choice of visits, with a hook that silences
the head, and takes the logits at the targets alone, so that it isn't charged for a vocabulary at every token. Adapted models (random weights, 16
steps) against themselves with no room to keep what their layers gave, so that each forward runs whole: `ablate_heads`, and the live probe's
scan. CPU time, one thread, the median of interleaved ratios; that both give the same numbers is asserted, of adapted models bit for bit.
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
from peers import make_model

import visitlens as vl
from visitlens.hooks.adapters import replay
from visitlens.hooks.core.loop_plan import visit_choices
from visitlens.hooks.models.checkpoint import load_model, load_tokenizer
from visitlens.hooks.models.looped_moe import LoopedMoE
from visitlens.probe.analyses.ablation.dyck_study import DyckSettings, dyck_task
from visitlens.probe.analyses.ablation.heads import Task, ablate_heads, nll
from visitlens.probe.live.live_model import Tracer
from visitlens.probe.model.bundled import PAIR


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
    steps16 = {name: replayed(make(), rounds) for name, make in ADAPTED.items()}
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
        "adapted": steps16,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(report, indent=2))


def dory() -> Any:
    import transformers

    sizes = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "sliding_window": 256}
    loop = {"num_hidden_layers": 10, "n_input_layers": 2, "n_output_layers": 2, "n_recurrent_loops": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    config = transformers.AutoConfig.for_model("dory", **sizes, **loop, **heads)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


ADAPTED: dict[str, Callable[[], Any]] = {
    "dory: six of ten layers twice": dory,
    "hrm_text: two layers six times, two twice": lambda: make_model(128, 256),
}


def replayed(hf: Any, rounds: int) -> dict[str, Any]:
    """How much faster a model's ablations are than whole forwards, and what a replay keeps of one."""
    model = vl.adapt(hf)
    live = Tracer(model, load_tokenizer(PAIR["looped"]))  # of another vocabulary: the ids are given
    run = live.run([0, *(3 + b for b in b"A prompt of forty tokens, BOS included.")], coda_lens=False)
    tokens = np.random.default_rng(0).integers(3, 500, (8, 64))
    context, position = np.indices(tokens.shape)[:, :, -3:].reshape(2, -1)
    task = Task(tokens, None, np.indices(tokens.shape)[0], context, position, context)
    kept = replay.Replay(model)
    with kept.going_on(keep=len(model.plan)):
        model(torch.from_numpy(tokens), return_type="none")
    ways = {"ablate": lambda layers: ablate_heads(model, task, layers=layers, heads=(0, 1)).change}
    ways["scan"] = lambda layers: live.scan(run).change
    by_visits = [
        [n for n, v in model.plan.visits.items() if v == visits] for visits in {*model.plan.visits.values()} - {1}
    ]
    found: dict[str, Any] = {
        "steps": len(model.plan),
        "kept_bytes_per_token": (replay.LIMIT - kept.left) // tokens.size,
    }
    for name, way in ways.items():
        for layers in by_visits if name == "ablate" else [[]]:
            ratios, room = [], replay.LIMIT
            for _ in range(rounds):
                try:
                    replay.LIMIT = 0
                    whole, slow = timed(lambda way=way, layers=layers: way(layers))
                finally:
                    replay.LIMIT = room
                fast, quick = timed(lambda way=way, layers=layers: way(layers))
                assert (whole == fast).all()
                ratios.append(slow / quick)
            found[f"{name} {layers or 'every layer'}"] = {
                "speed_up": statistics.median(ratios),
                "range": [min(ratios), max(ratios)],
            }
    return found


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
