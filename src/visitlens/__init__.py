"""visitlens: what each visit of a looped transformer's layers does.

Exports are lazy (PEP 562), so that reading a recording never imports torch.
"""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

_root = Path(__file__).resolve().parents[2]
if (_root / "pyproject.toml").is_file() and not (Path(__file__).parent / "probe").is_dir():
    __path__.insert(0, str(_root))  # a checkout on a system that does not make the four links (Windows)

__version__ = "0.1.0"

_EXPORTS = {
    # Recordings: make one, open one
    "open": "visitlens.probe.reading.recorded_run.open_recording",
    "record": "visitlens.probe.jobs.prepared_run.record",
    "prepare_recording": "visitlens.probe.jobs.prepared_run.prepare_recording",
    "RecordedRun": "visitlens.probe.reading.recorded_run.RecordedRun",
    # Numbers: what a statistic is, and its values with intervals
    "Measure": "visitlens.probe.measures.measure.Measure",
    "StatArray": "visitlens.probe.measures.measure.StatArray",
    "compare": "visitlens.probe.report.compare.compare",
    "over_models": "visitlens.probe.reading.seeds.over_models",
    # Figures and the dashboard
    "Pair": "visitlens.probe.reading.pair.Pair",
    "figure": "visitlens.probe.gallery.pictures.figure",
    "figures": "visitlens.probe.gallery.pictures.figures",
    "write_figures": "visitlens.probe.gallery.write_figures.write_figures",
    "dashboard": "visitlens.app.server.notebook.dashboard",
    # Models: run a text, read sites by visit
    "load": "visitlens.probe.model.load.load",
    "capture": "visitlens.hooks.capture.capture.capture",
    "LoopSpec": "visitlens.hooks.core.loop_plan.LoopSpec",
    "ExecutionPlan": "visitlens.hooks.core.loop_plan.ExecutionPlan",
    # Interventions and experiments
    "do": "visitlens.hooks.interventions.do",
    "intervene": "visitlens.hooks.interventions.intervene.intervene",
    "EvalSet": "visitlens.probe.samples.sample.EvalSet",
    "run_experiment": "visitlens.probe.experiments.run_experiment",
    "ablate": "visitlens.probe.analyses.ablation.ablate_recording.ablate",
    # Models of other libraries, and of your own
    "adapt": "visitlens.hooks.adapters.adapt.adapt",
    "from_nnsight": "visitlens.hooks.sources.nnsight.from_nnsight",
    "from_transformer_lens": "visitlens.hooks.sources.transformer_lens.from_transformer_lens",
    "Family": "visitlens.hooks.adapters.family.Family",
    "Anatomy": "visitlens.hooks.adapters.family.Anatomy",
    "Layer": "visitlens.hooks.adapters.family.Layer",
    "Read": "visitlens.hooks.adapters.family.Read",
    # Extensions: what a statistic or figure of your own is made of
    "register": "visitlens.plugins.register",
    "Statistic": "visitlens.probe.measures.statistic.Statistic",
    "Derived": "visitlens.probe.measures.derived.Derived",
    "TokenValues": "visitlens.probe.measures.statistic.TokenValues",
    "Figure": "visitlens.probe.gallery.figure.Figure",
    # Errors
    "VisitlensError": "visitlens.errors.VisitlensError",
}
"""Public name -> where it is defined, by subject."""

_DEPRECATED = {
    "Sample": ("visitlens.probe.samples.sample.EvalSet", "visitlens.EvalSet"),
    "experiment": ("visitlens.probe.experiments.run_experiment", "visitlens.run_experiment"),
    "load_model": ("visitlens.hooks.loading.load_model.load_model", "visitlens.load(...).native"),
    "plan_recording": ("visitlens.probe.jobs.prepared_run.prepare_recording", "visitlens.prepare_recording"),
}
"""Public name of an earlier version -> (what it is now, what to write instead)."""


def __getattr__(name: str) -> Any:
    target = _EXPORTS.get(name)
    if target is None and name in _DEPRECATED:
        target, instead = _DEPRECATED[name]
        warnings.warn(f"visitlens.{name} is deprecated: write {instead}", DeprecationWarning, stacklevel=2)
    if target is None:
        raise AttributeError(f"module 'visitlens' has no attribute {name!r}; it has {', '.join(_EXPORTS)}")
    module, _, attribute = target.rpartition(".")
    found = getattr(import_module(module), attribute)
    _attach_dashboard()
    return found


def _attach_dashboard() -> None:
    """`RecordedRun.dashboard()` of version 0.1: the class lies below the app and can't know it."""
    recorded_run = sys.modules.get("visitlens.probe.reading.recorded_run")
    if recorded_run is None or hasattr(recorded_run.RecordedRun, "dashboard"):
        return

    def dashboard(self: Any, **options: Any) -> Any:
        """As `visitlens.dashboard(rec)`, which to write instead."""
        warnings.warn(
            "RecordedRun.dashboard() is deprecated: write visitlens.dashboard(rec)", DeprecationWarning, stacklevel=2
        )
        return import_module("visitlens.app.server.notebook").dashboard(self, **options)

    recorded_run.RecordedRun.dashboard = dashboard


def __dir__() -> list[str]:
    return sorted([*_EXPORTS, "__version__"])


from visitlens.moved import OldPaths  # noqa: E402  # where `__path__` is complete

sys.meta_path.append(OldPaths())
