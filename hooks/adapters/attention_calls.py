"""Sees the attention calls of chosen modules: queries and keys after rotary embedding, and the output, SDPA staying in use.

Two ways, by how a family calls attention. Families of transformers look their attention function up in a registry: the
entry in use is wrapped there while someone watches. Others call `torch.nn.functional.scaled_dot_product_attention`: that is
seen by a function mode that lives only inside the module. An observer is told of a call, which passes on unchanged; an
editor may change what goes in and what comes out, before any observer is told.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_WATCHERS = "_visitlens_attention"
_REGISTRY = "ALL_ATTENTION_FUNCTIONS"
Attend = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class AttentionCall:
    """`q [batch, head, query, d]`, `k, v [batch, kv head, key, d]`, `output [batch, query, head, d]`; `weights` [batch, head,
    query, key] where the model itself formed them; `options` are the call's further arguments, its `attention_mask` and
    `scaling` among them."""

    q: Tensor
    k: Tensor
    v: Tensor
    output: Tensor
    weights: Tensor | None
    options: Mapping[str, Any]


Observer = Callable[[AttentionCall], None]


@runtime_checkable
class Editor(Protocol):
    """Changes the attention calls of a module."""

    def before(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]: ...

    def after(self, call: AttentionCall) -> AttentionCall:
        """The call with another output, and the weights that gave it, or as it was."""
        ...


Watcher = Observer | Editor


def _attend(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, attend: Attend, options: Mapping[str, Any]) -> Any:
    """`attend(q, k, v)` gives (output, weights or None). Editors act in the order they came, then observers are told."""
    watchers: tuple[Watcher, ...] = getattr(module, _WATCHERS, ())
    editors = [w for w in watchers if isinstance(w, Editor)]
    for editor in editors:
        q, k, v = editor.before(q, k, v)
    output, weights = attend(q, k, v)
    call = AttentionCall(q, k, v, output, weights, options)
    for editor in editors:
        call = editor.after(call)
    for watcher in watchers:
        if not isinstance(watcher, Editor):
            watcher(call)
    return call.output, weights


@contextmanager
def _attached(watchers: Mapping[nn.Module, Watcher]) -> Iterator[None]:
    with ExitStack() as undo:
        for module, watcher in watchers.items():
            before = getattr(module, _WATCHERS, ())
            undo.callback(_detach, module, watcher)
            object.__setattr__(module, _WATCHERS, (*before, watcher))
        yield


def _detach(module: nn.Module, watcher: Watcher) -> None:
    object.__setattr__(module, _WATCHERS, tuple(w for w in getattr(module, _WATCHERS) if w is not watcher))


@contextmanager
def watch_registry(watchers: Mapping[nn.Module, Watcher]) -> Iterator[None]:
    """Each module's watcher gets its calls through transformers' registry of attention functions."""
    with _attached(watchers), ExitStack() as undo:
        for registry, name in {(id(r), n): (r, n) for r, n in map(_entry, watchers)}.values():
            undo.enter_context(_wrapped(registry, name))
        yield


def _entry(module: nn.Module) -> tuple[Any, str]:
    """The registry that a module's file uses, and the name in use."""
    name: str | None = module.config._attn_implementation  # type: ignore[union-attr]  # every such module has a config
    return getattr(sys.modules[type(module).__module__], _REGISTRY), name or "eager"


class _Wrapper:
    """An attention function that lets the module's watchers take part. `users` are those at work."""

    def __init__(self, original: Callable[..., Any] | None) -> None:
        self.original, self.users = original, 0

    def __call__(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> Any:
        # "eager" is in no registry: each file has its own.
        attend = self.original or sys.modules[type(module).__module__].eager_attention_forward
        told = {"attention_mask": args[0], **options} if args else options
        return _attend(module, q, k, v, lambda q, k, v: attend(module, q, k, v, *args, **options), told)


@contextmanager
def _wrapped(registry: Any, name: str) -> Iterator[None]:
    original = registry.get(name)
    wrapper = original if isinstance(original, _Wrapper) else _Wrapper(original)
    local = name in registry._local_mapping
    if not wrapper.users:
        registry[name] = wrapper
    wrapper.users += 1
    try:
        yield
    finally:
        wrapper.users -= 1
        if not wrapper.users:
            del registry[name]
            if local and original is not wrapper:
                registry[name] = original


TorchCall = Callable[[Any, tuple, Mapping[str, Any], Any], Any]
"""Gets a torch function, its arguments and its result; what it returns takes the result's place, None leaves it."""


class _Sees(TorchFunctionMode):
    def __init__(self, observer: TorchCall) -> None:
        super().__init__()
        self.observer = observer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        changed = self.observer(func, args, kwargs, result)
        return result if changed is None else changed


class _SeesSDPA(TorchFunctionMode):
    """Lets a module's watchers take part in its calls of `scaled_dot_product_attention`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        named = {**dict(zip(("query", "key", "value"), args, strict=False)), **kwargs}
        rest = {name: value for name, value in kwargs.items() if name not in ("query", "key", "value")}

        def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, None]:
            return func(q, k, v, *args[3:], **rest).transpose(1, 2), None

        q, k, v = (named[name] for name in ("query", "key", "value"))
        mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
        if mask is not None:
            mask = mask[(None,) * (4 - mask.ndim)]
        output, _ = _attend(self.module, q, k, v, attend, {"scaling": kwargs.get("scale"), "attention_mask": mask})
        return output.transpose(1, 2)


@contextmanager
def watch_sdpa(watchers: Mapping[nn.Module, Watcher]) -> Iterator[None]:
    """Each module's watcher gets the calls of `scaled_dot_product_attention` that happen inside the module."""
    fresh = [module for module in watchers if not getattr(module, _WATCHERS, ())]  # the others have their mode already
    with _attached(watchers), _inside({module: partial(_SeesSDPA, module) for module in fresh}):
        yield


def watch_torch(observers: Mapping[nn.Module, TorchCall]) -> AbstractContextManager[None]:
    """Each module's observer gets every torch function called inside the module: for what no module hook shows."""
    return _inside({module: partial(_Sees, observer) for module, observer in observers.items()})


@contextmanager
def _inside(modes: Mapping[nn.Module, Callable[[], TorchFunctionMode]]) -> Iterator[None]:
    """Each module runs in a function mode of its own."""
    with ExitStack() as undo:
        for module, make in modes.items():
            running: list[TorchFunctionMode] = []

            def enter(*_: Any, make: Any = make, running: list[TorchFunctionMode] = running) -> None:
                running.append(make())
                running[-1].__enter__()

            def leave(*_: Any, running: list[TorchFunctionMode] = running) -> None:
                running.pop().__exit__(None, None, None)

            undo.callback(module.register_forward_pre_hook(enter).remove)
            undo.callback(module.register_forward_hook(leave, always_call=True).remove)
        yield
