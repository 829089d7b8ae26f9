"""Sees the attention calls of chosen modules: queries and keys after rotary embedding, and the output, SDPA staying in use.

Two ways, by how a family calls attention. Families of transformers look their attention function up in a registry: the
entry in use is wrapped there while someone observes, and the wrapper passes every call on unchanged. Others call
`torch.nn.functional.scaled_dot_product_attention`: that is seen by a function mode that lives only inside the module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_OBSERVERS = "_visitlens_attention"
_REGISTRY = "ALL_ATTENTION_FUNCTIONS"


@dataclass(frozen=True)
class AttentionCall:
    """`q [batch, head, query, d]`, `k, v [batch, kv head, key, d]`, `output [batch, query, head, d]`; `weights` [batch, head,
    query, key] where the model itself formed them; `options` are the call's further arguments."""

    q: Tensor
    k: Tensor
    v: Tensor
    output: Tensor
    weights: Tensor | None
    options: Mapping[str, Any]


Observer = Callable[[AttentionCall], None]


@contextmanager
def watch_registry(observers: Mapping[nn.Module, Observer]) -> Iterator[None]:
    """Each module's observer gets its calls through transformers' registry of attention functions."""
    with ExitStack() as undo:
        for module, observer in observers.items():
            mine = [*getattr(module, _OBSERVERS, ()), observer]
            undo.callback(setattr, module, _OBSERVERS, tuple(o for o in mine if o is not observer))
            object.__setattr__(module, _OBSERVERS, tuple(mine))
        for registry, name in {(id(r), n): (r, n) for r, n in map(_entry, observers)}.values():
            undo.enter_context(_wrapped(registry, name))
        yield


def _entry(module: nn.Module) -> tuple[Any, str]:
    """The registry that a module's file uses, and the name in use."""
    name: str | None = module.config._attn_implementation  # type: ignore[union-attr]  # every such module has a config
    return getattr(sys.modules[type(module).__module__], _REGISTRY), name or "eager"


class _Wrapper:
    """An attention function that passes every call on and tells the module's observers. `users` are captures at work."""

    def __init__(self, original: Callable[..., Any] | None) -> None:
        self.original, self.users = original, 0

    def __call__(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> Any:
        # "eager" is in no registry: each file has its own.
        attend = self.original or sys.modules[type(module).__module__].eager_attention_forward
        result = attend(module, q, k, v, *args, **options)
        for observer in getattr(module, _OBSERVERS, ()):
            observer(AttentionCall(q, k, v, result[0], result[1], options))
        return result


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


TorchCall = Callable[[Any, tuple, Mapping[str, Any], Any], None]
"""Gets a torch function, its arguments and its result."""


class _Sees(TorchFunctionMode):
    def __init__(self, observer: TorchCall) -> None:
        super().__init__()
        self.observer = observer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.observer(func, args, kwargs, result)
        return result


@contextmanager
def watch_sdpa(observers: Mapping[nn.Module, Observer]) -> Iterator[None]:
    """Each module's observer gets the calls of `scaled_dot_product_attention` that happen inside the module."""

    def see(observer: Observer) -> TorchCall:
        def look(func: Any, args: tuple, kwargs: Mapping[str, Any], result: Any) -> None:
            if func is torch.nn.functional.scaled_dot_product_attention:
                named = {**dict(zip(("query", "key", "value"), args, strict=False)), **kwargs}
                q, k, v = (named[name] for name in ("query", "key", "value"))
                observer(AttentionCall(q, k, v, result.transpose(1, 2), None, {"scaling": kwargs.get("scale")}))

        return look

    with watch_torch({module: see(observer) for module, observer in observers.items()}):
        yield


@contextmanager
def watch_torch(observers: Mapping[nn.Module, TorchCall]) -> Iterator[None]:
    """Each module's observer gets every torch function called inside the module: for what no module hook shows."""
    with ExitStack() as undo:
        for module, observer in observers.items():
            running: list[_Sees] = []

            def enter(*_: Any, observer: TorchCall = observer, running: list[_Sees] = running) -> None:
                running.append(_Sees(observer))
                running[-1].__enter__()

            def leave(*_: Any, running: list[_Sees] = running) -> None:
                running.pop().__exit__(None, None, None)

            undo.callback(module.register_forward_pre_hook(enter).remove)
            undo.callback(module.register_forward_hook(leave, always_call=True).remove)
        yield
