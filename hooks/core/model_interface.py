"""InstrumentedModel: what capture, recorder, interventions and statistics need of a model. No torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from functools import wraps
from threading import Lock, get_ident
from typing import TYPE_CHECKING, Any, Protocol

from visitlens.errors import InputError
from visitlens.hooks.core.loop_plan import ExecutionPlan, Step
from visitlens.hooks.core.sites import SITES, Sizes, check_sites

if TYPE_CHECKING:
    import torch

    from visitlens.hooks.capture.capture import Captured


NO_LIMIT = 2**31 - 1
"""The context length of a model whose configuration names none."""


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Sizes and limits of a model, under the names of the native configuration.

    `missing` maps a site, or one of `sites.ASSUMPTIONS`, to the reason why this model doesn't have it. `absent` maps a
    site to the layers that lack it although others have it, each with its reason (a dense layer among MoE layers).
    """

    family: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    num_experts: int = 0
    experts_per_token: int = 0
    context_length: int = NO_LIMIT
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    """None where the configuration names none."""
    pad_token_id: int = 0
    """Never read: segment ids keep padding out, so any id does where the configuration names none."""
    missing: Mapping[str, str] = field(default_factory=dict)
    absent: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    learned_sink: bool = False
    """Whether attention rows sum to 1 together with a slot of the model's own."""
    ragged: bool = False
    """Whether halting or routing leaves tokens out of visits."""
    state_seed: int | None = None
    """Of the random state that the loop starts from, part of a recording's identity; None where nothing is random."""
    order: tuple[int, ...] = ()
    """Physical layer of each step: part of a recording's identity, where loops are counted at run time."""
    layer_names: tuple[str, ...] = ()
    """Module path of each physical layer (the first, where tied modules share it)."""

    def to_dict(self) -> dict[str, Any]:
        fields = asdict(self)
        if self.state_seed is None:
            fields.pop("state_seed")
        return {"architecture": self.family, **fields}


class ModelConfig(Sizes, Protocol):
    """What is read of a model's configuration, native (`LoopedMoEConfig`) or adapted (`ModelFacts`)."""

    @property
    def family(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def context_length(self) -> int: ...
    @property
    def bos_token_id(self) -> int | None: ...
    @property
    def eos_token_id(self) -> int | None: ...
    @property
    def pad_token_id(self) -> int: ...
    @property
    def missing(self) -> Mapping[str, str]: ...
    @property
    def absent(self) -> Mapping[str, Mapping[int, str]]: ...
    @property
    def ragged(self) -> bool: ...
    def to_dict(self) -> dict[str, Any]: ...


_CLAIMING = Lock()


def check_model(model: Any) -> None:
    """Raises InputError: neither the native model nor one that is read by steps and sites, or one without weights."""
    if not isinstance(model, InstrumentedModel):
        inside = "its .native" if hasattr(model, "native") else "visitlens.adapt(model)"
        raise InputError(
            f"expected the native LoopedMoE or an adapted model, got {type(model).__name__}: give {inside}"
        )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise InputError("the model lies on the meta device, which holds no weights: load them first (visitlens.load)")


def check_tensor(tokens: Any) -> None:
    """Raises InputError: a text, say, where token ids are expected."""
    if not hasattr(tokens, "numel"):
        text = ": a text is run by vl.load(...).run(text)" if isinstance(tokens, str) else ""
        raise InputError(f"expected token ids as a tensor [context, position], got {tokens!r:.60}{text}")


def is_intervened(model: InstrumentedModel) -> bool:
    """Whether an `intervene` is at work on the model, so that a forward now would run inside it."""
    return model.followed > 0


def check_unbroken(cache: Any) -> None:
    """Raises InputError: a forward with this cache ended in an error."""
    if cache.broken:
        raise InputError("a forward with this cache ended in an error and left it half filled: begin with a new cache")


class InstrumentedModel(ABC):
    """A model whose steps and sites visitlens can read. Call it as the native model: token ids [context, position] and,
    for packed contexts, segment ids of the same shape (< 0: padding)."""

    plan: ExecutionPlan
    config: ModelConfig
    in_parts: bool = False
    """Whether the documents of a forward run in several parts, so that a site's value holds some documents alone."""
    loop_scales: tuple[str, ...] = ("kept",)
    """What `with_loop_count` can do to the scale of the writes in the loop."""
    followed: int = 0
    owner: int | None = None
    """The thread that observes or changes it, while one does."""
    claims: int = 0
    """How many `following` are at work."""

    @abstractmethod
    def __call__(
        self, tokens: torch.Tensor, segments: torch.Tensor | None = None, *, return_type: str = "logits"
    ) -> torch.Tensor | None:
        """Logits [context, position, vocab] (NaN at padding), the loss as the native model's, or None for "none"."""

    @abstractmethod
    def observing(self, captured: Captured) -> AbstractContextManager[None]:
        """Inside, each forward stores the captured sites of every step, and leaves the model's plan only with a PlanError."""

    def changing(
        self,
        places: Collection[tuple[str, Step]],
        change: Callable[..., torch.Tensor | None],
    ) -> AbstractContextManager[None]:
        """Inside, each forward puts what `change(site, step, value, there)` returns in a site's place; None leaves it. Values are
        [context, position, ...], zeros where other documents than those at work lie. `there [context, position]`, None for
        all: the tokens that are at the step; what stands at others (zeros, where the layer isn't given them) is left out.

        Raises:
            InputError: this kind of model can only be read.
        """
        raise InputError(
            f"{type(self).__name__} can be read, not intervened on: adapt the model itself (visitlens.adapt)"
        )

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Inside, the model is this thread's: hooks act on whichever forward runs, so that of another thread is refused.

        Raises:
            InputError: another thread has it.
        """
        with _CLAIMING:
            self.check_turn()
            self.owner, self.claims = get_ident(), self.claims + 1
        try:
            yield
        finally:
            with _CLAIMING:
                self.claims -= 1
                self.owner = self.owner if self.claims else None

    def check_turn(self) -> None:
        """Raises InputError: another thread is inside a capture or an intervention of this model."""
        if self.owner not in (None, get_ident()):
            raise InputError(
                "another thread is inside a capture or an intervention of this model, which would act on this forward too: wait for it, "
                "or give each thread a model of its own"
            )

    @contextmanager
    def following(self, follow: Mapping[str, Callable[[Callable[..., Any]], Callable[..., Any]]]) -> Iterator[None]:
        """Inside, calls of the methods named (`forward`, `run_steps`) are calls of what `follow` makes of
        them. One inside another comes first."""
        own = {name: vars(self).get(name) for name in follow}
        for name in own:
            setattr(self, name, self._in_turn(follow[name](getattr(self, name))))
        self.followed += 1
        try:
            yield
        finally:
            self.followed -= 1
            for name, held in own.items():
                if held is None:
                    delattr(self, name)
                else:
                    setattr(self, name, held)

    def _in_turn(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def called(*args: Any, **kwargs: Any) -> Any:
            self.check_turn()
            return method(*args, **kwargs)

        return called

    def run_steps(
        self, x: torch.Tensor, segments: torch.Tensor | None = None, *, start: int = 0, stop: int | None = None
    ) -> torch.Tensor:
        """The residual stream [context, position, hidden] after steps start..stop-1, from the one before them.

        Raises:
            InputError: a model that runs documents in parts (`in_parts`), whose steps run in its own code alone.
        """
        raise InputError(f"{self.config.family} runs its steps in its own code alone: call the model")

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """[..., vocab] from the residual stream [..., hidden] after the last step.

        Raises:
            InputError: as `run_steps`.
        """
        raise InputError(f"{self.config.family} reads out in its own code alone: call the model")

    def with_loop_count(self, visits: int, residual_scale: str | None = None) -> InstrumentedModel:
        """The same model with its loops run `visits` times.

        Raises:
            InputError: its loop count isn't a number that it reads when it runs; a scale that it doesn't have.
        """
        raise InputError(f"{self.config.family} doesn't read its loop count when it runs, so it can't be changed")

    def new_cache(self) -> Any:
        """An empty cache, for `model(tokens, cache=cache)`: tokens that go on from those before.

        Raises:
            InputError: this kind of model keeps none.
        """
        raise InputError(
            f"{self.config.family} is read through another tool, which doesn't generate: use visitlens.adapt"
        )

    @abstractmethod
    def parameters(self) -> Iterator[torch.nn.Parameter]: ...

    def check_sites(self, names: Any) -> tuple[str, ...]:
        """The names, if this model has all of them.

        Raises:
            InputError: an unknown site, or one that this model doesn't have, with the reason.
        """
        names = check_sites(names)
        lacking = [name for name in names if name in self.config.missing]
        if lacking:
            have = ", ".join(site for site in SITES if site not in self.config.missing)
            raise InputError(
                f"{self.config.family} has no site {lacking[0]!r}: {self.config.missing[lacking[0]]}; it has {have}"
            )
        return names

    def absent_steps(self) -> dict[str, dict[int, str]]:
        """Site -> steps that lack it, with the reason."""
        some = {
            site: {step.index: layers[step.layer] for step in self.plan.steps if step.layer in layers}
            for site, layers in self.config.absent.items()
        }
        return some | {
            site: dict.fromkeys(range(len(self.plan)), why)
            for site, why in self.config.missing.items()
            if site in SITES
        }
