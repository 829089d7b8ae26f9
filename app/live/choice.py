"""LiveChoice: what the Live probe's URL chooses of a run, fitted to it. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from visitlens.app.view.view import View
from visitlens.errors import InputError
from visitlens.hooks.core.loop_plan import visit_choices
from visitlens.probe.live.head_scan import KINDS
from visitlens.probe.live.live_run import LiveRun

PARAMETERS = ("job", "at", "silence", "scan", "when", "kind", "target", "lens")
"""`job`, `silence` and `scan` are ids of jobs: a probe, one silenced head, every head in turn. `at` is the chosen token of
the prompt, `when` the visits to silence at, `target` a token id."""


@dataclass(frozen=True)
class LiveChoice:
    """What isn't there falls back: a link may be of another model. `visits` is None where the layer has one."""

    layer: int
    head: int
    visits: tuple[int, int] | None
    at: int
    when: tuple[int, ...]
    kind: str
    target: int
    coda: bool


def choice(view: View, run: LiveRun) -> LiveChoice:
    """The URL's choice of this run's layers, heads, visits and tokens."""
    selection, extra, plan = view.selection, view.selection.extra, run.plan
    first = plan.looped_layers[0] if plan.looped_layers else 0
    layer = selection.layer if selection.layer in plan.visits else first
    head = selection.head if selection.head is not None and selection.head < run.heads else 0
    try:
        pair = run.pair(layer, selection.visits)
    except InputError:
        pair = run.pair(layer)
    at = number(extra.get("at"), len(run), len(run) - 1)
    choices = visit_choices(plan.visits[layer])
    asked = tuple(int(part) for part in extra.get("when", "").split("-") if part.isdigit())
    return LiveChoice(
        layer=layer,
        head=head,
        visits=(pair.earlier.visit, pair.later.visit) if pair else None,
        at=at,
        when=asked if asked in choices else choices[-1],
        kind=extra["kind"] if extra.get("kind") in KINDS else next(iter(KINDS)),
        target=number(extra.get("target"), run.logits.shape[1], run.target(at)),
        coda=extra.get("lens") == "coda" and run.coda_lens is not None,
    )


def number(text: str | None, below: int, otherwise: int) -> int:
    """A whole number of 0 to below - 1; else the other."""
    return (
        int(text) if text and text.isascii() and text.isdigit() and len(text) < 10 and int(text) < below else otherwise
    )
