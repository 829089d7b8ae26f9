"""Selection, what all panels of a page show, and its short URL. A wrong or stale parameter warns and falls back. No torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any
from urllib.parse import parse_qsl, urlencode

from visitlens.hooks.core.loop_plan import ExecutionPlan
from visitlens.probe.reading.recorded_run import RecordedRun

AGGREGATIONS = ("mean", "each", "token")
"""`mean` over heads (the default), `each` head by itself, `token`: the mean of each token's own ratio."""
_LONGEST = 200
_NUMBER = re.compile(r"[0-9]{1,12}")


@dataclass(frozen=True)
class Selection:
    """What is chosen; None or "" is "not chosen", and the URL holds only what is.

    `run` and `other` are ids of the registry, never paths; `layer` is 0-based, `visits` 1-based, `token` counts all
    recorded tokens from 0, `segment` the packed documents. `extra` are a page's own parameters (its `PARAMETERS`).
    """

    run: str = ""
    other: str = ""
    layer: int | None = None
    visits: tuple[int, int] | None = None
    head: int | None = None
    token: int | None = None
    segment: int | None = None
    metric: str = ""
    agg: str = ""
    extra: Mapping[str, str] = field(default_factory=dict)

    def change(self, **changes: Any) -> Selection:
        """Another selection; what no field is named for goes to `extra`. None or "" takes a choice back."""
        known = {key: value for key, value in changes.items() if key in _FIELDS}
        extra = {**self.extra, **{key: value for key, value in changes.items() if key not in _FIELDS}}
        empty = {key: _EMPTY[key] for key, value in known.items() if value is None}
        return replace(self, **(known | empty), extra={k: str(v) for k, v in extra.items() if v not in (None, "")})

    def query(self) -> str:
        """`?run=smelt&layer=3&visits=1-2`; empty if nothing is chosen."""
        chosen = {name: getattr(self, name) for name in _FIELDS}
        texts = {
            name: "-".join(map(str, value)) if isinstance(value, tuple) else str(value)
            for name, value in chosen.items()
            if value not in (None, "")
        }
        texts |= dict(self.extra)
        return "?" + urlencode(texts) if texts else ""


_FIELDS = tuple(f.name for f in fields(Selection) if f.name != "extra")
_EMPTY = {f.name: f.default for f in fields(Selection)}


def parse(search: str, parameters: tuple[str, ...] = ()) -> tuple[Selection, list[str]]:
    """A URL's query as a Selection, and a sentence for each parameter that was left out.

    Args:
        search: with or without the question mark.
        parameters: names that the page adds to those of Selection.
    """
    chosen: dict[str, Any] = {}
    extra: dict[str, str] = {}
    warnings: list[str] = []
    unknown: dict[str, None] = {}
    for name, text in parse_qsl(search.removeprefix("?"))[:40]:
        if name in parameters:
            extra[name] = text
        elif name not in _FIELDS:
            unknown[abbreviated(name)] = None
        elif (value := _value(name, text)) is None:
            warnings.append(
                f"The link's {name} is {abbreviated(text)}, where {_WANTED[name]} was expected; it is left out."
            )
        else:
            chosen[name] = value
    if unknown:
        one = len(unknown) == 1
        names = ", ".join(unknown) if len(unknown) <= 6 else f"{', '.join([*unknown][:6])} and {len(unknown) - 6} more"
        warnings.append(
            f"The link's parameter{'' if one else 's'} {names} mean{'s' if one else ''} nothing here and "
            f"{'is' if one else 'are'} left out."
        )
    return Selection(**chosen, extra=extra), warnings


def fit(selection: Selection, run: RecordedRun) -> tuple[Selection, list[str]]:
    """The selection with what this run doesn't have taken back, and a sentence for each."""
    recording, plan = run.recording, run.plan
    heads, tokens = int(recording.config.get("num_heads") or 0), recording.tokens
    warnings, changes = [], {}

    def check(name: str, fits: bool, has: str) -> None:
        value = getattr(selection, name)
        if value not in (None, "") and not fits:
            shown = "-".join(map(str, value)) if isinstance(value, tuple) else value
            warnings.append(f"{run.name} has no {named(name)} {abbreviated(str(shown))}; it has {has}.")
            changes[name] = None

    most = common_visits(plan)
    check("layer", selection.layer in plan.visits, f"layers {min(plan.visits)} to {max(plan.visits)}")
    check("head", (selection.head or 0) < heads, f"heads 0 to {heads - 1}")
    check("token", (selection.token or 0) < tokens, f"{tokens:,} tokens")
    a, b = selection.visits or (1, 2)
    check("visits", 1 <= a < b <= most, f"visits 1 to {most}" if most > 1 else "one visit a layer")
    if selection.metric:
        check("metric", selection.metric in run.measures, f"{len(run.measures)} measures")
    return selection.change(**changes), warnings


def named(parameter: str) -> str:
    """A parameter's name in a sentence."""
    return _NAMES.get(parameter, parameter)


def common_visits(plan: ExecutionPlan) -> int:
    """How often every looped layer runs; 1 where none is looped. Layers may run unequally often: pairs are of visits all have."""
    return min((plan.visits[layer] for layer in plan.looped_layers), default=1)


def _value(name: str, text: str) -> Any:
    if len(text) > _LONGEST:
        return None
    if name == "visits":
        parts = text.split("-")
        good = len(parts) == 2 and all(_NUMBER.fullmatch(part) for part in parts)
        return (int(parts[0]), int(parts[1])) if good else None
    if name in ("layer", "head", "token", "segment"):
        return int(text) if _NUMBER.fullmatch(text) else None
    if name == "agg":
        return text if text in AGGREGATIONS else None
    return text if re.fullmatch(r"[\w.-]+", text) else None


_NAMES = {"visits": "visit pair", "metric": "measure", "segment": "document", "agg": "aggregation"}
_WANTED = {
    **dict.fromkeys(("layer", "head", "token", "segment"), "a number from 0"),
    "visits": "a pair such as 1-2",
    "agg": f"one of {', '.join(AGGREGATIONS)}",
    **dict.fromkeys(("run", "other", "metric"), "a name"),
}


def abbreviated(text: str) -> str:
    """Of a link, in quotes."""
    return repr(text if len(text) <= 40 else text[:39] + "…")
