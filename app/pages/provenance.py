"""Provenance: what a recording is of, how it was made, what to beware of, and the definition of every number in it."""

from __future__ import annotations

import json
from typing import Any

from dash import html

from visitlens.app.panels.components import card, table
from visitlens.app.view.view import View
from visitlens.hooks.text.encoder import document_ends
from visitlens.probe.drawing.series import span
from visitlens.probe.reading.pair import describe as describe_run

PATH, TITLE, ORDER = "/provenance", "Provenance", 44
NEEDS = ("recording",)


def layout(view: View) -> list[Any]:
    run = view.recorded
    recording = run.recording
    provenance, config = recording.provenance, recording.run["config"]
    model = describe_run(run)
    identity = {
        "recording": recording.run["run_uuid"],
        "configuration, SHA-256": recording.run["config_sha256"],
        "weights, SHA-256": config.get("weights_sha256"),
        **({"code, SHA-256": code} if (code := config.get("code_sha256")) else {}),
        "data, SHA-256": config.get("data_sha256"),
        "made": provenance.get("created"),
        "by": provenance.get("command"),
        "source revision": provenance.get("git_revision"),
        "device": provenance.get("device"),
        "dtype": config.get("dtype"),
    }
    loop = {
        "loop": span(model),
        "order of layers": " ".join(str(step.layer) for step in run.plan.steps),
        "steps": len(run.plan),
        "visits": max(run.plan.visits.values()),
        "checkpoint": provenance.get("checkpoint"),
        "tokenizer": provenance.get("tokenizer")
        or f"of the checkpoint, {config['model'].get('vocab_size', 'unknown')} tokens",
    }
    text = {
        "text": provenance.get("text"),
        **({"documents are": ends} if (ends := document_ends(provenance.get("special_tokens"))) else {}),
        "tokens": f"{recording.tokens:,} of {recording.run['tokens']:,}",
        "documents": f"{recording.documents:,} in {run.groups} groups, the unit of intervals",
        "level": recording.level,
        "shards": len(recording.shards),
        "size": f"{sum(shard['bytes'] for shard in recording.shards) / 1e6:,.1f} MB",
        "options": json.dumps(config.get("options"), sort_keys=True),
    }
    versions = provenance.get("versions") or {}
    warnings = view.pair.warnings() or ["None."]
    definitions = [
        {
            "name": name,
            "title": m.title,
            "axes": ", ".join(m.axes),
            "unit": m.unit,
            "definition": m.definition,
            "paper": m.paper,
        }
        for name, m in ((name, run.stat(name).measure) for name in run.measures)
    ]
    columns = [
        ("name", "name"),
        ("title", "measure"),
        ("axes", "axes"),
        ("unit", "unit"),
        ("definition", "definition"),
        ("paper", "paper"),
    ]
    return [
        card("Warnings", [html.Ul([html.Li(w) for w in warnings], className="warnings-list")], wide=True),
        card("Identity", [_terms(identity)]),
        card("Model and loop", [_terms(loop)]),
        card("Text and extent", [_terms(text)]),
        card("Versions", [_terms(versions)]),
        card("Configuration", [_terms(config["model"])]),
        card(
            "Definitions",
            [
                table(
                    columns,
                    definitions,
                    f"The {len(definitions)} measures that this recording holds, as it defines them.",
                )
            ],
            wide=True,
        ),
    ]


def _terms(pairs: dict[str, Any]) -> html.Dl:
    rows = [
        html.Div([html.Dt(str(k)), html.Dd("not recorded" if v in (None, "") else str(v))]) for k, v in pairs.items()
    ]
    return html.Dl(rows, className="terms")
