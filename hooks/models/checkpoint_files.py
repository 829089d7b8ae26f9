"""What a checkpoint folder holds, by its files: whether it brings a loader of its own, the hashes of its weights and code. No torch."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any

from visitlens.errors import CheckpointError

LOADER = "visitlens_loader.py"
"""A folder with this file loads its model by it (`own_loader`). Named otherwise than the package, which it would hide from a Python
that is started in the folder."""
MAX_CONFIG_BYTES = 16 * 2**20
_SHARD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,200}\.safetensors")
_IMPLEMENTATIONS = ("attn_implementation", "attn_implementation_internal", "experts_implementation")
_LAYERS, _EXPERTS = 4096, 65_536
_COUNTS = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), _LAYERS),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), _EXPERTS),
}
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
    """Of a file's bytes.

    Raises:
        CheckpointError: no regular file: a pipe or a device never ends.
    """
    with _opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: Path) -> Any:
    """The value in a JSON file of a checkpoint, of at most 16 MB; the file may be a link to one (the hub's cache is made of links).

    Raises:
        CheckpointError: no regular file, too large, not JSON.
    """
    with _opened(path) as file:
        data = file.read(MAX_CONFIG_BYTES + 1)
    if len(data) > MAX_CONFIG_BYTES:
        raise CheckpointError(f"{path}: more than {MAX_CONFIG_BYTES:,} bytes; expected a small JSON file")
    try:
        return json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # ValueError: JSON, UTF-8, integers of thousands of digits
        raise CheckpointError(f"{path}: not valid JSON ({error!s:.200})") from error


def check_folder(folder: Path, *, trust: bool) -> None:
    """Before another library reads a checkpoint folder: what in it would hang it, lead it elsewhere or make it run code.

    Args:
        trust: whether the caller said that code from the folder, or named by it, may run.

    Raises:
        CheckpointError: a pipe, a device or a broken link in place of a file; weights outside the folder or of another kind than
            safetensors; more layers or experts than any model has; an implementation that is code from the hub.
    """
    for file in sorted(folder.iterdir()):
        if file.suffix in (".json", ".safetensors", ".model") and not file.is_file():
            raise CheckpointError(f"{file}: expected a regular file, got a pipe, a device, a folder or a broken link")
    for index in sorted(folder.glob("*.index.json")):
        names = read_json(index)
        names = names.get("weight_map") if isinstance(names, dict) else None
        if not isinstance(names, dict):
            raise CheckpointError(f"{index}: no weight_map there")
        for name in names.values():
            if not isinstance(name, str) or not _SHARD.fullmatch(name):
                raise CheckpointError(
                    f"{index}: names {name!r:.100} as weights; expected *.safetensors beside it (pickled weights run code)"
                )
    if (folder / "config.json").is_file():
        _check_values(read_json(folder / "config.json"), str(folder / "config.json"), trust)


def _check_values(value: Any, where: str, trust: bool) -> None:
    """Of a configuration and those inside it."""
    if not isinstance(value, dict):
        return
    for name, inside in value.items():
        if name.endswith(_IMPLEMENTATIONS) and "/" in str(inside) and not trust:
            raise CheckpointError(
                f"{where}: {name} is {inside!r:.100}, code that would be fetched from the hub and run: read it, then say "
                "--trust-remote-code (trust_remote_code=True), or take that line out"
            )
        if name in _COUNTS and isinstance(inside, int) and inside > _COUNTS[name]:
            raise CheckpointError(f"{where}: {name} is {inside:,}; expected at most {_COUNTS[name]:,}")
        _check_values(inside, where, trust)


@contextmanager
def _opened(path: Path) -> Iterator[BufferedReader]:
    try:  # without O_NONBLOCK a pipe would wait for its writer
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read ({error.strerror})") from error
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise CheckpointError(f"{path}: expected a regular file, got a folder, a pipe or a device")
        yield file
