"""The recordings of `visitlens app --demo`: the bundled pair on a short held-out text, with a head ablation, made once and kept
in the cache folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from visitlens.hooks.recording.store.fetch_cache import cache_folder
from visitlens.probe.model.bundled import PAIR, SAMPLE, check_assets
from visitlens.probe.reading.recorded_run import open_recording

TOKENS = 8192
MAP_TOKENS, MAP_CONTEXT = 512, 128
PROMPTS = 8
NAMES = {"looped": "smelt", "baseline": "baseline", "maps": "smelt-maps"}


def demo_recordings(say: Callable[[str], None]) -> list[Path]:
    """Paths of the recordings, made now if they aren't there: a minute or two on one core.

    Raises:
        InputError: the bundled files are missing.
    """
    check_assets()
    folder = cache_folder() / "demo"
    paths = [folder / f"{name}.vlens" for name in NAMES.values()]
    missing = [side for side, path in zip(NAMES, paths, strict=True) if not _whole(path)]
    if missing:
        say(f"recording the bundled models once, into {folder} ...")
        folder.mkdir(parents=True, exist_ok=True)
    for side in missing:
        _record(side, folder / f"{NAMES[side]}.vlens")
        say(f"recorded {NAMES[side]}")
    if not open_recording(paths[0]).ablations():
        _ablate(paths[0])
        say(f"ablated every looped head of {NAMES['looped']}")
    return paths


def _whole(path: Path) -> bool:
    try:
        return open_recording(path).recording.complete
    except (ValueError, OSError):
        return False


def _ablate(recording: Path) -> None:
    """Every head of the loop, on a few Dyck prompts."""
    from visitlens.probe.analyses.ablation.ablate_recording import AblationRequest, ablate_recording
    from visitlens.probe.analyses.ablation.dyck_study import DyckSettings

    settings = DyckSettings(prompts=PROMPTS)
    ablate_recording(AblationRequest(recording=recording, checkpoint=PAIR["looped"], dyck=settings))


def _record(side: str, out: Path) -> None:
    from visitlens.probe.jobs.prepared_run import PreparedRun
    from visitlens.probe.jobs.request import RunRequest

    maps = side == "maps"
    request = RunRequest.of(
        PAIR["looped" if maps else side],
        SAMPLE,
        out,
        level="maps" if maps else "tokens",
        max_tokens=MAP_TOKENS if maps else TOKENS,
        context_length=MAP_CONTEXT if maps else None,
    )
    PreparedRun(request).record()
