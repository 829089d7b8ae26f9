"""Analyses kept with a recording, as `analyses/KIND-NAME.json`: head ablations and Dyck studies. No torch.

Each file is self-contained: format and version, what was done, sums per document group (from which means and intervals
follow, as in the recording itself), and the means and intervals once more for other readers. A file is data from
somewhere: its size, shapes, numbers and texts are checked before anything is made of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from visitlens.errors import InputError, RecordingError
from visitlens.hooks.recording.format import schema
from visitlens.hooks.recording.format.untrusted import read_json, real_folder
from visitlens.hooks.recording.store.commit import commit
from visitlens.probe.analyses.results.head_ablation import ABLATION, HeadAblation
from visitlens.probe.measures.grouped import (
    VERSION,
    Grouped,
    about_stat,
    check_integers,
    checked_about,
    checked_text,
    header,
    short,
)
from visitlens.probe.measures.measure import StatArray

DYCK = "dyck"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class DyckExample:
    """One prompt and the head's attention at its targets: `maps [visit, target, key]`; position 0 is the segment start."""

    shots: int
    pieces: tuple[str, ...]
    targets: tuple[int, ...]
    demonstrations: tuple[tuple[int, int], ...]
    maps: np.ndarray


@dataclass(frozen=True)
class DyckStudy:
    """The Dyck head's attention, and how well the model completes brackets, by number of shots.

    `grouped_scores` are exact_match, accuracy and nll, each [shots]; `grouped_mass` is [shots, heads, visit, part]: the
    share of attention at the targets that lies on the segment start ("bos") and on the demonstrations' answers
    ("answers"), for the Dyck head and, as a control, for the mean over the other heads of the loop.
    """

    name: str
    layer: int
    head: int
    grouped_scores: Mapping[str, Grouped]
    grouped_mass: Grouped
    examples: tuple[DyckExample, ...]
    about: Mapping[str, Any]

    @cached_property
    def mass(self) -> StatArray:
        """[shots, heads, visit, part]; heads: "dyck head", "other heads", "uniform"; part: "bos", "answers"."""
        return self.grouped_mass.stat(**about_stat(self.about))

    @cached_property
    def scores(self) -> dict[str, StatArray]:
        """exact_match, accuracy, nll and perplexity by shots, over the whole answer; target_* at the targets alone."""
        found = {name: grouped.stat(**about_stat(self.about)) for name, grouped in self.grouped_scores.items()}
        for name in [name for name in found if name.endswith("nll")]:
            perplexity = replace(
                found[name].measure,
                name=name.replace("nll", "perplexity"),
                title="Perplexity",
                unit="ratio",
                definition=f"exp of: {found[name].measure.definition}",
            )
            found[perplexity.name] = found[name].combine(1.0, lambda nats, one: np.exp(nats) * one, perplexity)
        return found

    def to_dict(self) -> dict[str, Any]:
        return {
            **header(DYCK, self.name, self.about),
            "layer": self.layer,
            "head": self.head,
            "scores": {name: grouped.to_dict() for name, grouped in self.grouped_scores.items()},
            "mass": self.grouped_mass.to_dict(),
            "examples": [
                {
                    "shots": e.shots,
                    "pieces": list(e.pieces),
                    "targets": list(e.targets),
                    "demonstrations": [list(span) for span in e.demonstrations],
                    "maps": short(e.maps),
                }
                for e in self.examples
            ],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DyckStudy:
        mass = Grouped.from_dict(data["mass"])
        if mass.measure.axes != ("shots", "heads", "visit", "part"):
            raise ValueError(f"mass has axes {mass.measure.axes}")
        scores = {checked_text(name): Grouped.from_dict(grouped) for name, grouped in data["scores"].items()}
        if any(grouped.measure.axes != ("shots",) for grouped in scores.values()):
            raise ValueError("scores must have the axis shots alone")
        check_integers([data["layer"], data["head"]], mass.labels["visit"], mass.labels["shots"])
        examples = tuple(_example(e, len(mass.labels["visit"])) for e in data["examples"])
        return cls(
            checked_text(data["name"]),
            data["layer"],
            data["head"],
            scores,
            mass,
            examples,
            checked_about(data["about"]),
        )


_KINDS = {ABLATION: HeadAblation, DYCK: DyckStudy}


def check_name(name: str) -> str:
    """Raises InputError: not fit for a file name."""
    if not _NAME.fullmatch(name):
        raise InputError(f"expected a name of letters, digits, '.', '_' and '-', at most 64, got {name!r}")
    return name


def store(recording: Path, analysis: HeadAblation | DyckStudy) -> Path:
    """Writes the analysis into the recording's folder in one step, in place of one of the same kind and name.

    Raises:
        InputError: its name isn't fit for a file.
        RecordingError: the analyses folder is a link.
        StorageError: no room or no permission.
    """
    kind = ABLATION if isinstance(analysis, HeadAblation) else DYCK
    file = real_folder(recording / schema.ANALYSES) / f"{kind}-{check_name(analysis.name)}.json"
    file.parent.mkdir(exist_ok=True)
    commit(file, (json.dumps(analysis.to_dict(), ensure_ascii=False, allow_nan=False) + "\n").encode())
    return file


def stored(recording: Path, kind: str) -> list[str]:
    """Names of the analyses of a kind, sorted.

    Raises:
        RecordingError: the analyses folder is a link.
    """
    files = real_folder(recording / schema.ANALYSES).glob(f"{kind}-*.json")
    names = (path.name.removeprefix(f"{kind}-").removesuffix(".json") for path in files)
    return sorted(name for name in names if _NAME.fullmatch(name))


def load(recording: Path, kind: str, name: str) -> Any:
    """A HeadAblation or DyckStudy.

    Raises:
        RecordingError: the file is no such analysis, is too large, or holds something that doesn't fit.
    """
    file = real_folder(recording / schema.ANALYSES) / f"{kind}-{check_name(name)}.json"
    try:
        data = read_json(file)
        if data["format"] != f"visitlens-{kind}" or data["version"] != VERSION or data["name"] != name:
            raise ValueError(
                f"format {data['format']!r}, version {data['version']!r}, name {data['name']!r}; this visitlens reads "
                f"'visitlens-{kind}', version {VERSION}"
            )
        return _KINDS[kind].from_dict(data)
    except (ValueError, KeyError, TypeError, AttributeError) as error:  # ValueError: RecordingError too
        raise RecordingError(
            f"{file}: not a readable {kind} analysis ({error!s:.300}); make it again with `visitlens ablate`"
        ) from error


def _example(data: Mapping[str, Any], visits: int) -> DyckExample:
    pieces = tuple(checked_text(piece) for piece in data["pieces"])
    targets = tuple(data["targets"])
    spans = tuple((first, stop) for first, stop in data["demonstrations"])
    maps = np.array(data["maps"], dtype=np.float64)
    check_integers([data["shots"]], targets, [bound for span in spans for bound in span])
    if maps.shape != (visits, len(targets), len(pieces)) or not np.isfinite(maps).all():
        raise ValueError(f"maps {maps.shape} for {visits} visits, {len(targets)} targets and {len(pieces)} tokens")
    inside = all(0 < at < len(pieces) for at in targets) and all(0 <= a <= b <= len(pieces) for a, b in spans)
    if not inside:
        raise ValueError("targets or demonstrations lie outside the prompt")
    return DyckExample(data["shots"], pieces, targets, spans, maps)
