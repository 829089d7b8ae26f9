"""What every command that loads a model takes beside the checkpoint."""

from __future__ import annotations

from typing import Annotated, Any

import typer

Steps = Annotated[int | None, typer.Option(help="Loops, of a model that counts them at run time.")]
StateSeed = Annotated[
    int | None,
    typer.Option(min=0, help="Seed of the random state that a model's loop starts from (Huginn); 0 by default."),
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run the Python files of the checkpoint; read them first.")
]
FamilyName = Annotated[
    str, typer.Option("--family", help="Read the model by this family's adapter, whatever its configuration says.")
]
TieCopies = Annotated[
    bool, typer.Option("--tie-copies", help="Layers saved as copies of one another are visits of one layer.")
]

LeadingToken = Annotated[
    str,
    typer.Option(
        "--bos",
        help="The token that leads a text: none, an id, or a token by name; by default what the model's configuration says, else "
        "what its tokenizer puts in front, else none.",
    ),
]


def model_options(
    steps: int | None, state_seed: int | None, trust_remote_code: bool, family: str, tie_copies: bool
) -> dict[str, Any]:
    """What `load_model` takes beside the checkpoint; nothing that wasn't asked for."""
    said = {"trust_remote_code": trust_remote_code, "family": family, "tie_copies": tie_copies}
    numbers = {"steps": steps, "state_seed": state_seed}  # of which 0 is one
    return {n: v for n, v in said.items() if v} | {n: v for n, v in numbers.items() if v is not None}
