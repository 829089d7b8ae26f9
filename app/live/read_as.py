"""How the dashboard reads its checkpoint: as the command line says, and else as the checkpoint's recordings say. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from visitlens.app.view.registry import Entry, without_folder
from visitlens.errors import InputError
from visitlens.probe.jobs.as_recorded import as_recorded


def read_as(entries: Iterable[Entry], weights: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """What `load_model` takes beside the checkpoint with these weights: `given`, and what the recordings of just these weights
    say of the rest, if they agree. Whatever is given wins: a model may be probed otherwise than it was recorded.

    Raises:
        InputError: they don't agree; or one was made by running the checkpoint's Python files, and that isn't given.
    """
    trust = {name: value for name, value in given.items() if name == "trust_remote_code"}
    said: dict[str, tuple[Any, str]] = {}
    first = True
    for entry in entries:
        if entry.run is None or entry.run.provenance["weights_sha256"] != weights:
            continue
        try:
            recorded = as_recorded(entry.run, trust)
        except InputError as error:
            raise InputError(without_folder(str(error), entry.place)) from None
        if (seed := entry.run.recording.config.get("state_seed")) is not None:
            recorded.setdefault("state_seed", seed)
        for name in {*said, *recorded} - set(given):
            value, (before, by) = recorded.get(name), said.get(name, (None, "another"))
            if not first and value != before:
                raise InputError(
                    f"recordings of this checkpoint read it differently: {entry.name} with {_option(name, value)}, {by} with "
                    f"{_option(name, before)}. Start the dashboard with the --{name.replace('_', '-')} to probe it with"
                )
            said[name] = (value, entry.name)
        first = False
    return {**{name: value for name, (value, _) in said.items()}, **given}


def of_other_code(entries: Iterable[Entry], model: Mapping[str, Any]) -> list[str]:
    """Names of the recordings of a probed model's weights (`LiveRun.model`) that other code of its folder made."""
    made = [(entry.name, entry.run.recording.provenance) for entry in entries if entry.run is not None]
    ours = [(name, said.get("code_sha256")) for name, said in made if said["weights_sha256"] == model["weights_sha256"]]
    return [name for name, code in ours if code != model["code_sha256"]]


def told(options: Mapping[str, Any]) -> str:
    """The options as they are given on the command line."""
    return " ".join(_option(name, value) for name, value in options.items())


def _option(name: str, value: Any) -> str:
    option = f"--{name.replace('_', '-')}"
    return option if value is True else f"{option} {value}" if value is not None else f"no {option}"
