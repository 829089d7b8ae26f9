"""The wheel and the source distribution hold the package, and what is installed works away from the checkout."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


def test_wheel_holds_the_four_folders_once_and_the_bundled_files(built: Path) -> None:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        names = set(wheel.namelist())
    wanted = {
        "visitlens/__init__.py",
        "visitlens/py.typed",
        "visitlens/app/cli.py",
        "visitlens/hooks/recording/write/record.py",
        "visitlens/kernels/segments.py",
        "visitlens/probe/statistics/sink_mass.py",
        "visitlens/assets/models/smelt/config.json",
        "visitlens/assets/sample/heldout.jsonl.xz",
    }
    assert wanted <= names
    assert not [name for name in names if name.split("/")[0] in ("probe", "hooks", "app", "kernels", "src")]


def test_source_distribution_holds_what_a_build_needs(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert {"pyproject.toml", "README.md", "LICENSE", "app/cli.py", "kernels/segments.py"} <= names


def test_the_wheel_runs_from_another_folder(built: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        wheel.extractall(target)
    code = f"import sys; sys.path.insert(0, {str(target)!r}); import visitlens, visitlens.probe.reading.recorded_run; print(visitlens.__file__)"
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert str(target) in result.stdout
