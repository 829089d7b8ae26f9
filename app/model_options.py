"""What every command that loads a model takes beside the checkpoint."""

from __future__ import annotations

from typing import Annotated, Any

import typer

Steps = Annotated[int | None, typer.Option(help="Loops, of a model that counts them at run time.")]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run the Python files of the checkpoint.")]
FamilyName = Annotated[
    str, typer.Option("--family", help="Read the model by this family's adapter, whatever its configuration says.")
]
TieCopies = Annotated[
    bool, typer.Option("--tie-copies", help="Layers saved as copies of one another are visits of one layer.")
]


def model_options(steps: int | None, trust_remote_code: bool, family: str, tie_copies: bool) -> dict[str, Any]:
    """What `load_model` takes beside the checkpoint; nothing that wasn't asked for."""
    given = {"trust_remote_code": trust_remote_code, "family": family, "tie_copies": tie_copies}
    options: dict[str, Any] = {name: value for name, value in given.items() if value}
    return options if steps is None else {**options, "steps": steps}
