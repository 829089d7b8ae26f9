"""AdaptedModel: any decoder of a known family as an `InstrumentedModel`, by hooks; its code and weights stay as they are."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

from torch import Tensor, nn

from visitlens.hooks.adapters.attention_calls import Watcher, watch_registry, watch_sdpa, watch_torch
from visitlens.hooks.adapters.editor import StepEditor
from visitlens.hooks.adapters.family import Family
from visitlens.hooks.adapters.observer import StepObserver
from visitlens.hooks.capture import Captured
from visitlens.hooks.document_model import Change, DocumentModel
from visitlens.hooks.familiar_calls import FamiliarCalls
from visitlens.hooks.loop_plan import ExecutionPlan, Step
from visitlens.kernels.errors import InputError


class AdaptedModel(FamiliarCalls, DocumentModel):
    """`model` is the model as its library made it, in evaluation mode; `plan` and `config` follow from its family.

    `visits` is its loop count, None for the model's own; the model itself is left as it is.
    """

    def __init__(self, model: nn.Module, family: Family, visits: int | None = None) -> None:
        self.model, self.family, self.visits = model.eval(), family, visits
        self.expert_outputs: dict[nn.Module, Tensor] = {}
        """What each expert of a bank gave in its last call, while someone watches."""
        with self._looping():
            try:
                self.anatomy = family.anatomy(model)
            except AttributeError as error:
                raise InputError(
                    f"the adapter {type(family).__name__} doesn't fit this {type(model).__name__}: {error}"
                ) from error
        self.plan = ExecutionPlan.from_layers(self.anatomy.order)
        self.config = family.facts(model, self.anatomy)
        self.body = family.body(model)

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.model.parameters()

    def run_documents(self, documents: Tensor, return_type: str) -> Tensor | None:
        start = self.family.start(self.model, documents)
        with self._looping(), self.family.running(self.model):
            if return_type == "none":
                self.body(documents, **self.family.call, **start)
                return None
            logits = self.family.logits(self.model(documents, **self.family.call, **start))
        if logits is None:
            raise InputError(
                "this model has no language-model head, so there are no logits: load its ...ForCausalLM class, "
                "or ask for return_type='none'"
            )
        return logits

    def with_loop_count(self, visits: int) -> AdaptedModel:
        if visits < 1:
            raise InputError(f"expected at least 1 loop, got {visits}")
        return AdaptedModel(self.model, self.family, visits)

    def _looping(self) -> AbstractContextManager[None]:
        return nullcontext() if self.visits is None else self.family.looping(self.model, self.visits)

    @contextmanager
    def changing(self, places: Collection[tuple[str, Step]], change: Change) -> Iterator[None]:
        editor = StepEditor(self, places, change)
        with ExitStack() as undo:
            undo.callback(editor.remove)
            editor.install()
            undo.enter_context(self._watch(editor.attention_editors()))
            undo.enter_context(watch_torch(editor.torch_editors()))
            yield

    @contextmanager
    def observing(self, captured: Captured) -> Iterator[None]:
        observer = StepObserver(self, captured)
        with ExitStack() as undo:
            undo.callback(observer.remove)
            observer.install()
            undo.enter_context(self._watch(observer.attention_observers()))
            undo.enter_context(watch_torch(observer.torch_observers()))
            yield

    def _watch(self, watchers: Mapping[nn.Module, Watcher]) -> AbstractContextManager[None]:
        return (watch_registry if self.family.attention_calls == "registry" else watch_sdpa)(watchers)
