import json

from model import LoopedMoE
from safetensors.torch import load_model

import visitlens as vl
from visitlens.hooks.adapters.family import Anatomy, Family, Layer, pre_norm_reads


class MyFamily(Family):
    attention_calls = "sdpa"  # it calls scaled_dot_product_attention itself
    call = {}  # its forward takes token ids, and nothing else
    loops = "visits"  # model.visits is read at every forward

    def body(self, model):
        return model

    def logits(self, result):
        return result

    def anatomy(self, model):
        parts = {"attention": "attn", "norm": "norm1", "mlp": "moe", "mlp_norm": "norm2"}
        reads = pre_norm_reads(**parts, router="router", experts="experts")
        layers = tuple(Layer((f"blocks.{i}",), reads, attention="attn") for i in range(len(model.blocks)))
        looped = range(1, len(layers))
        return Anatomy(layers, order=(0, *[*looped] * model.visits))

    def sizes(self, model):
        block, hidden = model.blocks[0], model.embed.embedding_dim
        heads = block.attn.heads
        return {
            "vocab_size": model.embed.num_embeddings,
            "hidden_size": hidden,
            "num_heads": heads,
            "num_kv_heads": heads,
            "head_dim": hidden // heads,
            "value_dim": hidden // heads,
            "num_experts": block.moe.router.score.out_features,
            "experts_per_token": block.moe.router.k,
            "context_length": model.place.num_embeddings,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 2,
        }


def load(folder, *, dtype, device, steps=None):
    model = LoopedMoE(**json.loads((folder / "config.json").read_text()))
    load_model(model, folder / "model.safetensors")
    model.visits = steps or model.visits
    return vl.adapt(model.to(device, dtype), MyFamily())
