"""Plug-ins: being a file of a plug-in folder is being registered. No torch."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from types import ModuleType


def modules(package: str) -> list[ModuleType]:
    """Every module of a plug-in package, imported, in name order. `package` is its full dotted name."""
    folder = import_module(package)
    return [import_module(f"{package}.{found.name}") for found in pkgutil.iter_modules(folder.__path__)]
