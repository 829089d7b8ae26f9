"""Models by name: what a name or path means is settled before torch is imported. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from visitlens.errors import CheckpointError, InputError
from visitlens.hooks.text.documents import read_documents
from visitlens.probe.model.bundled import PAIR, SPECIMENS

if TYPE_CHECKING:
    from visitlens.probe.model.model import Model

BUNDLED = {"smelt": PAIR["looped"], "baseline": PAIR["baseline"], **SPECIMENS}
_HUB_NAME_PARTS = 2


def checkpoint(source: str | Path) -> Path:
    """The folder of a bundled name or a path; a hub name (owner/name), fetched later, as it is.

    Raises:
        CheckpointError: neither, with the names that there are.
        InputError: a recording; those are opened with `visitlens.open`.
    """
    folder = Path(BUNDLED.get(str(source), source))
    if (folder / "manifest.json").is_file():
        raise InputError(f"{folder} is a recording: open it with visitlens.open(...)")
    if not folder.is_dir() and (len(folder.parts) != _HUB_NAME_PARTS or folder.is_absolute() or folder.exists()):
        raise CheckpointError(
            f"{source}: no such checkpoint folder; bundled models are {', '.join(BUNDLED)}, a hub name is owner/name"
        )
    return folder


def check_text(text: str | Path) -> None:
    """Reads the first document, where the text lies on this machine.

    Raises:
        InputError: nothing readable there.
    """
    if not str(text).startswith("hf:"):
        next(iter(read_documents(Path(text))), None)


def load(
    source: Any = "smelt",
    dtype: str = "float32",
    device: str = "cpu",
    *,
    tokenizer: Any = None,
    bos: str | int | None = None,
    **options: Any,
) -> Model:
    """A model to probe: a checkpoint folder (native, of transformers, or with a loader of its own), a hub name, or a model that ships with
    visitlens by its name (`smelt`, `baseline`, `hops`; `visitlens specimens` lists the trained tasks); or a model in memory (native, adapted, or of transformers) with its `tokenizer`.

    `bos` is the token that leads a text: an id, a name or "none"; by default what the configuration says, else what the tokenizer
    itself puts in front, else none. `options` are those of `visitlens.hooks.loading.load_model.load_model`, for example `steps=8` or `trust_remote_code=True`.
    The tokenizer is copied: truncation and padding that it carries are not used, and the caller's stays as it is.

    Raises:
        CheckpointError: no such checkpoint, or a damaged one.
        InputError: a recording; those are opened with `visitlens.open`. A model without its tokenizer, or of no known family.

    Examples:
        >>> model = vl.load("smelt")
        >>> run = model.run("The router picks eight experts.")
        >>> run.site("V", layer=3, visit=2).ndim
        3
    """
    if not isinstance(source, (str, Path)):
        from visitlens.probe.model.model import model_of

        return model_of(source, tokenizer, bos, **options)
    folder = checkpoint(source)
    from visitlens.hooks.loading.load_model import code_sha256, load_model, resolve
    from visitlens.hooks.models.checkpoint import load_tokenizer
    from visitlens.hooks.text.tokenizer import own_tokenizer
    from visitlens.probe.model.model import Model

    code = code_sha256(folder)  # before it is run
    model = load_model(folder, dtype, device, **options)
    used = load_tokenizer(resolve(folder)) if tokenizer is None else own_tokenizer(tokenizer)
    about = {"folder": folder, "code_sha256": code, "options": options}
    return Model(model, used, folder.absolute().name, bos, **about)
