import torch
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Experts(nn.Module):
    def __init__(self, hidden: int, experts: int, width: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, hidden, width) / hidden**0.5)
        self.down = nn.Parameter(torch.randn(experts, width, hidden) / width**0.5)

    def forward(self, x, chosen, gates):
        inner = F.silu(torch.einsum("...h,...khw->...kw", x, self.up[chosen]))
        return torch.einsum("...kw,...kwh,...k->...h", inner, self.down[chosen], gates)


class Router(nn.Module):
    def __init__(self, hidden: int, experts: int, k: int) -> None:
        super().__init__()
        self.k, self.score = k, nn.Linear(hidden, experts)

    def forward(self, x):
        scores = self.score(x)
        gates, chosen = scores.softmax(-1).topk(self.k)
        return scores, chosen, gates


class MoE(nn.Module):
    def __init__(self, hidden: int, experts: int, k: int, width: int) -> None:
        super().__init__()
        self.router, self.experts = Router(hidden, experts, k), Experts(hidden, experts, width)

    def forward(self, x):
        _, chosen, gates = self.router(x)
        return self.experts(x, chosen, gates)


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int, **moe: int) -> None:
        super().__init__()
        self.norm1, self.attn = nn.RMSNorm(hidden), Attention(hidden, heads)
        self.norm2, self.moe = nn.RMSNorm(hidden), MoE(hidden, **moe)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.moe(self.norm2(x))


class LoopedMoE(nn.Module):
    def __init__(self, vocabulary: int, hidden: int, context: int, blocks: int, visits: int, **block: int) -> None:
        super().__init__()
        self.visits, self.embed, self.place = visits, nn.Embedding(vocabulary, hidden), nn.Embedding(context, hidden)
        self.blocks = nn.ModuleList(Block(hidden, **block) for _ in range(blocks))
        self.norm, self.head = nn.RMSNorm(hidden), nn.Linear(hidden, vocabulary)

    def forward(self, ids):
        x = self.blocks[0](self.embed(ids) + self.place.weight[: ids.shape[1]])
        for _ in range(self.visits):
            for block in self.blocks[1:]:
                x = block(x)
        return self.head(self.norm(x))
