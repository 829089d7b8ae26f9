"""Plug-ins of other packages: the package of docs/extending.md, a broken one, one that isn't there any more, and a notebook's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import visitlens as vl
from visitlens import plugins
from visitlens.errors import InputError
from visitlens.probe.experiments import find as find_experiment
from visitlens.probe.gallery import figure as gallery
from visitlens.probe.measures import collector
from visitlens.probe.report.compare import compare

ROOT = Path(__file__).resolve().parents[1]
SOURCE = Path(vl.__file__).parents[1]


def install(folder: Path, name: str, entry_points: dict[str, dict[str, str]]) -> None:
    """As pip leaves a package: its dist-info beside it."""
    info = folder / f"{name}-0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1\n")
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in of.items()) for group, of in entry_points.items()]
    (info / "entry_points.txt").write_text("\n".join(lines))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's package, installed, and a broken one."""
    folder = tmp_path_factory.mktemp("site-packages")
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    files = dict(re.findall(r"```(?:python|toml)\n# (\S+)\n(.*?)```", page, re.S))
    (folder / "write_alignment").mkdir()
    (folder / "write_alignment" / "__init__.py").touch()
    project = tomllib.loads(files.pop("pyproject.toml"))["project"]
    for name, code in files.items():
        (folder / name).write_text(code)
    install(folder, "write_alignment", project["entry-points"])
    (folder / "broken.py").write_text(
        "import visitlens as vl\n"
        "class Lacks(vl.Figure):\n    slug = 'lacks'\n"
        "class Twin(vl.Statistic):\n"
        "    measures = (vl.Measure('sink_mass', 'Taken', (), 'nats', 'x', 'ours'),)\n"
        "    sites = frozenset()\n"
        "    def per_token(self, values, geometry):\n        return {}\n"
    )
    broken = {
        "visitlens.statistics": {"gone": "broken_nowhere:Thing", "twin": "broken:Twin"},
        "visitlens.figures": {"lacks": "broken:Lacks"},
        "visitlens.experiments": {"nulls": "broken:Lacks", "number": "sys:maxsize"},
        "visitlens.pages": {"empty": "broken"},
        "visitlens.commands": {"number": "sys:maxsize"},
    }
    install(folder, "broken", broken)
    return folder


def run(site: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SOURCE), str(site)]), "PYTHONWARNINGS": "always"}
    return subprocess.run(
        [sys.executable, *command], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=540
    )


USE = """
import sys
import visitlens as vl
from visitlens.app.server import layout
from visitlens.app.view.registry import Registry
from visitlens.app.view.view import Context
from visitlens.hooks.adapters.adapt import families
from visitlens.probe.experiments import question, registered
folder = sys.argv[1]
rec = vl.record("assets/models/smelt", "assets/sample/heldout.jsonl.xz", f"{folder}/run.vlens", max_tokens=600,
                measures=("write_alignment", "sink_mass"))
assert rec.stat("write_alignment").values.shape == (12,) and not rec.absent_packages
assert len(vl.figure("write-alignment", rec).data) == 2
assert "my_decoder" in families() and question("half_writes") == "What half of every write costs."
model = vl.load("smelt")
cost = model.experiment("half_writes", model.sample(max_tokens=400)).half_writes.sel(slice="text")
assert cost.values > 0
page = layout.render(Context(Registry([f"{folder}/run.vlens"])), "http://x/alignment?run=run")
assert "Cosine between a step" in str(page.content) and page.title.startswith("Alignment")
assert "half_writes" in registered() and "nulls" in registered()
"""


@pytest.fixture(scope="module")
def recorded(site: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A recording made with the package, and the warnings on the way."""
    folder = tmp_path_factory.mktemp("recorded")
    result = run(site, "-c", USE, str(folder))
    assert result.returncode == 0, result.stderr
    return folder / "run.vlens", result.stderr


def test_the_documented_package_is_recorded_drawn_run_and_shown(recorded: tuple[Path, str]) -> None:
    assert "write_alignment" in vl.open(recorded[0]).measures


def test_each_broken_plug_in_is_named_and_left_out(recorded: tuple[Path, str]) -> None:
    said = [line.partition("Warning: ")[2] for line in recorded[1].splitlines() if "is left out of" in line]
    for name, reason in {
        "'gone' of broken 0.1 (broken_nowhere:Thing) is left out of statistics": "No module named 'broken_nowhere'",
        "'twin' of broken 0.1 (broken:Twin) is left out of statistics": "the name sink_mass is taken",
        "'lacks' of broken 0.1 (broken:Lacks) is left out of figures": "Lacks lacks title, question, content, draw",
        "'nulls' of broken 0.1 (broken:Lacks) is left out of experiments": "expected a function",
        "'number' of broken 0.1 (sys:maxsize) is left out of experiments": "expected a function",
        "'empty' of broken 0.1 (broken) is left out of pages": "without PATH, TITLE, ORDER, NEEDS, CONTROLS, layout",
    }.items():
        found = [line for line in said if line.startswith(name)]
        assert len(found) == 1 and reason in found[0], (name, said)


def test_a_command_of_another_package_is_one_of_the_command_line(site: Path, recorded: tuple[Path, str]) -> None:
    result = run(site, "-m", "visitlens", "alignment", str(recorded[0]))
    assert result.returncode == 0 and "Cosine between a step's two writes" in result.stdout, result.stderr
    assert "'number' of broken 0.1 (sys:maxsize) is left out of commands" in result.stderr
    helped = run(site, "-m", "visitlens", "--help").stdout
    assert "alignment" in helped and "validate" in helped


def test_a_recording_opens_without_the_package_of_its_measure_and_says_which(recorded: tuple[Path, str]) -> None:
    rec = vl.open(recorded[0])
    assert rec.absent_packages == {"write_alignment": ("write_alignment",)}
    assert "write_alignment is of the package write_alignment, which isn't installed" in repr(rec)
    assert rec.stat("write_alignment").interval()[0].shape == (12,)
    assert [c.name for c in compare(rec, rec, measures=["write_alignment"])] == ["write_alignment"]
    assert any("isn't installed" in warning for warning in vl.Pair(rec).warnings())


# In a notebook


@pytest.fixture
def fresh() -> Iterator[None]:
    """What a test registers is gone after it."""
    yield
    plugins._registered.clear()
    plugins._forget()


@pytest.mark.usefixtures("fresh")
def test_what_a_notebook_registers_is_found_and_running_its_cell_again_replaces_it() -> None:
    def define(title: str) -> type[vl.Figure]:
        class Plain(vl.Figure):
            slug, question = "plain", "What does it look like?"

            def content(self, looped, pair):
                return {"series": {}, "notes": []}

            def draw(self, data, theme):
                raise NotImplementedError

        Plain.title = title
        return Plain

    for title in ("One", "Two"):
        vl.register(define(title))
        assert gallery.find("plain").title == title
    assert [f.slug for f in gallery.registered()].count("plain") == 1

    vl.register(lambda model, sample: {}, kind="experiment", name="nothing")
    assert find_experiment("nothing")


@pytest.mark.usefixtures("fresh")
def test_what_cannot_be_registered_is_refused_and_nothing_is_kept() -> None:
    class Taken(vl.Figure):
        slug, title, question = "sink-heads", "Mine", "Why?"
        content = draw = lambda *_: None

    with pytest.raises(InputError, match="the name sink-heads is taken"):
        vl.register(Taken)
    with pytest.raises(InputError, match="expected a Statistic, Figure or Family class"):
        vl.register(lambda model, sample: {})
    with pytest.raises(InputError, match=r"expected a page's module.* without PATH"):
        vl.register(ModuleType("page"))
    assert gallery.find("sink-heads").title != "Mine" and len(collector.registered()) > 5
