"""What can't be shown, or not all of it: dense models, other visit counts, levels, damage, locks, growth. One sentence each."""

from __future__ import annotations

import fcntl
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from visitlens.app.server import layout
from visitlens.app.view.registry import Registry, without_folder
from visitlens.app.view.view import Context


@pytest.mark.parametrize(
    ("run", "page", "said"),
    [
        ("baseline", "residual", "no visits to compare"),
        ("baseline", "routing", "no visits to compare"),
        ("summary", "tokens", "--level tokens"),
        ("summary", "attention", "record again with --level activations --sites Q,K"),
        ("corrupt", "layers", "can't be read"),
        ("looped", "live", "--model CHECKPOINT"),
        ("looped", "nowhere", "No such page"),
    ],
)
def test_what_cannot_be_shown_is_one_sentence_and_the_rest_goes_on(visit, run: str, page: str, said: str) -> None:
    visit.open(f"{page}?run={run}")
    assert said in visit.page.inner_text("main")
    visit.page.click("nav[aria-label=Pages] >> text=Overview")
    visit.settled()
    assert visit.page.title().startswith("Overview")


def test_one_visit_three_visits_and_maps(visit) -> None:
    visit.open("layers?run=baseline")
    assert "every layer has one visit" in visit.page.inner_text("#panel-by-layer")
    assert visit.page.locator("select[name=visits]").count() == 0
    visit.open("layers?run=three")
    choices = visit.page.locator("select[name=visits] option").all_inner_texts()
    assert choices == ["1 and 2", "1 and 3", "2 and 3"] and visit.value("visits") == "1-3"
    visit.open("attention?run=maps&layer=1&head=2&token=25")
    visit.charted("map")
    assert "Keys gained and lost by token 25" in visit.page.inner_text("main")
    assert visit.page.inner_text("#panel-map .caption").startswith("Context 1 of")


def test_a_dense_model_has_no_routing_and_says_why(meet, serve, dense: Path) -> None:
    person = meet(serve(dense))
    person.open("")
    assert "dense feed-forward" in person.page.inner_text(".facts")
    assert "expert" not in person.page.inner_text(".number-cards")
    routing = person.page.locator("nav[aria-label=Pages] >> text=Routing")
    assert "pale" in (routing.get_attribute("class") or "") and "dense" in (routing.get_attribute("title") or "")
    routing.click()
    person.settled()
    assert "without experts there is no routing to show" in person.page.inner_text("main")
    person.page.click("nav[aria-label=Pages] >> text=Tokens")
    person.settled()
    person.page.locator("a.token").nth(5).click()
    person.settled()
    text = person.page.inner_text("main")
    assert "Values of token 5" in text and "Experts of token" not in text
    assert not person.errors and not person.outside


@pytest.fixture
def rendered(tmp_path: Path) -> Callable[[str], str]:
    """`rendered("layers?...")`: a page's text, of the recordings in `tmp_path`; the server stays the same."""
    context = Context(Registry([tmp_path]))
    return lambda href: str(layout.render(context, f"http://x/{href}").content)


def test_opening_reads_the_summary_and_never_the_shards(
    folder: Path, tmp_path: Path, rendered: Callable[[str], str]
) -> None:
    shutil.copytree(folder / "looped.vlens", tmp_path / "a.vlens")
    shutil.rmtree(tmp_path / "a.vlens" / "shards")
    for page in ("", "layers", "heads", "routing", "residual", "attention", "figures", "provenance"):
        assert "can't be read" not in rendered(page), page
    assert "Tokens: not for this recording" in rendered("tokens")


def test_a_damaged_or_missing_shard_is_named_where_it_is_needed(
    folder: Path, tmp_path: Path, rendered: Callable[[str], str]
) -> None:
    shutil.copytree(folder / "looped.vlens", tmp_path / "a.vlens")
    shard = next((tmp_path / "a.vlens" / "shards").glob("*.h5"))
    shard.write_bytes(shard.read_bytes()[:-1000])
    assert shard.name in rendered("tokens") and "Tokens: not for this recording" in rendered("tokens")


@pytest.mark.skipif(sys.platform != "linux", reason="flock is what HDF5 locks with there")
def test_a_locked_recording_says_so_and_is_shown_once_it_is_free(
    folder: Path, tmp_path: Path, rendered: Callable[[str], str]
) -> None:
    shutil.copytree(folder / "looped.vlens", tmp_path / "a.vlens")
    summary = tmp_path / "a.vlens" / "summary.h5"
    with summary.open("rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        text = rendered("layers")
    assert "can't be read" in text and "a.vlens/summary.h5: locked by another program" in text
    assert "by-layer" in rendered("layers")


def test_a_recording_that_vanishes_is_a_sentence(folder: Path, tmp_path: Path, rendered: Callable[[str], str]) -> None:
    shutil.copytree(folder / "looped.vlens", tmp_path / "a.vlens")
    assert "by-layer" in rendered("layers")
    shutil.rmtree(tmp_path / "a.vlens")
    assert "no recording there" in rendered("layers") and str(tmp_path) not in rendered("layers")


def test_many_recordings_are_listed_and_few_are_kept(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("visitlens.app.view.registry._MOST_READ", 3)
    for number in range(8):
        (tmp_path / f"r{number}.vlens").symlink_to(folder / "looped.vlens")
    registry = Registry([tmp_path])
    runs = [entry.run for entry in registry.entries()]
    assert len(runs) == 8 and all(runs)
    kept = sum("totals" in entry.run.recording.__dict__ for entry in registry.entries() if entry.run)
    assert kept == 3
    again = registry["r0"].run
    assert again and again.measures and registry["r0"].run is again


def test_a_recording_that_grows_is_followed(
    meet, serve, tmp_path: Path, shard_by_shard: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layout, "WATCH_MS", 200)
    person = meet(serve(tmp_path / "growing.vlens"))
    person.open("")
    assert "Still being recorded" in person.page.inner_text(".notices") and "50%" in person.page.inner_text(".notices")
    shard_by_shard()
    person.page.locator(".notices").wait_for(state="detached", timeout=60_000)
    assert "level tokens" in person.page.inner_text(".facts").replace("\n", " ")
    assert not person.errors


def test_an_empty_folder_says_how_to_record_and_shows_what_appears(
    meet, serve, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = layout.version
    monkeypatch.setattr(layout, "WATCH_MS", 200)
    monkeypatch.setattr(layout, "version", lambda view: (time.sleep(0.5), version(view))[1])  # a slow disk
    person = meet(serve(tmp_path))
    person.open("layers")
    text = person.page.inner_text("main")
    assert "No recording yet" in text and "visitlens record" in text and "--demo" in text
    (tmp_path / "new.vlens").symlink_to(folder / "looped.vlens")
    person.page.locator(".panels").wait_for(timeout=60_000)
    person.settled()
    assert person.page.title().startswith("Layers · new")


def test_a_stale_link_warns_and_falls_back(visit) -> None:
    visit.open("heads?run=gone&layer=99&visits=1-7&head=3&metric=nothing&nonsense=1&token=x")
    notices = visit.page.locator(".notices li").all_inner_texts()
    assert len(notices) == 6
    for part in ("'gone'", "'99'", "'1-7'", "'nothing'", "'nonsense'", "'x'"):
        assert any(part in notice for notice in notices), (part, notices)
    assert visit.value("head") == "3"  # what is right stays
    assert visit.page.locator("#panel-map").count() == 1


def test_a_message_loses_the_folder_alone() -> None:
    said = "run.vlens/summary.h5: see docs/recording.md"
    assert without_folder(said, Path("run.vlens")) == said
    assert without_folder(f"/data/mine/{said}", Path("/data/mine/run.vlens")) == said
