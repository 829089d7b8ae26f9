"""Ablation: what each head is for, by taking it away; over the analyses that are stored with a recording."""

from __future__ import annotations

from typing import Any

from visitlens.app.panels.ablation import finding_card, maps_panel, ranked_card, ranked_panel
from visitlens.app.panels.components import command, state
from visitlens.app.view.view import View

PATH, TITLE, ORDER = "/ablation", "Ablation", 42
NEEDS = ("recording",)
CONTROLS = ()
PARAMETERS = ("analysis", "when")


def layout(view: View) -> list[Any]:
    stored = view.recorded.ablations()
    if not stored:
        return [_none(view)]
    asked = view.selection.extra.get("analysis", "")
    ablation = stored.get(asked) or next(iter(stored.values()))
    visits = list(ablation.effect.labels["visits"])
    when = view.selection.extra.get("when", "").replace("-", "+")
    when = when if when in visits else visits[-1]
    return [
        finding_card(view, stored, ablation, when),
        maps_panel(view, ablation),
        ranked_panel(view, ablation, when),
        ranked_card(view, ablation, when),
    ]


def _none(view: View) -> Any:
    name = view.recorded.recording.path.name
    live = view.context.checkpoint is not None
    return state(
        "No head ablations in this recording",
        [
            "An ablation takes each head away, one at a time, at visit 1, at visit 2 and at both, and measures what that costs. "
            "Make one with the checkpoint that was recorded; it is kept in the recording:",
            command(f"visitlens ablate {name} --model CHECKPOINT"),
            command(f"visitlens ablate {name} --model CHECKPOINT --metric text --mode mean"),
            "For a single prompt, silence heads on the Live probe page"
            + ("." if live else ": start the dashboard with --model CHECKPOINT."),
        ],
        "wide",
    )
