"""The frame around every page, and a page's rendering from its URL. Pure functions: no request, no browser, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from dash import dcc, html

from visitlens.app.pages import find_page, pages
from visitlens.app.panels.components import attrs, command, icon, panel_card, state
from visitlens.app.panels.controls import controls, layered
from visitlens.app.panels.panel import Panel
from visitlens.app.view.selection import Selection, abbreviated, named
from visitlens.app.view.view import Context, View, describe_needs, said, view_of
from visitlens.errors import StorageError, VisitlensError
from visitlens.probe.reading.two_visits import largest_change

WATCH_MS = 4000
"""How often an unfinished recording, or a folder without one, is looked at again."""


@dataclass(frozen=True)
class Rendered:
    """A page: `title` of the document, `links` to all pages, `bar` above it, `content`; `version` changes when its files do."""

    title: str
    links: list[dict[str, Any]]
    bar: list[Any]
    content: list[Any]
    palette: list[dict[str, str]]
    version: str
    growing: bool


def frame(context: Context) -> html.Div:
    """What stays while pages change. The first page comes with a callback, into boxes that hold its place."""
    return html.Div(
        id="app",
        children=[
            html.A("Skip to the content", href="#main", className="skip"),
            dcc.Store(id="moves"),
            dcc.Store(id="request"),
            dcc.Store(id="page-links"),
            dcc.Store(id="palette-entries"),
            dcc.Store(id="seen", data={"version": "", "growing": False}),
            dcc.Store(id="title"),
            dcc.Interval(id="watch", interval=WATCH_MS, disabled=True),
            html.Aside(
                [
                    html.A(
                        [html.Span(className="logo", **attrs({"aria-hidden": "true"})), "visitlens"],
                        href=context.prefix,
                        className="brand",
                    ),
                    html.Nav(_navigation(context), id="navigation", **attrs({"aria-label": "Pages"})),
                    html.Div(
                        [
                            html.Button(
                                [icon("search"), "Go to", html.Kbd("Ctrl K")],
                                type="button",
                                className="text-button",
                                **attrs(
                                    {"data-action": "palette", "aria-label": "Go to a page, run, layer or measure"}
                                ),
                            ),
                            html.Button(
                                [icon("theme"), "Theme"],
                                id="theme",
                                type="button",
                                className="text-button",
                                **attrs({"aria-label": "Switch between light and dark"}),
                            ),
                        ],
                        className="side-tools",
                    ),
                ],
                className="side",
                **attrs({"aria-label": "Dashboard"}),
            ),
            html.Div(
                [
                    html.Header([], id="bar", className="bar"),
                    html.Main([html.Div(className="placeholder")], id="main", tabIndex=-1),
                    html.Section(id="tray", **attrs({"aria-label": "Pinned panels"})),
                ],
                className="body",
            ),
            html.Div(id="announce", className="unseen", role="status", **attrs({"aria-live": "polite"})),
            html.Div(id="toast", **attrs({"aria-hidden": "true"})),
        ],
    )


def render(context: Context, href: str, theme: str = "light") -> Rendered:
    """The page at a URL. Whatever goes wrong on purpose is a sentence on the page, never an exception."""
    parts = urlsplit(href)
    path = "/" + parts.path.removeprefix(context.prefix.rstrip("/")).strip("/")
    page = find_page(path)
    view = view_of(
        context,
        path,
        parts.query,
        theme,
        getattr(page, "PARAMETERS", ()),
        fitted=getattr(page, "NEEDS", ()) != ("model",),
    )
    growing = view.entry is None or view.run is None or not view.run.recording.complete
    if page is None:
        content: list[Any] = [
            state("No such page", [f"There is nothing at {path[:60]}.", _link("Overview", view.href("/"))])
        ]
    else:
        content = _content(page, view)
    above = bar(page, view)
    notices = _notices(view, unmet(page.TITLE, view, [*above, *content]) if page else [])
    name = view.entry.name if view.entry else ""
    title = " · ".join(filter(None, [page.TITLE if page else "Not found", name, "visitlens"]))
    return Rendered(
        title=title,
        links=page_links(view),
        bar=above,
        content=[*notices, *content],
        palette=palette(view),
        version=version(view),
        growing=growing,
    )


def page_items(page: ModuleType, view: View) -> list[Any]:
    """The page's panels and components; `parameters` of other pages are dropped from its links."""
    return list(page.layout(view))


def find_panel(page: ModuleType, view: View, key: str) -> Panel | None:
    """A panel of a page, for its exports."""
    if describe_needs(view, page.NEEDS):
        return None
    if (find := getattr(page, "panel", None)) and (found := find(view, key)):
        return found
    return next((item for item in page_items(page, view) if isinstance(item, Panel) and item.key == key), None)


def version(view: View) -> str:
    """Of the files behind a page."""
    entries = view.context.registry.ids()
    return f"{view.entry.version if view.entry else ''}|{len(entries)}"


def page_links(view: View) -> list[dict[str, Any]]:
    """Links to all pages, which keep the selection. What has nothing to show for this recording is pale and says why."""
    kept = replace(view.selection, extra={}).change(metric=None, agg=None, segment=None)
    return [
        {
            "href": view.context.href(page.PATH, kept),
            "current": view.path == page.PATH,
            "pale": describe_needs(view, page.NEEDS) if view.run is not None else "",
        }
        for page in pages()
    ]


def _navigation(context: Context) -> list[Any]:
    """In groups. It stays while pages change, so that no click falls between two drawings; `page_links` says where it leads."""
    groups: dict[int, list[Any]] = {}
    for page in pages():
        link = _link(page.TITLE, context.href(page.PATH, Selection()))
        groups.setdefault(page.ORDER // 10, []).append(html.Li(link))
    return [html.Ul(links) for _, links in sorted(groups.items())]


def bar(page: ModuleType | None, view: View) -> list[Any]:
    """Breadcrumb and selectors."""
    return [
        html.Div([_breadcrumb(page, view), html.Div(_tools(view), className="bar-tools")], className="bar-top"),
        html.Div(controls(page, view), className="controls", role="group", **attrs({"aria-label": "Selection"})),
    ]


def palette(view: View) -> list[dict[str, str]]:
    """Where the command palette leads."""
    entries = [
        {"text": page.TITLE, "kind": "page", "href": view.href(page.PATH, metric=None, agg=None)} for page in pages()
    ]
    entries += [
        {"text": e.name, "kind": "recording", "href": view.href("/", run=e.id, layer=None, head=None, token=None)}
        for e in view.context.registry.entries()[:200]
    ]
    if view.run is not None:
        entries += _surprise(view)
        for layer in sorted(view.run.plan.visits):
            entries.append(
                {"text": f"Layer {layer}", "kind": "layer", "href": view.href("/heads", layer=layer, head=None)}
            )
        for name in view.run.measures:
            if layered(view.run, name):
                title = view.run.stat(name).measure.title
                entries.append(
                    {"text": f"{title} ({name})", "kind": "measure", "href": view.href("/layers", metric=name)}
                )
    return entries


def _surprise(view: View) -> list[dict[str, str]]:
    """The head whose attention on the segment start changes most."""
    try:
        layer, head, change = largest_change(view.recorded, "sink_mass", view.visits)
    except VisitlensError:
        return []
    text = f"Surprise me: layer {layer}, head {head}, sink mass {change:+.2f}".replace("-", "−")
    return [{"text": text, "kind": "action", "href": view.href("/heads", layer=layer, head=head, metric="sink_mass")}]


def _content(page: ModuleType, view: View) -> list[Any]:
    if view.entry is None and page.NEEDS and "model" not in page.NEEDS:
        return [_no_recording(view)]
    if reason := describe_needs(view, page.NEEDS):
        kind = "corrupt" if view.entry is not None and view.run is None else "partial"
        title = "This recording can't be read" if kind == "corrupt" else f"{page.TITLE}: not for this recording"
        if "model" in page.NEEDS and view.context.checkpoint is None:
            title = f"{page.TITLE} needs a model"
        return [state(title, [reason], kind)]
    try:
        items = page_items(page, view)
    except VisitlensError as error:
        why = "not for this recording" if not isinstance(error, StorageError) else "can't be read now"
        return [state(f"{page.TITLE}: {why}", [said(error, view)], "partial")]
    cards = [panel_card(item, view) if isinstance(item, Panel) else item for item in items]
    return [html.Div(without_holes(cards), className="panels", id=f"page-{view.path.strip('/')}")]


def without_holes(cards: list[Any]) -> list[Any]:
    """Two narrow cards a row: one that would stand alone takes the whole row."""
    alone = None
    for card in [*cards, None]:
        if card is None or "wide" in str(getattr(card, "className", "")).split():
            if alone is not None:
                alone.className = f"{alone.className} wide"
            alone = None
        else:
            alone = card if alone is None else None
    return cards


def _no_recording(view: View) -> html.Section:
    return state(
        "No recording yet",
        [
            "A recording holds what each visit of a looped model did on some text. Make one:",
            command("visitlens record CHECKPOINT TEXT --out run.vlens --level tokens"),
            "then open it, or the folder that it lies in:",
            command("visitlens app run.vlens"),
            "To look around first, use the bundled models:",
            command("visitlens app --demo"),
            "This page looks again by itself.",
        ],
    )


def unmet(title: str, view: View, drawn: Sequence[Any]) -> list[str]:
    """What a link asks for and the selectors of its page don't show, in sentences."""
    asked = dict(parse_qsl(view.selection.query().removeprefix("?")))
    found = []
    for part in (part for top in drawn for part in (top, *top._traverse())):
        name = getattr(part, "data-parameter", None)
        if name in asked and asked[name] != (value := getattr(part, "data-value", "")):
            texts = {getattr(option, "value", None): option.children for option in part.children}
            found.append(
                f"The link's {named(name)} {abbreviated(asked[name])} isn't among what {title} offers; "
                f"{texts.get(value, value)} is shown."
            )
    return list(dict.fromkeys(found))


def _notices(view: View, unmet: Sequence[str]) -> list[Any]:
    notices = [html.Li(text) for text in (*view.warnings, *unmet)]
    if view.run is not None and not view.run.recording.complete:
        recording = view.run.recording
        share = recording.tokens / max(recording.run["tokens"], 1)
        notices.append(
            html.Li(
                f"Still being recorded: {recording.tokens:,} of {recording.run['tokens']:,} tokens ({share:.0%}). This page follows it."
            )
        )
    return [html.Ul(notices, className="notices", role="status")] if notices else []


def _breadcrumb(page: ModuleType | None, view: View) -> html.Nav:
    selection = view.selection
    steps: list[Any] = [
        _link(
            "Overview", view.href("/", run=None, layer=None, head=None, token=None, visits=None, metric=None, agg=None)
        )
    ]
    if view.entry is not None:
        steps.append(_link(view.entry.name, view.href("/layers", layer=None, head=None, token=None, segment=None)))
    if selection.layer is not None:
        steps.append(_link(f"layer {selection.layer}", view.href("/heads", head=None, token=None, segment=None)))
    if selection.head is not None:
        steps.append(_link(f"head {selection.head}", view.href("/attention", token=None, segment=None)))
    if selection.token is not None:
        steps.append(_link(f"token {selection.token}", view.href("/tokens")))
    return html.Nav(
        [html.H1(page.TITLE if page else "Not found"), html.Ol([html.Li(step) for step in steps])],
        className="breadcrumb",
        **attrs({"aria-label": "Breadcrumb"}),
    )


def _tools(view: View) -> list[Any]:
    name = view.path.strip("/") or "overview"
    return [
        html.Button(
            [icon("link"), "Copy link"], type="button", className="text-button", **attrs({"data-action": "copy-link"})
        ),
        html.Button(
            [icon("save"), "Keep"],
            type="button",
            className="text-button",
            title="Keep this view in the list of the command palette",
            **attrs({"data-action": "keep"}),
        ),
        html.A(
            [icon("snapshot"), "Snapshot"],
            href=f"{view.context.prefix}snapshot/{name}.html{view.selection.query()}",
            download=f"{name}.html",
            className="text-button",
            title="This page as one file that needs nothing else",
        ),
    ]


def _link(text: str, href: str) -> html.A:
    return html.A(text, href=href)
