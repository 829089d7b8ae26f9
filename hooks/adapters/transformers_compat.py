"""What code that comes with a checkpoint, written for transformers 4, no longer finds in transformers 5: put into that
code's own modules as they are loaded, where it is missing. Transformers itself, and every other model, stay as they are.

A family lists what its published code needs (`Family.mends`). Code that has been brought up to date finds nothing changed.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import wraps
from inspect import get_annotations, signature
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from visitlens.hooks.models.checkpoint_files import read_json

Mend = Callable[[ModuleType], None]
_AUTO_CLASSES = ("AutoConfig", "AutoModelForCausalLM", "AutoModelForMaskedLM")


def mend(folder: Path, **options: Any) -> None:
    """Loads the modules that a checkpoint folder's `auto_map` names, and gives them what their family's code needs."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    from visitlens.hooks.adapters.adapt import families

    try:
        config = read_json(folder / "config.json")
    except (OSError, ValueError):
        return  # transformers says what is wrong
    family, names = families().get(config.get("model_type")), config.get("auto_map")
    if family is None or not family.mends or not isinstance(names, dict):
        return
    for name in [names[auto] for auto in _AUTO_CLASSES if auto in names]:
        with redirect_stdout(io.StringIO()):  # transformers prints there what it misses in docstrings
            cls = get_class_from_dynamic_module(name, folder, **options)
        for change in family.mends:
            change(sys.modules[cls.__module__])


def _classes(module: ModuleType, base: type) -> Iterator[Any]:
    """Those that the module itself defines."""
    for value in list(vars(module).values()):
        if isinstance(value, type) and issubclass(value, base) and value.__module__ == module.__name__:
            yield value


def tied_to(embedding: str) -> Mend:
    """`_tied_weights_keys` was a list of names; it now says which Parameter each is tied to: the input `embedding`."""

    def change(module: ModuleType) -> None:
        from transformers import PreTrainedModel

        for cls in _classes(module, PreTrainedModel):
            if isinstance(keys := cls.__dict__.get("_tied_weights_keys"), (list, tuple)):
                cls._tied_weights_keys = dict.fromkeys(keys, embedding)

    return change


def token_ids(module: ModuleType) -> None:
    """A configuration had every special token's id, None where none was given."""
    from transformers import PretrainedConfig

    for cls in _classes(module, PretrainedConfig):
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if not hasattr(cls, name):
                setattr(cls, name, None)


def output_cache(module: ModuleType) -> None:
    """A model's output kept its cache as `past_key_values`: now the field is `cache`, which answers to either name."""
    from transformers.utils.generic import ModelOutput

    if not hasattr(ModelOutput, "past_key_values"):
        return  # of a release before the change
    for cls in _classes(module, ModelOutput):
        if "past_key_values" not in (fields := get_annotations(cls)):
            continue
        cls.__annotations__ = {"cache" if name == "past_key_values" else name: kind for name, kind in fields.items()}
        cls.cache = cls.past_key_values
        for made in ("past_key_values", "__init__", "__repr__", "__eq__"):
            delattr(cls, made)
        dataclass(cls)


def default_rope(module: ModuleType) -> None:
    """`ROPE_INIT_FUNCTIONS` had an entry for plain rotary embeddings, which are now a method of the module that has them."""
    known = getattr(module, "ROPE_INIT_FUNCTIONS", None)
    if known is None or "default" in known:
        return
    module.ROPE_INIT_FUNCTIONS = {**known, "default": _frequencies}  # type: ignore[attr-defined]  # the code's own name
    for cls in _classes(module, nn.Module):
        # Its frequencies aren't saved: weights are loaded into empty modules, which transformers then has them fill.
        if cls.__name__.endswith("RotaryEmbedding") and not hasattr(cls, "compute_default_rope_parameters"):
            cls.compute_default_rope_parameters = staticmethod(_frequencies)


def _frequencies(config: Any, device: Any = None, *_: Any, **__: Any) -> tuple[Tensor, float]:
    """Angles per position of plain rotary embeddings, and the factor of their sines: 1."""
    d = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    exponents = torch.arange(0, d, 2, dtype=torch.int64).to(device=device, dtype=torch.float) / d
    given = getattr(config, "rope_parameters", None) or {"rope_theta": config.rope_theta}
    return 1.0 / given["rope_theta"] ** exponents, 1.0


def mask_arguments(module: ModuleType) -> None:
    """The functions that make attention masks took other names, and the positions in the cache."""
    from transformers import masking_utils

    for name in ("create_causal_mask", "create_sliding_window_causal_mask"):
        if (function := getattr(masking_utils, name)) is getattr(module, name, None):
            setattr(module, name, _with_older_names(function))


_NEW_NAMES = {"input_embeds": "inputs_embeds", "past_key_values": "cache"}


def _with_older_names(function: Callable[..., Any]) -> Callable[..., Any]:
    takes = signature(function).parameters

    @wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        renamed = {key if key in takes else _NEW_NAMES.get(key, key): value for key, value in named.items()}
        if "cache_position" not in takes:
            renamed.pop("cache_position", None)  # follows from the cache
        return function(*args, **renamed)

    return call


def cache_sizes(module: ModuleType) -> None:
    """A cache that keeps keys and values its own way is now asked for its mask's size by the number of queries alone."""
    from transformers import Cache

    def get_mask_sizes(self: Any, query_length: int | Tensor, layer_idx: int = 0) -> tuple[int, int]:
        new = query_length if isinstance(query_length, int) else query_length.shape[0]  # the positions, before
        return self.get_seq_length(layer_idx) + new, 0

    for cls in _classes(module, Cache):
        if "get_seq_length" in cls.__dict__:
            cls.get_mask_sizes = get_mask_sizes
