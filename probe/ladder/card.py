"""Writes the model card of the bundled pair from `config.json` and `training.json`.

python -m visitlens.probe.ladder.card assets/models/smelt > assets/models/smelt/README.md
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from visitlens.hooks.models.config import LoopedMoEConfig
from visitlens.probe.ladder.budget import Budget

_ORDER = (
    "Up to {whole_documents_until:,} tokens long documents filled consecutive contexts, after that their pieces were shuffled "
    "(the first order taught little: it was changed midway, for both models at the same token). "
)
_MEAN_DOCUMENT = 330  # tokens of a segment in the training mix, within contexts of 1024


def model_card(folder: Path) -> str:
    """The card, as Markdown."""
    config = LoopedMoEConfig.from_dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    training = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    recipe, budget = training["recipe"], Budget.of(config, _MEAN_DOCUMENT)
    looped = len(config.loop_spec.span) > 0
    loop = (
        f"layers {config.loop_start}-{config.loop_stop - 1} run {config.visits} times, each write scaled by 1/{config.visits}"
        if looped
        else "none"
    )
    losses = "\n".join(f"| {name} | {loss:.3f} |" for name, loss in training["validation_loss"].items())
    dyck = "\n".join(
        f"| {shots} | {d['exact_match']:.1%} | {d['accuracy']:.1%} | {d['closer_accuracy']:.1%} | {d['nll']:.3f} |"
        for shots, d in training["dyck"].items()
    )
    return f"""# {"SMELT-style looped MoE" if looped else "Unlooped Baseline MoE"}, {budget.total / 1e6:.1f}M parameters

One of the two tiny models that ship with visitlens to have something real to probe. It is not useful as a language model.

| | |
|---|---|
| layers, hidden size | {config.num_layers}, {config.hidden_size} |
| loop | {loop} |
| heads | {config.num_heads} query, {config.num_kv_heads} key/value, of {config.head_dim} |
| experts per layer | {config.num_experts} of width {config.expert_dim}, {config.experts_per_token} per token |
| parameters without embeddings | {budget.total:,} stored, {budget.active:,} active, {budget.executed:,} executed per token |
| training FLOPs per token | {budget.flops_per_token:,.0f} at a mean document of {_MEAN_DOCUMENT} tokens |
| KV cache | {budget.kv_values_per_token} values per token |
| vocabulary, context | {config.vocab_size} (byte-level BPE), {config.context_length} |
| weights | bfloat16 safetensors, trained in float32 |

## Training

{training["tokens"]:,} tokens: documents of five categories (code, math and STEM, knowledge, finance, web; {training["training_documents"]:,} documents,
{training["corpus_tokens"]:,} tokens in all, so less than one pass) in random order, and few-shot Dyck prompts, so that a head that reads demonstrations can form
at this size: {recipe["dyck_share"]:.0%} of the tokens up to {recipe["late_dyck_from"]:,}, {recipe["late_dyck_share"]:.0%} after. {_ORDER.format(**recipe) if recipe["whole_documents_until"] else ""}A Dyck prompt asks to close a nested bracket string; the answer's style (marker, spacing, separator, end) is drawn afresh per
prompt, so that it can only be known from the demonstrations. Documents are packed into contexts of {config.context_length} tokens; attention stays within
a document. Both models of the pair saw the same sequences.

AdamW (0.9, 0.95), weight decay {recipe["weight_decay"]}, peak rate {recipe["learning_rate"]}, {recipe["warmup_tokens"]:,} tokens of warm-up, then constant, cosine decay over the last
{recipe["decay_share"]:.0%}; {recipe["batch"]} contexts per update, gradients clipped to {recipe["clip"]}, load-balance loss {config.load_balance_coef}, router z loss {config.router_z_coef}; seed {recipe["seed"]}.
{training["core_seconds"]:,} seconds of one CPU core. {training.get("notes", "")}The training code of then, with its change of order and of the
Dyck share midway, is `probe/ladder/train.py` in the commit that added these weights; `visitlens ladder run` is what trains a configuration now.

## What it learnt

Loss on held-out text, nats per token (about 100,000 tokens a category; a uniform guess has 8.318):

| category | loss |
|---|---|
{losses}

Dyck completion on prompts never trained on (400 per row). Exact match: every token of the answer is the most likely one, style included.

| shots | exact match | token accuracy | accuracy on closers | nats per token |
|---|---|---|---|---|
{dyck}

One run per model and one seed: differences between the two models of the pair may be chance.

## Licence

Apache-2.0, as visitlens. The training text is in the public domain or under permissive or attribution licences; sources and notices are listed in
[licences](../../licences/README.md). A tiny model can repeat short passages of its training text; the same notices cover that.
"""


def main(folder: Annotated[Path, typer.Argument(help="checkpoint folder with training.json")]) -> None:
    """Prints the model card."""
    typer.echo(model_card(folder), nl=False)


if __name__ == "__main__":
    typer.run(main)
