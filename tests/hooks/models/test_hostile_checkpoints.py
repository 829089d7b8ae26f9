"""A checkpoint folder of somebody else's: pipes, endless devices, other people's files, counts without end, code by name."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from visitlens.errors import CheckpointError
from visitlens.hooks.loading.load_model import load_model, load_transformers
from visitlens.hooks.models.checkpoint import save_model
from visitlens.hooks.models.checkpoint_files import MAX_CONFIG_BYTES, check_folder, read_json, sha256_of
from visitlens.hooks.models.looped_moe import LoopedMoE


@pytest.fixture
def native(make_model: Callable[..., LoopedMoE], tmp_path: Path) -> Path:
    save_model(make_model(2), tmp_path / "native", torch.float32)
    return tmp_path / "native"


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 32,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
    }
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_key_value_heads=2))
    model.save_pretrained(tmp_path / "foreign")
    return tmp_path / "foreign"


def configured(folder: Path, **changes: object) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize("folder", ["native", "foreign"])
def test_what_never_ends_is_refused_at_once(folder: str, kind: str, name: str, request: pytest.FixtureRequest) -> None:
    place = request.getfixturevalue(folder)
    (place / name).unlink()
    if kind == "pipe":
        os.mkfifo(place / name)
    else:
        (place / name).symlink_to("/dev/zero")
    began = time.process_time()
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        (load_model if folder == "native" else load_transformers)(place)
    with pytest.raises(CheckpointError, match="regular file"):
        sha256_of(place / name)
    assert time.process_time() - began < 30, "it was read to its end"


def test_a_link_to_a_file_is_a_file(foreign: Path, tmp_path: Path) -> None:
    """As in the hub's cache."""
    (foreign / "config.json").rename(tmp_path / "blob")
    (foreign / "config.json").symlink_to(tmp_path / "blob")
    assert load_transformers(foreign).config.num_hidden_layers == 1


@pytest.mark.parametrize(("layers", "visits"), [(10**8, 1), (4, 10**8), (4097, 1)])
def test_layers_without_end_are_refused_before_they_are_made(native: Path, layers: int, visits: int) -> None:
    with pytest.raises(CheckpointError, match=r"steps .*at most 4,096"):
        load_model(configured(native, num_layers=layers, visits=visits))


def test_layers_without_end_of_transformers_are_refused_before_they_are_made(foreign: Path) -> None:
    with pytest.raises(CheckpointError, match="num_hidden_layers is 100,000,000"):
        load_transformers(configured(foreign, num_hidden_layers=10**8))


@pytest.mark.parametrize(
    "name", ["x.bin", "../outside.safetensors", "/etc/x.safetensors", "a/b.safetensors", 7, "..safetensors/x", "x.pt"]
)
def test_an_index_names_safetensors_beside_it_alone(foreign: Path, name: object) -> None:
    index = {"metadata": {}, "weight_map": {"lm_head.weight": name}}
    (foreign / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"expected \*\.safetensors beside it"):
        load_transformers(foreign)


@pytest.mark.parametrize("field", ["attn_implementation", "_attn_implementation", "experts_implementation"])
@pytest.mark.parametrize("inside", [False, True])
def test_an_implementation_from_the_hub_needs_trust(foreign: Path, field: str, inside: bool) -> None:
    change = {field: "org/kernel"}
    configured(foreign, **({"text_config": change} if inside else change))
    with pytest.raises(CheckpointError, match=r"org/kernel.*--trust-remote-code"):
        load_transformers(foreign)
    check_folder(foreign, trust=True)
    check_folder(configured(foreign, **{field: "eager", "text_config": {}}), trust=False)


@pytest.mark.parametrize(
    "text", ["[" * 400_000, '{"a": ' + "9" * 100_000 + "}", '{"a": ' + " " * MAX_CONFIG_BYTES + "1}"]
)
def test_json_that_exhausts_a_reader_is_one_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json: (not valid JSON|more than)"):
        read_json(tmp_path / "config.json")
