"""What is wrong with a folder that brings its own loader is one error, with its place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.hooks.adapters.own_folders import LOADER

from visitlens.errors import CheckpointError, InputError, VisitlensError
from visitlens.hooks.loading.load_model import load_model

Run = Callable[..., tuple[int, str, str]]
TRUST = "--trust-remote-code"
SHORT = "def load(folder, *, dtype, device):\n    "
BAD = {
    "x = (": (CheckpointError, r"visitlens_loader\.py:1: importing it failed \(SyntaxError: '\(' was never closed"),
    "import torch\nimport nowhere": (
        CheckpointError,
        r"visitlens_loader\.py:2: importing it failed \(ModuleNotFoundError",
    ),
    "import helper": (CheckpointError, r"helper\.py:4: importing it failed \(KeyError: 'gone'\)"),
    "raise SystemExit(3)": (CheckpointError, r"visitlens_loader\.py:1: importing it failed \(SystemExit: 3\)"),
    "made = 1": (
        CheckpointError,
        r"visitlens_loader\.py: defines no function load; expected def load\(folder, \*, dtype",
    ),
    "load = 1": (CheckpointError, r"defines no function load"),
    "def load(folder): ...": (
        CheckpointError,
        r"load\(folder\): got an unexpected keyword argument 'd.*'; expected def load",
    ),
    "def load(folder, *, dtype, device, n): ...": (CheckpointError, r"missing a required argument: 'n'"),
    f"{SHORT}return {{}}['x']": (CheckpointError, r"visitlens_loader\.py:2: load failed \(KeyError: 'x'\)"),
    f"{SHORT}import visitlens\n    return visitlens.adapt(None)": (
        InputError,
        r"loader\.py:3: load failed \(no adapter for",
    ),
    f"{SHORT}return None": (
        CheckpointError,
        r"load returned NoneType, expected an nn\.Module, or one with its adapter",
    ),
    f"{SHORT}return 1, 2": (CheckpointError, r"load returned tuple, expected an nn\.Module"),
    f"import torch\n{SHORT}return torch.nn.Linear(2, 2, device='meta')": (
        CheckpointError,
        r"asked for device cpu and returned weight on meta: end with \.to\(device\)",
    ),
}


@pytest.mark.parametrize("code", BAD)
def test_what_is_wrong_with_a_loader_is_said_with_its_place(code: str, tmp_path: Path) -> None:
    (tmp_path / LOADER).write_text(f"{code}\n")
    (tmp_path / "helper.py").write_text("def find():\n    return {}\n\nfind()['gone']\n")
    kind, said = BAD[code]
    with pytest.raises(VisitlensError, match=said) as caught:
        load_model(tmp_path, trust_remote_code=True)
    assert caught.type is kind


def test_a_tokenizer_and_a_config_are_missed_in_words(
    folder: Callable[..., Path], words: Path, run: Run, tmp_path: Path
) -> None:
    own = folder()
    (own / "config.json").unlink()
    code, _, err = run("record", own, words, "-o", tmp_path / "r", TRUST)
    place = (own / LOADER).read_text().splitlines().index("def load(folder, *, dtype, device, steps=None):") + 2
    assert code == 1 and f"{own / LOADER}:{place}: load failed (FileNotFoundError" in err and err.count("error:") == 1
    own = folder(name="no-tokenizer")
    (own / "tokenizer.json").unlink()
    code, _, err = run("record", own, words, "-o", tmp_path / "r", TRUST)
    assert code == 1 and f"{own}: no tokenizer.json there; a checkpoint folder holds {LOADER}, weights and" in err
