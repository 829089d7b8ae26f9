"""Context, what the server holds; View, one request: the selection fitted to its run, with its theme. No torch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from visitlens.app.view.registry import Entry, Registry, without_folder
from visitlens.app.view.selection import Selection, common_visits, fit, parse
from visitlens.app.view.token_texts import TextsOfRecordings
from visitlens.errors import InputError, VisitlensError
from visitlens.hooks.models.checkpoint_files import brings_loader
from visitlens.probe.drawing.theme import DARK, LIGHT, Theme
from visitlens.probe.model import load as loaded
from visitlens.probe.reading.pair import Pair
from visitlens.probe.reading.recorded_run import RecordedRun

_Kept = TypeVar("_Kept")
_MOST_KEPT = 64


@dataclass(frozen=True)
class Context:
    """`checkpoint` is a model folder, for the live probe and for token text, and `model_options` how it is read (as of
    `visitlens.load`); `prefix` starts and ends with a slash.

    `services` is where a page keeps what outlives a request (a job queue, say), under the page's name.
    """

    registry: Registry
    checkpoint: Path | None = None
    prefix: str = "/"
    services: dict[str, Any] = field(default_factory=dict)
    model_options: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def texts(self) -> TextsOfRecordings:
        """Token ids as text."""
        return TextsOfRecordings(self.checkpoint)

    def remember(self, key: str, version: str, make: Callable[[], _Kept]) -> _Kept:
        """What `make` gives, kept until the version changes; the few used last are kept."""
        kept: OrderedDict[str, tuple[str, Any]] = self.services.setdefault("remembered", OrderedDict())
        found = kept.pop(key, None)
        if found is None or found[0] != version:
            found = (version, make())
        kept[key] = found
        while len(kept) > _MOST_KEPT:
            kept.popitem(last=False)
        return found[1]

    def href(self, path: str, selection: Selection | None = None) -> str:
        """A link into the dashboard, behind the prefix."""
        return self.prefix + path.lstrip("/") + (selection.query() if selection else "")


@dataclass(frozen=True)
class View:
    """What a page draws from. `warnings` are sentences about the link; `entry.error` says why there is no `run`."""

    context: Context
    path: str
    selection: Selection
    theme: Theme = LIGHT
    entry: Entry | None = None
    warnings: tuple[str, ...] = ()

    @property
    def run(self) -> RecordedRun | None:
        return self.entry.run if self.entry else None

    @cached_property
    def recorded(self) -> RecordedRun:
        """The run, for pages whose NEEDS promise that there is one."""
        assert self.run is not None, "a page without 'recording' in NEEDS asked for the run"
        return self.run

    @cached_property
    def pair(self) -> Pair:
        """The run and its partner, as the figures want them."""
        assert self.entry is not None
        return self.context.registry.pair(self.entry.id, self.selection.other)

    def remember(self, key: str, make: Callable[[], _Kept]) -> _Kept:
        """What `make` reads from the recording, kept until its files change."""
        assert self.entry is not None
        return self.context.remember(f"{self.entry.id}:{key}", self.entry.version, make)

    @property
    def layer(self) -> int:
        """Chosen, else the first looped one, else 0."""
        looped = self.recorded.plan.looped_layers
        return self.selection.layer if self.selection.layer is not None else (looped[0] if looped else 0)

    @property
    def head(self) -> int:
        return self.selection.head or 0

    @property
    def visits(self) -> tuple[int, int]:
        """Chosen, else the first and the last that every looped layer has; (1, 1) for an unlooped model."""
        return self.selection.visits or (1, common_visits(self.recorded.plan))

    def href(self, path: str = "", **changes: Any) -> str:
        """Here, or another page, with parts of the selection changed. A page's own parameters stay on it."""
        here = path in ("", self.path)
        selection = self.selection if here else replace(self.selection, extra={})
        return self.context.href(path or self.path, selection.change(**changes))


def checkpoint_folder(model: Path | str) -> Path:
    """The folder of a bundled name, a path or a hub name; of the last, its files in the local cache, fetched if need be.

    Raises:
        CheckpointError: none of these.
        InputError: a folder without config.json and without a loader of its own, or a recording.
    """
    folder = loaded.checkpoint(model)
    if not folder.is_dir():
        from visitlens.hooks.loading.load_model import resolve  # brings torch

        folder = resolve(folder)
    if not (folder / "config.json").is_file() and not brings_loader(folder):
        raise InputError(f"{model}: no config.json there; --model takes a checkpoint folder")
    return folder


def view_of(
    context: Context,
    path: str,
    search: str,
    theme: str = "light",
    parameters: tuple[str, ...] = (),
    *,
    fitted: bool = True,
) -> View:
    """The view that a URL asks for: the first recording where it names none, warnings where it names what isn't there.

    `fitted=False` leaves layers, heads and visits as they are asked for: a page of its own model fits them to that.
    """
    selection, warnings = parse(search, parameters)
    registry = context.registry
    ids = registry.ids()
    for name in ("run", "other"):
        asked = getattr(selection, name)
        if asked and asked not in ids:
            known = ", ".join(ids[:6]) + (" …" if len(ids) > 6 else "")
            warnings.append(f"There is no recording {asked!r} here{f'; there are {known}' if ids else ''}.")
            selection = selection.change(**{name: None})
    entry = registry[selection.run or _first_readable(registry, ids)] if ids else None
    if fitted and entry is not None and entry.run is not None:
        try:
            selection, unfit = fit(selection, entry.run)
            warnings += unfit
        except VisitlensError as error:
            entry = replace(entry, run=None, error=without_folder(str(error), entry.place))
    return View(context, path, selection, DARK if theme == "dark" else LIGHT, entry, tuple(warnings))


def _first_readable(registry: Registry, ids: tuple[str, ...]) -> str:
    """A looped model's if there is one; what can't be read comes last."""
    entries = [registry[id_] for id_ in ids]
    best = sorted(entries, key=lambda e: 0 if e.run and e.run.looped else 1 if e.run else 2)
    return best[0].id


def said(error: VisitlensError, view: View) -> str:
    """Its message, for a page."""
    return without_folder(str(error), view.entry.place) if view.entry else str(error)


def describe_needs(view: View, needs: Mapping[str, str] | tuple[str, ...]) -> str:
    """Why a page can't be shown for this view, in one sentence; "" if it can. See `app/pages/__init__.py`."""
    run = view.run
    if "model" in needs and view.context.checkpoint is None:
        return "This page runs a model, and none was given: start the dashboard with --model CHECKPOINT."
    if not needs or needs == ("model",):
        return ""
    if view.entry is None:
        return "There is no recording yet."
    if run is None:
        return view.entry.error
    if "looped" in needs and not run.looped:
        return (
            f"{run.name} runs every layer once, so there are no visits to compare. Choose a looped model's recording."
        )
    if "routing" in needs and not routed(run):
        return f"{run.name} has dense feed-forward layers: without experts there is no routing to show."
    if "tokens" in needs and run.recording.level == "summary":
        return (
            f"{run.name} keeps statistics only (level summary). Tokens, their experts and their own values need "
            "level tokens: record again with --level tokens."
        )
    return ""


def routed(run: RecordedRun) -> bool:
    """Whether the model chooses among experts."""
    return int(run.recording.config.get("num_experts") or 0) > 1
