"""The Live probe's card that silences a head, and what changes. No torch."""

from __future__ import annotations

from math import exp
from typing import Any

from dash import html

from visitlens.app.live.choice import LiveChoice
from visitlens.app.panels.components import card, selector, table
from visitlens.app.panels.live_parts import bar, button, visible
from visitlens.hooks.core.loop_plan import visit_choices
from visitlens.probe.live.figures import place_label
from visitlens.probe.live.head_scan import KINDS, SilencedHead
from visitlens.probe.live.live_run import LiveRun


def silence_card(run: LiveRun, chosen: LiveChoice, ablation: SilencedHead | None, said: str) -> html.Section:
    """Silences the chosen head, at one visit or all, and shows what changes after the chosen token."""
    why = run.lacks("PV", chosen.layer)
    if run.lacks("PV"):
        return card("Silence a head", [html.P(f"Not in this model: {why}.", className="hint")], key="silence")
    choices = visit_choices(run.plan.visits[chosen.layer])
    whens = [("-".join(map(str, c)), _when(c, len(choices))) for c in choices]
    targets = [(str(token), f"“{visible(text)}” ({p:.3f})") for token, text, p in run.next_tokens(chosen.at)]
    if str(chosen.target) not in dict(targets):
        p = float(run.log_probs(chosen.at)[chosen.target])
        targets.append((str(chosen.target), f"“{visible(run.text_of(chosen.target))}” ({exp(p):.2g})"))
    form = [
        selector("at", "when", whens, "-".join(map(str, chosen.when))),
        selector("by", "kind", [(kind, said_) for kind, said_ in KINDS.items()], chosen.kind),
        selector("target", "target", targets, str(chosen.target)),
    ]
    buttons = [
        button("silence", f"Silence layer {chosen.layer}, head {chosen.head}", "Silence this head", primary=True),
        button("scan", "Every head in turn", "Silence every head in turn"),
    ]
    if why:
        buttons, said = buttons[1:], said or f"Layer {chosen.layer} has no heads: {why}."
    if ablation is not None:
        result = _ablation(ablation, chosen)
    else:
        result = [
            html.P(
                said or "The head's output (PV, before W_O) is taken away; the rest of the prompt runs as it was.",
                className="hint",
            )
        ]
    return card(
        "Silence a head",
        [html.Div(form, className="live-form"), html.Div(buttons, className="live-bar"), *result],
        key="silence",
    )


def _when(visits: tuple[int, ...], choices: int) -> str:
    if choices == 1:
        return "its one visit"
    return (
        f"visit {visits[0]}" if len(visits) == 1 else "both visits" if len(visits) == 2 else f"all {len(visits)} visits"
    )


def _ablation(ablation: SilencedHead, chosen: LiveChoice) -> list[Any]:
    where = place_label(ablation.layer, ablation.visits, ablation.run.plan.visits[ablation.layer])
    change = f"{ablation.log_prob_change(chosen.at, chosen.target):+.4f}".replace("-", "−")
    target = visible(ablation.run.text_of(chosen.target))
    after = ablation.run.predicts_next
    where_read, kind = ("after", "next token") if after else ("in place of", "token")
    rows = [
        {
            "token": f"“{visible(c.text)}”",
            "before": bar(c.before, 1),
            "after": bar(c.after, 2),
            "change": f"{c.after - c.before:+.4f}".replace("-", "−"),
        }
        for c in ablation.changes(chosen.at, n=6)
    ]
    columns = [("token", kind), ("before", "as it was"), ("after", "silenced"), ("change", "change")]
    return [
        html.P(
            [
                html.B(f"{where}, head {ablation.head}, {KINDS[ablation.kind]}: "),
                f"log P(“{target}”) {change} nats, KL {ablation.kl(chosen.at):.4f} nats {where_read} token {chosen.at}.",
            ],
            className="figure-line",
        ),
        table(columns, rows, f"The {kind}'s distribution, before and after."),
    ]
