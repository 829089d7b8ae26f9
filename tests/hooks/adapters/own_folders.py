"""Folders that bring their own loader: the one of docs/adapters.md, word for word, and one with MoEUT's anatomy."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_model
from tests.hooks.adapters.remote_code import tiny_moeut, tiny_ragged
from torch import nn

LOADER = "visitlens_loader.py"
PAGE = Path(__file__).resolve().parents[3] / "docs" / "adapters.md"
MOEUT = """\
from safetensors.torch import load_model
from torch import nn

import visitlens as vl
from visitlens.hooks.adapters.families.moeut import MoEUT

from .model import TinyMoEUT


def load(folder, *, dtype, device, **options):
    model = TinyMoEUT()
    model.embedding, model.lm_head = nn.Embedding(61, 16), nn.Linear(16, 61)
    load_model(model, folder / "model.safetensors")
    return vl.adapt(model.to(device, dtype), MoEUT(context_length=64, **options))
"""
RECURSIVE = """\
from safetensors.torch import load_model
from tiny_ragged import Recursive

import visitlens as vl
from visitlens.hooks.adapters.families.mixture_of_recursions import MixtureOfRecursions


def load(folder, *, dtype, device):
    model = Recursive()
    load_model(model, folder / "model.safetensors")
    return vl.adapt(model.to(device, dtype), MixtureOfRecursions())
"""
STEPS = {"documented": [0, 1, 2, 1, 2], "moeut": [0, 1] * 3}
"""Physical layer of each step, by hand."""


def documented(folder: Path) -> Path:
    """The page's folder, with random weights."""
    text = PAGE.read_text(encoding="utf-8")
    folder.mkdir()
    for name, code in re.findall(r"```python\n# my-model/(\S+)\n(.*?)```", text, flags=re.DOTALL):
        (folder / name).write_text(code)
    config = re.search(r"```json\n(\{.*?\})\n```", text, flags=re.DOTALL)
    assert config is not None
    (folder / "config.json").write_text(config[1])
    beside: dict[str, Any] = {"__name__": "model"}
    exec(compile((folder / "model.py").read_text(), "model.py", "exec"), beside)
    torch.manual_seed(5)
    save_model(beside["LoopedMoE"](**json.loads(config[1])), str(folder / "model.safetensors"))
    return folder


def moeut(folder: Path) -> Path:
    """Its code is in a `model.py` too."""
    folder.mkdir()
    shutil.copy(str(tiny_moeut.__file__), folder / "model.py")
    (folder / LOADER).write_text(MOEUT)
    torch.manual_seed(5)
    model = tiny_moeut.TinyMoEUT()
    model.embedding, model.lm_head = nn.Embedding(61, 16), nn.Linear(16, 61)
    save_model(model, str(folder / "model.safetensors"))
    return folder


def recursive(folder: Path) -> Path:
    """A Mixture of Recursions; its words aren't those of the other folders, so it has no tokenizer."""
    folder.mkdir()
    shutil.copy(str(tiny_ragged.__file__), folder)
    (folder / LOADER).write_text(RECURSIVE)
    torch.manual_seed(8)
    save_model(tiny_ragged.Recursive(), str(folder / "model.safetensors"))
    return folder


FOLDERS = {"documented": documented, "moeut": moeut}
