"""What a trained specimen can do, measured on held-out examples, and its card from that.

python -m visitlens.probe.ladder.specimen_card hops assets/models/hops     (measures again and writes both files)
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from visitlens.hooks.models.checkpoint import load_model, load_tokenizer
from visitlens.probe.experiments.accuracy import accuracy
from visitlens.probe.experiments.loop_count import loop_count
from visitlens.probe.ladder.budget import Budget
from visitlens.probe.ladder.specimens import EXAMPLES, Specimen, held_out_examples, specimen
from visitlens.probe.measures.measure import StatArray
from visitlens.probe.samples.sample import EvalSet

Table = dict[str, dict[str, list[float]]]
"""Row -> column -> value, and the low and high end of its 95 % interval."""
PARTS = ("Q", "K", "V", "PV", "experts", "moe_write")


def finish(chosen: Specimen, folder: Path) -> None:
    """Adds what was measured to `training.json` and writes the card."""
    file = folder / "training.json"
    report = json.loads(file.read_text(encoding="utf-8"))
    if chosen.continues:
        report["tokens_before"] = chosen.tokens_before(folder)
    report |= {"specimen": chosen.name, "recipe": asdict(chosen.recipe), **measure(chosen, folder)}
    file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(card(chosen, report), encoding="utf-8")


def measure(chosen: Specimen, folder: Path) -> dict[str, Table]:
    """Accuracy on the held-out examples by number of hops: under interventions, and by loop count (writes as trained)."""
    model = load_model(folder)
    sample = EvalSet.of_task(held_out_examples(chosen.task), load_tokenizer(folder), model.config, name="all")
    hops = [name for name in sample.slices if "hop" in name]
    found = {"accuracy": _table(accuracy(model, sample, parts=PARTS)["accuracy"], "intervention", hops)}
    if model.plan.looped_layers:
        by_count = loop_count(model, sample, loops=range(1, chosen.config.visits + 2))["accuracy"]
        kept = list(by_count.labels["scale"]).index("kept")
        found["loops"] = {
            str(count): {
                hop: [round(float(x), 4) for x in (by_count.values[kept, i, j], *_ends(by_count, (kept, i, j)))]
                for hop in hops
                for j in [list(by_count.labels["slice"]).index(hop)]
            }
            for i, count in enumerate(by_count.labels["loops"])
        }
    return found


def _table(stat: StatArray, axis: str, slices: list[str]) -> Table:
    rows, columns = list(stat.labels[axis]), list(stat.labels["slice"])
    return {
        str(row): {
            name: [round(float(x), 4) for x in (stat.values[i, j], *_ends(stat, (i, j)))]
            for name in slices
            for j in [columns.index(name)]
        }
        for i, row in enumerate(rows)
    }


def _ends(stat: StatArray, at: tuple[int, ...]) -> tuple[float, float]:
    low, high = stat.interval()
    return float(np.asarray(low)[at]), float(np.asarray(high)[at])


def card(chosen: Specimen, report: dict[str, Any]) -> str:
    """The card, as Markdown."""
    config, recipe = chosen.config, chosen.recipe
    budget = Budget.of(config, 40)
    looped = len(config.loop_spec.span) > 0
    loop = (
        f"layer {config.loop_start} runs {config.visits} times, each write scaled by 1/{config.visits}"
        if looped
        else "none"
    )
    first = (
        f" It began with the weights of `{chosen.continues}` ({report['tokens_before']:,} tokens, batch 64, rate 2e-3; its card)."
        if chosen.continues
        else ""
    )
    drawn = (
        f" After the last stage the loop count of each update was drawn from {', '.join(map(str, recipe.loop_counts))}, and its "
        "queries asked for no more hops than that."
        if recipe.loop_counts
        else ""
    )
    return f"""# {chosen.name}: {chosen.purpose}

A specimen that ships with visitlens to have something to see. It knows one task and nothing else.

| | |
|---|---|
| layers, hidden size | {config.num_layers}, {config.hidden_size} |
| loop | {loop} |
| heads | {config.num_heads} of {config.head_dim} |
| experts per layer | {config.num_experts} of width {config.expert_dim}, {config.experts_per_token} per token |
| parameters without embeddings | {budget.total:,} stored, {budget.executed:,} executed per token |
| vocabulary, context | {config.vocab_size} words, {config.context_length} |
| weights | bfloat16 safetensors, trained in float32 |

## Task and training

A prompt names a permutation by its edges `x f(x)` in random order and asks `k x`: the answer is f applied k times to x ({chosen.task.hops} hops at
most, one cycle through {", ".join(map(str, chosen.task.sizes))} of {chosen.task.symbols} symbols, so that x itself is never right). {report["tokens"]:,} tokens,
{report["core_seconds"]:,} seconds of one CPU core, seed {recipe.seed}; contexts of {chosen.task.queries} queries, of which only the answers were trained
on; one hop first, the next number of hops once held-out accuracy was {recipe.pass_at:.2f}.{first}{drawn} AdamW, rate {recipe.learning_rate:g}, batch
{recipe.batch}, cosine decay over the last {recipe.decay_tokens:,} tokens. Made again by `visitlens specimens {chosen.name} --out FOLDER`.

## What it does

Accuracy on {EXAMPLES} held-out prompts of one query for each number of hops, none drawn in training, with 95 % intervals over prompts.
Chance is about 0.14 (one of the other symbols).

{_markdown(report["accuracy"], "intervention")}
{_loops(report, config.visits)}
## What it is good for, and what it doesn't show

{_meaning(chosen)}
## Licence

Apache-2.0, as visitlens. It was trained on random symbols alone.
"""


def _markdown(table: Table, first: str) -> str:
    columns = list(next(iter(table.values())))
    rows = [f"| {first} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name, row in table.items():
        cells = (f"{value:.2f} ({low:.2f}-{high:.2f})" for value, low, high in row.values())
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def _loops(report: dict[str, Any], visits: int) -> str:
    if "loops" not in report:
        return ""
    return (
        f"\nThe span run another number of times, its writes scaled by 1/{visits} as trained:\n\n"
        f"{_markdown(report['loops'], 'loops')}"
    )


def _meaning(chosen: Specimen) -> str:
    if not chosen.config.loop_spec.span:
        return (
            "To be compared with the looped model on equal budgets. It is one run of one seed: a difference between the two may be "
            "chance, and it says nothing of language models.\n"
        )
    return (
        "Interventions on visits have answers that one can check: which visit does which hop, and by what. The span is a single "
        "layer, so skipping any one of its visits is the same forward, the layer run once less. It is a toy of two layers on one "
        "task with a curriculum; that a visit does a hop here doesn't say that visits of a large model do one step each, and other "
        "seeds may do it in another way (their cards say).\n"
    )


def main(
    name: Annotated[str, typer.Argument(help="A specimen's name.")],
    folder: Annotated[Path, typer.Argument(help="Its checkpoint folder.")],
) -> None:
    """Measure a specimen again and write its training.json and card."""
    finish(specimen(name), folder)


if __name__ == "__main__":
    typer.run(main)
