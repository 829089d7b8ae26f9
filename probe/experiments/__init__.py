"""Experiments: found by their files in `probe/experiments`, run by name; Results, the StatArrays that one gives."""

from __future__ import annotations

import difflib
import html
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

from visitlens import plugins
from visitlens.errors import InputError
from visitlens.probe.measures.measure import StatArray
from visitlens.probe.measures.tables import sizes

if TYPE_CHECKING:
    from visitlens.hooks.core.model_interface import InstrumentedModel
    from visitlens.probe.model.model import Model
    from visitlens.probe.samples.sample import EvalSet

Experiment = Callable[..., dict[str, StatArray]]


@dataclass(frozen=True)
class Results(Mapping[str, StatArray]):
    """What an experiment measured; each StatArray is an item and an attribute."""

    name: str
    stats: Mapping[str, StatArray] = field(repr=False)

    def __getitem__(self, name: str) -> StatArray:
        if name not in self.stats:
            raise InputError(f"{self.name} has no result {name!r}; it has {', '.join(self.stats)}")
        return self.stats[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.stats)

    def __len__(self) -> int:
        return len(self.stats)

    def __getattr__(self, name: str) -> StatArray:
        stats = self.__dict__.get("stats", {})
        if name not in stats:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}; it has {', '.join(stats)}")
        return stats[name]

    def __dir__(self) -> list[str]:
        return sorted([*super().__dir__(), *self.stats])

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"experiment": self.name, "results": {name: stat.to_dict() for name, stat in self.stats.items()}}

    def __repr__(self) -> str:
        rows = [
            f"  .{name}: {stat.measure.title} [{stat.measure.unit}], {sizes(stat)}" for name, stat in self.stats.items()
        ]
        return "\n".join([f"Results of {self.name}", *rows])

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td><code>.{html.escape(name)}</code></td><td>{html.escape(stat.measure.title)}</td>"
            f"<td>{html.escape(stat.measure.unit)}</td><td>{html.escape(sizes(stat))}</td>"
            f"<td>{html.escape(stat.measure.definition)}</td></tr>"
            for name, stat in self.stats.items()
        )
        head = "<tr><th></th><th>result</th><th>unit</th><th>axes</th><th>definition</th></tr>"
        return f"<b>{html.escape(self.name)}</b><table>{head}{rows}</table>"


@plugins.once
def registered() -> Mapping[str, Experiment]:
    """Name -> the function of that name in the file of that name, in name order; then other packages' and a notebook's."""
    named = {module.__name__.rpartition(".")[2]: module for module in plugins.modules(__name__)}
    own = {name: getattr(module, name) for name, module in named.items()}
    return own | plugins.added("experiments", _name_of, own)


def _name_of(name: str, function: Any) -> list[str]:
    if not callable(function) or isinstance(function, type):
        raise InputError(f"expected a function (model, sample, *, options), got {function!r:.80}")
    return [name]


def find(name: str) -> Experiment:
    """Raises InputError: no experiment of that name."""
    experiments = registered()
    if name not in experiments:
        near = difflib.get_close_matches(str(name), experiments, 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise InputError(f"no experiment {name!r}; there are {', '.join(experiments)}.{hint}")
    return experiments[name]


def question(name: str) -> str:
    """What an experiment answers, in one line: the first of its file, or of its function where the file has none."""
    function = find(name)
    said = import_module(function.__module__).__doc__ or function.__doc__ or name
    return said.strip().splitlines()[0]


def options(name: str) -> dict[str, inspect.Parameter]:
    """The keyword options of an experiment, beside `on_progress`."""
    parameters = inspect.signature(find(name)).parameters
    return {n: p for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY and n != "on_progress"}


def run_experiment(name: str, model: InstrumentedModel | Model, sample: EvalSet, **chosen: Any) -> Results:
    """Runs one experiment on a model and a sample; `chosen` are its options.

    Raises:
        InputError: no such experiment or option, or what the experiment refuses.

    Examples:
        >>> model = vl.load("smelt")
        >>> results = vl.run_experiment("skip_visit", model, model.sample(max_tokens=256))
        >>> results.skip_block.axes
        ('visit', 'slice')
    """
    from visitlens.hooks.core.model_interface import check_model
    from visitlens.probe.samples.sample import EvalSet

    function = find(name)
    model = getattr(model, "native", model)
    check_model(model)
    if not isinstance(sample, EvalSet):
        raise InputError(f"expected an EvalSet (model.sample(), model.dyck()), got {sample!r:.80}")
    unknown = [option for option in chosen if option not in options(name) and option != "on_progress"]
    if unknown:
        raise InputError(f"{name} has no option {', '.join(unknown)}; it has {', '.join(options(name)) or 'none'}")
    return Results(name, function(model, sample, **chosen))
