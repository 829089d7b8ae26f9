"""How many groups of documents a recording keeps apart, and that one that was begun goes on with its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from visitlens.hooks.recording.format import schema
from visitlens.hooks.recording.write.record import FEWEST_GROUPS
from visitlens.hooks.text.packed_tokens import PackedTokens

_MOST_GROUPS, _MOST_BYTES = 1024, 256 << 20


def most_groups(bytes_per_group: int) -> int:
    """How many groups of documents a recording keeps apart: 1,024, or half of that and again half while their sums take more than
    256 MB, but 128 at least. By the model alone, so that recordings of two texts can be merged."""
    groups = _MOST_GROUPS
    while groups > FEWEST_GROUPS and groups * bytes_per_group > _MOST_BYTES:
        groups //= 2
    return groups


def _begun(out: Path) -> dict[str, Any]:
    """The description of the recording that is there already, to be gone on with; empty where there is none that can be."""
    try:
        run = json.loads((out / schema.MANIFEST).read_text(encoding="utf-8"))["run"]
        options = run["config"]["options"]
        whole = all(isinstance(n, int) and n > 0 for n in (run["tokens"], run.get("groups", 1), options["groups"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    return run if whole and options["groups"] <= schema.MAX_GROUPS else {}


def begun_groups(out: Path) -> int | None:
    """How many groups the recording that is there keeps apart at most; None where there is none."""
    run = _begun(out)
    return run["config"]["options"]["groups"] if run else None


def begun_in_other_groups(out: Path, packed: PackedTokens) -> bool:
    """Whether there is a recording of this text from before near copies counted as one document: it goes on as it began."""
    if "groups" not in (run := _begun(out)):
        return False
    part = packed.first_contexts(min(run["tokens"], packed.num_tokens))
    if part.sha256 != run["config"].get("data_sha256"):
        return False
    return int(part.document_groups(run["config"]["options"]["groups"]).max()) + 1 != run["groups"]
