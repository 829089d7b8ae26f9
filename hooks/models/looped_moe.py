"""The native looped MoE transformer, a TransformerLens `HookedRootModule` with one hook point per (layer, visit, site).

    x_hat = RMSNorm(x);  d_attn = s Attn(x_hat);  y_hat = RMSNorm(x + d_attn);  d_moe = s MoE(y_hat)
    x_next = x + d_attn + d_moe,      s = 1/r inside the loop span, 1 outside     (SMELT, Eq. 8-9)

Hook names follow TransformerLens with the visit in them: `blocks.4.visit.2.attn.hook_rot_q`. No visit shares a name
with another, so TransformerLens' cache and hooks keep them apart. Activations at hooks are batched
[context, position, ...]; inside, the batch is one flat token axis with segment boundaries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformer_lens.hook_points import HookPoint

from visitlens.errors import InputError
from visitlens.hooks.core.loop_plan import Step
from visitlens.hooks.core.model_interface import check_tensor, check_unbroken
from visitlens.hooks.models.attention import KVCache, SegmentedAttention
from visitlens.hooks.models.config import LoopedMoEConfig
from visitlens.hooks.models.experts import ExpertHooks, MixtureOfExperts, RoutedSteps, at_least_float32
from visitlens.hooks.models.hooked_model import HookedModel
from visitlens.kernels.segments import Segments


@dataclass(frozen=True)
class TrainingLoss:
    """Nats per predicted token, and the two router losses averaged over steps (before their coefficients)."""

    total: Tensor
    cross_entropy: Tensor
    load_balance: Tensor
    router_z: Tensor


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.w.shape, self.w, self.eps)


class NormHooks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hook_normalized = HookPoint()  # after the gain: what the projections read


class AttentionHooks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hook_q = HookPoint()
        self.hook_k = HookPoint()
        self.hook_v = HookPoint()
        self.hook_rot_q = HookPoint()
        self.hook_rot_k = HookPoint()
        self.hook_attn_scores = HookPoint()
        self.hook_pattern = HookPoint()
        self.hook_z = HookPoint()
        self.hook_o = HookPoint()


class VisitHooks(nn.Module):
    """The hook points of one visit of one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.hook_resid_pre = HookPoint()
        self.ln1 = NormHooks()
        self.attn = AttentionHooks()
        self.hook_attn_out = HookPoint()
        self.hook_resid_mid = HookPoint()
        self.ln2 = NormHooks()
        self.mlp = ExpertHooks()
        self.hook_mlp_out = HookPoint()
        self.hook_resid_post = HookPoint()


class Block(nn.Module):
    """One physical layer: its weights once, its hook points once per visit."""

    def __init__(self, config: LoopedMoEConfig, layer: int, visits: int) -> None:
        super().__init__()
        self.scale = config.residual_scale(layer)
        self.ln1 = RMSNorm(config.hidden_size, config.norm_eps)
        self.attn = SegmentedAttention(config)
        self.ln2 = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MixtureOfExperts(config)
        self.visit = nn.ModuleDict({str(v): VisitHooks() for v in range(1, visits + 1)})

    def forward(
        self,
        x: Tensor,
        step: Step,
        segments: Segments,
        rotary: tuple[Tensor, Tensor],
        contexts: int,
        cache: KVCache | None,
        routed: RoutedSteps | None,
    ) -> Tensor:
        hooks = cast(VisitHooks, self.visit[str(step.visit)])

        def batched(hook: HookPoint, value: Tensor) -> Tensor:
            return hook(value.unflatten(0, (contexts, -1))).flatten(0, 1)

        x = batched(hooks.hook_resid_pre, x)
        normalized = batched(hooks.ln1.hook_normalized, self.ln1(x))
        slot = None if cache is None else cache.slots[step.index]
        attn = batched(hooks.attn.hook_o, self.attn(normalized, hooks.attn, segments, rotary, contexts, slot))
        x = batched(hooks.hook_resid_mid, x + batched(hooks.hook_attn_out, attn * self.scale))
        normalized = batched(hooks.ln2.hook_normalized, self.ln2(x))
        moe = self.mlp(normalized, hooks.mlp, contexts, routed)
        return batched(hooks.hook_resid_post, x + batched(hooks.hook_mlp_out, moe * self.scale))


class Embedding(nn.Module):
    def __init__(self, config: LoopedMoEConfig) -> None:
        super().__init__()
        self.W_E = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))


class Unembedding(nn.Module):
    def __init__(self, config: LoopedMoEConfig) -> None:
        super().__init__()
        self.W_U = nn.Parameter(torch.empty(config.hidden_size, config.vocab_size))


class LoopedMoE(HookedModel):
    """A looped MoE and, with an empty loop span, its Baseline.

    Call it with token ids [context, position] and, for packed contexts, segment ids of the same shape: attention
    stays within a segment and positions restart there. Without segment ids each context is one document.
    """

    config: LoopedMoEConfig
    loop_scales = ("rescaled", "kept")
    rotary_cos: Tensor
    rotary_sin: Tensor

    def __init__(self, config: LoopedMoEConfig) -> None:
        super().__init__()
        self.cfg = config
        self.config = config  # pyright: ignore[reportIncompatibleVariableOverride]  # narrower, and only read
        self.plan = config.loop_spec.plan()
        self.embed = Embedding(config)
        self.hook_embed = HookPoint()
        self.blocks = nn.ModuleList(Block(config, layer, self.plan.visits[layer]) for layer in range(config.num_layers))
        self.ln_final = RMSNorm(config.hidden_size, config.norm_eps)
        if not config.tie_embeddings:
            self.unembed = Unembedding(config)
        cos, sin = _rotary_tables(config, torch.float32)
        self.register_buffer("rotary_cos", cos, persistent=False)
        self.register_buffer("rotary_sin", sin, persistent=False)
        self.setup()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LoopedMoE:
        """As torch's; rotary tables of a float64 model are computed in float64, not cast."""
        super()._apply(fn, recurse)
        if self.rotary_cos.dtype == torch.float64:
            cos, sin = _rotary_tables(self.config, torch.float64)
            self.rotary_cos, self.rotary_sin = (table.to(self.rotary_cos.device) for table in (cos, sin))
        return self

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Normal weights: 0.02 for embeddings, 1/sqrt(fan in) elsewhere, residual outputs shrunk by 1/sqrt(2 L_eff)."""
        generator = torch.Generator().manual_seed(seed)
        shrink = (2 * len(self.plan)) ** -0.5
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                continue
            std = 0.02 if name in ("embed.W_E", "unembed.W_U") else parameter.shape[-2] ** -0.5
            if name.endswith(("W_O", "W_out", "W_shared_out")):
                std *= shrink
            parameter.normal_(0.0, std, generator=generator)

    def forward(
        self,
        tokens: Tensor,
        segments: Tensor | None = None,
        *,
        cache: KVCache | None = None,
        return_type: Literal["logits", "loss", "none"] = "logits",
    ) -> Tensor | None:
        """Logits [context, position, vocab], or the loss [context, position - 1] in nats with NaN where the next
        token is another document's or padding (segment id < 0), or nothing but the hooks' effects.

        Raises:
            InputError: ids outside the vocabulary, shapes that disagree, a context longer than the model's.
        """
        normalized = self._features(tokens, segments, cache, None)
        if return_type == "none":
            return None
        logits = self._unembed(normalized).unflatten(0, tuple(tokens.shape))
        if return_type == "logits":
            return logits
        if return_type == "loss":
            return self._token_loss(logits, tokens, segments)
        raise InputError(f"expected return_type 'logits', 'loss' or 'none', got {return_type!r}")

    def run_steps(
        self, x: Tensor, segments: Tensor | None = None, *, start: int = 0, stop: int | None = None
    ) -> Tensor:
        """The residual stream [context, position, H] after steps start..stop-1, from the one before them; their hooks fire.

        Raises:
            InputError: no such steps, or segment ids of another shape.
        """
        stop = len(self.plan) if stop is None else stop
        if not 0 <= start <= stop <= len(self.plan):
            raise InputError(f"expected steps 0 <= start <= stop <= {len(self.plan)}, got {start} and {stop}")
        if segments is not None and segments.shape != x.shape[:2]:
            raise InputError(f"segment ids {tuple(segments.shape)} don't fit a residual stream {tuple(x.shape)}")
        contexts, length = x.shape[:2]
        split = Segments.whole_contexts(contexts, length) if segments is None else Segments.from_ids(segments)
        rotary = self._rotary(split.positions().to(x.device))
        flat = self._run(x.flatten(0, 1), range(start, stop), split, rotary, contexts, None, None)
        return flat.unflatten(0, (contexts, length))

    def logits(self, x: Tensor) -> Tensor:
        """[..., vocab] from the residual stream [..., H] after the last step."""
        return self._unembed(self.ln_final(x))

    def training_loss(
        self,
        tokens: Tensor,
        segments: Tensor,
        scored: Tensor | None = None,
        added_up: Callable[[Tensor], Tensor] = lambda counts: counts,
    ) -> TrainingLoss:
        """Mean cross-entropy over predicted tokens, plus load-balance and router-z losses.

        With `scored` [context, position] the cross-entropy is over the tokens that it marks alone.

        Of one process's part of a batch, with `added_up` summing counts over all of them: its share of each, over all tokens of
        the batch. The shares, and so their gradients, add up to those of the batch in one process, however uneven its documents.
        """
        routed = RoutedSteps()
        logits = self._unembed(self._features(tokens, segments, None, routed)).unflatten(0, tuple(tokens.shape))
        losses = self._token_loss(logits, tokens, segments)
        if scored is not None:
            losses = losses.masked_fill(~scored[:, 1:], float("nan"))
        steps, num_experts = len(routed.steps), self.config.num_experts
        slots = [torch.bincount(experts.flatten(), minlength=num_experts) for _, experts in routed.steps]
        counts = added_up(torch.cat([losses.isnan().logical_not().sum().view(1), *slots]))
        predicted, slots = counts[0], counts[1:].view(steps, num_experts)
        cross_entropy = losses.nansum() / predicted
        balance = z = logits.new_zeros(())
        for (router_logits, experts), used in zip(routed.steps, slots, strict=True):
            routed_tokens = used.sum() // experts.shape[1]
            share = router_logits.softmax(-1).sum(0) / routed_tokens
            balance = balance + num_experts * (used / used.sum() * share).sum() / steps
            z = z + router_logits.logsumexp(-1).square().sum() / routed_tokens / steps
        total = cross_entropy + self.config.load_balance_coef * balance + self.config.router_z_coef * z
        return TrainingLoss(total, cross_entropy, balance, z)

    def new_cache(self) -> KVCache:
        """An empty KV cache with one slot per (layer, visit)."""
        return KVCache(len(self.plan))

    def with_loop_count(self, visits: int, residual_scale: str | None = None) -> LoopedMoE:
        """As `InstrumentedModel.with_loop_count`; `residual_scale`: "rescaled" (the default) scales each write in the span by
        1/visits, as a model trained so; "kept" leaves the scale that this model was trained with.

        Raises:
            InputError: an unlooped model, an unknown scale.
        """
        residual_scale = residual_scale or "rescaled"
        if self.config.loop_start == self.config.loop_stop:
            raise InputError("an unlooped model has no span to run more often")
        if residual_scale not in self.loop_scales:
            raise InputError(f"expected residual_scale 'rescaled' or 'kept', got {residual_scale!r}")
        with torch.device("meta"):
            view = LoopedMoE(replace(self.config, visits=visits))
        for mine, theirs in zip(view.parameters(), self.parameters(), strict=True):
            mine.requires_grad_(theirs.requires_grad)  # assigning gives theirs what mine has
        view.load_state_dict(self.state_dict(keep_vars=True), assign=True)
        view.rotary_cos, view.rotary_sin = self.rotary_cos, self.rotary_sin
        if residual_scale == "kept":
            for mine, theirs in zip(view.blocks, self.blocks, strict=True):
                mine.scale = theirs.scale
        return view.train(self.training)

    def _features(
        self,
        tokens: Tensor,
        segment_ids: Tensor | None,
        cache: KVCache | None,
        routed: RoutedSteps | None,
    ) -> Tensor:
        self._check(tokens, segment_ids, cache)
        contexts, length = tokens.shape
        whole = Segments.whole_contexts(contexts, length)
        segments = whole if segment_ids is None else Segments.from_ids(segment_ids)
        positions = segments.positions().to(tokens.device)
        if cache is not None:
            positions = positions + cache.length
            check_unbroken(cache)
            cache.broken = True
        x = self.hook_embed(self.embed.W_E[tokens]).flatten(0, 1)
        every = range(len(self.plan))
        normalized = self.ln_final(self._run(x, every, segments, self._rotary(positions), contexts, cache, routed))
        if cache is not None:
            cache.broken = False
        return normalized

    def _run(
        self,
        x: Tensor,
        steps: range,
        segments: Segments,
        rotary: tuple[Tensor, Tensor],
        contexts: int,
        cache: KVCache | None,
        routed: RoutedSteps | None,
    ) -> Tensor:
        for step in self.plan.steps[steps.start : steps.stop]:
            x = cast(Block, self.blocks[step.layer])(x, step, segments, rotary, contexts, cache, routed)
        return x

    def _rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.rotary_cos[positions].unsqueeze(1), self.rotary_sin[positions].unsqueeze(1)

    def _unembed(self, normalized: Tensor) -> Tensor:
        return normalized @ (self.embed.W_E.T if self.config.tie_embeddings else self.unembed.W_U)

    def _token_loss(self, logits: Tensor, tokens: Tensor, segments: Tensor | None) -> Tensor:
        loss = F.cross_entropy(
            at_least_float32(logits[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten().long(), reduction="none"
        )
        loss = loss.view(tokens.shape[0], -1)
        if segments is None:
            return loss
        return loss.masked_fill((segments[:, 1:] != segments[:, :-1]) | (segments[:, 1:] < 0), float("nan"))

    def _check(self, tokens: Tensor, segments: Tensor | None, cache: KVCache | None) -> None:
        check_tensor(tokens)
        if tokens.ndim != 2 or tokens.numel() == 0:
            raise InputError(f"expected token ids [context, position], at least one, got shape {tuple(tokens.shape)}")
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self.config.vocab_size:
            raise InputError(
                f"token ids must lie in 0..{self.config.vocab_size - 1}, got {low}..{high}: is this the model's tokenizer?"
            )
        if segments is not None and segments.shape != tokens.shape:
            raise InputError(
                f"segment ids {tuple(segments.shape)} and token ids {tuple(tokens.shape)} must have one shape"
            )
        if segments is not None and cache is not None:
            raise InputError("a KV cache holds one document per context: pass no segment ids with it")
        end = tokens.shape[1] + (0 if cache is None else cache.length)
        if end > self.config.context_length:
            raise InputError(f"{end} positions exceed the model's context of {self.config.context_length}")


def _rotary_tables(config: LoopedMoEConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine [position, head_dim / 2], on the CPU, also where the parameters are made on the meta device."""
    cpu = torch.device("cpu")
    halves = torch.arange(0, config.head_dim, 2, device=cpu).to(dtype)
    frequencies = config.rope_theta ** (-halves / config.head_dim)
    angles = torch.outer(torch.arange(config.context_length, device=cpu).to(dtype), frequencies)
    return angles.cos(), angles.sin()
