"""Visits that leave tokens out, as small as they can be: halting by a mask, and the routing of Mixture of Recursions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from visitlens.hooks.adapters.family import Anatomy, Family, Layer, Read, Visited, pre_norm_reads


def tiny_llama(layers: int) -> Any:
    import transformers

    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": layers}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
    torch.manual_seed(4)
    model: Any = transformers.LlamaForCausalLM(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(0, 0.3)
    return model


class Halting(nn.Module):
    """A Llama layer that runs up to four times. A token halts after visit 1, 2, 3 or 4 by its id modulo 4; halted tokens keep
    their state and are still attended to. The loop ends when all have halted."""

    def __init__(self) -> None:
        super().__init__()
        llama = tiny_llama(3)
        self.config, self.inner = llama.config, llama
        self.halt = nn.Identity()

    @property
    def base_model(self) -> nn.Module:
        return self

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Any:
        inner = self.inner.model
        x, positions = inner.embed_tokens(input_ids), torch.arange(input_ids.shape[1]).unsqueeze(0)
        causal = torch.ones(x.shape[1], x.shape[1]).tril().log()[None, None]
        options = {"position_embeddings": inner.rotary_emb(x, positions), "attention_mask": causal}
        x = inner.layers[0](x, **options)
        for visit in range(4):
            going = self.halt((input_ids % 4 >= visit).float())
            if not going.any():
                break
            x = torch.where(going.bool().unsqueeze(2), inner.layers[1](x, **options), x)
        return SimpleNamespace(logits=self.inner.lm_head(inner.norm(inner.layers[2](x, **options))))


class HaltingFamily(Family):
    model_types = ("halting_llama",)
    call = {}  # noqa: RUF012 (a constant of the test)

    def anatomy(self, model: Any) -> Anatomy:
        halted = Visited(Read("", "halt"), at_body=True)
        paths = [f"inner.model.layers.{i}" for i in range(3)]
        layers = [Layer((p,), pre_norm_reads(), visited=halted if i == 1 else None) for i, p in enumerate(paths)]
        return Anatomy(
            tuple(layers), (0, 1, 1, 1, 1, 2), missing=dict.fromkeys(("router", "experts", "gates"), "dense")
        )


class Recursion(nn.Module):
    """One recursion of the expert-choice router of Mixture of Recursions, inference alone, by its published order of calls."""

    def __init__(self, block: list[nn.Module], share: float) -> None:
        super().__init__()
        self.shared_keys = False  # then every token is computed, so that all are keys, and the chosen ones are taken
        self.block, self.share, self.router = nn.ModuleList(block), share, nn.Linear(16, 1, bias=False)

    def forward(self, total: Tensor, before: Tensor | None, embeddings: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        wide = total.shape[2]
        x = total if before is None else torch.gather(total, 1, before.expand(-1, -1, wide))
        weights, chosen = torch.topk(
            self.router(x).sigmoid(), max(1, int(self.share * total.shape[1])), dim=1, sorted=False
        )
        chosen, index = torch.sort(chosen, dim=1)
        weights = torch.gather(weights, dim=1, index=index)
        y = torch.gather(x, dim=1, index=chosen.expand(-1, -1, wide))
        if before is not None:
            chosen = torch.gather(before, dim=1, index=chosen)
        if self.shared_keys:
            y, causal = total.clone(), torch.ones(total.shape[1], total.shape[1]).tril().log()[None, None]
            for layer in self.block:
                y = layer(y, position_embeddings=embeddings, attention_mask=causal)
            y = torch.gather(y, 1, chosen.expand(-1, -1, wide))
            return torch.scatter_add(total, 1, chosen.expand(-1, -1, wide), y * weights), chosen
        there = [torch.gather(e.expand(len(x), -1, -1), 1, chosen.expand(-1, -1, e.shape[-1])) for e in embeddings]
        causal = torch.ones(y.shape[1], y.shape[1]).tril().log()[None, None]
        for layer in self.block:
            y = layer(y, position_embeddings=tuple(there), attention_mask=causal)
        return torch.scatter_add(total, 1, chosen.expand(-1, -1, wide), y * weights), chosen


class Recursive(nn.Module):
    """Layers: 0; [1, 2] over all tokens, three quarters and a half of them; 3."""

    def __init__(self) -> None:
        super().__init__()
        llama = tiny_llama(4)
        self.config, self.lm_head, self.norm = llama.config, llama.lm_head, llama.model.norm
        self.embed_tokens, self.rotary_emb = llama.model.embed_tokens, llama.model.rotary_emb
        first, *block, last = llama.model.layers
        copies = [[self._tied(layer) for layer in block] for _ in range(2)]
        recursions = [Recursion(b, share) for b, share in zip((block, *copies), (1.0, 0.75, 0.5), strict=True)]
        self.layers = nn.ModuleList([first, *recursions, last])

    @staticmethod
    def _tied(layer: Any) -> Any:
        import copy

        twin = copy.deepcopy(layer)
        for name, parameter in layer.named_parameters():
            owner, _, leaf = name.rpartition(".")
            setattr(twin.get_submodule(owner), leaf, parameter)
        return twin

    @property
    def base_model(self) -> nn.Module:
        return self

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Any:
        x, before = self.embed_tokens(input_ids), None
        embeddings = self.rotary_emb(x, torch.arange(x.shape[1]).unsqueeze(0))
        causal = torch.ones(x.shape[1], x.shape[1]).tril().log()[None, None]
        for layer in self.layers:
            if isinstance(layer, Recursion):
                x, before = layer(x, before, embeddings)
            else:
                x = layer(x, position_embeddings=embeddings, attention_mask=causal)
        return SimpleNamespace(logits=self.lm_head(self.norm(x)))
