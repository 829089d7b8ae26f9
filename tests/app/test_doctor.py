"""`visitlens doctor` as a person runs it, on this machine and on poorer ones."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib import metadata

import pytest

from visitlens.app.cli import main
from visitlens.app.commands import doctor as command
from visitlens.kernels.attention import rows as attention_rows


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def call(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["visitlens", "doctor", *arguments])
        with pytest.raises(SystemExit) as exit_:
            main()
        assert exit_.value.code in (0, None)
        return capsys.readouterr().out

    return call


def test_it_says_what_runs_here(run) -> None:
    found = json.loads(run("--json"))
    assert found["kernels"]["torch"] in ("runs on the CPU", "runs on the GPU")
    assert set(found["kernels"]) == {"torch", "numba", "triton"}
    assert found["packages"]["h5py"] == metadata.version("h5py") and found["cores"] >= 1
    text = run()
    for words in ("attention statistics", "HDF5", "Chromium", "optional parts", found["python"]):
        assert words in text


def test_missing_and_old_packages_become_suggestions(run, monkeypatch) -> None:
    requirements = [
        "h5py>=3",
        "torch>=99.1; extra == 'model'",
        "no-such-package>=1; extra == 'fast'",
        "x; extra == 'dev'",
    ]
    monkeypatch.setattr(metadata, "requires", lambda _: requirements)
    monkeypatch.setattr("visitlens.probe.drawing.images.find_browser", lambda: None)
    found = json.loads(run("--json"))
    assert list(found["extras"]) == ["model", "fast"]
    assert "torch 99.1 or later (not " in found["extras"]["model"][0] and found["extras"]["fast"] == ["no-such-package"]
    suggestions = " ".join(found["suggestions"])
    assert "visitlens[model]" in suggestions and "visitlens[fast]" in suggestions and "Install Chromium" in suggestions
    assert "-> pip install 'visitlens[fast]'" in run()


def test_a_kernel_that_fails_or_is_wrong_is_reported(run, monkeypatch) -> None:
    right = attention_rows.row_statistics

    def broken(q, k, segments, *, implementation):
        if implementation == "numba":
            raise RuntimeError("no such instruction\nlong trace")
        return right(q if q.element_size() == 8 else q * 9, k, segments, implementation="torch")

    monkeypatch.setattr(attention_rows, "row_statistics", broken)
    found = json.loads(run("--json"))
    assert found["kernels"]["numba"] == "doesn't run: no such instruction"
    assert found["kernels"]["torch"] == "runs, but its results are wrong"
    assert any("report it" in line for line in found["suggestions"])


def test_a_checkout_that_is_not_installed_and_has_no_torch(run, monkeypatch) -> None:
    def missing(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", missing)
    monkeypatch.setattr(command, "find_spec", lambda _: None)
    found = json.loads(run("--json"))
    assert found["kernels"] == {"torch": "needs torch"} and "pip install -e ." in " ".join(found["suggestions"])


def test_requirements_are_read() -> None:
    assert command._parsed("transformer-lens[x]>=4.3,<5; extra == 'model'") == ("transformer-lens", "4.3", "model")
    assert command._parsed("rich") == ("rich", "0", None)
    assert command._release("2.13.0+cpu") == (2, 13, 0) > command._release("2.9")
