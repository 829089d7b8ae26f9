"""Module paths of version 0.1 that its documentation, notebooks and copied code named: they still import, with a warning. No torch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MOVED = {
    "kernels.attention_rows": "kernels.attention.rows",
    "kernels.errors": "errors",
    "hooks.contexts": "hooks.text.packed_tokens",
    "hooks.generation": "hooks.capture.generation",
    "hooks.guards": "hooks.audit.guards",
    "hooks.instrumented": "hooks.core.model_interface",
    "hooks.intervene": "hooks.interventions.intervene",
    "hooks.loop_plan": "hooks.core.loop_plan",
    "hooks.recorder": "hooks.recording.write.record",
    "hooks.sampling": "hooks.capture.sampling",
    "hooks.sites": "hooks.core.sites",
    "hooks.adapters.albert": "hooks.adapters.families.albert",
    "hooks.adapters.deepseek": "hooks.adapters.families.deepseek",
    "hooks.adapters.dense": "hooks.adapters.families.dense",
    "hooks.adapters.dory": "hooks.adapters.families.dory",
    "hooks.adapters.gpt_oss": "hooks.adapters.families.gpt_oss",
    "hooks.adapters.hrm_text": "hooks.adapters.families.hrm_text",
    "hooks.adapters.huginn": "hooks.adapters.families.huginn",
    "hooks.adapters.inkling2_loop": "hooks.adapters.families.inkling2_loop",
    "hooks.adapters.mixture_of_recursions": "hooks.adapters.families.mixture_of_recursions",
    "hooks.adapters.moe": "hooks.adapters.families.moe",
    "hooks.adapters.moeut": "hooks.adapters.families.moeut",
    "hooks.adapters.ouro": "hooks.adapters.families.ouro",
    "hooks.adapters.zamba": "hooks.adapters.families.zamba",
    "probe.ablation": "probe.analyses.ablation.heads",
    "probe.ablation_run": "probe.analyses.ablation.ablate_recording",
    "probe.attention_from_qk": "probe.reading.attention_from_qk",
    "probe.bundled": "probe.model.bundled",
    "probe.collect": "probe.measures.collector",
    "probe.compare": "probe.report.compare",
    "probe.dyck_study": "probe.analyses.ablation.dyck_study",
    "probe.experiment": "probe.experiments",
    "probe.findings": "probe.report.findings",
    "probe.inspection": "hooks.loading.inspect_model",
    "probe.loaded": "probe.model.load",
    "probe.measure": "probe.measures.measure",
    "probe.notebook": "probe.model.model",
    "probe.opened": "probe.reading.recorded_run",
    "probe.run": "probe.jobs.prepared_run",
    "probe.runs": "probe.model.run",
    "probe.scores": "probe.samples.scores",
    "probe.figures.base": "probe.gallery.figure",
    "probe.figures.drawing": "probe.drawing.drawing",
    "probe.figures.export": "probe.gallery.write_figures",
    "probe.figures.pair": "probe.reading.pair",
    "probe.figures.pairs": "probe.reading.pair_grid",
    "probe.figures.series": "probe.drawing.series",
    "probe.figures.theme": "probe.drawing.theme",
    "probe.statistics.base": "probe.measures.statistic",
    "probe.statistics.names": "probe.measures.axes",
}
"""Old module -> new one, both below `visitlens`."""

RENAMED = {
    "probe.experiment": {"experiment": "run_experiment"},
    "probe.opened": {"open": "open_recording"},
    "probe.run": {"plan_recording": "prepare_recording"},
}
"""Old module -> the names in it that are others now."""


class OldPaths:
    """The last finder on `sys.meta_path`: it is asked for what no other one found."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        old = name.removeprefix("visitlens.")
        if old == name or old not in MOVED:
            return None
        warnings.warn(f"{name} is deprecated: import visitlens.{MOVED[old]}", DeprecationWarning, stacklevel=2)
        loader = _Forwarding(MOVED[old], RENAMED.get(old, {}))
        return ModuleSpec(name, loader)  # type: ignore[arg-type]  # a loader by its two methods


class _Forwarding:
    """Loads a module without names of its own: it hands out those of the new one."""

    def __init__(self, new: str, renamed: dict[str, str]) -> None:
        self.new, self.renamed = f"visitlens.{new}", renamed

    def create_module(self, spec: ModuleSpec) -> None:
        """The usual one."""

    def exec_module(self, module: ModuleType) -> None:
        new = import_module(self.new)
        module.__doc__ = new.__doc__
        module.__getattr__ = lambda name: getattr(new, self.renamed.get(name, name))  # type: ignore[method-assign]
        module.__dir__ = lambda: sorted({*dir(new), *self.renamed})  # type: ignore[method-assign]


def from_module(package: str, module: str) -> Callable[[str], Any]:
    """`__getattr__` of a package that was a module before (`probe/live/` was `probe/live.py`): its names are in `module` now."""
    target = f"{package}.{module}"

    def attribute(name: str) -> Any:
        if name.startswith("__") or not hasattr(found := import_module(target), name):
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        warnings.warn(f"{package}.{name} is deprecated: import it from {target}", DeprecationWarning, stacklevel=2)
        return getattr(found, name)

    return attribute
