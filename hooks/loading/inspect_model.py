"""Inspection of a model before it is recorded: the ledger of its steps, its ties, what can't be measured, its guards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from visitlens.errors import InputError, VisitlensError
from visitlens.hooks.adapters.adapt import NO_TOKENS, adapt, families
from visitlens.hooks.adapters.adapted_model import AdaptedModel
from visitlens.hooks.audit.discovery import StepLedger, discover, follow
from visitlens.hooks.audit.false_loops import false_loops
from visitlens.hooks.audit.guards import check, sample_tokens
from visitlens.hooks.audit.tie_audit import audit_ties
from visitlens.hooks.audit.tied_copies import copied_layers
from visitlens.hooks.audit.tied_copies import tie_copies as tie
from visitlens.hooks.loading.custom_loader import load_own
from visitlens.hooks.loading.load_model import dtype_named, load_model, load_transformers, model_type, resolve
from visitlens.hooks.models.checkpoint import load_tokenizer
from visitlens.hooks.models.checkpoint_files import LOADER
from visitlens.hooks.models.looped_moe import LoopedMoE
from visitlens.hooks.text.encoder import TextEncoder


def inspect_model(
    source: str | Path,
    tokens: int = 24,
    *,
    checks: bool = True,
    dtype: str = "float32",
    trust_remote_code: bool = False,
    tie_copies: bool = False,
    bos: str | int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """JSON-ready: `steps` [{index, module, layer, visit}], `ties`, `flags`, `missing`, `notes`, `guards`, and `documents`: which
    tokens lead and close a text, and why ("" where there is no tokenizer.json). `bos` is the leading token instead.

    A model of a family without an adapter is discovered: `adapter` then says so, and it can't be recorded yet.

    Raises:
        CheckpointError, InputError, UnavailableError: as `load_model`.
        PlanError: the model runs its layers in another order than its adapter says.
    """
    folder = resolve(source)
    kind = model_type(folder)
    if kind == LOADER:
        given = {"trust": trust_remote_code, "tie_copies": tie_copies, "unread": True}
        model = load_own(folder, dtype_named(dtype), "cpu", **given, **options)
    elif kind is not None and kind not in families() and "family" not in options:
        if options:
            raise InputError(
                f"{kind} has no adapter, so it takes no option {next(iter(options))!r}; --family reads it as another does"
            )
        model = load_transformers(folder, dtype, trust_remote_code=trust_remote_code)
        if tie_copies:
            tie(model)
    else:
        # What is asked for alone: a native model takes nothing.
        asked = {"trust_remote_code": trust_remote_code, "tie_copies": tie_copies}
        model = load_model(folder, dtype, **{name: True for name, given in asked.items() if given}, **options)
    found = {"model": str(source), "documents": "", **describe(model, tokens, checks=checks)}
    if (folder / "tokenizer.json").is_file():
        try:
            encoder = TextEncoder.of(load_tokenizer(folder), getattr(model, "config", None), bos=bos)
            found["documents"] = str(encoder)
            told = [(None, f"warning: {warning}") for warning in encoder.warnings] or [(True, str(encoder))]
        except VisitlensError as error:
            told = [(False, str(error))]
        found["guards"] += [{"name": "tokens at document ends", "ok": ok, "detail": why} for ok, why in told] * checks
    return found


def describe(model: Any, tokens: int = 24, *, checks: bool = True) -> dict[str, Any]:
    """As `inspect_model`, of a loaded model: native, adapted, or any module that takes token ids [context, position]."""
    if not isinstance(model, (LoopedMoE, AdaptedModel)):
        kind = getattr(getattr(model, "config", None), "model_type", None)
        model = adapt(model) if kind in families() else model
    if isinstance(model, AdaptedModel):
        return _adapted(model, sample_tokens(model, tokens), checks)
    if isinstance(model, LoopedMoE):
        ids = _random(model.config.vocab_size, min(tokens, model.config.context_length))
        ledger = follow(model, [[f"blocks.{i}"] for i in range(model.config.num_layers)], model, ids)
        return {"family": "native looped MoE", "adapter": "none needed", **_common(model, ledger)}
    ids = _random(_vocabulary(model), tokens)
    try:
        ledger = discover(model, model, ids)
    except VisitlensError:
        raise
    except Exception as error:  # anything, of a model that takes other arguments
        raise InputError(
            f"{type(model).__name__} can't be called with token ids [context, position] alone ({type(error).__name__}: {error}): "
            "write an adapter, whose `call` says the rest (docs/adapters.md)"
        ) from error
    family = getattr(getattr(model, "config", None), "model_type", None) or type(model).__name__
    why = f": {NO_TOKENS[family]}" if family in NO_TOKENS else " (docs/adapters.md: how to write one)"
    none = f"none for this family; the plan below is proposed from one forward{why}"
    return {"family": family, "adapter": none, **_common(model, ledger)}


def _adapted(model: AdaptedModel, tokens: Tensor, checks: bool) -> dict[str, Any]:
    def run(ids: Tensor) -> Any:
        return model(ids, return_type="none")

    layers = [layer.modules for layer in model.anatomy.layers]
    modules = {path: model.body.get_submodule(path) for paths in layers for path in paths}
    ledger = follow(model.body, layers, run, tokens, false_loops(model.model, modules, run, tokens))
    guards = [guard.to_dict() for guard in check(model, tokens)] if checks else []
    facts = {"missing": dict(model.config.missing), "notes": list(model.config.notes), "guards": guards}
    return {
        "family": model.config.family,
        "adapter": type(model.family).__name__,
        **_common(model.body, ledger),
        **facts,
    }


def _common(model: nn.Module, ledger: StepLedger) -> dict[str, Any]:
    return {
        "layers": len(ledger.plan.visits),
        "steps": ledger.steps(),
        "ties": [tie.to_dict() for tie in audit_ties(model, ledger)],
        "flags": [*ledger.flags, *_copies(model)],
        "missing": {},
        "notes": [],
        "guards": [],
    }


def _copies(model: nn.Module) -> list[str]:
    return [
        f"{', '.join(paths)} hold equal weights in separate Parameters: copies of one layer, perhaps a loop whose tying was lost in "
        "saving; --tie-copies reads them as visits of one"
        for paths in copied_layers(model)
    ]


def _vocabulary(model: nn.Module) -> int:
    """By its configuration, else by its embedding (the first one: positions have theirs after it)."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    size = config.get("vocab_size") if isinstance(config, dict) else getattr(config, "vocab_size", None)
    embeddings = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    return size if isinstance(size, int) else embeddings[0] if embeddings else 256


def _random(vocabulary: int, tokens: int) -> Tensor:
    return torch.randint(0, vocabulary, (1, tokens), generator=torch.Generator().manual_seed(0))
