"""AdaptedModel: any decoder of a known family as an `InstrumentedModel`, by hooks; its code and weights stay as they are."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from visitlens.errors import InputError
from visitlens.hooks.adapters.attention_calls import Watcher, watch_registry, watch_sdpa, watch_torch
from visitlens.hooks.adapters.cache import Cache, cache_of, takes_cache
from visitlens.hooks.adapters.document_model import Change, DocumentModel, Part, check_return_type, read_out
from visitlens.hooks.adapters.editor import StepEditor
from visitlens.hooks.adapters.family import Family
from visitlens.hooks.adapters.foreign_errors import forward_told
from visitlens.hooks.adapters.mask_rules import MaskRules
from visitlens.hooks.adapters.observer import StepObserver
from visitlens.hooks.adapters.transformer_lens_calls import FamiliarCalls
from visitlens.hooks.capture.capture import Captured
from visitlens.hooks.core.evaluation import evaluating
from visitlens.hooks.core.loop_plan import ExecutionPlan, Step
from visitlens.hooks.core.model_interface import ModelFacts, check_unbroken


class AdaptedModel(FamiliarCalls, DocumentModel):
    """`model` is the model as its library made it; it runs in evaluation mode, and is afterwards in the mode that it was in.
    `plan` and `config` follow from its family.

    `visits` is its loop count, None for the model's own; the model itself is left as it is.
    """

    config: ModelFacts  # narrower than the interface says, and only read

    def __init__(self, model: nn.Module, family: Family, visits: int | None = None) -> None:
        self.model, self.family, self.visits = model, family, visits
        self.expert_outputs: dict[nn.Module, Tensor] = {}
        """What each expert of a bank gave in its last call, while someone watches."""
        try:
            with self._looping(), evaluating(model):
                self.anatomy = family.anatomy(model)
            self.config = family.facts(model, self.anatomy)  # pyright: ignore[reportIncompatibleVariableOverride]
            self.body = family.body(model)
        except AttributeError as error:
            raise InputError(
                f"the adapter {type(family).__name__} doesn't fit this {type(model).__name__}: {error}. A fork that only runs its layers "
                "in another order is read by its family's adapter with an `order` of its own (docs/adapters.md, Writing one)"
            ) from error
        self.plan = ExecutionPlan.from_layers(self.anatomy.order)
        self.masks = MaskRules(self.config.family)
        """What the masks that attention was given so far say of each step's rows."""
        self.cache: Cache | None = None
        """That of the forward at work."""

    def parameters(self) -> Iterator[nn.Parameter]:
        return self.model.parameters()

    def __call__(
        self,
        tokens: Tensor,
        segments: Tensor | None = None,
        *,
        cache: Cache | None = None,
        return_type: str = "logits",
    ) -> Tensor | None:
        return self.forward(tokens, segments, cache=cache, return_type=return_type)

    def forward(
        self,
        tokens: Tensor,
        segments: Tensor | None = None,
        *,
        cache: Cache | None = None,
        return_type: str = "logits",
    ) -> Tensor | None:
        """As `InstrumentedModel.__call__`; with a `cache` (`new_cache`), tokens that go on from those before.

        Raises:
            InputError: as without; segments beside a cache, or a model that has none.
        """
        self.check_turn()
        if cache is None:
            return super().forward(tokens, segments, return_type=return_type)
        check_return_type(return_type)
        if why := self.config.missing.get("cached generation"):
            raise InputError(f"{self.config.family} can't generate token by token: {why}")
        if not takes_cache(self.model):
            raise InputError(
                f"{self.config.family} can't generate token by token: the forward of {type(self.model).__name__} takes no use_cache; "
                "docs/adapters.md says what a model of your own needs to generate"
            )
        if segments is not None:
            raise InputError("a KV cache holds one document per context: pass no segment ids with it")
        self._check(tokens, None)
        if (end := cache.length + tokens.shape[1]) > self.config.context_length:
            raise InputError(f"{end} positions exceed the model's context of {self.config.context_length}")
        if any(editor.ended for editor, _, _ in cache.changed):
            raise InputError(
                "this cache holds keys or values that were changed inside an `intervene` that has ended: begin with a new cache"
            )
        check_unbroken(cache)
        index = torch.arange(tokens.numel()).view(tokens.shape)
        before, self.part, self.cache = self.cache, Part(index, *tokens.shape, first=True, whole=True), cache
        cache.broken = True
        try:
            with self.as_planned():
                options = {**self.family.call, **self.family.start(self.model, tokens, cache.length), "use_cache": True}
                result = self.model(tokens.long(), **options, **cache.passed)
        finally:
            self.part, self.cache = None, before
        if not (passed := cache_of(result, self.model)):
            raise InputError(
                f"{self.config.family} returns no cache that can be passed on: it can't generate token by token"
            )
        cache.passed, cache.length, cache.broken = passed, end, False
        return None if return_type == "none" else read_out(self._logits(result), tokens, None, return_type)

    def new_cache(self) -> Cache:
        """An empty cache, for `model(tokens, cache=cache)`."""
        return Cache()

    def run_documents(self, documents: Tensor, return_type: str) -> Tensor | None:
        with self.as_planned():
            start = self.family.start(self.model, documents)
            if return_type == "none":
                self.body(documents, **self.family.call, **start)
                return None
            return self._logits(self.model(documents, **self.family.call, **start))

    def _logits(self, result: Any) -> Tensor:
        if (logits := self.family.logits(result)) is None:
            raise InputError(
                "this model has no language-model head, so there are no logits: load its ...ForCausalLM class, "
                "or ask for return_type='none'"
            )
        return logits

    def with_loop_count(self, visits: int, residual_scale: str | None = None) -> AdaptedModel:
        if residual_scale not in (None, *self.loop_scales):
            raise InputError(
                f"{self.config.family} doesn't scale its writes by the loop count: leave residual_scale out"
            )
        if visits < 1:
            raise InputError(f"expected at least 1 loop, got {visits}")
        return AdaptedModel(self.model, self.family, visits)

    @contextmanager
    def as_planned(self) -> Iterator[None]:
        """What every call of the model's own code is made in: it runs the steps of the plan."""
        with forward_told(), self._looping(), evaluating(self.model), self.family.running(self.model):
            yield

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
