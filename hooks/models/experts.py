"""The MoE feed-forward of one physical layer, and its hook points of one visit."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformer_lens.hook_points import HookPoint

from visitlens.hooks.models.attention import pass_through, versions_counted
from visitlens.hooks.models.config import LoopedMoEConfig
from visitlens.kernels.grouped_experts import expert_outputs, grouped_experts


class ExpertHooks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hook_router_logits = HookPoint()
        self.hook_expert_indices = HookPoint()
        self.hook_expert_weights = HookPoint()
        self.hook_expert_in = HookPoint()  # what the experts read, apart from what the router read
        self.hook_result = HookPoint()  # each chosen expert's output before its gate; computed if someone looks


class RoutedSteps:
    """Router logits [token, expert] and experts [token, k] of each step of a forward, for the auxiliary losses.

    Not a plain list: FSDP2 hands modules copies of the lists among their arguments.
    """

    def __init__(self) -> None:
        self.steps: list[tuple[Tensor, Tensor]] = []


class MixtureOfExperts(nn.Module):
    """Router and experts of one physical layer."""

    def __init__(self, config: LoopedMoEConfig) -> None:
        super().__init__()
        h, f, e, shared = config.hidden_size, config.expert_dim, config.num_experts, config.shared_expert_dim
        self.k = config.experts_per_token
        self.W_router = nn.Parameter(torch.empty(h, e))
        self.W_in = nn.Parameter(torch.empty(e, h, 2 * f))
        self.W_out = nn.Parameter(torch.empty(e, f, h))
        if shared:
            self.W_shared_in = nn.Parameter(torch.empty(h, 2 * shared))
            self.W_shared_out = nn.Parameter(torch.empty(shared, h))
        self.has_shared = shared > 0
        self.run_experts = grouped_experts  # `expert_parallel` puts its own in its place

    def forward(self, x: Tensor, hooks: ExpertHooks, contexts: int, routed: RoutedSteps | None) -> Tensor:
        def batched(hook: HookPoint, value: Tensor) -> Tensor:
            return hook(value.unflatten(0, (contexts, -1))).flatten(0, 1)

        logits = batched(hooks.hook_router_logits, at_least_float32(x @ self.W_router))
        probabilities = logits.softmax(-1)
        experts = batched(hooks.hook_expert_indices, probabilities.topk(self.k, dim=-1).indices)
        gates = probabilities.gather(1, experts)
        gates = batched(hooks.hook_expert_weights, (gates / gates.sum(-1, keepdim=True)).to(x.dtype))
        if routed is not None:
            routed.steps.append((logits, experts))
        x = batched(hooks.hook_expert_in, x)
        out = self._watched_outputs(x, experts, gates, hooks.hook_result, contexts)
        if out is None:
            out = self.run_experts(x, experts, gates, self.W_in, self.W_out)
        if self.has_shared:
            gate, up = (x @ self.W_shared_in).chunk(2, dim=-1)
            out = out + (F.silu(gate) * up) @ self.W_shared_out
        return out

    def _watched_outputs(
        self, x: Tensor, experts: Tensor, gates: Tensor, hook: HookPoint, contexts: int
    ) -> Tensor | None:
        """The experts' weighted sum [token, H] if a hook changed one's output, else None."""
        if not hook.has_hooks():
            return None
        with versions_counted():
            outputs = expert_outputs(x, experts, self.W_in, self.W_out).unflatten(0, (contexts, -1))
        changed, outputs = pass_through(hook, outputs)
        return (outputs.flatten(0, 1) * gates.unsqueeze(-1)).sum(1) if changed else None


def at_least_float32(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
