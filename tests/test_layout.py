"""The shape of the project: one direction of imports, bare root folders, and a reading path without torch."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import visitlens
from visitlens.probe.measures.collector import registered
from visitlens.probe.reading.recorded_run import RecordedRun

ROOT = Path(__file__).parents[1]
FOLDERS = ("kernels", "hooks", "probe", "app")
"""Each may import itself and those before it."""
ROOMS = (
    ("kernels",),
    ("kernels.attention",),
    ("hooks.core",),
    ("hooks.text", "hooks.recording.format"),
    ("hooks.models", "hooks.recording.store"),
    ("hooks.capture", "hooks.recording.read"),
    ("hooks.interventions", "hooks.recording.write"),
    ("hooks.adapters", "hooks.recording.maintain"),
    ("hooks.adapters.families", "hooks.audit"),
    ("hooks.loading", "hooks.sources"),
    ("probe.measures", "probe.tasks"),
    ("probe.drawing", "probe.statistics"),
    ("probe.analyses.results", "probe.samples"),
    ("probe.reading", "probe.experiments"),
    ("probe.gallery", "probe.derived"),
    ("probe.figures",),
    ("probe.live",),
    ("probe.model",),
    ("probe.jobs",),
    ("probe.analyses.ablation", "probe.ladder"),
    ("probe.report", "probe.scaling"),
    ("probe.scaling.figures",),
    ("app.terminal", "app.view"),
    ("app.panels",),
    ("app.live",),
    ("app.pages",),
    ("app.server",),
    ("app.commands",),
    ("app",),
)
"""Floor by floor: a room imports itself and rooms of lower floors, also inside functions; type checkers may look up."""
UPWARD = {("probe.measures.measure", "probe.drawing")}
"""The one lazy import of a higher room: `StatArray.plot`."""
SOURCE = Path(visitlens.__file__).parents[1]

READING_PATH = (
    "hooks.core.loop_plan",
    "hooks.core.visit_clock",
    "hooks.core.sites",
    "hooks.text.packed_tokens",
    "hooks.recording.format.schema",
    "hooks.recording.store.commit",
    "hooks.recording.read.recording",
    "probe.measures.measure",
    "probe.measures.intervals",
    "probe.reading.recorded_run",
    "probe.samples.dyck_prompts",
    "hooks.text.documents",
)


def module_files() -> list[Path]:
    return [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]


def module_name(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported(file: Path) -> list[tuple[int, str]]:
    """(line, absolute module name) of every import, those for type checkers and inside functions included."""
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = ["visitlens", *file.relative_to(ROOT).parent.parts]
                base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
            found += [(node.lineno, base), *((node.lineno, f"{base}.{alias.name}") for alias in node.names)]
    return found


def run_time_imports(file: Path) -> list[tuple[int, str]]:
    """`imported`, without what stands under `if TYPE_CHECKING`; with names of the facade (`visitlens.dashboard`) as their modules."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    checked = [n for n in ast.walk(tree) if isinstance(n, ast.If) and getattr(n.test, "id", "") == "TYPE_CHECKING"]
    hidden = {line for node in checked for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    facade = visitlens._EXPORTS
    named = [
        (node.lineno, facade[node.attr])
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and getattr(node.value, "id", "") in ("visitlens", "vl")
        and node.attr in facade
    ]
    through = [
        (line, facade[name.removeprefix("visitlens.")])
        for line, name in imported(file)
        if name.removeprefix("visitlens.") in facade
    ]
    return [(line, name) for line, name in [*imported(file), *named, *through] if line not in hidden]


def room_of(name: str) -> str | None:
    """The room of a dotted name below `visitlens`: the longest part of it that is a room."""
    parts = name.removeprefix("visitlens.").split(".")
    rooms = {room for floor in ROOMS for room in floor}
    heads = (".".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((head for head in heads if head in rooms), None)


def run_python(code: str, *arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=folder, capture_output=True, text=True, timeout=300
    )


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_imports_only_itself_and_those_to_its_left(folder: str) -> None:
    allowed = FOLDERS[: FOLDERS.index(folder) + 1]
    wrong = []
    for file in sorted((ROOT / folder).rglob("*.py")):
        for line, name in imported(file):
            first, _, rest = name.partition(".")
            assert first not in FOLDERS, f"{file.relative_to(ROOT)}:{line} imports {name}: use visitlens.{name}"
            part = rest.partition(".")[0]
            if first == "visitlens" and part in FOLDERS and part not in allowed:
                wrong.append(f"{file.relative_to(ROOT)}:{line} imports {name}")
    assert not wrong, f"{folder} may import {allowed}: " + "; ".join(wrong)


def test_every_file_lies_in_a_room_and_imports_rooms_of_lower_floors() -> None:
    floor = {room: n for n, rooms in enumerate(ROOMS) for room in rooms}
    found = {".".join(file.relative_to(ROOT).parent.parts) for file in module_files()}
    roofs = {"hooks.recording", "probe.analyses"}  # rooms in them, no modules
    assert found == set(floor) | roofs, "a room without files, or a folder that is no room"
    wrong = []
    for file in module_files():
        here = ".".join(file.relative_to(ROOT).parent.parts)
        assert here in floor or file.name == "__init__.py", f"{file.relative_to(ROOT)} lies under a roof, in no room"
        for line, name in run_time_imports(file) if here in floor else ():
            there = room_of(name) if name.startswith("visitlens.") else None
            if there and there != here and floor[there] >= floor[here] and (module_name(file), there) not in UPWARD:
                wrong.append(f"{file.relative_to(ROOT)}:{line} imports {name} of {there}")
    assert not wrong, "; ".join(wrong)


def test_a_room_says_its_subject_where_it_is_opened() -> None:
    rooms = [room for floor in ROOMS for room in floor if "." in room]
    silent = [
        r for r in rooms if not ast.get_docstring(ast.parse((ROOT / r.replace(".", "/") / "__init__.py").read_text()))
    ]
    assert not silent


def test_the_map_of_contributing_names_every_room_on_its_floor() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = [name.replace("/", ".") for name in re.findall(r"^\| `([\w/]+)/` \|", text, re.M)]
    floor = {room: n for n, rooms in enumerate(ROOMS) for room in rooms if room != "app"}
    assert set(named) == set(floor) and len(named) == len(floor), "CONTRIBUTING.md: a line for each room, and no other"
    assert [floor[room] for room in named] == sorted(floor[room] for room in named), (
        "from the lowest floor to the highest"
    )


def test_the_tree_of_the_readme_names_folders_and_files_that_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    tree = text.partition("## Where the code lives")[2].partition("## More")[0]
    top, wrong = "", []
    for line in (line for line in tree.splitlines() if line.startswith("    ")):
        deeper = line.startswith("      ")
        names = re.findall(r"(?<![\w/])([\w/]+/|[\w/]+\.py)(?![\w/])", line)
        if not deeper:
            top = names[0]
        below = ROOT / top if deeper else ROOT
        wrong += [name for name in names if not (below / name).exists() and not list(below.rglob(name.rstrip("/")))]
    assert top and not wrong


def test_the_check_of_imports_sees_every_form(tmp_path: Path) -> None:
    code = (
        "import visitlens.app.a\nfrom visitlens import probe\nfrom visitlens.hooks.b import c\n"
        "def f():\n    from visitlens.probe import d\n"
    )
    (tmp_path / "x.py").write_text(code)
    names = {name for _, name in imported(tmp_path / "x.py")}
    assert {"visitlens.app.a", "visitlens.probe", "visitlens.hooks.b", "visitlens.probe.d"} <= names


def test_the_root_folders_hold_no_init_and_their_subfolders_do() -> None:
    """A bare folder never shadows an installed package of the same name (Hugging Face's `kernels`)."""
    assert not [folder for folder in FOLDERS if (ROOT / folder / "__init__.py").exists()]
    packages = {file.parent for file in module_files()} - {ROOT / folder for folder in FOLDERS}
    assert packages and not [p for p in packages if not (p / "__init__.py").exists()]


def test_every_module_says_what_it_is_in_its_first_line() -> None:
    silent = [
        module_name(file)
        for file in module_files()
        if file.name != "__init__.py" and not ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
    ]
    assert not silent


def test_each_statistic_has_a_file_of_its_own() -> None:
    folder = ROOT / "probe" / "statistics"
    holding = {}
    for file in sorted(folder.glob("*.py")):
        classes = [n for n in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(n, ast.ClassDef)]
        holding[file.stem] = [c.name for c in classes if any(getattr(b, "id", "") == "Statistic" for b in c.bases)]
    statistics = {name: found for name, found in holding.items() if found}
    assert all(len(found) == 1 for found in statistics.values()), statistics
    assert {(cls.__module__.rsplit(".", 1)[1], cls.__name__) for cls in registered()} == {
        (name, found[0]) for name, found in statistics.items()
    }


# The reading path


def claims_to_need_no_torch(file: Path) -> bool:
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return "No torch." in text or "Torch-free." in text


READ = """
import json, sys
names, path = json.loads(sys.argv[1]), sys.argv[2]
import visitlens
run = visitlens.open(path)
for name in run.measures:
    run.stat(name).interval()
run.expert_overlap(), run.expert_overlap_chance_by_load(), run.norm_ratio("norm_output"), run.load_imbalance()
run.update_cosine_other_layers(), run.attended_control("mass_overlap"), repr(run), run.sink_mass().to_dict()
run.recording.token_table(), run.recording.experts(1, 2), run.recording.token_stat("sink_mass")
try:
    visitlens.load("nope")
except visitlens.VisitlensError as error:
    assert "bundled models are smelt, baseline, hops" in str(error)
heavy = ("torch", "transformer_lens", "transformers", "pandas")
loaded = [h for h in heavy if h in sys.modules]
assert not loaded, f"reading a recording imported {loaded}"
for name in names:
    __import__(f"visitlens.{name}")
    loaded = [h for h in heavy if h in sys.modules]
    assert not loaded, f"visitlens.{name} imported {loaded}"
print(len(names), visitlens.__file__)
"""


def test_reading_and_drawing_never_import_torch(looped_recording: RecordedRun) -> None:
    """The reading path by name, and every module whose docstring says that it needs none."""
    claimed = {module_name(file) for file in module_files() if claims_to_need_no_torch(file)}
    missing = [name for name in READING_PATH if find_spec(f"visitlens.{name}") is None]
    assert not missing
    names = sorted(claimed | set(READING_PATH))
    code = f"import sys; sys.path.insert(0, {str(SOURCE)!r})\n{READ}"
    result = run_python(code, json.dumps(names), str(looped_recording.recording.path))
    assert result.returncode == 0, result.stderr
    assert result.stdout.split()[0] == str(len(names))


BUDGET = """
import json, sys
import h5py, numpy, numpy.ma
before = set(sys.modules)
import visitlens
imported = set(sys.modules) - before
visitlens.open(sys.argv[1]).sink_mass().interval()
opened = set(sys.modules) - before
print(json.dumps([sorted(imported), sorted(opened)]))
"""


def test_importing_and_opening_stay_within_their_budget_of_modules(looped_recording: RecordedRun) -> None:
    """Modules beside numpy's and h5py's: a count that says what a stopwatch on a busy machine can't."""
    code = f"import sys; sys.path.insert(0, {str(SOURCE)!r})\n{BUDGET}"
    result = run_python(code, str(looped_recording.recording.path))
    assert result.returncode == 0, result.stderr
    imported, opened = json.loads(result.stdout)
    assert {name for name in imported if name.startswith("visitlens")} == {"visitlens", "visitlens.moved"}
    assert len(imported) <= 20, imported
    own = [name for name in opened if name.startswith("visitlens")]
    assert len(own) <= 44, f"{len(own)} modules of visitlens to read one statistic: {own}"
    others = [name for name in opened if name.partition(".")[0] not in ("visitlens", "numpy", "h5py")]
    assert len(others) <= 60, f"{len(others)} other modules to read one statistic: {others}"


def test_an_installed_package_of_a_folders_name_is_the_one_that_is_imported_from_the_root(tmp_path: Path) -> None:
    """As `transformers` imports Hugging Face's `kernels`: installed packages come later on the path than the root."""
    for folder in FOLDERS:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").write_text("installed = True")
    code = (
        "import sys; assert sys.path[0] == '', sys.path; sys.path.append(sys.argv[1])\n"
        "import kernels, hooks, probe, app\n"
        "assert kernels.installed and hooks.installed and probe.installed and app.installed\n"
    )
    result = run_python(code, str(tmp_path))
    assert result.returncode == 0, result.stderr


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers isn't installed")
def test_transformers_still_imports_from_the_root() -> None:
    code = "import transformers; assert 'site-packages' in transformers.__file__"
    result = run_python(code)
    assert result.returncode == 0, result.stderr


def test_importing_visitlens_is_lazy_and_lists_what_it_exports() -> None:
    assert set(dir(visitlens)) == {*visitlens._EXPORTS, "__version__"}
    with pytest.raises(AttributeError, match=r"no attribute 'opne'; it has .*\bopen\b"):
        _ = visitlens.opne


def test_no_hover_label_writes_a_hyphen_for_a_minus_sign() -> None:
    """Plotly does where a template has a format of its own (`%{z:.4f}`): give the trace `zhoverformat`, or text (`drawing.told`)."""
    formats = re.compile(r"%\{+[\w\[\].]+:[^}]*[.]\d+[fe]\}")
    assert formats.search('"%{customdata[0]:+.4f}"') and formats.search('f"%{{z:.4f}}"')
    for file in module_files():
        code = "\n".join(line for line in file.read_text(encoding="utf-8").splitlines() if "`%{" not in line)
        assert not (found := formats.search(code)), f"{file.name}: {found}"
