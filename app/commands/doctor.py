"""`visitlens doctor`: what runs on this machine, and what would make more of it run."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
from dataclasses import asdict, dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

_PURPOSES = {
    "model": "running and recording models",
    "fast": "attention statistics several times faster on the CPU",
    "images": "figures as PNG, SVG and PDF",
    "frames": "results as pandas frames",
    "app": "the dashboard",
    "data": "texts from Hugging Face data sets, Parquet and zstd files",
    "sources": "models of other libraries",
    "notebook": "notebooks",
    "ray": "runs on several machines",
}


@dataclass
class Diagnosis:
    """What was found. `kernels` maps an implementation of the attention statistics to "runs" or why it doesn't."""

    visitlens: str
    python: str
    system: str
    processor: str
    cores: int
    threads: dict[str, Any]
    packages: dict[str, str]
    extras: dict[str, list[str]]
    kernels: dict[str, str]
    gpus: list[str]
    chromium: str | None
    hdf5: str
    suggestions: list[str] = field(default_factory=list)


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as JSON.")] = False,
) -> None:
    """Say what runs on this machine: packages, kernels, GPU, threads, Chromium; and what to install for more."""
    from visitlens.app.terminal.console import console

    with console.status("trying the kernels (numba compiles once, which takes seconds) ..."):
        found = diagnose()
    if as_json:
        typer.echo(json.dumps(asdict(found), indent=2))
        return
    rows = {
        "visitlens": f"{found.visitlens}, Python {found.python}, {found.system}",
        "processor": f"{found.processor}, {found.cores} cores usable",
        "threads": ", ".join(f"{name} {'unset' if value is None else value}" for name, value in found.threads.items()),
        "GPU": ", ".join(found.gpus) or "none that PyTorch can use",
        "HDF5": found.hdf5,
        "Chromium": found.chromium or "none found",
    }
    typer.echo("\n".join(f"{name:<10} {value}" for name, value in rows.items()))
    typer.echo("\nattention statistics")
    for name, state in found.kernels.items():
        typer.echo(f"  {name:<8} {state}")
    typer.echo("\noptional parts")
    for extra, missing in found.extras.items():
        state = f"needs {', '.join(missing)}" if missing else "installed"
        typer.echo(f"  {extra:<10} {state:<40} {_PURPOSES[extra]}")
    typer.echo("\npackages   " + ", ".join(f"{name} {version}" for name, version in found.packages.items()))
    for suggestion in found.suggestions:
        typer.echo(f"\n-> {suggestion}")


def diagnose() -> Diagnosis:
    """Looks, and runs each kernel on a tiny input."""
    import h5py

    from visitlens import __version__
    from visitlens.probe.drawing.images import find_browser

    packages, extras = _packages()
    threads: dict[str, Any] = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS")}
    kernels, gpus = {"torch": "needs torch"}, []
    if find_spec("torch") is not None:
        import torch

        threads["torch"] = torch.get_num_threads()
        gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        kernels = _try_kernels(gpus)
    found = Diagnosis(
        visitlens=__version__,
        python=platform.python_version(),
        system=platform.platform(terse=True),
        processor=_processor(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        threads=threads,
        packages=packages,
        extras=extras,
        kernels=kernels,
        gpus=gpus,
        chromium=find_browser(),
        hdf5=f"{h5py.version.hdf5_version} (h5py {h5py.__version__})",
    )
    found.suggestions = _suggestions(found)
    return found


def _packages() -> tuple[dict[str, str], dict[str, list[str]]]:
    """Versions of the installed packages that visitlens can use, and of each extra what is missing or too old."""
    versions, extras = {}, {}
    try:
        requirements = metadata.requires("visitlens") or []
    except metadata.PackageNotFoundError:  # a checkout on the path that isn't installed
        requirements = []
    for requirement in requirements:
        name, least, extra = _parsed(requirement)
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            version = None
        if extra is None or extra in _PURPOSES:
            if version is not None:
                versions[name] = version
            if extra is not None:
                missing = extras.setdefault(extra, [])
                if version is None or _release(version) < _release(least):
                    missing.append(name if version is None else f"{name} {least} or later (not {version})")
    return versions, {extra: extras[extra] for extra in _PURPOSES if extra in extras}


def _parsed(requirement: str) -> tuple[str, str, str | None]:
    """Name, least version and extra of a line such as `torch>=2.13; extra == 'model'`."""
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    least = re.search(r">=\s*([0-9.]+)", requirement)
    extra = re.search(r"extra\s*==\s*['\"]([\w-]+)['\"]", requirement)
    return name[0] if name else "", least[1] if least else "0", extra[1] if extra else None


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(n) for n in re.findall(r"\d+", version.split("+")[0])[:3])


def _try_kernels(gpus: list[str]) -> dict[str, str]:
    import torch

    from visitlens.kernels.attention.dispatch import ATTENTION_ROWS
    from visitlens.kernels.attention.rows import row_statistics
    from visitlens.kernels.segments import Segments

    states = {}
    q, k = torch.linspace(-1, 1, 256).view(16, 2, 8), torch.linspace(1, 2, 128).view(16, 1, 8)
    segments = Segments((0, 6, 16))
    expected = row_statistics(q.double(), k.double(), segments, implementation="torch").entropy
    for name in ATTENTION_ROWS:
        if name == "triton" and not gpus:
            states[name] = "needs a GPU"
            continue
        device = "cuda" if gpus and name != "numba" else "cpu"
        try:
            entropy = row_statistics(q.to(device), k.to(device), segments, implementation=name).entropy.cpu().double()
        except Exception as error:  # whatever a compiler or driver throws is what the user wants to read
            states[name] = f"doesn't run: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
            continue
        right = bool(torch.allclose(entropy, expected, atol=1e-4))
        states[name] = (
            f"runs on the {'GPU' if device == 'cuda' else 'CPU'}" if right else "runs, but its results are wrong"
        )
    return states


def _processor() -> str:
    if platform.system() == "Linux":
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
        if names:
            return names[0]
    return platform.processor() or platform.machine()


def _suggestions(found: Diagnosis) -> list[str]:
    lines = []
    for extra in ("model", "fast", "images", "app"):
        if found.extras.get(extra):
            lines.append(f"pip install 'visitlens[{extra}]' for {_PURPOSES[extra]}.")
    if found.chromium is None:
        lines.append("Install Chromium (or set BROWSER_PATH to one) for figures as PNG, SVG and PDF.")
    if not found.extras:
        lines.append("visitlens isn't installed as a package, so its optional parts aren't known: pip install -e .")
    if any("wrong" in state for state in found.kernels.values()):
        lines.append("A kernel is wrong on this machine: force another with --attention torch, and please report it.")
    if found.cores > 1 and found.threads["OMP_NUM_THREADS"] is None and found.threads.get("torch", 1) > 1:
        lines.append(
            "On small models two processes of one thread beat one of two: OMP_NUM_THREADS=1 when you run several."
        )
    if shutil.disk_usage(".").free < 2**30:
        lines.append("Less than 1 GB is free on this disk: recordings may not fit.")
    return lines
