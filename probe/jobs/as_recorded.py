"""How a recording's model is read again: by the options that it was recorded with. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from visitlens.errors import InputError
from visitlens.hooks.recording.format import schema
from visitlens.hooks.text.encoder import NO_TOKEN
from visitlens.probe.reading.recorded_run import RecordedRun


def as_recorded(rec: RecordedRun, given: Mapping[str, Any]) -> dict[str, Any]:
    """How the recording's model is read: `given`, and the rest of what its provenance says (`steps`, `family` ...). That code may
    run is nothing that a recording decides: `trust_remote_code` is only ever given; so are options of a `load` of one's own that
    aren't known here.

    Raises:
        InputError: the two contradict each other, or it was read with options unknown here.
    """
    place, said = rec.recording.place, rec.recording.provenance.get("model_options") or {}
    recorded, given = (_said(options) if isinstance(options, Mapping) else {"": options} for options in (said, given))
    known = {name for name in _READ.keys() & recorded.keys() if _READ[name](recorded[name])}
    if not all(name in known or given.get(name) == value for name, value in recorded.items()):
        raise InputError(f"{place}: its model was read with options that this visitlens doesn't know: {said!r:.200}")
    says = {"state_seed": rec.recording.config.get("state_seed"), **recorded}
    for name, value in given.items():
        if name != "trust_remote_code" and says.get(name) not in (None, value):
            option = name.replace("_", "-")
            raise InputError(
                f"{place}: its model was recorded with --{option} {says[name]}, not {value}: leave --{option} out to take it as "
                "recorded, or record it so"
            )
    if recorded.get("trust_remote_code") and not given.get("trust_remote_code"):
        raise InputError(
            f"{place}: its model was read by running the Python files of the checkpoint. A recording isn't believed in that: read "
            "them, and give --trust-remote-code again"
        )
    return {**recorded, **given}


def recorded_bos(rec: RecordedRun) -> str | int | None:
    """What led the recording's documents, as `TextEncoder.of` takes it; None where it doesn't say."""
    ends = rec.recording.provenance.get("special_tokens")
    bos = ends.get("bos") if isinstance(ends, Mapping) else None
    if not isinstance(bos, Mapping) or "id" not in bos:
        return None
    return NO_TOKEN if bos["id"] is None else str(bos["id"])


def _said(options: Mapping[str, Any]) -> dict[str, Any]:
    """Without those that are named to say that they are as ever."""
    return {name: value for name, value in options.items() if value is not None and value is not False}


_READ: dict[str, Callable[[Any], bool]] = {
    "steps": lambda value: type(value) is int and 0 < value <= schema.MAX_STEPS,
    "state_seed": lambda value: type(value) is int and 0 <= value < 2**63,
    "family": lambda value: isinstance(value, str),
    "context_length": lambda value: type(value) is int and value > 0,
    "tie_copies": lambda value: value is True,
    "trust_remote_code": lambda value: value is True,
}
"""Options of `load_model` that a recording may name, and which values it may say."""
