"""A checkpoint folder: `config.json`, `model.safetensors`, `tokenizer.json`. Never pickle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from visitlens.errors import CheckpointError, InputError
from visitlens.hooks.models.checkpoint_files import LOADER, brings_loader, read_json
from visitlens.hooks.models.config import LoopedMoEConfig
from visitlens.hooks.text.tokenizer import Tokenizer, read_tokenizer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from visitlens.hooks.models.looped_moe import LoopedMoE

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def load_config(folder: Path) -> LoopedMoEConfig:
    """The configuration of a checkpoint folder."""
    return LoopedMoEConfig.from_dict(read_json(_existing(Path(folder), "config.json")))


def load_model(
    folder: str | Path, dtype: str = "float32", device: str = "cpu", mesh: DeviceMesh | None = None
) -> LoopedMoE:
    """The model of a checkpoint folder, in evaluation mode. With a mesh, this process reads its share of the experts
    alone and runs them with the others (`expert_parallel`).

    Raises:
        CheckpointError: a file is missing or damaged, or tensors disagree with the configuration (all are named).
        InputError: an unknown dtype.
    """
    from visitlens.hooks.models.expert_parallel import is_expert, read_share, run_together
    from visitlens.hooks.models.looped_moe import LoopedMoE

    if dtype not in DTYPES:
        raise InputError(f"expected a dtype among {', '.join(DTYPES)}, got {dtype!r}")
    folder = Path(folder)
    config = load_config(folder)
    path = _existing(folder, "model.safetensors")
    with torch.device("meta"):  # no memory for weights that are about to be replaced
        model = LoopedMoE(config)
    expected = {name: tuple(p.shape) for name, p in model.named_parameters()}
    try:
        with safe_open(path, framework="pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (no mapping)
            _check_shapes(path, expected, shapes)
            state = {}
            for name in expected:
                if mesh is not None and is_expert(name):
                    state[name] = read_share(file.get_slice(name), mesh, device, DTYPES[dtype])
                else:  # a copy: what safetensors gives may be the file itself, mapped into memory
                    state[name] = file.get_tensor(name).to(device, DTYPES[dtype], copy=True)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: not a readable safetensors file ({error}); copy or fetch it again") from error
    model.load_state_dict(state, assign=True)
    if mesh is not None:
        run_together(model)
    return model.to(device=device, dtype=DTYPES[dtype]).eval().requires_grad_(False)


def _check_shapes(path: Path, expected: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]]) -> None:
    problems = [f"{name} is missing" for name in sorted(set(expected) - set(found))]
    problems += [f"{name} is not part of the model" for name in sorted(set(found) - set(expected))]
    problems += [
        f"{name} has shape {found[name]}, the configuration says {shape}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]
    if problems:
        raise CheckpointError(f"{path} disagrees with config.json: {'; '.join(problems[:8])}")


def save_model(model: LoopedMoE, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    """Writes `config.json` and `model.safetensors`."""
    save_weights(model.config, {name: p.detach() for name, p in model.named_parameters()}, folder, dtype)


def save_weights(
    config: LoopedMoEConfig, weights: Mapping[str, Tensor], folder: Path, dtype: torch.dtype = torch.bfloat16
) -> None:
    """`save_model` of the parameters by name."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config.to_dict(), indent=2) + "\n", encoding="utf-8")
    tensors = {name: p.to(dtype).contiguous() for name, p in weights.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def load_tokenizer(path: Path) -> Tokenizer:
    """From a Hugging Face `tokenizer.json`, or the checkpoint folder that holds one; without the truncation and padding that it
    may have been saved with."""
    return read_tokenizer(_existing(Path(path), "tokenizer.json") if Path(path).is_dir() else Path(path))


def _existing(folder: Path, name: str) -> Path:
    path = folder / name
    if not path.is_file():
        what = "config.json, model.safetensors and tokenizer.json"
        if brings_loader(folder):
            what = f"{LOADER}, weights and tokenizer.json (tokenizers.Tokenizer's save)"
        raise CheckpointError(f"{folder}: no {name} there; a checkpoint folder holds {what}")
    return path
