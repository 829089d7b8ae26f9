"""AdaptedModel: any decoder of a known family as an `InstrumentedModel`, by hooks; its code and weights stay as they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import Tensor, nn

from visitlens.hooks.adapters.attention_calls import watch_registry, watch_sdpa, watch_torch
from visitlens.hooks.adapters.family import Family
from visitlens.hooks.adapters.observer import StepObserver
from visitlens.hooks.capture import Captured
from visitlens.hooks.document_model import DocumentModel
from visitlens.hooks.loop_plan import ExecutionPlan
from visitlens.kernels.errors import InputError


class AdaptedModel(DocumentModel):
    """`model` is the model as its library made it, in evaluation mode; `plan` and `config` follow from its family."""

    def __init__(self, model: nn.Module, family: Family) -> None:
        self.model, self.family = model.eval(), family
        self.anatomy = family.anatomy(model)
        self.plan = ExecutionPlan.from_layers(self.anatomy.order)
        self.config = family.facts(model, self.anatomy)
        self.body = family.body(model)

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.model.parameters()

    def run_documents(self, documents: Tensor, return_type: str) -> Tensor | None:
        start = self.family.start(self.model, documents)
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

    @contextmanager
    def observing(self, captured: Captured) -> Iterator[None]:
        observer = StepObserver(self, captured)
        watch = watch_registry if self.family.attention_calls == "registry" else watch_sdpa
        with ExitStack() as undo:
            undo.callback(observer.remove)
            observer.install()
            undo.enter_context(watch(observer.attention_observers()))
            undo.enter_context(watch_torch(observer.torch_observers()))
            yield
