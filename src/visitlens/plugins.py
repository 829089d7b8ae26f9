"""Plug-ins: files of a plug-in folder, entry points of other installed packages, and what a notebook registers. No torch.

    group          what an entry point `visitlens.GROUP` names        register(...) takes it
    statistics     a Statistic class                                  yes
    figures        a Figure class                                     yes
    derived        a Derived(measure, function)                       yes
    experiments    a function (model, sample, *, options) -> results  yes, kind="experiment"
    families       a Family class                                     yes
    pages          a module as `app/pages/__init__.py` describes it   yes
    commands       a function or Typer group, by the entry's name     no: the command line is another process

What another package brings and can't be used is named in one warning and left out; the rest works.
"""

from __future__ import annotations

import pkgutil
import sys
import warnings
from collections.abc import Callable, Iterable
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from visitlens.errors import InputError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

T = TypeVar("T")
_BASES = {
    "statistics": "visitlens.probe.measures.statistic.Statistic",
    "figures": "visitlens.probe.gallery.figure.Figure",
    "families": "visitlens.hooks.adapters.family.Family",
}
_REGISTERS = {
    "statistics": "visitlens.probe.measures.collector.registered",
    "derived": "visitlens.probe.measures.derived.registered",
    "figures": "visitlens.probe.gallery.figure.registered",
    "experiments": "visitlens.probe.experiments.registered",
    "families": "visitlens.hooks.adapters.adapt.families",
    "pages": "visitlens.app.pages.pages",
}
"""Group -> the function that looks through it."""
_registered: dict[str, dict[str, Any]] = {}
"""Group -> name -> what `register` was given."""
_caches: list[Callable[[], None]] = []


def modules(package: str) -> list[ModuleType]:
    """Every module of a plug-in package, imported, in name order. `package` is its full dotted name."""
    folder = import_module(package)
    return [import_module(f"{package}.{found.name}") for found in pkgutil.iter_modules(folder.__path__)]


def once(look: Callable[[], T]) -> Callable[[], T]:
    """Keeps what a register holds until something is registered."""
    kept = cache(look)
    _caches.append(kept.cache_clear)
    return kept


def added(group: str, names_of: Callable[[str, Any], Iterable[str]], taken: Iterable[str]) -> dict[str, Any]:
    """Name -> what other packages and notebooks bring to a group; what is broken is left out with a warning.

    Args:
        names_of: the names that a plug-in takes (slug, measures, path); raises where it isn't what the group needs.
        taken: names that it can't have any more.
    """
    from importlib.metadata import entry_points  # some twenty modules, which opening a recording doesn't need

    names, found = set(taken), {}
    points = sorted(entry_points(group=f"visitlens.{group}"), key=lambda point: (point.name, point.value))
    for point in points:
        try:
            thing = point.load()
            wanted = _free(names_of(point.name, thing), names)
        except Exception as error:  # whatever another package's import raises
            reason = f"{type(error).__name__}: {error}" if not isinstance(error, InputError) else str(error)
            warnings.warn(f"{_origin(point)} is left out of {group}: {reason}", stacklevel=2)
            continue
        names |= wanted
        found[point.name] = thing
    for name, thing in _registered.get(group, {}).items():
        names |= _free(names_of(name, thing), names)
        found[name] = thing
    return found


def register(thing: T, *, kind: str = "", name: str = "") -> T:
    """Adds a plug-in for this process: in a notebook, until its kernel ends. Registering one of the same name replaces it.

    Args:
        thing: a Statistic, Figure or Family class, a dashboard page (a module), or a function that is an experiment.
        kind: `experiment`, for a function.
        name: of an experiment; its function's name by default.

    Returns:
        `thing`, so that it can stand above a class: `@vl.register`.

    Raises:
        InputError: it is none of these, lacks what its kind needs, or takes a name that is taken.

    Examples:
        >>> def nothing(model, sample):
        ...     return {}
        >>> registered = vl.register(nothing, kind="experiment")
        >>> len(vl.run_experiment("nothing", vl.load("smelt"), vl.load("smelt").sample(max_tokens=256)))
        0
    """
    group = _group(thing, kind)
    named = getattr(thing, "measure", thing)  # of a derived number
    key = name or str(getattr(named, "__qualname__", getattr(named, "name", ""))).rpartition(".")[2] or thing.__name__  # type: ignore[attr-defined]
    before = dict(_registered.get(group, {}))
    _registered.setdefault(group, {})[key] = thing
    _forget()
    try:
        module, _, look = _REGISTERS[group].rpartition(".")
        getattr(import_module(module), look)()  # fills it again, and says what is wrong with a plug-in
    except Exception:
        _registered[group] = before
        _forget()
        raise
    return thing


def package_of(thing: Any) -> str:
    """The top-level package that a plug-in comes from; empty for visitlens itself."""
    package = str(getattr(thing, "__module__", "")).partition(".")[0]
    return "" if package == "visitlens" else {"__main__": "a notebook"}.get(package, package)


def is_installed(package: str) -> bool:
    """Whether a package that `package_of` named can be imported here."""
    from importlib.util import find_spec

    try:
        return package in sys.modules or find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def need(thing: Any, base: type, *attributes: str) -> None:
    """Raises InputError where a class isn't one of `base`, is unfinished, or lacks attributes."""
    if not (isinstance(thing, type) and issubclass(thing, base)):
        raise InputError(f"expected a class derived from {base.__name__}, got {thing!r:.80}")
    lacking = [a for a in attributes if not hasattr(thing, a)] + sorted(getattr(thing, "__abstractmethods__", ()))
    if lacking:
        raise InputError(f"{thing.__name__} lacks {', '.join(lacking)}")


def _free(wanted: Iterable[str], taken: Iterable[str]) -> set[str]:
    wanted = set(wanted)
    if clash := sorted(wanted & set(taken)):
        raise InputError(f"the name {', '.join(clash)} is taken")
    return wanted


def _origin(point: EntryPoint) -> str:
    package = f"{point.dist.name} {point.dist.version}" if point.dist else "a package"
    return f"{point.name!r} of {package} ({point.value})"


def _group(thing: Any, kind: str) -> str:
    if isinstance(thing, ModuleType):
        return "pages"
    if isinstance(thing, type):
        lineage = {f"{cls.__module__}.{cls.__qualname__}" for cls in thing.__mro__}
        if found := next((group for group, base in _BASES.items() if base in lineage), ""):
            return found
    elif type(thing).__module__ == "visitlens.probe.measures.derived":
        return "derived"
    elif callable(thing) and kind == "experiment":
        return "experiments"
    raise InputError(
        "expected a Statistic, Figure or Family class, a Derived, a page's module, or a function with kind='experiment', "
        f"got {thing!r:.80}; a command is found by the entry point visitlens.commands"
    )


def _forget() -> None:
    for clear in _caches:
        clear()
