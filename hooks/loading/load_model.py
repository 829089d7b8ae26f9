"""Any model from a folder or a hub name: the native looped MoE, one of transformers through its adapter, or what the folder's own
loader makes. Never pickle, but what such a loader reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from visitlens.errors import CheckpointError, InputError, UnavailableError
from visitlens.hooks.models import checkpoint, checkpoint_files
from visitlens.hooks.models.checkpoint import DTYPES
from visitlens.hooks.models.checkpoint_files import LOADER, OTHER_WEIGHTS, brings_loader

if TYPE_CHECKING:
    import torch

    from visitlens.hooks.core.model_interface import InstrumentedModel

_FILES = ("*.json", "*.safetensors", "*.py", "*.model", "*.txt")


def load_model(
    source: str | Path,
    dtype: str = "float32",
    device: str = "cpu",
    *,
    trust_remote_code: bool = False,
    tie_copies: bool = False,
    **options: Any,
) -> InstrumentedModel:
    """The model of a checkpoint folder or hub name, in evaluation mode.

    `trust_remote_code` runs the Python files that come with a checkpoint (Huginn, Ouro; a `visitlens_loader.py`): read them
    first. `tie_copies` makes layers that were saved as copies of one another one layer again (`hooks.audit.tied_copies`). `options` go
    to `adapt`: `family` by name, and what that family takes, for example `steps=8` or `state_seed=3`; or to the folder's own
    `load`, as far as it takes them (`hooks.loading.custom_loader`).

    Raises:
        CheckpointError: nothing loadable there.
        InputError: an unknown dtype, a kind of model without an adapter, an option it doesn't take.
        UnavailableError: transformers is needed and isn't installed.
    """
    check_device(device)
    folder = resolve(source)
    if brings_loader(folder):
        from visitlens.hooks.loading.custom_loader import load_own

        return cast(
            "InstrumentedModel",
            load_own(folder, dtype_named(dtype), device, trust=trust_remote_code, tie_copies=tie_copies, **options),
        )
    if model_type(folder) is None:
        if options or tie_copies:
            from visitlens.hooks.adapters.adapt import WHY_NOT

            first = next(iter(options), "tie_copies")
            raise InputError(f"the native model takes no options, got {first!r}{WHY_NOT.get(first, '')}")
        return checkpoint.load_model(folder, dtype, device)
    from visitlens.hooks.adapters.adapt import adapt
    from visitlens.hooks.audit.tied_copies import tie_copies as tie

    model = load_transformers(folder, dtype, device, trust_remote_code=trust_remote_code)
    if tie_copies:
        tie(model)
    return adapt(model, **options)


def load_transformers(
    source: str | Path, dtype: str = "float32", device: str = "cpu", *, trust_remote_code: bool = False
) -> Any:
    """The model as transformers makes it: the causal or masked language model of its configuration."""
    dtype_named(dtype)
    try:
        import transformers
    except ImportError as error:
        raise UnavailableError(f"{source} is a model of transformers: pip install 'visitlens[sources]'") from error
    from visitlens.hooks.adapters.transformers_compat import mend

    folder = resolve(source)
    checkpoint_files.check_folder(folder, trust=trust_remote_code)
    transformers.utils.logging.disable_progress_bar()
    options = {"trust_remote_code": trust_remote_code, "local_files_only": True}
    try:
        if trust_remote_code:
            mend(folder, local_files_only=True)
        config = transformers.AutoConfig.from_pretrained(folder, **options)
        masked = type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING and "AutoModelForCausalLM" not in (
            getattr(config, "auto_map", None) or {}
        )
        auto: Any = transformers.AutoModelForMaskedLM if masked else transformers.AutoModelForCausalLM
        model = auto.from_pretrained(folder, dtype=DTYPES[dtype], use_safetensors=True, **options)
    except Exception as error:
        if trust_remote_code and not isinstance(error, (OSError, ValueError)) and (advice := _own_code(folder)):
            raise CheckpointError(
                f"{source}: its own code doesn't run under transformers {transformers.__version__} ({type(error).__name__}: "
                f"{error}); {advice}"
            ) from error
        if not isinstance(error, (OSError, ValueError, KeyError, ImportError)):
            raise
        raise CheckpointError(f"{source}: transformers can't load it ({error})") from error
    if getattr(model.config, "_experts_implementation", None) == "grouped_mm" and not _grouped(model, DTYPES[dtype]):
        model.set_experts_implementation("eager")
    return model.to(device).eval().requires_grad_(False)


def _grouped(model: Any, dtype: torch.dtype) -> bool:
    """Whether torch's grouped product takes the experts' weights: no float64, and rows of a multiple of 16 bytes alone."""
    banks = [p for name, p in model.named_parameters() if p.ndim == 3 and "expert" in name]
    return dtype.itemsize < 8 and all(size * dtype.itemsize % 16 == 0 for bank in banks for size in bank.shape[1:])


def dtype_named(dtype: str) -> torch.dtype:
    """Raises InputError: none of `DTYPES`."""
    if dtype not in DTYPES:
        raise InputError(f"expected a dtype among {', '.join(DTYPES)}, got {dtype!r}")
    return DTYPES[dtype]


def check_device(device: str) -> None:
    """Raises InputError: no such device, or none here."""
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, TypeError, AssertionError) as error:  # torch raises all three
        why = str(error).splitlines()[0]
        raise InputError(
            f"expected a device of this machine, such as cpu, cuda or cuda:1, got {device!r} ({why})"
        ) from None


def resolve(source: str | Path) -> Path:
    """A checkpoint folder; of a hub name (owner/name), its files in the local cache, fetched if they aren't there.

    Raises:
        CheckpointError: no such folder, and no such model to be had from the hub.
    """
    if not isinstance(source, (str, Path)):
        raise InputError(f"expected a checkpoint folder or a hub name, got {source!r:.80}")
    folder = Path(source)
    if folder.exists() or len(folder.parts) != 2 or folder.is_absolute():
        return folder
    try:
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(str(source), allow_patterns=list(_FILES)))
        if brings_loader(folder) and not any(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(str(source), allow_patterns=[*_FILES, *OTHER_WEIGHTS]))
        return folder
    except ImportError as error:
        raise UnavailableError(f"{source}: no such folder; hub names need pip install 'visitlens[sources]'") from error
    except Exception as error:  # huggingface_hub raises many kinds: no such model, no access, no network
        raise CheckpointError(f"{source}: no such folder, and the hub doesn't give it ({error})") from error


def model_type(folder: Path) -> str | None:
    """What transformers calls the checkpoint's family, `LOADER` where a folder brings its own; None for a native checkpoint, or
    where there is no configuration."""
    if brings_loader(folder):
        return LOADER
    try:
        data = checkpoint_files.read_json(folder / "config.json")
    except (OSError, ValueError):
        return None  # the native loader says what is wrong
    return data.get("model_type") if isinstance(data, Mapping) and "architecture" not in data else None


def _own_code(folder: Path) -> str | None:
    """What to do about the code that a checkpoint brings along; None where it brings none."""
    config = checkpoint_files.read_json(folder / "config.json")
    if "auto_map" not in config:
        return None
    if (saved := config.get("transformers_version")) is None:
        return "install the release that it was written for, or mend the code"
    return f"it was saved by release {saved}: pip install 'transformers=={saved}', or mend the code"


def weights_sha256(source: str | Path) -> str:
    """Of the weight files of a folder or hub name: `checkpoint_files.weights_sha256`."""
    return checkpoint_files.weights_sha256(resolve(source))


def code_sha256(source: str | Path) -> str | None:
    """Of the code of a folder that brings its loader, None of others: `checkpoint_files.code_sha256`."""
    return checkpoint_files.code_sha256(resolve(source))
