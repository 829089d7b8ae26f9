"""Live probe: a prompt of one's own through the model, visit by visit; heads silenced on the spot."""

from __future__ import annotations

import secrets
from typing import Any
from urllib.parse import urlsplit

from dash import ALL, ClientsideFunction, Dash, Input, Output, State, ctx, html, no_update

from visitlens.app.live.ablation_card import silence_card
from visitlens.app.live.cards import (
    experts_card,
    keys_card,
    lens_card,
    output_card,
    prompt_card,
    tokens_card,
)
from visitlens.app.live.choice import PARAMETERS, choice
from visitlens.app.live.panels import heads_panel, lens_panel, maps_panel, norms_panel, scan_panel
from visitlens.app.live.read_as import of_other_code, read_as
from visitlens.app.live.service import LiveService
from visitlens.app.panels.components import state
from visitlens.app.view.view import Context, View, view_of
from visitlens.errors import InputError, VisitlensError
from visitlens.probe.live.head_scan import HeadScan, SilencedHead
from visitlens.probe.live.live_run import LiveRun

PATH, TITLE, ORDER = "/live", "Live probe", 41
NEEDS = ("model",)
CONTROLS = ()


def service(context: Context) -> LiveService:
    """The model and its queue, one a dashboard."""
    if PATH not in context.services:
        assert context.checkpoint is not None, "the page isn't drawn without a model"

        def options(weights: str) -> dict[str, Any]:
            return read_as(context.registry.entries(), weights, context.model_options)

        context.services[PATH] = LiveService(context.checkpoint, options=options)
    return context.services[PATH]


def layout(view: View) -> list[Any]:
    live = service(view.context)
    job = view.selection.extra.get("job", "")
    if not job:
        return [prompt_card(live, None), _hint()]
    try:
        run = live.find(job, LiveRun)
    except InputError as error:
        return [
            prompt_card(live, None),
            state("This run isn't here", [_sentence(error), "Run the prompt again."], "note wide"),
        ]
    chosen = choice(view, run)
    answers = answers_of(live, run)
    ablation, said = _other(live, view, "silence", SilencedHead, run)
    scan, said_of_scan = _other(live, view, "scan", HeadScan, run)
    without = run.lacks("Q", chosen.layer)
    items: list[Any] = [
        prompt_card(live, run),
        *_changed(of_other_code(view.context.registry.entries(), run.model)),
        tokens_card(view, run, chosen, answers),
        state(f"Layer {chosen.layer} has no attention", [_sentence(without)], "note wide")
        if without
        else maps_panel(view, run, chosen, answers),
        experts_card(run, chosen),
        keys_card(view, run, chosen),
        output_card(run, chosen),
        silence_card(run, chosen, ablation, said or said_of_scan),
    ]
    if scan is not None:
        items.append(scan_panel(view, scan))
    if run.plan.looped_layers:
        items.append(heads_panel(view, run, chosen))
    lenses = [lens_card(run, chosen), *([lens_panel(view, run, chosen)] if run.lens else [])]
    return [*items, norms_panel(view, run, chosen), *lenses]


def answers_of(live: LiveService, run: LiveRun) -> tuple[tuple[int, int], ...]:
    """Token spans of the demonstrations' answers, where the prompt is a Dyck preset as it was."""
    return next((preset.demonstrations for preset in live.presets if preset.text == run.prompt), ())


def _hint() -> html.Section:
    return state(
        "What a run shows",
        [
            "Every token's experts kept, dropped and new between visits; a head's attention at both visits and the difference; "
            "what each step would already say; and what changes when a head is silenced at one visit or all.",
            "The Dyck prompts ask for a closing bracket after 0 to 8 demonstrations.",
        ],
        "note wide",
    )


def _changed(recordings: list[str]) -> list[html.Section]:
    if not recordings:
        return []
    said = f"The code in the model's folder (*.py, config.json) isn't that which made {', '.join(recordings)}: what is shown here needn't be"
    return [state("The model's code has changed", [f"{said} what was recorded."], "note wide")]


def _other(live: LiveService, view: View, name: str, kind: Any, run: LiveRun) -> tuple[Any, str]:
    """The result of another job of the URL, if it is of this run; or why it isn't there."""
    id_ = view.selection.extra.get(name, "")
    if not id_:
        return None, ""
    try:
        result = live.find(id_, kind)
    except InputError as error:
        return None, _sentence(error)
    return (result, "") if result.run is run else (None, "")


# Callbacks


def callbacks(app: Dash, context: Context) -> None:
    if context.checkpoint is None:
        return
    live = service(context)
    app.clientside_callback(
        ClientsideFunction("visitlensLive", "go"),
        Output("live-went", "data"),
        Input("live-go", "data"),
    )

    @app.callback(
        Output("live-active", "data"),
        Output("live-prompt", "value"),
        Output("live-status", "children"),
        Input({"type": "live-do", "what": ALL}, "n_clicks"),
        State("live-prompt", "value"),
        State("live-active", "data"),
        State("request", "data"),
        prevent_initial_call=True,
    )
    def _do(_: Any, prompt: Any, active: Any, asked: Any) -> tuple[Any, ...]:
        if not isinstance(ctx.triggered_id, dict) or not ctx.triggered[0]["value"]:
            return (no_update,) * 3  # the buttons appear, which counts as a change
        href, tab = (str(asked.get(name, "")) if isinstance(asked, dict) else "" for name in ("href", "tab"))
        return do(live, context, str(ctx.triggered_id["what"]), str(prompt or ""), tab, active, href)

    @app.callback(
        Output("live-status", "children", allow_duplicate=True),
        Output("live-progress", "value"),
        Output("live-progress", "max"),
        Output("live-progress", "hidden"),
        Output({"type": "live-do", "what": "cancel"}, "hidden"),
        Output("live-tick", "disabled"),
        Output("live-active", "data", allow_duplicate=True),
        Output("live-go", "data"),
        Input("live-tick", "n_intervals"),
        Input("live-active", "data"),
        prevent_initial_call=True,
    )
    def _watch(_: Any, active: Any) -> tuple[Any, ...]:
        return watch(live, active)


def do(
    live: LiveService, context: Context, what: str, prompt: str, tab: str, active: Any, href: str
) -> tuple[Any, ...]:
    """A button's effect: the job that is active now, the prompt, what to say.

    A tab has one job at a time: a new one takes the place of what runs, also of what the tab hasn't heard of yet.
    """
    tab = tab or secrets.token_urlsafe(9)
    stopped = live.jobs.cancel(tab)
    if what == "cancel":  # `watch` says how it stands: this answer may come after the one that says it is over
        running = _active(active)
        return (
            {"job": running[0], "as": running[1], "stopped": True} if stopped and running else no_update,
            no_update,
            no_update,
        )
    presets = {f"dyck-{i}": preset.text for i, preset in enumerate(live.presets)}
    try:
        if what in presets or what == "run":
            prompt = presets.get(what, prompt)
            return {"job": live.probe(tab, prompt), "as": "job"}, prompt, "Waiting …"
        view = view_of(context, PATH, urlsplit(href).query, parameters=PARAMETERS, fitted=False)
        run = live.find(view.selection.extra.get("job", ""), LiveRun)
        chosen = choice(view, run)
        if what == "silence":
            id_ = live.ablate(tab, run, chosen.layer, chosen.head, chosen.when, chosen.kind)
        elif what == "scan":
            id_ = live.scan(tab, run, chosen.at, chosen.target, chosen.kind)
        else:
            raise InputError(f"no button {what[:40]!r}")
        return {"job": id_, "as": what}, no_update, "Waiting …"
    except VisitlensError as error:
        return None, no_update, _sentence(error)


def watch(live: LiveService, active: Any) -> tuple[Any, ...]:
    """How the active job stands: what to say, progress (value, of, hidden), cancel hidden, clock off, active, where to go."""
    running = _active(active)
    if running is None:
        return no_update, "0", "1", True, True, True, no_update, no_update
    id_, name = running
    job = live.jobs.state(id_)
    if job.status == "waiting":
        said = f"Waiting: {job.ahead} job{'' if job.ahead == 1 else 's'} ahead."
        return said, "0", "1", False, False, False, no_update, no_update
    if job.status == "running":
        said = "Cancelling …" if "stopped" in active else "Running …" if job.total else "Loading the model …"
        return said, str(job.done), str(job.total or 1), False, False, False, no_update, no_update
    off = ("0", "1", True, True, True, None)
    if job.status == "done":
        return "Done.", *off, {name: id_, **(_ANEW if name == "job" else {})}
    return {"cancelled": "Cancelled."}.get(job.status) or _sentence(job.message), *off, no_update


_ANEW = dict.fromkeys(("at", "silence", "scan", "target"))
"""Parameters that belong to one run: a new one takes them back."""


def _active(active: Any) -> tuple[str, str] | None:
    """The job id and what it is for, from what the browser keeps."""
    if not isinstance(active, dict) or active.get("as") not in ("job", "silence", "scan"):
        return None
    return str(active.get("job", "")), str(active["as"])


def _sentence(error: object) -> str:
    text = str(error)
    return text[:1].upper() + text[1:] + "."
