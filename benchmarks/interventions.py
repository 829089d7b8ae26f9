"""What interventions cost: on an adapted model against the plain forward, and against TransformerLens' run_with_hooks.

    python benchmarks/interventions.py --out benchmarks/results/interventions.json

The HRM-Text of `peers.py` (random weights; L layers run six times, H layers twice). Ratios are to the plain forward of the same
model without a cache, CPU time, one thread, medians over interleaved rounds. TransformerLens names no visits: its hook acts
at every one, so what is compared with it acts at every visit too. Its bridge forms a map at each step, with hooks or
without; its own forward without hooks is given beside.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from interleaved import interleaved, spread
from machine import describe
from peers import make_bridge, make_model

import visitlens as vl
from visitlens.hooks.capture.generation import generate

do = vl.do
OURS: dict[str, tuple[Any, ...]] = {
    "no intervention": (),
    "one write at one visit": (do.zero("attn_write", layer=0, visit=2),),
    "one write at every visit": (do.zero("attn_write", layer=0),),
    "one pattern at every visit": (do.knock_out_sink(layer=0),),
    "V of every later visit taken from the first": (do.take("V"),),
    "every write scaled": (do.scale("attn_write", 0.5), do.scale("moe_write", 0.5)),
}
THEIRS: dict[str, list[tuple[str, Callable[..., Any]]]] = {
    "no hook": [],
    "one write at every visit": [("L_blocks.0.attn.hook_out", lambda value, hook: torch.zeros_like(value))],
    "one pattern at every visit": [("L_blocks.0.attn.hook_pattern", lambda p, hook: _without_start(p))],
}


def main(
    out: Annotated[Path, typer.Option(help="JSON file for the results")] = Path("interventions.json"),
    rounds: Annotated[int, typer.Option(help="interleaved rounds")] = 7,
    hidden: Annotated[int, typer.Option(help="hidden size")] = 256,
    tokens: Annotated[int, typer.Option(help="tokens per context")] = 256,
    contexts: Annotated[int, typer.Option(help="contexts per forward")] = 4,
    new: Annotated[int, typer.Option(help="tokens generated")] = 16,
) -> None:
    """Times every way in turn."""
    torch.set_num_threads(1)
    model = make_model(hidden, tokens + new)
    adapted, bridge = vl.adapt(model), make_bridge(model)
    ids = torch.randint(3, 500, (contexts, tokens), generator=torch.Generator().manual_seed(0))

    def ours(chain: tuple[Any, ...], run: Callable[[], Any]) -> Callable[[], Any]:
        def intervened() -> Any:
            with torch.no_grad(), vl.intervene(adapted, *chain):
                return run()

        return intervened

    def theirs(hooks: list[Any]) -> Callable[[], Any]:
        def hooked() -> Any:
            with torch.no_grad():
                return bridge.run_with_hooks(ids, fwd_hooks=hooks, return_type="logits")

        return hooked

    plain = torch.no_grad()(lambda: model(ids, use_cache=False).logits)
    written = ours((), lambda: generate(adapted, ids[:1], new))
    taken = ours(OURS["V of every later visit taken from the first"], lambda: generate(adapted, ids[:1], new))
    groups: dict[str, dict[str, Callable[[], Any]]] = {
        "ratio_to_plain_forward": {
            "plain": plain,
            **{f"visitlens: {name}": ours(chain, lambda: adapted(ids)) for name, chain in OURS.items()},
            **{f"TransformerLens: {name}": theirs(hooks) for name, hooks in THEIRS.items()},
        },
        "ratio_to_plain_generation": {"plain": written, "V of every later visit taken from the first": taken},
    }
    report = {
        "machine": describe(),
        "model": f"hrm_text, hidden {hidden}, {len(adapted.plan)} steps, {contexts} x {tokens} tokens; {new} tokens generated after {tokens}",
        "rounds": rounds,
        **{name: _ratios(ways, rounds) for name, ways in groups.items()},
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


def _without_start(pattern: torch.Tensor) -> torch.Tensor:
    """As `knock_out_sink`: no mass on the first key, save of the first query; the rest made up to what it was."""
    rest = pattern.clone()
    rest[..., 1:, 0] = 0
    return rest / rest.sum(-1, keepdim=True)


def _ratios(ways: dict[str, Callable[[], Any]], rounds: int) -> dict[str, Any]:
    seconds, found = interleaved(ways, rounds)
    return {"seconds_plain": round(seconds, 4)} | {name: spread(each) for name, each in found.items()}


if __name__ == "__main__":
    typer.run(main)
