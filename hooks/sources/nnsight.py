"""nnsight as a source: the inputs and outputs of a model's modules, by visit, from one trace; local or remote.

`tracer.cache()` keeps every call of a module in order and says nothing of visits. The family's adapter says which modules
are which sites and how often each layer runs, so the calls are labelled, and counted against the plan.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from visitlens.errors import InputError, PlanError
from visitlens.hooks.adapters.adapt import adapt
from visitlens.hooks.adapters.document_model import Change, DocumentModel
from visitlens.hooks.adapters.family import Family, Read
from visitlens.hooks.adapters.transformer_lens_calls import FamiliarCalls
from visitlens.hooks.audit.guards import difference, sample_tokens, tolerance
from visitlens.hooks.capture.capture import Captured, capture
from visitlens.hooks.core.loop_plan import Step
from visitlens.hooks.core.sites import SITES

_INSIDE = (
    "nnsight's cache keeps inputs and outputs of modules, and this lies inside one; visitlens.adapt reads it locally"
)


@dataclass(frozen=True)
class _Edit:
    """The change of a site at one call of its module, inside a trace."""

    step: Step
    site: str
    read: Read
    envoy: Any
    call: int
    changes: tuple[Change, ...]

    def put_in(self, model: NNsightModel, batch: tuple[int, ...]) -> None:
        of_output, nothing = self.read.end == "output", ((), {})
        output, (args, kwargs) = (self.envoy.output, nothing) if of_output else (None, self.envoy.inputs)
        value = new = _value(self.read, (output, (args, kwargs)))
        for change in self.changes:
            changed = model.changed(change, self.site, self.step, new, batch)
            new = new if changed is None else changed
        if new is value:
            return
        number = self.read.item
        if of_output:
            self.envoy.output = _with_item(output, number, new) if isinstance(output, (tuple, list)) else new
        elif number < len(args):
            self.envoy.inputs = (_with_item(args, number, new), kwargs)
        else:
            self.envoy.inputs = (args, {**kwargs, self.read.name: new})


def _with_item(items: Any, number: int, new: Tensor) -> Any:
    return type(items)([*items[:number], new, *items[number + 1 :]])


class NNsightModel(FamiliarCalls, DocumentModel):
    """An nnsight model by visit. `remote` is nnsight's own: True runs traces on NDIF, a URL on that host, "local" here, as they
    would be sent.

    Its cache keeps values by reference. Where the weights are here, the first capture of a site is held on a few tokens against
    the values themselves: a model that writes over them in place is found out.
    """

    def __init__(self, lm: Any, family: Family | None = None, *, remote: bool | str = False) -> None:
        adapted = adapt(lm._model if hasattr(lm, "_model") else lm._module, family)
        if adapted.config.ragged:
            raise InputError(
                f"{adapted.config.family} leaves tokens out of visits, and nnsight's cache doesn't say which: use visitlens.adapt"
            )
        if remote and not hasattr(lm, "to_model_key"):
            raise InputError(
                f"remote={remote!r}: {type(lm).__name__} has no name that a server knows it by; wrap it in nnsight's LanguageModel or "
                "TransformersModel"
            )
        self.lm, self.family, self.anatomy, self.remote = lm, adapted.family, adapted.anatomy, remote
        self._adapted, self._weights, self.plan = adapted, adapted.model, adapted.plan
        self._checked: set[str] = set()
        self._prefix = next(name for name, module in adapted.model.named_modules() if module is adapted.body)
        reads = {read.site for layer in self.anatomy.layers for read in layer.reads}
        inside = {site: _INSIDE for site in SITES if site not in reads}
        self.config = replace(
            adapted.config,
            missing={**inside, **adapted.config.missing},
            notes=(*adapted.config.notes, "read through nnsight: inputs and outputs of modules"),
        )
        self._captured: Captured | None = None
        self._changes: tuple[tuple[frozenset[tuple[str, Step]], Change], ...] = ()

    def parameters(self) -> Iterator[nn.Parameter]:
        return self._weights.parameters()

    @contextmanager
    def observing(self, captured: Captured) -> Iterator[None]:
        before, self._captured = self._captured, captured
        try:
            yield
        finally:
            self._captured = before

    def forward(self, tokens: Tensor, segments: Tensor | None = None, *, return_type: str = "logits") -> Tensor | None:
        """As `DocumentModel.forward`.

        Raises:
            InputError: what nnsight's cache holds isn't what was there.
        """
        result = super().forward(tokens, segments, return_type=return_type)
        if self._captured is not None and not self._changes and (new := set(self._captured.sites) - self._checked):
            self._checked |= new  # by now: the check runs this model
            try:
                if self.remote in (False, "local"):
                    self._check_kept(sorted(new))
            except BaseException:
                self._checked -= new
                raise
        return result

    def _check_kept(self, sites: list[str]) -> None:
        """Raises InputError: what nnsight's cache holds at the end of a trace isn't what was there."""
        tokens = sample_tokens(self._adapted, 6)
        with torch.no_grad(), capture(self, sites) as kept, capture(self._adapted, sites) as direct:
            self(tokens, return_type="none")
            self._adapted(tokens, return_type="none")
        for site in sites:
            for step in self.plan.steps:
                value = direct.held(site, step.index)
                if value is None:
                    continue
                if difference(kept.at(site, step.index), value.cpu()) > tolerance(self._adapted):
                    raise InputError(
                        f"nnsight's {site!r} at {step} isn't what was there: {self.config.family} writes over it in place after it is "
                        "read, and nnsight's cache keeps references. Use visitlens.adapt"
                    )

    @contextmanager
    def changing(self, places: Collection[tuple[str, Step]], change: Change) -> Iterator[None]:
        if self.remote:
            raise InputError(
                f"interventions are functions of this process, and nnsight's remote={self.remote!r} runs the trace as in another: change values "
                "there in nnsight's own trace, `for _ in tracer.iter[visit - 1]: module.output = ...`, or open the model without remote"
            )
        before, self._changes = self._changes, (*self._changes, (frozenset(places), change))
        try:
            yield
        finally:
            self._changes = before

    def run_documents(self, documents: Tensor, return_type: str) -> Tensor | None:
        options = {**self.family.call, **self.family.start(self._weights, documents)}
        where = {"remote": self.remote} if self.remote else {}
        captured = self._captured
        paths = [] if captured is None else sorted(self._watched(captured))
        modules = [self._envoy(path) for path in paths]
        edits, batch, result = list(self._edits()), tuple(documents.shape), None
        with torch.no_grad():
            if not modules and not edits:
                with self.lm.trace(documents, **options, **where):
                    result = self.lm.output.save()
            else:
                with self.lm.trace(documents, **options, **where) as tracer:
                    cache = tracer.cache(modules=modules, include_inputs=True)
                    for edit in edits:
                        for _ in tracer.iter[edit.call]:
                            edit.put_in(self, batch)
                    result = self.lm.output.save()
                if result is None:  # a trace ends, with a warning, where it waits for a call that never comes
                    raise PlanError("a visit to be changed never came: plan and model disagree")
                if captured is not None:
                    self._label(
                        captured, {p: _calls(cache, m.path) for p, m in zip(paths, modules, strict=True)}, documents
                    )
        if return_type == "none":
            return None
        return self.family.logits(result)

    def _watched(self, captured: Captured) -> dict[str, None]:
        """Paths of the modules that hold the wanted sites, and of the layers, whose calls are counted."""
        watched: dict[str, None] = {}
        for layer in self.anatomy.layers:
            for path in layer.modules:
                watched[path] = None
                for read in layer.reads:
                    if read.site in captured.sites:
                        watched[".".join(p for p in (path, read.module) if p)] = None
        return watched

    def _edits(self) -> Iterator[_Edit]:
        """What `intervene` changes, in the order of the forward: a trace takes values in the order they come."""
        for step in self.plan.steps:
            layer = self.anatomy.layers[step.layer]
            for site in SITES:
                changes = tuple(change for places, change in self._changes if (site, step) in places)
                if changes:
                    read = next(read for read in layer.reads if read.site == site)
                    tied = len(layer.modules) > 1
                    path = layer.modules[step.visit - 1 if tied else 0]
                    envoy = self._envoy(".".join(p for p in (path, read.module) if p))
                    yield _Edit(step, site, read, envoy, 0 if tied else step.visit - 1, changes)

    def _envoy(self, path: str) -> Any:
        found = self.lm
        for name in [part for part in (*self._prefix.split("."), *path.split(".")) if part]:
            found = found[int(name)] if name.isdigit() else getattr(found, name)
        return found

    def _label(self, captured: Captured, calls: Mapping[str, list[tuple[Any, Any]]], documents: Tensor) -> None:
        self.begin(captured)
        for number, layer in enumerate(self.anatomy.layers):
            steps = [step for step in self.plan.steps if step.layer == number]
            ran = [(path, call) for path in layer.modules for call in range(len(calls[path]))]
            if len(ran) != len(steps) or (len(layer.modules) > 1 and len(layer.modules) != len(ran)):
                counts = {path: len(calls[path]) for path in layer.modules}
                raise PlanError(
                    f"expected {len(steps)} runs of layer {number}, nnsight saw {counts}: plan and model disagree"
                )
            for step, (path, call) in zip(steps, ran, strict=True):
                for read in layer.reads:
                    if read.site not in captured.sites:
                        continue
                    name = ".".join(p for p in (path, read.module) if p)
                    if len(calls[name]) <= call:
                        raise PlanError(f"{step} ran, and nnsight saw no call of {name}: the adapter doesn't fit")
                    self.place(captured, read.site, step.index, _value(read, calls[name][call]), tuple(documents.shape))


def from_nnsight(lm: Any, family: Family | None = None, *, remote: bool | str = False) -> NNsightModel:
    """An nnsight model (`LanguageModel`, or `NNsight` around a model) by visit; `remote` as in nnsight's `trace`.

    Raises:
        InputError: not an nnsight model, of a family without an adapter or one that leaves tokens out of visits, or `remote` of
            a model that no server knows.
    """
    if not hasattr(lm, "trace") or not (hasattr(lm, "_model") or hasattr(lm, "_module")):
        raise InputError(f"expected an nnsight LanguageModel or NNsight, got {type(lm).__name__}")
    return NNsightModel(lm, family, remote=remote)


def _calls(cache: Any, path: str) -> list[tuple[Any, Any]]:
    """(output, inputs) of every call of a module, in order. nnsight gives a value for one call and a list for several."""
    if path not in cache.keys():  # noqa: SIM118 (a view, no mapping)
        return []
    view = cache[path]
    if len(view) == 1:
        return [(view.output, view.inputs)]
    return list(zip(view.output, view.inputs, strict=True))


def _value(read: Read, call: tuple[Any, Any]) -> Tensor:
    output, (args, kwargs) = call
    if read.end == "output":
        return output[read.item] if isinstance(output, (tuple, list)) else output
    return args[read.item] if read.item < len(args) else kwargs[read.name]
