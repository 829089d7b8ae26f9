"""Options that commands share, in groups: a command's parameter of such a type has an option for each field (`grouped`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, get_type_hints

import typer


def choice(name: str, values: tuple[str, ...]) -> Any:
    """An option's choices: the values of one of the library's own tables."""
    return StrEnum(name, [(value, value) for value in values])


TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run the Python files of the checkpoint; read them first.")
]


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """How a model is read."""

    steps: Annotated[int | None, typer.Option(help="Loops, of a model that counts them at run time.")] = None
    state_seed: Annotated[
        int | None,
        typer.Option(min=0, help="Seed of the random state that a model's loop starts from (Huginn); 0 by default."),
    ] = None
    trust_remote_code: TrustRemoteCode = False
    family: Annotated[
        str, typer.Option("--family", help="Read the model by this family's adapter, whatever its configuration says.")
    ] = ""
    tie_copies: Annotated[
        bool, typer.Option("--tie-copies", help="Layers saved as copies of one another are visits of one layer.")
    ] = False

    def given(self) -> dict[str, Any]:
        """What `load_model` takes beside the checkpoint; nothing that wasn't asked for (0 is a number that was)."""
        said = {name: value for name, value in vars(self).items() if value is not None}
        return {name: value for name, value in said.items() if value is not False and value != ""}


@dataclass(frozen=True, kw_only=True)
class DeviceOptions:
    """On what, and in what precision, a model runs."""

    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 or float64.")] = "float32"
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 ...")] = "cpu"


@dataclass(frozen=True, kw_only=True)
class TextOptions:
    """How a text becomes tokens."""

    bos: Annotated[
        str,
        typer.Option(
            help="The token that leads a text: none, an id, or a token by name; by default what the model's configuration says, else "
            "what its tokenizer puts in front, else none."
        ),
    ] = ""
    special_as_text: Annotated[
        bool, typer.Option("--special-as-text", help="Special tokens written out in the text, such as <eos>, are text.")
    ] = False
    by_line: Annotated[
        bool,
        typer.Option("--by-line", help="Each line of a .txt or .md file is a document; with --generate, a prompt."),
    ] = False

    def given(self) -> dict[str, Any]:
        """What `RunRequest.of` takes of them."""
        return {"bos": self.bos or None, "special_as_text": self.special_as_text, "by_line": self.by_line}


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """What the model writes, and how."""

    generate: Annotated[
        int,
        typer.Option(help="Take each document as a prompt, and record what the model writes: tokens a prompt."),
    ] = 0
    temperature: Annotated[
        float, typer.Option(min=0, help="Of --generate: 0 takes the likeliest token, above 0 tokens are drawn.")
    ] = 0.0
    top_p: Annotated[float, typer.Option(help="Draw among the fewest tokens whose probabilities sum to this.")] = 1.0
    seed: Annotated[int, typer.Option(min=0, help="Of the tokens drawn; kept in the recording.")] = 0


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """A command for Typer: a parameter whose type is a group stands for the group's options, and gets the group made of them."""
    parameters: list[Parameter] = []
    groups: dict[str, type] = {}
    for parameter in signature(command, eval_str=True).parameters.values():
        group = parameter.annotation
        if not is_dataclass(group):
            parameters.append(parameter)
            continue
        groups[parameter.name] = group  # pyright: ignore[reportArgumentType]  # a class, not an instance
        hints = get_type_hints(group, include_extras=True)
        parameters += [
            Parameter(f.name, Parameter.KEYWORD_ONLY, default=f.default, annotation=hints[f.name])
            for f in fields(group)
        ]

    def called(**values: Any) -> None:
        made = {
            name: group(**{f.name: values.pop(f.name) for f in fields(group)})  # pyright: ignore[reportArgumentType]
            for name, group in groups.items()
        }
        command(**values, **made)

    called.__name__, called.__doc__, called.__module__ = command.__name__, command.__doc__, command.__module__
    called.__annotations__ = {p.name: p.annotation for p in parameters}
    called.__signature__ = Signature([p.replace(kind=Parameter.KEYWORD_ONLY) for p in parameters])  # pyright: ignore[reportFunctionMemberAccess]
    return called
