"""The Live probe's parts: the prompt, the tokens, one token's experts, keys, output and lens. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from dash import dcc, html

from visitlens.app.live.choice import LiveChoice
from visitlens.app.live.read_as import told
from visitlens.app.live.service import LiveService
from visitlens.app.panels.components import card, selector, table
from visitlens.app.panels.live_parts import attribute, badge, bar, button, visible
from visitlens.app.view.view import View
from visitlens.probe.live.live_run import ExpertChange, KeyChange, LiveRun

_TICK_MS = 300


def prompt_card(live: LiveService, run: LiveRun | None) -> html.Section:
    """Where a prompt is typed, started and stopped; and what becomes of it."""
    presets = [
        button(
            f"dyck-{i}",
            str(preset.shots),
            f"Run the Dyck prompt with {preset.shots} shot{'' if preset.shots == 1 else 's'}",
        )
        for i, preset in enumerate(live.presets)
    ]
    name = live.checkpoint.resolve().name
    options = told(run.model["options"]) if run else ""
    return card(
        f"Prompt for {name}" + (f", read with {options}" if options else ""),
        [
            html.Label("Prompt", htmlFor="live-prompt", className="unseen"),
            dcc.Textarea(
                id="live-prompt",
                value=run.prompt if run else "",
                maxLength=live.most_characters + 1,
                placeholder="Type or paste some text, then Run (Ctrl Enter).",
                persistence=True,
                persistence_type="session",
                spellCheck=False,
                className="live-prompt",
                rows=2,
            ),
            html.Div(
                [
                    button("run", "Run", "Run the prompt", primary=True),
                    button("cancel", "Cancel", "Cancel what runs", hidden=True),
                    html.Div(
                        [html.Span("Dyck, shots"), *presets],
                        className="live-presets",
                        role="group",
                        **attribute("aria-label", "Dyck prompts by number of shots"),
                    )
                    if presets
                    else html.Span(f"No Dyck prompts: {live.unasked}.", className="live-presets")
                    if live.unasked
                    else None,
                    html.Span(f"up to {live.limit:,} tokens, BOS counted", className="live-limit"),
                ],
                className="live-bar",
            ),
            html.Div(
                [
                    html.Progress(
                        id="live-progress", max="1", value="0", hidden=True, **attribute("aria-label", "Progress")
                    ),
                    html.Span(summary(run) if run else "", id="live-status", role="status"),
                ],
                className="live-status",
            ),
            dcc.Store(id="live-active", storage_type="session"),
            dcc.Store(id="live-go", data=None),  # said outright: a store that is told nothing takes back what it had
            dcc.Store(id="live-went"),
            dcc.Interval(id="live-tick", interval=_TICK_MS, disabled=True),
        ],
        wide=True,
        key="prompt",
    )


def summary(run: LiveRun) -> str:
    """Size, time and the model's own continuation of a run."""
    _, text, probability = run.next_tokens(n=1)[0]
    where = "next" if run.predicts_next else "last"
    return f"{len(run)} tokens in {run.seconds:.2f} s; {where} “{visible(text)}” at {probability:.3f}."


def tokens_card(view: View, run: LiveRun, chosen: LiveChoice, answers: Iterable[tuple[int, int]]) -> html.Section:
    """The prompt's tokens, each a link that chooses it, coloured by how many experts change between the visits."""
    kept, k = run.experts_kept(chosen.layer, chosen.visits), run.experts.shape[-1]
    marked = {at for start, stop in answers for at in range(start, stop)}
    links = []
    for at, text in enumerate(run.texts):
        current: Any = {"aria-current": "true"} if at == chosen.at else {}
        said = f"keeps {kept[at]} of {k} experts" if kept is not None else "no experts to compare"
        shown = visible(text)
        links.append(
            html.A(
                shown,
                href=view.href(at=at),
                className="token up" + (" live-mark" if at in marked else "") + (" line-end" if "\n" in text else ""),
                style={"--strength": f"{0 if kept is None else 0.8 * (1 - kept[at] / k):.3f}"},
                title=f"token {at}: {said}",
                **current,
                **attribute("aria-label", f"token {at} {shown}, {said}"),
            )
        )
    if not run.routed(chosen.layer):
        note = f"No colours: {no_experts(run, chosen.layer)}."
    elif kept is None:
        note = f"Layer {chosen.layer} has one visit, so no experts change."
    else:
        a, b = chosen.visits or (1, 1)
        chance = k * k / run.model["config"]["num_experts"]
        note = (
            f"Colour: experts that change from visit {a} to visit {b} of layer {chosen.layer}. On average {kept.mean():.2f} of {k} "
            f"are kept; uniform chance keeps {chance:.2f}."
        )
    if marked:
        note += " Underlined: answers of the demonstrations."
    ends = (("all kept", "0"), ("none kept", "0.8")) if kept is not None else ()
    legend = html.Div(
        [html.Span(word, className="token up", style={"--strength": strength}) for word, strength in ends],
        className="legend",
        **attribute("aria-hidden", "true"),
    )
    return card(
        "Tokens",
        [
            html.Div(_pickers(run, chosen), className="live-pick"),
            html.Div(links, className="text live-text", **attribute("data-arrows", "true")),
            html.Div([html.P(note), legend], className="caption split"),
        ],
        wide=True,
        key="tokens",
    )


def _pickers(run: LiveRun, chosen: LiveChoice) -> list[Any]:
    plan = run.plan
    most = plan.visits[chosen.layer]
    pairs = [(a, b) for a in range(1, most) for b in range(a + 1, most + 1)]
    layers = [(str(n), f"{n}" if plan.visits[n] > 1 else f"{n} (one visit)") for n in sorted(plan.visits)]
    found = [
        selector("layer", "layer", layers, str(chosen.layer)),
        selector("head", "head", [(str(n), str(n)) for n in range(run.heads)], str(chosen.head)),
    ]
    if len(pairs) > 1 and chosen.visits:
        a, b = chosen.visits
        found.insert(1, selector("visits", "visits", [(f"{x}-{y}", f"{x} and {y}") for x, y in pairs], f"{a}-{b}"))
    return found


def experts_card(run: LiveRun, chosen: LiveChoice) -> html.Section:
    """One token's experts: kept, dropped and new, with their gates."""
    if not run.routed(chosen.layer):
        return _without("Experts", f"Layer {chosen.layer} has none: {no_experts(run, chosen.layer)}.", "experts")
    changes = run.expert_changes(chosen.layer, chosen.at, chosen.visits)
    most = _most(changes)
    counts = {status: sum(c.status == status for c in changes) for status in ("kept", "dropped", "new")}
    rows = [
        {
            "expert": str(c.expert),
            "change": badge(c.status),
            "earlier": bar(c.earlier, 1, most),
            "later": bar(c.later, 2, most),
        }
        for c in changes
    ]
    columns, said = _columns(("expert", "expert"), "gate at visit", chosen)
    k = run.experts.shape[-1]
    line = f"{counts['kept']} of {k} kept, {counts['dropped']} dropped, {counts['new']} new." if chosen.visits else said
    return card(
        f"Experts of token {chosen.at} “{visible(run.texts[chosen.at])}”",
        [
            html.P(line, className="figure-line"),
            table(columns, rows, f"Experts in layer {chosen.layer}, with their gates."),
        ],
        key="experts",
    )


def keys_card(view: View, run: LiveRun, chosen: LiveChoice) -> html.Section:
    """One query's 8 highest-weighted keys at either visit: kept, lost and gained."""
    if why := run.lacks("Q", chosen.layer):
        return _without("Keys", f"Layer {chosen.layer} has no attention: {why}.", "keys")
    changes = run.top_keys(chosen.layer, chosen.head, chosen.at, chosen.visits)
    most = _most(changes)
    rows = [
        {
            "key": html.A(f"{c.position} “{visible(c.text)}”", href=view.href(at=c.position)),
            "change": badge(c.status),
            "earlier": bar(c.earlier, 1, most),
            "later": bar(c.later, 2, most),
        }
        for c in changes
    ]
    columns, said = _columns(("key", "key"), "weight at visit", chosen)
    counts = {status: sum(c.status == status for c in changes) for status in ("kept", "lost", "gained")}
    line = f"Of the 8 highest, {counts['lost']} lost and {counts['gained']} gained." if chosen.visits else said
    return card(
        f"Keys of token {chosen.at} “{visible(run.texts[chosen.at])}”",
        [
            html.P(line, className="figure-line"),
            table(columns, rows, f"The highest-weighted keys in layer {chosen.layer}, head {chosen.head}."),
        ],
        key="keys",
    )


def _without(title: str, why: str, key: str) -> html.Section:
    return card(title, [html.P(why, className="hint")], key=key)


def no_experts(run: LiveRun, layer: int) -> str:
    """Why a layer has none."""
    return run.lacks("experts", layer) or "its feed-forward layers are dense, there is no router"


def place(run: LiveRun, at: int) -> str:
    """Where the logits at a token are read: after it, or, of a masked language model, in its place."""
    return f"{'After' if run.predicts_next else 'In place of'} token {at} “{visible(run.texts[at])}”"


def _most(changes: Iterable[ExpertChange] | Iterable[KeyChange]) -> float:
    return max(value for c in changes for value in (c.earlier, c.later) if value is not None)


def _columns(first: tuple[str, str], what: str, chosen: LiveChoice) -> tuple[list[tuple[str, str]], str]:
    if chosen.visits is None:
        return [first, ("earlier", what.removesuffix(" at visit"))], f"Layer {chosen.layer} has one visit."
    a, b = chosen.visits
    return [first, ("change", "change"), ("earlier", f"{what} {a}"), ("later", f"{what} {b}")], ""


def output_card(run: LiveRun, chosen: LiveChoice) -> html.Section:
    """What would follow the chosen token."""
    after, follows = run.predicts_next, None
    if not after or chosen.at + 1 < len(run):
        follows = int(run.tokens[chosen.at + after])
    here = "follows here" if after else "stands here"
    rows = [
        {
            "token": html.Span([f"“{visible(text)}”", _note(here) if token == follows else None]),
            "probability": bar(p, 1),
        }
        for token, text, p in run.next_tokens(chosen.at)
    ]
    line = "The model's distribution after it."
    if follows is not None:
        nats = f"{float(run.log_probs(chosen.at)[follows]):.3f} nats".replace("-", "−")
        line = f"In the prompt “{visible(run.text_of(follows))}” {'follows' if after else 'stands here'}, at {nats}."
    if not after:
        line += f" No next token: {run.lacks('next token')}."
    kind = "next token" if after else "token"
    return card(
        place(run, chosen.at),
        [
            html.P(line, className="figure-line"),
            table([("token", kind), ("probability", "probability")], rows, f"The 8 most likely {kind}s."),
        ],
        key="output",
    )


def lens_card(run: LiveRun, chosen: LiveChoice) -> html.Section:
    """What each step would say after the chosen token, straight and through the layers after the loop."""
    if run.lens is None:
        return _without("Step by step", f"Its steps can't be read early: {run.lacks('lens')}.", "lens-table")
    straight = run.readout(chosen.at)
    coda = {(r.layer, r.visit): r for r in run.readout(chosen.at, coda=True)} if run.coda_lens is not None else {}
    rows = []
    for row in straight:
        other = coda.get((row.layer, row.visit))
        rows.append(
            {
                "step": f"{row.layer}·{row.visit}",
                "top": _top(row.top),
                "entropy": row.entropy,
                "kl": row.kl,
                "coda": _top(other.top) if other else None,
                "coda_kl": other.kl if other else None,
            }
        )
    columns = [("step", "step"), ("top", "logit lens says"), ("entropy", "entropy"), ("kl", "KL")]
    if coda:
        columns += [("coda", "coda lens says"), ("coda_kl", "KL")]
    note = "A step is layer·visit. KL(final || lens) and entropy in nats; the coda lens runs the layers after the loop first."
    return card(
        f"{place(run, chosen.at)}, step by step",
        [table(columns, rows, note)],
        wide=True,
        key="lens-table",
    )


def _top(top: Sequence[tuple[str, float]]) -> html.Span:
    return html.Span([html.Span(f"“{visible(text)}” {p:.2f}", className="live-top") for text, p in top[:3]])


def _note(text: str) -> html.Span:
    return html.Span(text, className="badge muted live-note")
