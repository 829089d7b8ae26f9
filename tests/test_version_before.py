"""What version 0.1 made or told users to write still works: recordings, loaders, dashboard links, public names, module paths."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import warnings
from importlib import import_module
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest

import visitlens as vl
from visitlens import moved
from visitlens.app.pages import find_page
from visitlens.app.server.layout import render
from visitlens.app.view.registry import Registry
from visitlens.app.view.view import Context

BEFORE = Path(__file__).parent / "files" / "before"
SOURCE = Path(vl.__file__).parents[1]


def sums() -> dict:
    return json.loads((BEFORE / "sums.json").read_text())


def test_its_recording_opens_with_the_same_numbers() -> None:
    rec = vl.open(BEFORE / "looped.vlens")
    assert set(rec.measures) == set(sums()["measures"])
    for name, total in sums()["measures"].items():
        assert np.nansum(rec.stat(name).values) == pytest.approx(total, rel=1e-12, abs=1e-12), name


def test_its_loader_gives_the_same_model(tmp_path: Path) -> None:
    folder = shutil.copytree(BEFORE / "own-model", tmp_path / "own-model")
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)
        model = vl.load(str(folder), trust_remote_code=True)
    logits = model.run("w5 w9 w30 w31 w8 w60").logits.reshape(-1, 61)[:, :4]
    np.testing.assert_allclose(logits, sums()["logits"], atol=2e-6)  # float32 sums of 8 terms, written with six digits


@pytest.mark.parametrize("link", (BEFORE / "links.txt").read_text().split())
def test_its_dashboard_links_open_their_page(link: str) -> None:
    page = render(Context(Registry([BEFORE / "looped.vlens"])), f"http://x{link}")
    assert find_page(urlsplit(link).path) is not None and page.title.endswith("visitlens")
    assert not (said := re.findall(r"[^'\"]*link's[^'\"]*|[^'\"]* has no [^'\"]*; it has[^'\"]*", str(page.content))), (
        said
    )


@pytest.mark.parametrize("name", vl._DEPRECATED)
def test_a_public_name_that_changed_says_the_new_one(name: str) -> None:
    instead = vl._DEPRECATED[name][1]
    with pytest.warns(DeprecationWarning) as caught:
        old = getattr(vl, name)
    assert [str(w.message) for w in caught] == [f"visitlens.{name} is deprecated: write {instead}"]
    assert caught[0].filename == __file__
    new = instead.removeprefix("visitlens.")
    assert "(" in new or old is getattr(vl, new)


@pytest.mark.parametrize("old", moved.MOVED)
def test_a_module_that_moved_is_imported_from_its_old_path(old: str) -> None:
    sys.modules.pop(f"visitlens.{old}", None)
    with pytest.warns(DeprecationWarning, match=f"import visitlens.{moved.MOVED[old]}$"):
        module = import_module(f"visitlens.{old}")
    new = import_module(f"visitlens.{moved.MOVED[old]}")
    names = [name for name in dir(new) if not name.startswith("_")]
    assert names and all(getattr(module, name) is getattr(new, name) for name in names)
    for before, now in moved.RENAMED.get(old, {}).items():
        assert getattr(module, before) is getattr(new, now)


def test_a_name_of_a_module_that_became_a_package_is_found_in_it() -> None:
    with pytest.warns(DeprecationWarning, match="import it from visitlens.hooks.capture.capture"):
        from visitlens.hooks.capture import Captured  # type: ignore[attr-defined]
    assert Captured is import_module("visitlens.hooks.capture.capture").Captured
    with pytest.raises(ImportError):
        from visitlens.hooks.capture import Nothing  # type: ignore[attr-defined]  # noqa: F401


def test_an_old_path_imports_in_a_fresh_process_without_torch() -> None:
    code = (
        "import sys, warnings; sys.path.insert(0, sys.argv[1]); warnings.simplefilter('ignore')\n"
        "from visitlens.probe.figures.pair import Pair\nfrom visitlens.probe.opened import open\n"
        "import visitlens as vl\n"
        "assert Pair is vl.Pair and open is vl.open and 'torch' not in sys.modules\n"
        "try:\n    import visitlens.probe.never_there\n"
        "except ModuleNotFoundError as error:\n    print(error.name)\n"
    )
    result = subprocess.run([sys.executable, "-c", code, str(SOURCE)], capture_output=True, text=True, timeout=120)
    assert result.stdout.strip() == "visitlens.probe.never_there", result.stderr


def test_a_recordings_dashboard_method_is_still_there(monkeypatch: pytest.MonkeyPatch) -> None:
    from visitlens.app.server import notebook

    monkeypatch.setattr(notebook, "dashboard", lambda *runs, **options: (runs, options))
    rec = vl.open(BEFORE / "looped.vlens")
    with pytest.warns(DeprecationWarning, match=r"write visitlens.dashboard\(rec\)"):
        assert rec.dashboard(height=500) == ((rec,), {"height": 500})
