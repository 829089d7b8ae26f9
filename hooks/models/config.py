"""The configuration of the native looped MoE: sizes, loop span, options. Torch-free."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from visitlens.errors import CheckpointError, InputError
from visitlens.hooks.core.loop_plan import LoopSpec

ARCHITECTURE = "LoopedMoE"
MAX_STEPS = 4096
"""Of one pass, as many as a recording may have."""


@dataclass(frozen=True, kw_only=True)
class LoopedMoEConfig:
    """Decoder-only, GQA, RoPE, RMSNorm, top-k-of-E SwiGLU experts in every layer; layers
    `[loop_start, loop_stop)` run `visits` times. An empty span (`loop_start == loop_stop`) is the Baseline.

    Router: softmax over all E experts in float32, the top k chosen, their gates renormalised to sum to 1
    (the paper is silent on it). `head_dim` is free of `hidden_size / num_heads`.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    expert_dim: int
    experts_per_token: int = 8
    shared_expert_dim: int = 0
    """Width of an always-on expert beside the routed ones; 0 = none."""
    loop_start: int = 0
    loop_stop: int = 0
    visits: int = 1
    context_length: int = 1024
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    qk_norm: bool = False
    tie_embeddings: bool = True
    load_balance_coef: float = 0.01
    router_z_coef: float = 0.001
    bos_token_id: int = 0
    eos_token_id: int = 1
    pad_token_id: int = 2

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "expert_dim", "context_length")
        for name in (*sizes, "experts_per_token"):
            if getattr(self, name) < 1:
                raise InputError(f"config: {name} must be at least 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise InputError(
                f"config: num_heads must be a multiple of num_kv_heads, got {self.num_heads} and {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise InputError(f"config: rotary embedding needs an even head_dim, got {self.head_dim}")
        if self.num_experts < self.experts_per_token:
            raise InputError(f"config: {self.experts_per_token} experts per token of only {self.num_experts}")
        steps = self.num_layers + max(self.visits - 1, 0) * max(self.loop_stop - self.loop_start, 0)
        if max(steps, self.visits) > MAX_STEPS:
            raise InputError(f"config: {steps:,} steps (layers times their visits); expected at most {MAX_STEPS:,}")
        _ = self.loop_spec

    @property
    def loop_spec(self) -> LoopSpec:
        return LoopSpec(self.num_layers, range(self.loop_start, self.loop_stop), self.visits)

    @property
    def family(self) -> str:
        return "native looped MoE"

    @property
    def missing(self) -> Mapping[str, str]:
        """Of sites: it has all of them."""
        return {}

    @property
    def absent(self) -> Mapping[str, Mapping[int, str]]:
        return {}

    @property
    def ragged(self) -> bool:
        """Every token is at every visit."""
        return False

    @property
    def value_dim(self) -> int:
        return self.head_dim

    def residual_scale(self, layer: int) -> float:
        """1/r inside the loop span, 1 outside."""
        return 1.0 / self.visits if self.loop_start <= layer < self.loop_stop else 1.0

    def to_dict(self) -> dict[str, Any]:
        return {"architecture": ARCHITECTURE, **dataclasses.asdict(self)}

    @property
    def sha256(self) -> str:
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()

    @classmethod
    def from_dict(cls, data: Any) -> LoopedMoEConfig:
        """From `config.json`.

        Raises:
            CheckpointError: another architecture, an unknown field or a missing one, values that make no model.
        """
        if not isinstance(data, dict):
            raise CheckpointError(f"config.json: expected a JSON object, got {type(data).__name__}")
        data = dict(data)
        architecture = data.pop("architecture", None)
        if architecture != ARCHITECTURE:
            raise CheckpointError(f"expected config.json with architecture {ARCHITECTURE!r}, got {architecture!r}")
        fields = {f.name: f for f in dataclasses.fields(cls)}
        unknown = sorted(set(data) - set(fields))
        required = {name for name, f in fields.items() if f.default is dataclasses.MISSING}
        missing = sorted(required - set(data))
        if unknown or missing:
            raise CheckpointError(f"config.json: unknown fields {unknown}, missing fields {missing}")
        for name, value in data.items():
            wanted, got = fields[name].type, type(value).__name__  # "int", "float" or "bool": annotations are strings
            if got != wanted and (wanted, got) != ("float", "int"):
                raise CheckpointError(f"config.json: {name} must be of type {wanted}, got {value!r}")
        try:
            return cls(**data)
        except InputError as error:
            raise CheckpointError(f"config.json: {str(error).removeprefix('config: ')}") from error
