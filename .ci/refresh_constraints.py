"""constraints.txt and docs/dependencies.md anew, from what the environment that runs this has: all that pyproject.toml's extras install,
each at its version.

    .venv/bin/pip install --upgrade -e '.[dev]'     # without -c: what is newest
    .venv/bin/python .ci/refresh_constraints.py     # then `make test`
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
HEADER = """\
# Tested together on Python 3.11, on Linux; all that `make test` installs. .ci/refresh_constraints.py writes this file.
# torch is pinned because a newer one pulls gigabytes of CUDA on some machines.
"""
TOOLS = ("pip", "setuptools")
"""Pinned though no package of ours asks for them: pip makes the environment."""
WHY = {
    "h5py": "reads and writes recordings",
    "numpy": "arithmetic of statistics and figures",
    "plotly": "draws every figure",
    "rich": "tables and progress in the terminal",
    "typer": "the command line",
    "torch": "runs models",
    "transformer-lens": "hook names and their caches; bridges as sources",
    "safetensors": "weights, never pickled",
    "tokenizers": "reads tokenizer.json",
    "numba": "compiled attention statistics on CPUs",
    "kaleido": "figures as PNG, SVG and PDF",
    "pandas": "tables as data frames",
    "dash": "the dashboard",
    "dash-ag-grid": "the dashboard's long tables",
    "waitress": "serves the dashboard",
    "datasets": "texts from the Hugging Face hub or saved by it",
    "pyarrow": "Parquet",
    "zstandard": ".zst texts and packed recordings",
    "ray": "recording on several machines",
    "fsspec": "recordings in object stores",
    "s3fs": "of them, S3",
    "nnsight": "nnsight models as sources",
    "transformers": "models of other families",
    "ipykernel": "notebooks",
    "ipython": "notebooks: rich display",
    "mkdocs-material": "this documentation",
    "mkdocstrings": "its API reference",
    "axe-playwright-python": "tests: accessibility of the dashboard",
    "build": "the release check",
    "hatchling": "builds the package",
    "hypothesis": "tests: properties",
    "moto": "tests: an S3 server on this machine",
    "nbclient": "tests: runs the notebooks",
    "nbconvert": "tests: the notebooks as pages",
    "playwright": "tests: a browser",
    "pre-commit": "checks before a commit",
    "pyright": "types",
    "pytest": "tests",
    "pytest-xdist": "tests: several processes",
    "ruff": "format and lint",
    "triton": "tests of the GPU kernel's arithmetic, interpreted",
    "scipy": "fits of scaling laws",
}


def extras() -> dict[str, list[Requirement]]:
    """Extra -> what it asks for itself; "" is the package without extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lists = {"": project["dependencies"], **project["optional-dependencies"]}
    found = {name: [Requirement(text) for text in texts] for name, texts in lists.items()}
    return {name: [r for r in wanted if r.name != "visitlens"] for name, wanted in found.items()}


def closure(wanted: Iterable[Requirement]) -> dict[str, str]:
    """Canonical name -> version of all that these install here, themselves included. What isn't installed here is left out."""
    found: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    waiting = [(requirement, "") for requirement in wanted]
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        try:
            installed = distribution(name)
        except PackageNotFoundError:
            continue
        found[name] = installed.version.partition("+")[0]
        for of in ("", *requirement.extras):
            if (name, of) not in seen:
                seen.add((name, of))
                waiting += [(Requirement(text), of) for text in installed.requires or ()]
    return dict(sorted(found.items()))


def before() -> dict[str, str]:
    """What constraints.txt pins now."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return {
        canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines) if version
    }


def constraints() -> str:
    """What constraints.txt should hold."""
    pinned = closure(r for wanted in extras().values() for r in wanted)
    for name in TOOLS:
        pinned.setdefault(name, distribution(name).version)
    for name, version in before().items():
        if name not in pinned:
            print(f"{name} isn't installed here: kept at {version}", file=sys.stderr)
            pinned[name] = version
    return HEADER + "".join(f"{name}=={version}\n" for name, version in sorted(pinned.items()))


def table() -> str:
    """What docs/dependencies.md should hold."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# What is installed, and why\n"
    yield "`pip install visitlens` installs the first row's packages; each extra (`visitlens[model,app]`) adds its own. `all` is all of them but "
    yield "`docs`, `ray`, `cloud` and `dev`. The last column lists what these packages install in turn, beyond what stands above it in the "
    yield "first row. `constraints.txt` pins every one of them; `make reproduce` and `make test` install by it. "
    yield "`python .ci/refresh_constraints.py` writes that file and this page.\n"
    yield "| extra | package | what for | brings along |"
    yield "|---|---|---|---|"
    base = closure(extras()[""])
    for extra, wanted in extras().items():
        for requirement in wanted:
            name = canonicalize_name(requirement.name)
            others = [other for other in closure([requirement]) if other != name and (not extra or other not in base)]
            yield f"| {extra or '(none)'} | {name} | {WHY[name]} | {', '.join(others)} |"


if __name__ == "__main__":
    (ROOT / "constraints.txt").write_text(constraints(), encoding="utf-8")
    (ROOT / "docs" / "dependencies.md").write_text(table(), encoding="utf-8")
