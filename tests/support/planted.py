"""A looped model whose weights are set by hand, so that what it does is known before it runs.

Three layers, the middle one run twice, four query heads over two key/value heads; layers 0 and 2 write nothing. In layer 1
head 2 looks at the segment start at visit 1, and at visit 2 at every closing bracket that it can see (at the segment
start where it sees none). All else follows from that:

- the second write, of attention, of the experts and of both, is exactly `ratio` times the first, for every token;
- the two visits use `shared` of 8 experts in common;
- where brackets are seen, closers get a logit `z`, everything else 0; without the head at visit 2, all logits are 0.

The residual stream is one direction a purpose (`Direction`), the vocabulary one direction a token, and every token has
the same norm at every step: so each RMSNorm divides by a known number, and each result below is a formula.
"""

from __future__ import annotations

import math
import string
from dataclasses import dataclass
from enum import IntEnum

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from visitlens.hooks.models.config import LoopedMoEConfig
from visitlens.hooks.models.looped_moe import LoopedMoE

CLOSERS = ")]}>"
CHARACTERS = "([{<" + CLOSERS + "\n :=.,;!|/+" + string.ascii_letters
LAYER, HEAD, HEADS, EXPERTS, K = 1, 2, 4, 16, 8
_STILL = 1e30
"""RoPE base: only the first pair of a head turns, and that pair is left empty."""


class Direction(IntEnum):
    """Of the residual stream; token directions follow."""

    BALANCE, CONSTANT, START, CLOSER, LATER, EXPERT, TOKENS = range(7)


@dataclass(frozen=True)
class Planted:
    """The model, its tokenizer, and what must come out."""

    model: LoopedMoE
    tokenizer: Tokenizer
    ratio: float
    shared: int
    x_cosine: float
    """Of the two visits' normalised inputs."""
    q_cosine: float
    first_attention_write: float
    """Norm at visit 1."""
    first_expert_write: float
    nll: float
    """Of a closer where one is seen."""
    nll_without: float
    """The same with the head ablated at visit 2."""


def plant(*, shared: int = 4, ratio: float = 1.5, z: float = 5.0, dtype: torch.dtype = torch.float64) -> Planted:
    """Builds the model; `shared` in 0..8, `ratio` above 1."""
    tokenizer = character_tokenizer()
    vocabulary = tokenizer.get_vocab_size()
    hidden = Direction.TOKENS + vocabulary
    config = LoopedMoEConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_layers=3,
        num_heads=HEADS,
        num_kv_heads=2,
        head_dim=8,
        num_experts=EXPERTS,
        expert_dim=4,
        experts_per_token=K,
        loop_start=LAYER,
        loop_stop=LAYER + 1,
        visits=2,
        context_length=512,
        rope_theta=_STILL,
        norm_eps=0.0,
        tie_embeddings=False,
    )
    model = LoopedMoE(config).to(dtype).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.fill_(1.0 if parameter.ndim == 1 else 0.0)
    # Every token: 2 along BALANCE, 2 along CONSTANT, 1 along its own direction.
    balance, constant, own = 2.0, 2.0, 1.0
    model.embed.W_E[:, Direction.BALANCE], model.embed.W_E[:, Direction.CONSTANT] = balance, constant
    model.embed.W_E[:, Direction.TOKENS :] = own * torch.eye(vocabulary, dtype=dtype)
    size = balance**2 + constant**2 + own**2  # squared norm of each token

    def scale(squared_norm: float) -> float:
        """What RMSNorm multiplies by."""
        return math.sqrt(hidden / squared_norm)

    # Sizes of the writes at visit 1, and what follows from them; each write is half of what the sub-layer gives.
    attention_1 = 1.0
    before_experts_1 = size + attention_1**2
    expert_1 = 0.5 * silu(constant * scale(before_experts_1)) * constant * scale(before_experts_1)
    size_2 = before_experts_1 + expert_1**2
    value = 2 * attention_1 / (own * scale(size))
    carried = attention_1 * scale(size_2) / scale(size)  # the same value, read once more from a longer vector
    later = math.sqrt(
        (ratio * attention_1) ** 2 - carried**2
    )  # the rest of the second write, from the first EXPERT write
    before_experts_2 = size_2 + 2 * attention_1 * carried + carried**2 + later**2
    s = scale(before_experts_2)
    more = (2 * ratio * expert_1 / silu(constant * s) - constant * s) / (later * s)

    block = model.blocks[LAYER]
    bos = Direction.TOKENS + tokenizer.token_to_id("<bos>")
    closers = [Direction.TOKENS + tokenizer.token_to_id(c) for c in CLOSERS]
    q, kv = slice(HEAD * 8, HEAD * 8 + 8), slice(8, 16)  # query head 2 uses key/value head 1
    queries, keys, values, out = block.attn.W_Q[:, q], block.attn.W_K[:, kv], block.attn.W_V[:, kv], block.attn.W_O[q]
    keys[bos, 1] = 1.0
    keys[closers, 2] = 1.0
    keys[Direction.CONSTANT, 3] = 1.0  # read by no query: no key is the zero vector
    queries[Direction.CONSTANT, 1] = 100.0
    queries[Direction.EXPERT, 2] = 100.0 * 2 * constant / expert_1  # only at visit 2: twice the score of the start
    values[bos, 0] = values[closers, 1] = value
    values[Direction.EXPERT, 2] = 2 * later / (scale(size_2) * expert_1)
    values[Direction.CONSTANT, 3] = 1.0  # written nowhere: no value is the zero vector
    out[0, Direction.START] = 1.0
    # Part of what a closer gives lies along BALANCE, so that it lengthens the stream exactly as the start's does.
    aside = attention_1 / balance
    out[1, Direction.BALANCE], out[1, Direction.CLOSER] = aside, math.sqrt(1 - aside**2)
    out[2, Direction.LATER] = 1.0

    experts = block.mlp
    experts.W_router[Direction.CONSTANT, :K] = 1.0
    experts.W_router[Direction.LATER, K - shared : 2 * K - shared] = 3 * constant / later
    experts.W_in[:, Direction.CONSTANT, 0] = 1.0  # gate half
    experts.W_in[:, Direction.CONSTANT, 4] = 1.0  # up half
    experts.W_in[:, Direction.LATER, 4] = more
    experts.W_out[:, 0, Direction.EXPERT] = 1.0

    last = before_experts_2 - expert_1**2 + ((1 + ratio) * expert_1) ** 2
    model.unembed.W_U[Direction.CLOSER, [c - Direction.TOKENS for c in closers]] = z / (
        scale(last) * carried * math.sqrt(1 - aside**2)
    )
    turned = queries[Direction.EXPERT, 2].item() * expert_1
    straight = queries[Direction.CONSTANT, 1].item() * constant
    return Planted(
        model,
        tokenizer,
        ratio,
        shared,
        x_cosine=math.sqrt(size / size_2),
        q_cosine=straight / math.hypot(straight, turned),
        first_attention_write=attention_1,
        first_expert_write=expert_1,
        nll=math.log(len(CLOSERS) * math.exp(z) + vocabulary - len(CLOSERS)) - z,
        nll_without=math.log(vocabulary),
    )


def silu(x: float) -> float:
    return x / (1 + math.exp(-x))


def character_tokenizer() -> Tokenizer:
    """One token a character, `?` for those it doesn't know; <bos>, <eos> and <pad> are 0, 1 and 2."""
    names = ["<bos>", "<eos>", "<pad>", "?", *dict.fromkeys(CHARACTERS)]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer
