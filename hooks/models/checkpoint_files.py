"""What a checkpoint folder holds, by its files: whether it brings a loader of its own, the hashes of its weights and code. No torch."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from visitlens.errors import CheckpointError

LOADER = "visitlens_loader.py"
"""A folder with this file loads its model by it (`own_loader`). Named otherwise than the package, which it would hide from a Python
that is started in the folder."""
OTHER_WEIGHTS = ("*.pt", "*.pth", "*.bin", "*.ckpt")
"""What a loader of one's own may read; visitlens itself opens none of them, but to hash their bytes."""


def brings_loader(folder: Path) -> bool:
    """Whether the folder's own code makes the model."""
    return (folder / LOADER).is_file()


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files, in the order of their names; where a folder brings its loader and has none, its other weights."""
    files = sorted(folder.glob("*.safetensors"))
    if not files and brings_loader(folder):
        files = sorted(file for pattern in OTHER_WEIGHTS for file in folder.glob(pattern))
    return files


def weights_sha256(folder: Path) -> str:
    """Of the weight files one after another; of one file, its own SHA-256.

    Raises:
        CheckpointError: no weights there.
    """
    files = weight_files(folder)
    if not files:
        raise CheckpointError(f"{folder}: no {_expected(folder)}")
    if len(files) == 1:
        return sha256_of(files[0])
    digest = hashlib.sha256()
    for file in files:
        digest.update(bytes.fromhex(sha256_of(file)))
    return digest.hexdigest()


def _expected(folder: Path) -> str:
    if brings_loader(folder):
        return (
            f"weights there, by which a recording knows its model: expected *.safetensors, or {', '.join(OTHER_WEIGHTS)}. Of a random "
            'model too: torch.manual_seed(0), make it once, safetensors.torch.save_model(model, "model.safetensors"), and '
            f"let {LOADER} read that"
        )
    return "model.safetensors there; a checkpoint folder holds config.json, model.safetensors and tokenizer.json"


def code_sha256(folder: Path) -> str | None:
    """Of what makes the model of a folder that brings its loader: every *.py below it, by path, and config.json. None of others."""
    if not brings_loader(folder):
        return None
    digest = hashlib.sha256()
    for file in (*_code_files(folder), *([Path("config.json")] if (folder / "config.json").is_file() else [])):
        digest.update(f"{file.as_posix()} {sha256_of(folder / file)}\n".encode())
    return digest.hexdigest()


def _code_files(folder: Path) -> list[Path]:
    """Every *.py that may be imported from there, relative to it: in linked folders too, each once, and in no hidden one."""
    files, seen = list[Path](), set[str]()
    for place, below, names in os.walk(folder, followlinks=True):
        if (real := os.path.realpath(place)) in seen:
            below.clear()
            continue
        seen.add(real)
        below[:] = sorted(name for name in below if not name.startswith("."))
        found = (Path(place, name) for name in names if name.endswith(".py") and not name.startswith("."))
        files += [file.relative_to(folder) for file in found if file.is_file()]
    return sorted(files)


def sha256_of(path: Path) -> str:
    """Of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
