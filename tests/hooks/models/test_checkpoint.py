"""A checkpoint folder comes back as it was written; whatever is wrong with it is said by name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from visitlens.errors import CheckpointError, InputError
from visitlens.hooks.models.checkpoint import load_config, load_model, load_tokenizer, save_model
from visitlens.hooks.models.checkpoint_files import weights_sha256
from visitlens.hooks.models.looped_moe import LoopedMoE


@pytest.fixture
def folder(make_model: Callable[..., LoopedMoE], tmp_path: Path) -> Path:
    save_model(make_model(2), tmp_path / "checkpoint", torch.float32)
    return tmp_path / "checkpoint"


def edit_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_float32_weights_come_back_bit_for_bit(folder: Path, make_model: Callable[..., LoopedMoE]) -> None:
    saved, loaded = make_model(2), load_model(folder)
    assert loaded.config == saved.config and load_config(folder) == saved.config
    assert not loaded.training and not any(p.requires_grad for p in loaded.parameters())
    tokens = torch.tensor([[0, 5, 9, 30]])
    assert torch.equal(loaded(tokens), saved(tokens))


def test_bfloat16_is_the_default_on_disk_and_rounds_once(tmp_path: Path, make_model: Callable[..., LoopedMoE]) -> None:
    model = make_model(3, tie_embeddings=False, shared_expert_dim=4, qk_norm=True)
    save_model(model, tmp_path)
    loaded = load_model(tmp_path)
    for (name, a), (same, b) in zip(model.named_parameters(), loaded.named_parameters(), strict=True):
        assert name == same and torch.equal(b, a.bfloat16().float()) and b.dtype == torch.float32
    assert load_model(tmp_path, "bfloat16").embed.W_E.dtype == torch.bfloat16
    assert load_model(tmp_path, "float64").embed.W_E.dtype == torch.float64


def test_the_weights_hash_is_that_of_the_file(folder: Path) -> None:
    assert weights_sha256(folder) == hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(name: str, folder: Path) -> None:
    (folder / name).unlink()
    with pytest.raises(CheckpointError, match=rf"no {name} there; a checkpoint folder holds config\.json"):
        load_model(folder)


def test_a_missing_folder_or_tokenizer_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere: no config\.json there"):
        load_model(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json there"):
        load_tokenizer(folder)
    with pytest.raises(CheckpointError, match=r"no model\.safetensors there"):
        weights_sha256(tmp_path)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.update({"blocks.1.attn.W_Q": torch.zeros(16, 8)}))
    with pytest.raises(
        CheckpointError, match=r"blocks\.1\.attn\.W_Q has shape \(16, 8\), the configuration says \(16, 16\)"
    ):
        load_model(folder)


def test_missing_and_unknown_tensors_are_all_named(folder: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["ln_final.w"]
        tensors["head.weight"] = torch.zeros(2)

    edit_tensors(folder, change)
    with pytest.raises(CheckpointError) as caught:
        load_model(folder)
    assert "ln_final.w is missing" in str(caught.value) and "head.weight is not part of the model" in str(caught.value)


def test_weights_of_another_configuration_are_refused(folder: Path) -> None:
    edit_config(folder, num_experts=11)
    with pytest.raises(CheckpointError, match=r"W_router has shape \(16, 10\), the configuration says \(16, 11\)"):
        load_model(folder)


@pytest.mark.parametrize("damage", ["truncated", "empty", "garbage"])
def test_damaged_weights_are_refused(damage: str, folder: Path) -> None:
    file = folder / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes({"truncated": data[: len(data) // 2], "empty": b"", "garbage": b"\xff" * 64}[damage])
    with pytest.raises(CheckpointError, match=r"not a readable safetensors file .*copy or fetch it again"):
        load_model(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("", "not valid JSON"),
        ("\x00\ufffd", "not valid JSON"),
        ("[1, 2]", "JSON object"),
        ("null", "JSON object"),
        ('{"vocab_size": 10}', "architecture 'LoopedMoE', got None"),
        ('{"architecture": "LlamaForCausalLM"}', "architecture 'LoopedMoE', got 'LlamaForCausalLM'"),
    ],
)
def test_a_wrong_config_file_is_refused(text: str, message: str, folder: Path) -> None:
    (folder / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match=message):
        load_model(folder)


def test_a_config_that_is_not_utf8_is_refused(folder: Path) -> None:
    (folder / "config.json").write_bytes(b'{"architecture": "\xff\xfe"}')
    with pytest.raises(CheckpointError, match="not valid JSON"):
        load_model(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": "many"}, "num_experts"),
        ({"num_experts": 10.5}, "num_experts"),
        ({"num_experts": None}, "num_experts"),
        ({"qk_norm": "no"}, "qk_norm"),
        ({"num_kv_heads": 3}, "num_heads must be a multiple of num_kv_heads"),
        ({"loop_stop": 9}, r"loop span must lie within layers 0\.\.3"),
        ({"depth": 3}, "unknown fields .'depth'."),
    ],
)
def test_a_config_that_makes_no_model_is_refused(changes: dict, message: str, folder: Path) -> None:
    edit_config(folder, **changes)
    with pytest.raises(CheckpointError, match=message):
        load_model(folder)


def test_an_unknown_dtype_is_refused(folder: Path) -> None:
    with pytest.raises(InputError, match="float32, bfloat16, float16, float64, got 'int8'"):
        load_model(folder, "int8")


def test_a_damaged_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="not a readable tokenizer file"):
        load_tokenizer(tmp_path)
