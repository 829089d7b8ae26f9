"""Copies of fetched recordings: packed and merged from, listed, and emptied without harm to who reads or to anybody's files."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from visitlens.app.view.registry import Registry
from visitlens.errors import StorageError
from visitlens.hooks.recording.maintain.validate import validate
from visitlens.hooks.recording.read.recording import Recording
from visitlens.hooks.recording.store import fetch_cache
from visitlens.hooks.recording.store.fetch_cache import ADDRESS, chosen, copies, empty, fetched_folder
from visitlens.hooks.recording.store.object_store import ObjectStore

Run = Callable[..., tuple[int, str, str]]
pytestmark = pytest.mark.parametrize("url", ["memory"], indirect=True)


def put(path: Path, url: str) -> None:
    for file in (*path.glob("*.*"), *path.glob("shards/*")):
        if file.suffix != ".lock":
            ObjectStore(url).put(str(file.relative_to(path)), file.read_bytes())


@pytest.fixture(scope="module")
def local(make_model, make_text, make_recording, tmp_path_factory) -> tuple[Path, Path]:
    """Two texts recorded, each in two shards or more."""
    folder, model = tmp_path_factory.mktemp("local"), make_model(2)
    for name, seed in (("one.vlens", 6), ("two.vlens", 7)):
        make_recording(
            model, make_text(seed=seed), folder / name, measures=("resid_rms",), level="tokens", shard_tokens=80
        )
    return folder / "one.vlens", folder / "two.vlens"


@pytest.fixture
def stored(local: tuple[Path, Path], url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The first of them in a store; the cache is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    put(local[0], url)
    return url


def files() -> set[str]:
    return {
        str(path.relative_to(fetched_folder()))
        for path in fetched_folder().rglob("*")
        if path.is_symlink() or path.is_file()
    }


def test_pack_takes_an_address(
    run: Run, stored: str, local: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = run("pack", stored)
    packed = tmp_path / out.split("  ")[0]
    assert code == 0 and packed.name.startswith(f"{stored.rpartition('/')[2]}.tar.") and "fetched" in err
    assert run("unpack", packed, "-o", tmp_path / "copy.vlens")[0] == 0
    assert validate(tmp_path / "copy.vlens").exit_code == 0
    manifest = (local[0] / "manifest.json").read_bytes()
    assert (tmp_path / "copy.vlens/manifest.json").read_bytes() == manifest
    code, _, err = run("pack", stored)
    assert code == 1 and "exists" in err and "fetched" not in err
    monkeypatch.chdir(tmp_path / "copy.vlens")  # a recording that one is in is packed beside it
    code, out, err = run("pack", ".")
    assert code == 0 and out.startswith(f"{tmp_path.resolve()}/copy.vlens.tar."), err
    ObjectStore(stored).delete("shards/w00-000001.h5")
    code, _, err = run("pack", stored, "-o", tmp_path / "again.tar")
    assert code == 1 and f"{stored}: w00-000001.h5: missing" in err and not (tmp_path / "again.tar").exists()


def test_merge_takes_addresses_and_folders(run: Run, stored: str, local: tuple[Path, Path], tmp_path: Path) -> None:
    short = "--allow-duplicates"  # documents of one token
    assert run("merge", *local, "-o", tmp_path / "here", short)[0] == 0
    assert run("merge", stored, local[1], "-o", tmp_path / "there", short)[0] == 0
    here, there = Recording(tmp_path / "here"), Recording(tmp_path / "there")
    assert validate(tmp_path / "there").exit_code == 0
    np.testing.assert_array_equal(there.token_table()["id"], here.token_table()["id"])
    np.testing.assert_array_equal(there.totals["resid_rms"].total, here.totals["resid_rms"].total)
    code, _, err = run("merge", stored, stored, "-o", tmp_path / "twice")  # parts of one run: each shard once
    assert code == 0 and Recording(tmp_path / "twice").tokens == Recording(local[0]).tokens, err
    code, _, err = run("merge", f"{stored}.nowhere", local[1], "-o", tmp_path / "x")
    assert code == 1 and "nowhere: no recording there" in err and err.count("error:") == 1


def test_the_command_lists_and_deletes_copies(
    run: Run, stored: str, local: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("fetched") == (0, f"0 copies, 0 B in {fetched_folder()}\n", "")
    other = f"{stored}.two"
    put(local[1], other)
    for place, hours in ((stored, 2), (other, 1)):
        assert Recording(place).token_table()["id"].size
        (used,) = (copy.state / ADDRESS for copy in copies() if copy.address == place)
        os.utime(used, (0, time.time() - hours * 3600))  # a disk may not tell two moments apart
    code, out, _ = run("fetched")
    first, second, last = out.splitlines()
    shards = len(Recording(local[0]).shards)
    assert code == 0 and first.startswith(f"{stored}  ") and f" kB in {shards} shards, last opened 20" in first
    assert second.startswith(f"{other}  ") and last.startswith("2 copies, ") and last.endswith(str(fetched_folder()))
    code, out, _ = run("fetched", f"{other}/")
    assert code == 0 and stored + " " not in out and out.splitlines()[1].startswith("1 copy, ")
    code, _, err = run("fetched", "s3://bucket/nowhere", "--clear")
    assert code == 1 and "no copy of it is here" in err and len(copies()) == 2

    old = copies()[0]
    os.utime(old.state / ADDRESS, (0, time.time() - 40 * 86_400))
    assert run("fetched", "--older-than", 50)[1].startswith("0 copies")
    code, out, _ = run("fetched", "--older-than", 30, "--clear")
    assert code == 0 and out == f"1 copy deleted from {fetched_folder()}\n"
    assert [copy.address for copy in copies()] == [other] and not old.state.parent.exists()
    assert run("fetched", "--clear")[0] == 0 and list(fetched_folder().iterdir()) == []
    np.testing.assert_array_equal(Recording(stored).token_table()["id"], Recording(local[0]).token_table()["id"])
    assert run("fetched", "--older-than", -1)[0] == 2


def test_nothing_but_its_own_files_is_deleted(run: Run, stored: str, tmp_path: Path) -> None:
    recording = Recording(stored)
    _ = recording.token_table()
    folder, shard = recording.path, recording.shards[0]["name"]
    del recording
    precious = tmp_path / "precious"
    (precious / "shards").mkdir(parents=True)
    for name in ("manifest.json", "shards/w00-000000.h5"):
        (precious / name).write_text("mine")
    theirs = [folder / "notes.txt", folder / "shards/w00.h5", folder.parent / "manifest.json", fetched_folder() / "a"]
    for file in theirs:
        file.write_text("mine")
    links = {
        folder.parent / "linked": precious,
        folder.parent.parent / ("0" * 16): precious,
        fetched_folder() / ("1" * 16): tmp_path,
        folder / "shards/w00-000099.h5": precious / "manifest.json",
    }
    for link, target in links.items():
        link.symlink_to(target)
    for killed in (f"shards/{shard}.0123abcd.tmp", "summary.h5.0123abcd.tmp.01230123.tmp"):
        (folder / killed).write_text("a download that was killed")
    linked = {str(path.relative_to(tmp_path)) for path in precious.rglob("*")}
    assert run("fetched", "--clear")[0] == 0
    assert files() == {str(path.relative_to(fetched_folder())) for path in (*theirs, *links)}
    assert {str(path.relative_to(tmp_path)) for path in precious.rglob("*")} == linked
    assert all(file.read_text() == "mine" for file in precious.rglob("*.*"))
    assert Recording(stored).token_table()["id"].size and len(copies()) == 1


def test_what_is_read_is_left_until_nobody_reads_it(run: Run, stored: str, tmp_path: Path) -> None:
    recording = Recording(stored)
    before, data = files(), pickle.dumps(recording)
    code, out, err = run("fetched", "--clear")
    assert code == 0 and f"{stored}: in use, left alone" in err and out.startswith("0 copies deleted")
    assert files() == before and recording.token_table()["id"].size
    copied = pickle.loads(data)  # as in another process
    del recording
    assert not empty(copies()[0]) and copied.totals and copied.token_table()["id"].size
    del copied
    code = "import sys; from visitlens.hooks.recording.read.recording import Recording as R; r = R(sys.argv[1]); print('', flush=True); input()"
    assert empty(copies()[0]) and files() == set()
    folder = tmp_path / "on-disk"  # a store that another process sees, too
    copy_of(stored, folder)
    reader = subprocess.Popen(
        [sys.executable, "-c", code, f"file://{folder}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert reader.stdout is not None and reader.stdout.readline() == "\n"
    (there,) = copies()
    assert there.address == f"file://{folder}" and not empty(there)
    reader.kill()
    reader.communicate()
    assert empty(there) and empty(there) and copies() == []


def copy_of(url: str, folder: Path) -> Path:
    store = ObjectStore(url)
    for name in store.sizes():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(store.get(name) or b"")
    return folder


def test_readers_and_emptying_at_once(stored: str, local: tuple[Path, Path], tmp_path: Path) -> None:
    there = (
        f"file://{copy_of(stored, tmp_path / 'on-disk')}"  # readers in one process share a place in a file in memory
    )
    expected, done, failed = Recording(local[0]).token_table()["id"], threading.Event(), list[BaseException]()

    def read() -> None:
        try:
            for _ in range(6):
                recording = Recording(there)
                np.testing.assert_array_equal(recording.token_table()["id"], expected)
                assert recording.totals
                del recording
                time.sleep(0.02)
        except BaseException as error:
            failed.append(error)

    def clear() -> None:
        last = False
        while not last:
            last = done.is_set()
            emptied.extend(copy for copy in copies() if empty(copy))

    emptied: list[object] = []
    readers, clearer = [threading.Thread(target=read) for _ in range(3)], threading.Thread(target=clear)
    for thread in (clearer, *readers):
        thread.start()
    for thread in readers:
        thread.join()
    done.set()
    clearer.join()
    assert not failed and emptied, failed


def test_a_cache_that_can_not_be_made_is_one_error(
    run: Run, stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("")
    for place in (
        str(tmp_path / "cache"),
        "/proc/nowhere",
    ):  # no folder is there; none can be made, for it "isn't there"
        monkeypatch.setenv("XDG_CACHE_HOME", place)
        code, _, err = run("info", stored)
        assert code == 1 and err.count("error:") == 1 and place in err
        assert chosen() == [] and run("fetched", "--clear")[0] == 0


def test_a_user_without_a_home_is_told_to_name_a_folder(
    run: Run, stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    for command in (("info", stored), ("fetched",)):
        code, _, err = run(*command)
        assert code == 1 and err.count("error:") == 1 and "set XDG_CACHE_HOME" in err
    with pytest.raises(StorageError, match="set XDG_CACHE_HOME"):
        Registry([stored])
    (tmp_path / "broken.vlens").mkdir()
    (tmp_path / "broken.vlens" / "manifest.json").write_text("{")
    registry = Registry([tmp_path / "broken.vlens"])
    (id_,) = registry.ids()
    assert "broken.vlens" in registry[id_].error and str(tmp_path) not in registry[id_].error


def test_what_is_renamed_while_it_is_listed_hides_no_copy(
    run: Run, stored: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording = Recording(stored)
    (recording.path / "shards/w00-000000.h5.0123abcd.tmp").write_text("a download")
    listed = fetch_cache._listed

    def then_renamed(folder: Path) -> list[os.DirEntry[str]]:
        found = listed(folder)
        for partial in folder.glob("*.tmp"):
            partial.rename(partial.with_suffix(".h5"))
        return found

    monkeypatch.setattr(fetch_cache, "_listed", then_renamed)
    code, out, _ = run("fetched")
    assert code == 0 and out.startswith(f"{stored}  ") and out.splitlines()[-1].startswith("1 copy, ")
