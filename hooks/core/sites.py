"""The catalogue of sites: places where a tensor is read, once per step. No torch.

`hook` is the hook point of the native model below `blocks.LAYER.visit.VISIT.`; `dataset` is where a recording keeps the
site at level `activations` (None: not stored, or stored otherwise).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from visitlens.errors import InputError


@dataclass(frozen=True)
class Site:
    """`axes` are those of one token's value; `symbol` is the paper's."""

    name: str
    symbol: str
    axes: tuple[str, ...]
    hook: str
    title: str
    dataset: str | None = None


SITES = {
    site.name: site
    for site in (
        Site("resid", "x", ("hidden",), "hook_resid_pre", "residual stream at the step's input", "resid/full"),
        Site("X", "x_hat", ("hidden",), "ln1.hook_normalized", "RMSNorm output that attention reads", "resid/x"),
        Site("Q", "Q", ("head", "d"), "attn.hook_rot_q", "queries after rotary embedding and QK-norm", "vec/q"),
        Site("K", "K", ("kv_head", "d"), "attn.hook_rot_k", "keys after rotary embedding and QK-norm", "vec/k"),
        Site("V", "V", ("kv_head", "d"), "attn.hook_v", "values", "vec/v"),
        Site("P", "P", ("head", "key"), "attn.hook_pattern", "attention pattern", "attn/p"),
        Site("PV", "PV", ("head", "d"), "attn.hook_z", "attended context", "vec/pv"),
        Site("O", "O", ("hidden",), "attn.hook_o", "attention output PV W_O, before the 1/r scale"),
        Site(
            "attn_write", "d_attn", ("hidden",), "hook_attn_out", "attention write, after the 1/r scale", "resid/attn"
        ),
        Site("moe_in", "y_hat", ("hidden",), "ln2.hook_normalized", "RMSNorm output that router and experts read"),
        Site("router", "", ("expert",), "mlp.hook_router_logits", "router logits over all experts"),
        Site("experts", "S", ("k",), "mlp.hook_expert_indices", "experts used", "routing/ids"),
        Site("gates", "g", ("k",), "mlp.hook_expert_weights", "gates of the experts used", "routing/gate"),
        Site("expert_in", "", ("hidden",), "mlp.hook_expert_in", "what the experts read, the router having chosen"),
        Site("expert_out", "", ("k", "hidden"), "mlp.hook_result", "output of each expert used, before its gate"),
        Site("moe_write", "d_moe", ("hidden",), "hook_mlp_out", "MoE write, after the 1/r scale", "resid/moe"),
        Site("resid_out", "x'", ("hidden",), "hook_resid_post", "residual stream after the step"),
    )
}
ACTIVATION_SITES = ("resid", "X", "Q", "K", "V", "PV", "attn_write", "moe_write")
"""What level `activations` can store. O is `attn_write` times r, `resid_out` the next step's `resid`: neither is stored twice."""

ASSUMPTIONS = {
    "sum of writes": "residual in + attention write + MoE write = residual out",
    "next token": "the logits at a token are of the token after it, from what comes before",
    "softmax router": "the router's scores over all experts are a softmax",
    "ragged visits": "halting or routing leaves tokens out of visits",
    "cached generation": "a text token by token, through the model's cache, is one forward over it",
    "learned sink": "attention rows have a slot of the model's own that takes mass and gives nothing",
}
"""What a measure may assume beyond its sites; a model that breaks one says so, and the measure is left out."""


class Sizes(Protocol):
    """What a configuration says of a token's values."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def value_dim(self) -> int: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def experts_per_token(self) -> int: ...


def token_shape(site: str, sizes: Sizes) -> tuple[int, ...]:
    """Shape of one token's value, of a pattern (head,): its keys are as many as tokens."""
    widths = {
        "hidden": sizes.hidden_size,
        "head": sizes.num_heads,
        "kv_head": sizes.num_kv_heads,
        "d": sizes.value_dim if site in ("V", "PV") else sizes.head_dim,
        "expert": sizes.num_experts,
        "k": sizes.experts_per_token,
    }
    return tuple(widths[axis] for axis in SITES[site].axes if axis != "key")


def check_sites(names: Iterable[str], allowed: Iterable[str] = tuple(SITES)) -> tuple[str, ...]:
    """The names (one, or several), if all are allowed.

    Raises:
        InputError: an unknown site; the message names those that exist.
    """
    try:
        names, allowed = (names,) if isinstance(names, str) else tuple(names), tuple(allowed)
    except TypeError:
        raise InputError(f"expected names of sites, such as ['Q', 'PV'], got {names!r:.80}") from None
    unknown = [name for name in names if name not in allowed]
    if unknown:
        raise InputError(f"no site {', '.join(map(repr, unknown))}; expected some of {', '.join(allowed)}")
    return names
