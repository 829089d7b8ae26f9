"""A checkpoint folder that brings its own loader: `visitlens_loader.py`, whose `load` makes the model, for models that no library holds.

    def load(folder: Path, *, dtype: torch.dtype, device: str, **options) -> nn.Module | AdaptedModel

Its code, and the files beside it, are imported as a package of the folder's own: `import model` and `from .model import ...` find
the folder's, `sys.path` stays as it is, and two folders with a `model.py` each don't meet.
"""

from __future__ import annotations

import builtins
import hashlib
import importlib
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec
from inspect import Parameter, signature
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import torch
from torch import nn

from visitlens.errors import CheckpointError, InputError, VisitlensError
from visitlens.hooks.adapters.adapt import adapt, families
from visitlens.hooks.adapters.adapted_model import AdaptedModel
from visitlens.hooks.adapters.foreign_errors import PACKAGE, place_of
from visitlens.hooks.audit.tied_copies import tie_copies as tie
from visitlens.hooks.models.checkpoint_files import LOADER, code_sha256
from visitlens.hooks.models.looped_moe import LoopedMoE

OURS = ("family", "tie_copies")
"""Options that are visitlens' own, unless `load` names them."""


def load_own(
    folder: Path,
    dtype: torch.dtype,
    device: str,
    *,
    trust: bool,
    tie_copies: bool = False,
    unread: bool = False,
    **options: Any,
) -> AdaptedModel | LoopedMoE | nn.Module:
    """The model of the folder's `load`, adapted, in evaluation mode and without gradients. `unread` leaves a plain module of no
    known family as it is.

    Options go to `load` as far as it takes them, the others to the adapter of the plain module that it returns.

    Raises:
        InputError: not trusted; an option that isn't taken; a module that no adapter knows.
        CheckpointError: the code can't be imported, has no such `load`, fails (the message says where), or returns something
            else than was asked for.
    """
    folder = folder.absolute()
    file = folder / LOADER
    if not trust:
        raise InputError(
            f"{file} would be run to load this model: read it, then say --trust-remote-code (trust_remote_code=True)"
        )
    with _told(folder, "importing it"):
        load = getattr(_imported(folder), "load", None)
    if not callable(load):
        raise CheckpointError(f"{file}: defines no function load; expected {_EXPECTED}")
    takes = _options_of(load)
    given = {**options, **({"tie_copies": True} if tie_copies else {})}
    given = {name: value for name, value in given.items() if value is not None}
    taken = {name: value for name, value in given.items() if name in takes or ("**" in takes and name not in OURS)}
    left = {name: value for name, value in given.items() if name not in taken}
    try:
        signature(load).bind(folder, dtype=dtype, device=device, **taken)
    except TypeError as error:
        raise CheckpointError(f"{file}: load{signature(load)}: {error}; expected {_EXPECTED}") from None
    with _told(folder, "load"):
        model: Any = load(folder, dtype=dtype, device=device, **taken)
    _check(model, file, dtype, device)
    if left.pop("tie_copies", False):
        tie(model.model if isinstance(model, AdaptedModel) else model)
        if isinstance(model, AdaptedModel):
            model = AdaptedModel(model.model, model.family, model.visits)
    adapted = isinstance(model, AdaptedModel | LoopedMoE)
    unknown = getattr(getattr(model, "config", None), "model_type", None) not in families() and "family" not in left
    if left and (adapted or (unread and unknown)):
        raise InputError(f"{file}: load takes no option {next(iter(left))!r}; it takes {', '.join(takes) or 'none'}")
    return model if adapted or (unread and unknown) else adapt(model, **left)


def _options_of(load: Any) -> list[str]:
    """Names beside the folder, dtype and device; `**` stands for any."""
    _, *parameters = signature(load).parameters.values() or (None,)
    names = ["**" if p.kind is Parameter.VAR_KEYWORD else p.name for p in parameters]
    return [name for name in names if name not in ("dtype", "device")]


_CAST = "Casting complex values to real"
"""What torch warns of."""
_EXPECTED = "def load(folder, *, dtype, device, **options)"


def _check(made: Any, file: Path, dtype: torch.dtype, device: str) -> None:
    """That it is a model, on the device that was asked for; casts its weights where `load` hasn't, and puts it into evaluation
    mode, without gradients."""
    module = made.model if isinstance(made, AdaptedModel) else made
    if not isinstance(module, nn.Module):
        raise CheckpointError(
            f"{file}: load returned {type(made).__name__}, expected an nn.Module, or one with its adapter: "
            "visitlens.adapt(module, YourFamily())"
        )
    weights = [p for p in module.parameters() if p.is_floating_point()]
    alike = sum(p.numel() for p in weights if p.dtype == dtype)
    if 2 * alike < sum(p.numel() for p in weights):  # else `load` has cast them; a router, say, may be kept in float32
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point():  # not complex tables
                tensor.data = tensor.data.to(dtype)
    wanted = torch.empty(0, device=device).device
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.device != wanted:
            raise CheckpointError(
                f"{file}: load was asked for device {device} and returned {name} on {tensor.device}: end with .to(device)"
            )
    module.eval().requires_grad_(False)


@contextmanager
def _told(folder: Path, what: str) -> Iterator[None]:
    """An error of the folder's code as one of ours, which says where in that code it came up. What it prints goes to stderr, where
    no result of a command is; a default dtype that it sets, which later sums would be made in, is put back."""
    before, always = torch.get_default_dtype(), torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # else a second load of a process casts in silence
    try:
        with redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.filterwarnings("error", message=_CAST)
            yield
    except (Exception, SystemExit) as error:
        if isinstance(error, SyntaxError) and error.filename:
            where = f"{error.filename}:{error.lineno}"
        else:
            where = place_of(error) or str(folder / LOADER)
        if isinstance(error, UserWarning) and _CAST in str(error):
            raise CheckpointError(
                f"{where}: {what} makes a complex tensor real, which throws half of it away: .to(dtype) does that to complex buffers, such "
                "as tables of rotary embedding. Return the model without .to(dtype): visitlens casts floating-point tensors alone"
            ) from error
        name = "" if isinstance(error, VisitlensError) else f"{type(error).__name__}: "
        kind = InputError if isinstance(error, InputError) else CheckpointError
        raise kind(f"{where}: {what} failed ({name}{error})") from error
    finally:
        torch.set_default_dtype(before)
        torch.set_warn_always(always)


# Importing


def _imported(folder: Path) -> ModuleType:
    """The loader, as a member of the folder's package: named by the folder and its code, so that code that has changed is new."""
    key = hashlib.sha256(f"{folder} {code_sha256(folder)}".encode()).hexdigest()
    package = f"{PACKAGE}{key[:16]}"
    if package not in sys.modules:
        sys.modules[package] = root = ModuleType(package, f"The files of {folder}.")
        root.__path__ = [str(folder)]
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    importlib.invalidate_caches()
    return importlib.import_module(f"{package}.{Path(LOADER).stem}")


class _Finder(MetaPathFinder):
    """Of modules of such packages."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if path is None or not fullname.startswith(PACKAGE):
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(fullname, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    """Runs a file with an `import` that looks into its folder first, as that of a script does; leaves no __pycache__ there."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)

    def exec_module(self, module: ModuleType) -> None:
        package = module.__name__.partition(".")[0]

        def importing(name: str, globals_: Any = None, locals_: Any = None, fromlist: Any = (), level: int = 0) -> Any:
            top = name.partition(".")[0]
            if level or not _is_of(package, top):
                return builtins.__import__(name, globals_, locals_, fromlist, level)
            found = builtins.__import__(f"{package}.{name}", globals_, locals_, fromlist, 0)
            return found if fromlist else sys.modules[f"{package}.{top}"]

        module.__dict__["__builtins__"] = {**vars(builtins), "__import__": importing}
        super().exec_module(module)


def _is_of(package: str, top: str) -> bool:
    """Whether the folder holds a module of that name; a folder of mere data is none where something else has the name."""
    spec = find_spec(f"{package}.{top}")
    if spec is None or spec.loader is not None:
        return spec is not None
    return top not in sys.modules and PathFinder.find_spec(top) is None
