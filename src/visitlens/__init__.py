"""visitlens: what each visit of a looped transformer's layers does.

Exports are lazy (PEP 562), so that reading a recording never imports torch.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

_root = Path(__file__).resolve().parents[2]
if (_root / "pyproject.toml").is_file() and not (Path(__file__).parent / "probe").is_dir():
    __path__.insert(0, str(_root))  # a checkout on a system that does not make the four links (Windows)

__version__ = "0.1.0"

_EXPORTS = {
    "ExecutionPlan": "visitlens.hooks.core.loop_plan",
    "LoopSpec": "visitlens.hooks.core.loop_plan",
    "StatArray": "visitlens.probe.measures.measure",
    "VisitlensError": "visitlens.errors",
    "adapt": "visitlens.hooks.adapters.adapt",
    "capture": "visitlens.hooks.capture.capture",
    "dashboard": "visitlens.app.server.notebook",
    "from_nnsight": "visitlens.hooks.sources.nnsight",
    "from_transformer_lens": "visitlens.hooks.sources.transformer_lens",
    "load_model": "visitlens.hooks.loading.load_model",
    "open": "visitlens.probe.reading.recorded_run",
    "plan_recording": "visitlens.probe.jobs.prepared_run",
    "record": "visitlens.probe.jobs.prepared_run",
    "Sample": "visitlens.probe.samples.sample",
    "do": "visitlens.hooks.interventions.intervene",
    "experiment": "visitlens.probe.experiments",
    "intervene": "visitlens.hooks.interventions.intervene",
    "load": "visitlens.probe.model.load",
}


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'visitlens' has no attribute {name!r}; it has {', '.join(_EXPORTS)}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_EXPORTS])
