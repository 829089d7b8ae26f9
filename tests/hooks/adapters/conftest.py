"""Tiny random-weight models of every family of transformers that has an adapter, and what each family's contract is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.hooks.adapters.own_folders import FOLDERS
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn

import visitlens as vl
from visitlens.probe.reading.recorded_run import RecordedRun

pytest.importorskip("transformers", reason="the extra visitlens[sources] is optional")

SMALL: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
DENSE = {**SMALL, "num_key_value_heads": 2, "intermediate_size": 24, "num_hidden_layers": 3}
MOE = {**SMALL, "num_key_value_heads": 2, "intermediate_size": 24, "num_hidden_layers": 3, "num_experts_per_tok": 3}
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": DENSE,
    "qwen3": {**DENSE, "head_dim": 8},
    "qwen3_moe": {
        **MOE,
        "head_dim": 8,
        "num_experts": 7,
        "moe_intermediate_size": 8,
        "mlp_only_layers": [0],
        "decoder_sparse_step": 1,
    },
    "olmoe": {**MOE, "num_experts": 7},
    "mixtral": {**MOE, "num_local_experts": 5},
    "deepseek_v3": {
        **MOE,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 8,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 6,
        "v_head_dim": 5,
        "n_shared_experts": 1,
    },
    "gpt_oss": {**MOE, "head_dim": 8, "num_local_experts": 6, "sliding_window": 12},
    "dory": {
        **DENSE,
        "num_hidden_layers": 4,
        "n_input_layers": 1,
        "n_output_layers": 1,
        "n_recurrent_loops": 3,
        "head_dim": 8,
        "sliding_window": 12,
    },
    "inkling2_loop_text": {
        **MOE,
        "num_hidden_layers": 6,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
        "head_dim": 8,
        "swa_head_dim": 8,
        "sliding_window_size": 12,
        "rel_extent": 16,
        "d_rel": 4,
        "n_layers_per_attn_res_block": 2,
        "loop_layer_index_start": 2,
        "loop_layer_index_end": 4,
        "loop_num_passes": 3,
        "loop_gate_rank": 4,
        "n_routed_experts": 8,
        "moe_intermediate_size": 8,
        "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"],
        "unpadded_vocab_size": 61,
    },
    "hrm_text": {**SMALL, "intermediate_size": 24, "head_dim": 4, "num_hidden_layers": 2, "H_cycles": 2, "L_cycles": 3},
    "albert": {
        **SMALL,
        "intermediate_size": 24,
        "embedding_size": 8,
        "num_hidden_layers": 6,
        "num_hidden_groups": 2,
        "inner_group_num": 1,
    },
    "zamba": {
        **SMALL,
        "num_key_value_heads": 4,
        "intermediate_size": 24,
        "num_hidden_layers": 5,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "n_mamba_heads": 2,
        "mamba_d_state": 4,
        "use_mamba_kernels": False,
    },
    "zamba2": {
        **SMALL,
        "intermediate_size": 24,
        "num_hidden_layers": 7,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid", "hybrid", "mamba", "hybrid"],
        "num_mem_blocks": 2,
        "n_mamba_heads": 2,
        "mamba_d_state": 4,
        "mamba_ngroups": 1,
        "adapter_rank": 2,
        "use_shared_attention_adapter": True,
        "use_mem_rope": True,
        "chunk_size": 8,
        "use_mamba_kernels": False,
    },
}
STEPS: dict[str, list[tuple[int, int]]] = {
    "llama": [(0, 1), (1, 1), (2, 1)],
    "qwen3": [(0, 1), (1, 1), (2, 1)],
    "qwen3_moe": [(0, 1), (1, 1), (2, 1)],
    "olmoe": [(0, 1), (1, 1), (2, 1)],
    "mixtral": [(0, 1), (1, 1), (2, 1)],
    "deepseek_v3": [(0, 1), (1, 1), (2, 1)],
    "gpt_oss": [(0, 1), (1, 1), (2, 1)],
    "dory": [(0, 1), (1, 1), (2, 1), (1, 2), (2, 2), (1, 3), (2, 3), (3, 1)],
    "inkling2_loop_text": [(0, 1), (1, 1), (2, 1), (3, 1), (2, 2), (3, 2), (2, 3), (3, 3), (4, 1), (5, 1)],
    # Two high cycles of: the L stack (layers 0, 1) three times, then the H stack (2, 3).
    "hrm_text": [
        *[(0, 1), (1, 1), (0, 2), (1, 2), (0, 3), (1, 3), (2, 1), (3, 1)],
        *[(0, 4), (1, 4), (0, 5), (1, 5), (0, 6), (1, 6), (2, 2), (3, 2)],
    ],
    "albert": [(0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (1, 3)],
    # Mamba 0, Mamba 1, [shared block 2, Mamba 3], Mamba 4, [shared block, Mamba 5]
    "zamba": [(0, 1), (1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (5, 1)],
    # m0, [A, m], m, [B, m], [A, m], m, [B, m]
    "zamba2": [*[(0, 1), (1, 1), (2, 1), (3, 1), (4, 1), (5, 1)], *[(1, 2), (6, 1), (7, 1), (4, 2), (8, 1)]],
}
"""(layer, visit) of each step, by hand."""
NATIVE = tuple(CONFIGS)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "family" in metafunc.fixturenames:
        metafunc.parametrize("family", NATIVE)


@pytest.fixture(scope="session")
def expected_steps() -> dict[str, list[tuple[int, int]]]:
    return STEPS


@pytest.fixture(scope="session")
def make_hf() -> Callable[..., nn.Module]:
    """Factory: `make_hf(family, dtype=torch.float32, **config)`, random weights away from their special initial values."""
    import transformers

    def build(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
        config = transformers.AutoConfig.for_model(family, **{**CONFIGS[family], **changes})
        if family == "inkling2_loop_text":
            from transformers.models.inkling2_loop.modeling_inkling2_loop import Inkling2LoopForCausalLM as cls
        elif family == "albert":
            cls = transformers.AlbertForMaskedLM
        else:
            cls = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        torch.manual_seed(1)
        model = cls(config)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "A_log" in name or "dt_" in name:
                    continue
                noise = torch.randn(parameter.shape, generator=generator)
                gain = parameter.ndim == 1 and bool(parameter.any())
                parameter.copy_(parameter * (1 + 0.2 * noise) if gain else 0.2 * noise)
            for name, buffer in model.named_buffers():
                if "correction_bias" in name:  # chosen experts are then not the top k of the scores
                    buffer.copy_(0.5 * torch.randn(buffer.shape, generator=generator))
        return model.to(dtype).eval().requires_grad_(False)

    return build


@pytest.fixture(scope="session")
def adapted(make_hf: Callable[..., nn.Module]) -> Callable[..., Any]:
    """Factory of adapted models, made once each."""
    from visitlens.hooks.adapters.adapt import adapt

    made: dict[Any, Any] = {}

    def build(family: str, dtype: torch.dtype = torch.float32) -> Any:
        if (family, dtype) not in made:
            made[family, dtype] = adapt(make_hf(family, dtype))
        return made[family, dtype]

    return build


@pytest.fixture(scope="session")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of 3 to 30 of 58 words."""
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("text") / "words.jsonl"
    documents = [" ".join(f"w{i}" for i in rng.integers(3, 61, rng.integers(3, 30))) for _ in range(10)]
    path.write_text("".join(json.dumps({"text": d}) + "\n" for d in documents))
    return path


@pytest.fixture(scope="session")
def save_tokenizer() -> Callable[[Path], None]:
    def save(folder: Path) -> None:
        vocabulary = {"<bos>": 0, "<eos>": 1, "<pad>": 2} | {f"w{i}": i for i in range(3, 61)}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer.save(str(folder / "tokenizer.json"))

    return save


@pytest.fixture(scope="session")
def recorded(
    make_hf: Callable[..., Any],
    words: Path,
    save_tokenizer: Callable[[Path], None],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[str], RecordedRun]:
    """Factory: a family's tiny checkpoint, recorded at level `tokens` by `visitlens.record`; made once each."""
    made: dict[str, RecordedRun] = {}

    def build(family: str) -> RecordedRun:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            make_hf(family).save_pretrained(folder / "model")
            save_tokenizer(folder / "model")
            options = {"context_length": 48, "attention": "torch"}
            made[family] = vl.record(folder / "model", words, folder / f"{family}.vlens", level="tokens", **options)
        return made[family]

    return build


@pytest.fixture(scope="module")
def halting() -> Any:
    from tests.hooks.adapters.remote_code.tiny_ragged import Halting, HaltingFamily

    return vl.adapt(Halting().eval().requires_grad_(False), HaltingFamily())


@pytest.fixture(scope="module")
def recursive() -> Any:
    from tests.hooks.adapters.remote_code.tiny_ragged import Recursive

    from visitlens.hooks.adapters.families.mixture_of_recursions import MixtureOfRecursions

    torch.manual_seed(8)
    return vl.adapt(Recursive().eval().requires_grad_(False), MixtureOfRecursions())


@pytest.fixture
def folder(tmp_path: Path, save_tokenizer: Callable[[Path], None]) -> Callable[[str], Path]:
    """Factory: one of `own_folders`, with a tokenizer."""

    def build(kind: str = "documented", name: str = "") -> Path:
        made = FOLDERS[kind](tmp_path / (name or kind))
        save_tokenizer(made)
        return made

    return build


@pytest.fixture(scope="session")
def check_replays() -> Callable[..., None]:
    """Asserts that what goes on from a step, at each layer with heads and each choice of its visits, is bit for bit the whole
    forward; and that the heads matter."""
    from visitlens.hooks.adapters.replay import replay_of
    from visitlens.hooks.interventions.intervene import intervene, replace

    @torch.no_grad()
    def check(model: Any, tokens: torch.Tensor, segments: torch.Tensor) -> None:
        real, replay = segments >= 0, replay_of(model)
        with replay.going_on(keep=len(model.plan)):
            plain = model(tokens, segments)[real]
        assert torch.equal(plain, model(tokens, segments)[real])
        without = model.config.absent.get("PV", {})
        for layer in sorted(set(model.plan.visits) - set(without)):
            steps, changed = [step.index for step in model.plan.steps if step.layer == layer], []
            for visits, still, going_on in replay.changed_at(steps):
                with intervene(model, [replace("PV", 0.0, layer=layer, visit=visits, head=1)], must_match=False):
                    whole = model(tokens, segments)[real]
                chain = [replace("PV", 0.0, layer=layer, visit=visit, head=1) for visit in still]
                with going_on, intervene(model, chain, must_match=False):
                    assert torch.equal(model(tokens, segments)[real], whole), (layer, visits)
                changed.append(not torch.equal(whole, plain))
            assert any(changed), f"layer {layer} does nothing"

    return check
