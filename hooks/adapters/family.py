"""Family: what a model family's adapter states. One file of this folder holds one family or a group that shares its shape.

An adapter is declarative. It says where the physical layers are (by Parameter identity: modules that are tied are one
layer), in which order one forward runs them, and which module's input or output is which site. It never edits the
model's code; see docs/adapters.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from operator import attrgetter
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from torch import nn

from visitlens.errors import InputError
from visitlens.hooks.adapters.transformers_compat import Mend
from visitlens.hooks.core.model_interface import NO_LIMIT, ModelFacts
from visitlens.hooks.core.sites import SITES


@dataclass(frozen=True)
class Read:
    """A site is the input or output of a module below the layer ("" is the layer itself). `item` picks from several
    arguments (a position or a keyword) or from a tuple of outputs; `names` are keywords under which an input may come.

    Examples:
        >>> vl.Read("attn_write", "attention", "output").site
        'attn_write'
    """

    site: str
    module: str
    end: Literal["input", "output"] = "output"
    item: int = 0
    name: str = "hidden_states"


@dataclass(frozen=True)
class Inside:
    """Sites that no module hook shows (a router that is a bare Parameter): `read` gets the module and each torch function
    called inside it, (module, function, arguments, result), and returns sites' values."""

    module: str
    sites: tuple[str, ...]
    read: Callable[[Any, Any, tuple, Any], Mapping[str, Any]]


@dataclass(frozen=True)
class Visited:
    """Which tokens are really at a visit, where halting or routing leaves some out: a mask [batch, position], 0 for tokens that
    the layer computes and the model throws away; or, `gathered`, the positions [batch, n] of the tokens that count: of
    those that the layer is given, which are then the only keys too, or of all that it computes.

    Either a `read` (of the layer's own input, or, `at_body`, of a module below the body, whose last value before the visit
    counts); or `routes`, which gets each torch function (function, arguments, result) called in the module that holds the
    layer, `above` names up the layer's path, and returns that value or None; the last before the visit counts.
    """

    read: Read | None = None
    gathered: bool = False
    at_body: bool = False
    routes: Callable[[Any, tuple, Any], Any] | None = None
    above: int = 1


@dataclass(frozen=True)
class Layer:
    """One physical layer. `modules` are the paths, below the body, that run it; several where modules are tied.

    `attention` is the path below the module that calls the attention function, None where the layer has none. `visited` says
    which tokens a visit really has; None where each has all.

    Examples:
        >>> vl.Layer(("layers.0", "layers.4"), ()).modules  # two modules with the same weights: one physical layer
        ('layers.0', 'layers.4')
    """

    modules: tuple[str, ...]
    reads: tuple[Read, ...]
    attention: str | None = "self_attn"
    inside: tuple[Inside, ...] = ()
    visited: Visited | None = None


@dataclass(frozen=True)
class Anatomy:
    """`layers` by physical layer; `order` is the physical layer of each step of one forward.

    `missing`, `absent`, `notes`: as in `ModelFacts`.

    Examples:
        >>> layers = (vl.Layer(("layers.0",), ()), vl.Layer(("layers.1",), ()))
        >>> vl.Anatomy(layers, order=(0, 1, 1)).order
        (0, 1, 1)
    """

    layers: tuple[Layer, ...]
    order: tuple[int, ...]
    missing: Mapping[str, str] = field(default_factory=dict)
    absent: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def ragged(self) -> bool:
        """Whether visits may leave tokens out. The loop may then end early, once every token has halted."""
        return any(layer.visited is not None for layer in self.layers)


class Family(ABC):
    """One model family; being in this folder is being registered.

    Examples:
        >>> class Mine(vl.Family):
        ...     model_types = ("mine",)
        ...
        ...     def anatomy(self, model):
        ...         parts = (vl.Read("resid", ""), vl.Read("attn_write", "attn", "output"), vl.Read("moe_write", "mlp", "output"))
        ...         layers = tuple(vl.Layer((f"layers.{i}",), parts) for i in range(2))
        ...         return vl.Anatomy(layers, order=(0, 1, 1))  # layer 1 runs twice
        >>> issubclass(Mine, vl.Family)
        True
    """

    model_types: ClassVar[tuple[str, ...]] = ()
    """Values of `config.model_type` that it fits; the first, or else the class, names a model that has none."""
    attention_calls: ClassVar[Literal["registry", "sdpa"]] = "registry"
    causal: ClassVar[bool] = True
    learned_sink: ClassVar[bool] = False
    """Whether attention rows sum to 1 together with a slot of the model's own."""
    state_seed: int | None = None
    """Of the random state that its loop starts from; None where nothing is random."""
    call: Mapping[str, Any] = MappingProxyType({"use_cache": False})
    """Arguments of every forward beside the token ids."""

    loops: ClassVar[str] = ""
    """Path, from the model, of the loop count that its code reads at every forward; "" where there is no such number."""

    mends: ClassVar[tuple[Mend, ...]] = ()
    """What the code that its checkpoints bring along needs under today's transformers (`older_code`)."""

    def running(self, model: nn.Module) -> AbstractContextManager[None]:
        """What each forward runs in, for code that would otherwise cut gradients short or run other loops."""
        return nullcontext()

    @abstractmethod
    def anatomy(self, model: nn.Module) -> Anatomy: ...

    @contextmanager
    def looping(self, model: nn.Module, visits: int) -> Iterator[None]:
        """The model with another loop count.

        Raises:
            InputError: it has none that is read when it runs.
        """
        owner, _, name = self.loops.rpartition(".")
        if not name:
            raise InputError(
                f"{type(self).__name__} has no loop count that is read when it runs, so it can't be changed"
            )
        holder = attrgetter(owner)(model)
        before = getattr(holder, name)
        setattr(holder, name, visits)
        try:
            yield
        finally:
            setattr(holder, name, before)

    def body(self, model: Any) -> nn.Module:
        """The module whose forward runs every step once, without the head."""
        return model.base_model

    def text_config(self, model: Any) -> Any:
        config = model.config
        return config.get_text_config() if hasattr(config, "get_text_config") else config

    def sizes(self, model: nn.Module) -> dict[str, Any]:
        """The fields of `ModelFacts` that sizes make up; a family overrides what its configuration names otherwise."""
        config = self.text_config(model)
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        bos, eos, pad = (getattr(config, f"{name}_token_id", None) for name in ("bos", "eos", "pad"))
        return {
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "num_heads": heads,
            "num_kv_heads": getattr(config, "num_key_value_heads", None) or heads,
            "head_dim": head_dim,
            "value_dim": head_dim,
            "context_length": longest_context(config),
            "bos_token_id": first_id(bos),
            "eos_token_id": first_id(eos),
            "pad_token_id": next((i for i in map(first_id, (pad, eos, bos)) if i is not None), 0),
        }

    def start(self, model: nn.Module, tokens: Any, position: int = 0) -> dict[str, Any]:
        """Further arguments of one forward over `tokens` from `position` on, for example a seeded initial state."""
        return {}

    def logits(self, result: Any) -> Any:
        """Of what the model's forward returns; None where it has no language-model head."""
        return getattr(result, "logits", None)

    def facts(self, model: nn.Module, anatomy: Anatomy) -> ModelFacts:
        return ModelFacts(
            family=getattr(getattr(model, "config", None), "model_type", None)
            or (*self.model_types, type(self).__name__)[0],
            num_layers=len(anatomy.layers),
            missing={**dict.fromkeys(_unread(anatomy), "its adapter doesn't say where it is"), **anatomy.missing},
            absent=anatomy.absent,
            notes=anatomy.notes,
            learned_sink=self.learned_sink,
            ragged=anatomy.ragged,
            state_seed=self.state_seed,
            order=anatomy.order,
            layer_names=tuple(layer.modules[0] for layer in anatomy.layers),
            **self.sizes(model),
        )


def _unread(anatomy: Anatomy) -> list[str]:
    """Sites that no layer has."""
    known: set[str] = set()
    for layer in anatomy.layers:
        known |= {read.site for read in layer.reads}
        known |= {site for inside in layer.inside for site in inside.sites}
        known |= set() if layer.attention is None else {"Q", "K", "V", "P", "PV"}
    known |= {"expert_out"} if any(map(bank_inputs, anatomy.layers)) else set()
    return [site for site in SITES if site not in known]


def bank_inputs(layer: Layer) -> dict[str, Read]:
    """The reads of expert_in, experts and gates, where all are inputs of one module: each expert's output can then be had. Else none."""
    inputs = {read.site: read for read in layer.reads if read.end == "input"}
    reads = {site: inputs[site] for site in ("expert_in", "experts", "gates") if site in inputs}
    return reads if len(reads) == 3 and len({read.module for read in reads.values()}) == 1 else {}


def first_id(value: Any) -> int | None:
    """A special token's id as a configuration names it, of a list its first; None where it names none."""
    found = next(iter(value), None) if isinstance(value, (list, tuple)) else value
    return None if found is None else int(found)


_CONTEXT_NAMES = (
    "max_position_embeddings", "n_positions", "max_seq_len", "max_seq_length", "max_sequence_length", "seq_length", "n_ctx"
)  # fmt: skip


def longest_context(config: Any) -> int:
    """The longest context that a configuration names, under any of the usual names; `NO_LIMIT` where it names none."""
    found = (getattr(config, name, None) for name in _CONTEXT_NAMES)
    return next((int(length) for length in found if isinstance(length, int) and length > 0), NO_LIMIT)


ROUTING: tuple[str, ...] = ("router", "experts", "gates", "expert_in", "expert_out")
NO_ROUTER: Mapping[str, str] = dict.fromkeys(ROUTING, "its feed-forward layers are dense, there is no router")
"""`missing` of a dense family."""


def physical_layers(modules: Mapping[str, nn.Module]) -> list[list[str]]:
    """Paths by physical layer, in order: modules that share at least half of the smaller one's weights are one layer."""
    sizes = {path: {id(p): p.numel() for p in module.parameters()} for path, module in modules.items()}
    layers: list[list[str]] = []
    for path, mine in sizes.items():
        for layer in layers:
            first = sizes[layer[0]]
            shared = sum(size for key, size in mine.items() if key in first)
            if 2 * shared >= min(sum(mine.values()), sum(first.values())):
                layer.append(path)
                break
        else:
            layers.append([path])
    return layers


def by_identity(body: Any) -> tuple[list[list[str]], tuple[int, ...]]:
    """The members of `body.layers` by physical layer, and the physical layer of each in the order they run."""
    paths = [f"layers.{i}" for i in range(len(body.layers))]
    groups = physical_layers({path: body.get_submodule(path) for path in paths})
    number = {path: n for n, group in enumerate(groups) for path in group}
    return groups, tuple(number[path] for path in paths)


def pre_norm_reads(
    *,
    attention: str = "self_attn",
    norm: str = "input_layernorm",
    mlp: str = "mlp",
    mlp_norm: str = "post_attention_layernorm",
    router: str | None = None,
    experts: str | None = None,
    attn_write: str | None = None,
    mlp_write: str | None = None,
) -> tuple[Read, ...]:
    """The sites of `x + Attn(norm(x))`, then `x + MLP(norm(x))`. A router's first output is its logits over all experts;
    the experts take (hidden states, expert ids, gates): what is used, after bias, grouping and scaling."""
    reads = [
        Read("resid", "", "input"),
        Read("X", norm),
        Read("O", attention),
        Read("attn_write", attn_write or attention),
        Read("moe_in", mlp_norm),
        Read("moe_write", mlp_write or mlp),
        Read("resid_out", ""),
    ]
    if router is not None and experts is not None:
        reads.append(Read("router", f"{mlp}.{router}"))
        reads.append(Read("experts", f"{mlp}.{experts}", "input", 1, "top_k_index"))
        reads.append(Read("gates", f"{mlp}.{experts}", "input", 2, "top_k_weights"))
        reads.append(Read("expert_in", f"{mlp}.{experts}", "input"))
    return tuple(reads)
