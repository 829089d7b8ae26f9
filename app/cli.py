"""`visitlens` on the command line. A file of `commands/` is a command: its function (or Typer group) of the file's name.

Thin: every command calls one function. Commands import what is heavy when they run.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Annotated, Any, NoReturn

import typer

from visitlens import __version__, plugins
from visitlens.app.terminal.console import console, log_shown, plain
from visitlens.errors import TRACEBACK, InputError, VisitlensError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback(invoke_without_command=True)
def about(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """What each visit of a looped Mixture-of-Experts transformer does: record it, measure it, draw it."""
    if version:
        typer.echo(__version__)
        raise typer.Exit


def _name_of(name: str, command: Any) -> list[str]:
    if not callable(command):
        raise InputError(f"expected a function or a Typer group, got {command!r:.80}")
    return [name]


_own = {module.__name__.rpartition(".")[2]: module for module in plugins.modules("visitlens.app.commands")}
_commands = {name: getattr(module, name) for name, module in _own.items()}
for _name, _command in (_commands | plugins.added("commands", _name_of, _commands)).items():
    if isinstance(_command, typer.Typer):
        app.add_typer(_command, name=_name)
    else:
        app.command(_name)(_command)


def main() -> None:
    """Runs the command line; every error on purpose is one line and a non-zero exit, its traceback where `TRACEBACK` is set."""
    signal.signal(
        signal.SIGTERM, lambda number, frame: sys.exit(128 + number)
    )  # cleans up; a recording ends its context first
    try:
        with log_shown():
            app(standalone_mode=True)
    except VisitlensError as error:
        if os.environ.get(TRACEBACK):
            raise
        _fail(str(error))
    except OSError as error:  # of a path that no command expected
        _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in ("torch", "transformer_lens", "safetensors", "tokenizers"):
            raise
        _fail(f"this command runs a model and needs {error.name}: pip install 'visitlens[model]'")
    except KeyboardInterrupt as stop:
        said = str(stop) or "stopped; what is recorded is kept, and the same command goes on from there"
        console.print(plain(said), soft_wrap=True)
        sys.exit(130)


def _fail(message: str) -> NoReturn:
    """Unwrapped, so that a path can be copied."""
    console.print(f"[bold red]error:[/] {plain(message)}", soft_wrap=True)
    sys.exit(1)
