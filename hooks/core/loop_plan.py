"""The order in which a looped model runs its physical layers: LoopSpec, Step, VisitPair, ExecutionPlan.

Layers are 0-based, visits 1-based, steps 0-based in execution order. A looped model with L layers whose span of
m layers runs r times has L + (r - 1) m steps; the unlooped Baseline is an empty span.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

from visitlens.errors import InputError


@dataclass(frozen=True, order=True)
class Step:
    """One run of one physical layer."""

    index: int
    layer: int
    visit: int

    def __str__(self) -> str:
        return f"step {self.index} (layer {self.layer}, visit {self.visit})"


@dataclass(frozen=True)
class VisitPair:
    """Two visits of one physical layer, the earlier first."""

    earlier: Step
    later: Step

    @property
    def layer(self) -> int:
        return self.earlier.layer

    def __str__(self) -> str:
        return f"layer {self.layer}, visits {self.earlier.visit} and {self.later.visit}"


@dataclass(frozen=True)
class ExecutionPlan:
    """The steps of one forward, in order. Any order is a plan: the visit number counts a layer's runs.

    Examples:
        >>> plan = vl.load("smelt").plan
        >>> [(step.layer, step.visit) for step in plan.steps][:7]
        [(0, 1), (1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (2, 2)]
        >>> plan.looped_layers
        (2, 3, 4, 5)
    """

    steps: tuple[Step, ...]

    @classmethod
    def from_layers(cls, layers: Iterable[int]) -> ExecutionPlan:
        """From the physical layer of each step; visits are counted."""
        seen: dict[int, int] = {}
        steps = []
        for index, layer in enumerate(layers):
            seen[layer] = seen.get(layer, 0) + 1
            steps.append(Step(index, layer, seen[layer]))
        if not steps:
            raise InputError("an execution plan needs at least one step")
        return cls(tuple(steps))

    def __len__(self) -> int:
        return len(self.steps)

    def __repr__(self) -> str:
        return f"ExecutionPlan({len(self)} steps: {', '.join(f'{s.layer}·{s.visit}' for s in self.steps)}; layer·visit)"

    @cached_property
    def visits(self) -> dict[int, int]:
        """Physical layer -> how often it runs."""
        counts: dict[int, int] = {}
        for step in self.steps:
            counts[step.layer] = step.visit
        return counts

    @cached_property
    def looped_layers(self) -> tuple[int, ...]:
        return tuple(sorted(layer for layer, count in self.visits.items() if count > 1))

    @cached_property
    def pairs(self) -> tuple[VisitPair, ...]:
        """Every pair of visits (a < b) of every looped layer, by layer, then a, then b."""
        by_layer = {layer: [s for s in self.steps if s.layer == layer] for layer in self.looped_layers}
        return tuple(VisitPair(a, b) for steps in by_layer.values() for a, b in combinations(steps, 2))

    def visit_pairs(self, earlier: int = 1, later: int | None = None) -> tuple[VisitPair, ...]:
        """One pair a looped layer: visits `earlier` and `later` (default: the layer's last).

        Raises:
            InputError: a looped layer has no such visits.
        """
        chosen = []
        for layer in self.looped_layers:
            last = self.visits[layer] if later is None else later
            if not 1 <= earlier < last <= self.visits[layer]:
                raise InputError(
                    f"expected visits 1 <= a < b <= {self.visits[layer]} for layer {layer}, got ({earlier}, {last})"
                )
            chosen.append(VisitPair(self.step(layer, earlier), self.step(layer, last)))
        return tuple(chosen)

    def step(self, layer: int, visit: int) -> Step:
        """The step that is this visit of this layer."""
        for step in self.steps:
            if step.layer == layer and step.visit == visit:
                return step
        raise InputError(f"no visit {visit} of layer {layer}; visits per layer are {self.visits}")


@dataclass(frozen=True)
class LoopSpec:
    """`layers` physical layers of which the contiguous `span` runs `visits` times.

    Examples:
        >>> spec = vl.LoopSpec(layers=4, span=range(1, 3), visits=2)
        >>> [(step.layer, step.visit) for step in spec.plan().steps]
        [(0, 1), (1, 1), (2, 1), (1, 2), (2, 2), (3, 1)]
    """

    layers: int
    span: range
    visits: int

    def __post_init__(self) -> None:
        if self.layers < 1 or self.visits < 1:
            raise InputError(f"expected at least one layer and one visit, got {self.layers} and {self.visits}")
        if len(self.span) and not (0 <= self.span.start < self.span.stop <= self.layers and self.span.step == 1):
            raise InputError(f"the loop span must lie within layers 0..{self.layers - 1}, got {self.span}")

    def plan(self) -> ExecutionPlan:
        start, stop = (self.span.start, self.span.stop) if len(self.span) else (self.layers, self.layers)
        prelude, recurrent, coda = range(start), list(self.span) * self.visits, range(stop, self.layers)
        return ExecutionPlan.from_layers([*prelude, *recurrent, *coda])


def visit_choices(visits: int) -> tuple[tuple[int, ...], ...]:
    """Each visit alone, then all together: `((1,), (2,), (1, 2))`; one visit has one choice."""
    alone = tuple((v,) for v in range(1, visits + 1))
    return alone if visits == 1 else (*alone, tuple(range(1, visits + 1)))
