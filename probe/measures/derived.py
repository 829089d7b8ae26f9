"""Derived, a number computed from recorded measures when it is asked for; the register, filled by the files of `probe/derived`. No torch."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from visitlens import plugins
from visitlens.errors import InputError
from visitlens.probe.measures.measure import Measure, StatArray

if TYPE_CHECKING:
    from visitlens.probe.reading.recorded_run import RecordedRun

Visits = tuple[int, int] | None
"""The earlier and the later visit, 1-based; None: the first and the last."""


@dataclass(frozen=True)
class Derived:
    """A number computed from what a recording holds, by `function(run, visits, measure)`.

    A file of `probe/derived` holds some in its tuple `DERIVED`; being there is being registered: `rec.derived(name)`, `visitlens
    export` and docs/measures.md have it then.

    Examples:
        >>> vl.open("run.vlens").derived("expert_overlap").axes
        ('layer',)
    """

    measure: Measure
    function: Callable[[RecordedRun, Visits, Measure], StatArray]

    def of(self, run: RecordedRun, visits: Visits = None) -> StatArray:
        """Of one recording."""
        return self.function(run, visits, self.measure)


@plugins.once
def registered() -> Mapping[str, Derived]:
    """Name -> derived number, of `probe/derived`, then of other packages and of a notebook."""
    own = [derived for module in plugins.modules("visitlens.probe.derived") for derived in module.DERIVED]
    by_name = {derived.measure.name: derived for derived in own}
    others = plugins.added("derived", _name_of, by_name)
    return by_name | {derived.measure.name: derived for derived in others.values()}


def find(name: str) -> Derived:
    """By name.

    Raises:
        InputError: no such number.
    """
    known = registered()
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
        raise InputError(f"no derived number {name!r}; {hint}")
    return known[name]


def _name_of(name: str, derived: Any) -> list[str]:
    if not isinstance(derived, Derived):
        raise InputError(f"expected a Derived(measure, function), got {derived!r:.80}")
    return [derived.measure.name]
