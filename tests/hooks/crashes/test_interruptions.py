"""Nothing that was acknowledged is lost, whatever happens to the writer."""

from __future__ import annotations

import errno
import json
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import namedtuple
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import h5py
import numpy as np
import pytest
from tests.hooks.crashes.wholeness import Crash, assert_whole, contents, crash_after, leftovers

import visitlens
from visitlens.errors import RecordingError, StorageError
from visitlens.hooks.recording.format import schema
from visitlens.hooks.recording.maintain.merge import merge
from visitlens.hooks.recording.maintain.validate import repair, validate
from visitlens.hooks.recording.read.recording import Recording
from visitlens.hooks.recording.store.commit import committing
from visitlens.hooks.text.packed_tokens import PackedTokens

# Resuming


@pytest.mark.parametrize("contexts", [1, 2, 3, 5])
def test_a_crash_loses_the_open_shard_only_and_resuming_makes_it_whole(
    contexts: int, resume, unbroken: Recording, text: PackedTokens, tmp_path: Path
) -> None:
    path = tmp_path / "r.vlens"
    with pytest.raises(Crash):
        resume(path, on_progress=crash_after(contexts))
    committed = sorted(p.name for p in (path / "shards").glob("*.h5"))
    assert len(committed) == (contexts - 1) // 2
    before = contents(path / "shards")
    rec = resume(path)
    assert_whole(rec, unbroken, text)
    after = contents(path / "shards")
    assert {name: after[name] for name in before} == before


def test_a_run_resumes_with_another_shard_size(resume, unbroken: Recording, text, tmp_path: Path) -> None:
    path = tmp_path / "r.vlens"
    with pytest.raises(Crash):
        resume(path, on_progress=crash_after(3))
    assert_whole(resume(path, shard_tokens=1), unbroken, text)


def test_several_crashes_in_a_row_add_up(resume, unbroken: Recording, text, tmp_path: Path) -> None:
    path = tmp_path / "r.vlens"
    for _ in range(3):
        with pytest.raises(Crash):
            resume(path, shard_tokens=1, on_progress=crash_after(2))
    assert Recording(path).tokens == 3 * 32  # one context a time was committed
    assert_whole(resume(path, shard_tokens=1), unbroken, text)


def test_a_recording_of_the_beginning_is_gone_on_with(resume, make_text, tmp_path: Path) -> None:
    """More of the same text: what is there stays, and the whole is what one run makes."""
    text, path = make_text(seed=6, lengths=(20, 30, 9, 40, 25, 70, 12)), tmp_path / "r.vlens"
    first = resume(path, text=text.first_contexts(70), groups=3)
    before = contents(path / "shards")
    with pytest.raises(Crash):
        resume(path, text=text, groups=3, on_progress=crash_after(3))
    half = Recording(path)
    assert first.run["tokens"] == 96 and half.run["tokens"] == text.num_tokens and half.tokens > 96
    assert validate(path).exit_code == 3 and half.run["extends"] == [first.run["config_sha256"]]
    for cache in ("manifest.json", "summary.h5"):
        (path / cache).unlink()
    repair(path)
    rec = resume(path, text=text, groups=3)
    assert_whole(rec, resume(tmp_path / "unbroken.vlens", text=text, groups=3), text)
    assert validate(path).exit_code == 0 and contents(path / "shards").items() >= before.items()
    assert rec.run["run_uuid"] == first.run["run_uuid"] and rec.run["extends"] == half.run["extends"]
    for other, why in ((text.first_contexts(70), "another configuration"), (make_text(seed=7), "another config")):
        with pytest.raises(RecordingError, match=why):
            resume(path, text=other, groups=3)


def test_documents_that_are_groups_of_their_own_get_other_groups_as_more_come(
    resume, make_text, tmp_path: Path
) -> None:
    """From one document, to four, to as many as have groups of their own, to more, which are grouped by hash."""
    text, path = make_text(seed=6, lengths=(40, 30, 9, 40, 25, 70, 12)), tmp_path / "r.vlens"
    runs = []
    for tokens in (30, 70, 150, text.num_tokens):
        part = text.first_contexts(tokens)
        with suppress(Crash):  # the first part is one context
            resume(path, text=part, groups=6, shard_tokens=1, on_progress=crash_after(2))
        if tokens == 150:
            for cache in ("manifest.json", "summary.h5"):
                (path / cache).unlink()
            repair(path)
        rec = resume(path, text=part, groups=6, shard_tokens=1)
        runs.append(rec.run)
        assert_whole(rec, resume(tmp_path / f"unbroken{tokens}.vlens", text=part, groups=6), part)
        assert validate(path).exit_code == 0
    assert [run["groups"] for run in runs] == [1, 4, 6, 6]
    assert runs[-1]["extends"] == [run["config_sha256"] for run in runs[:-1]]
    repair(path)
    assert Recording(path).run == runs[-1] and validate(path).exit_code == 0
    copy = tmp_path / "again.vlens"
    merge([path, path], copy)
    assert validate(copy).exit_code == 0
    assert_whole(Recording(copy), Recording(path), text)


def test_a_finished_recording_is_left_alone(resume, text: PackedTokens, tmp_path: Path) -> None:
    path, seen = tmp_path / "r.vlens", []
    resume(path)
    before = contents(path)
    resume(path, on_progress=lambda *p: seen.append(p))
    assert contents(path) == before and seen == [(text.num_tokens, text.num_tokens)]


def test_stale_partial_files_are_removed(resume, unbroken: Recording, text: PackedTokens, tmp_path: Path) -> None:
    path = tmp_path / "r.vlens"
    with pytest.raises(Crash):
        resume(path, on_progress=crash_after(3))
    for name in ("shards/w00-000001.h5.tmp", "shards/w00-000099.h5.tmp", "summary.h5.tmp", "manifest.json.tmp"):
        (path / name).write_bytes(b"half a file")
    assert_whole(resume(path), unbroken, text)


def test_a_lost_manifest_and_summary_are_rebuilt(resume, unbroken: Recording, text, tmp_path: Path) -> None:
    path = tmp_path / "r.vlens"
    resume(path)
    (path / "manifest.json").unlink()
    (path / "summary.h5").unlink()
    assert_whole(resume(path), unbroken, text)


@pytest.mark.parametrize("names", [["manifest.json", "summary.h5"], ["manifest.json"]], ids=["both", "manifest"])
def test_a_crash_after_the_last_shard_but_before_its_manifest_is_repaired(
    names: list[str], resume, unbroken: Recording, text, tmp_path: Path
) -> None:
    """The shards are all there; manifest (and summary) are those of the shard before."""
    path, older = tmp_path / "r.vlens", tmp_path / "older"
    older.mkdir()

    def keep_copies(done: int, total: int) -> None:
        for name in names:
            if (path / name).is_file():
                shutil.copy(path / name, older / name)

    resume(path, on_progress=keep_copies)
    for name in names:
        shutil.copy(older / name, path / name)
    assert not Recording(path).complete
    assert_whole(resume(path), unbroken, text)


def test_a_lost_summary_of_a_finished_recording_is_rebuilt(resume, unbroken: Recording, text, tmp_path: Path) -> None:
    path = tmp_path / "r.vlens"
    resume(path)
    (path / "summary.h5").unlink()
    assert_whole(resume(path), unbroken, text)


# Killed, interrupted, out of room


class Child:
    """A process of its own that does `work(say)`; what it says and what it raises comes back. Killed in the end at the latest."""

    def __init__(self, work: Callable[[Callable[[str], object]], object]) -> None:
        self.reader, writer = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                work(lambda text: os.write(writer, text.encode()))
            except BaseException as error:
                os.write(writer, repr(error).encode())
            finally:
                os._exit(0)
        os.close(writer)

    def said(self) -> str:
        """The next that it says; nothing once it has ended."""
        assert select.select([self.reader], [], [], 300)[0], "it hangs"
        return os.read(self.reader, 65536).decode()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *raised: object) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.reader)


@pytest.mark.parametrize(
    ("moment", "at", "name"),
    [
        ("before", 4, "w00-000001.h5"),
        ("after", 4, "w00-000001.h5"),
        ("after", 5, "summary.h5"),
        ("after", 6, "manifest.json"),
        ("context", 5, ""),
    ],
)
def test_kill_9_in_the_middle_loses_and_doubles_nothing(
    moment: str, at: int, name: str, resume, unbroken: Recording, text: PackedTokens, tmp_path: Path
) -> None:
    """Where a file is about to get its name or has it (the fourth is the second shard), or the third shard's first context is done;
    the killed process has stopped there."""
    path = tmp_path / "r.vlens"

    def work(say: Callable[[str], object]) -> None:
        rename, calls = Path.rename, list[str]()

        def look(now: str, name: str = "") -> None:
            if (now, calls.count(now)) == (moment, at):
                say(f"stopped {name}")
                threading.Event().wait()

        def renaming(self: Path, target: Path) -> Path:
            calls.extend(("before", "after"))
            look("before", target.name)
            rename(self, target)
            look("after", target.name)
            return target

        def on_progress(done: int, total: int) -> None:
            calls.append("context")
            look("context")

        Path.rename = renaming  # type: ignore[method-assign]  # in the child alone
        resume(path, on_progress=on_progress)

    with Child(work) as child:
        assert child.said() == f"stopped {name}"
    there = len(list(path.glob("shards/*.h5")))
    assert len(unbroken.shards) == 3 and there in {"before": (1,), "after": (2,), "context": (1, 2)}[moment]
    assert moment != "before" or leftovers(path)
    assert_whole(resume(path), unbroken, text)


def test_a_handful_of_kills_at_random_instants_lose_nothing() -> None:
    """The benchmark does it sixty times; a reader looks on meanwhile."""
    script = Path(__file__).parents[3] / "benchmarks" / "crash.py"
    environment = {**os.environ, "PYTHONPATH": str(Path(visitlens.__file__).parents[1])}
    command = [sys.executable, str(script), "--kills", "5", "--seed", "3"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(result.stdout)
    assert found["kills"] >= 5 and found["acknowledged_shards_checked"] > 0
    assert (found["acknowledged_shards_lost"], found["wrong"]) == (0, 0)


def test_a_disk_that_refuses_a_shard_gives_one_error_and_keeps_the_rest(
    resume, unbroken: Recording, text: PackedTokens, tmp_path: Path
) -> None:
    """The kernel refuses any file beyond 2000 bytes once the first shard is there."""
    path, contexts = tmp_path / "r.vlens", list[int]()

    def on_progress(done: int, total: int) -> None:
        contexts.append(done)
        if len(contexts) == 3:  # the first shard is being committed, by a thread, and the second one isn't full
            while not (path / "manifest.json").exists():
                time.sleep(0.01)
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))  # a shard doesn't fit

    with Child(lambda say: resume(path, on_progress=on_progress)) as child:
        said = child.said()
    assert said.startswith("StorageError(") and "w00-000001.h5" in said and "File too large" in said
    assert not leftovers(path)
    partial = Recording(path)
    assert partial.tokens == int((text.segments[:2] >= 0).sum()) == len(partial.token_table()["id"])
    assert_whole(resume(path), unbroken, text)


@pytest.mark.parametrize("step", [613, 5003])
def test_hdf5_survives_a_disk_that_is_full_at_any_byte(step: int, tmp_path: Path) -> None:
    """In processes of their own, since HDF5 by itself crashes them: refused data, metadata or superblock is one error."""
    values = np.random.default_rng(0).standard_normal((4, 700, 8))

    def write(path: Path) -> None:
        with committing(path, values.nbytes) as aside, h5py.File(aside, "w", libver=schema.LIBVER) as file:
            for name, filters in (("a", schema.TEXT_FILTERS), ("b/c", schema.VECTOR_FILTERS)):
                file.create_dataset(name, data=values, chunks=(1, 100, 8), **filters)
            file.attrs["complete"] = np.int64(1)

    write(tmp_path / "whole.h5")
    size = (tmp_path / "whole.h5").stat().st_size
    limits = range(1, size + step, step) if step > 1000 else range(1, 12 * step, step)
    for limit in limits:
        child = os.fork()
        if child == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            try:
                write(tmp_path / "refused.h5")
                os._exit(0)
            except StorageError as error:
                os._exit(3 if "File too large" in str(error) else 4)
            except BaseException:
                os._exit(5)
        status = os.waitpid(child, 0)[1]
        assert os.waitstatus_to_exitcode(status) == (3 if limit < size else 0), limit
        assert limit >= size or [p.name for p in tmp_path.iterdir()] == ["whole.h5"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_or_a_scheduler_commits_what_is_complete_and_resuming_makes_it_whole(
    number: signal.Signals, resume, unbroken: Recording, text: PackedTokens, tmp_path: Path
) -> None:
    path, contexts = tmp_path / "r.vlens", []
    handler = signal.getsignal(number)

    def press_at_the_third_context(done: int, total: int) -> None:
        contexts.append(done)
        if len(contexts) == 3:
            os.kill(os.getpid(), number)

    with pytest.raises(KeyboardInterrupt):
        resume(path, on_progress=press_at_the_third_context)
    assert signal.getsignal(number) is handler
    partial = Recording(path)
    assert len(contexts) == 3 and not partial.complete and not leftovers(path)
    assert partial.tokens == int((text.segments[:3] >= 0).sum()) == len(partial.token_table()["id"])
    assert int(partial.totals["resid_rms"].count[:, 0].sum()) == partial.tokens
    assert_whole(resume(path), unbroken, text)


def test_a_second_ctrl_c_stops_at_once(resume, unbroken: Recording, text: PackedTokens, tmp_path: Path) -> None:
    path, contexts = tmp_path / "r.vlens", []

    def press_twice(done: int, total: int) -> None:
        contexts.append(done)
        if len(contexts) == 3:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        resume(path, on_progress=press_twice)
    assert Recording(path).tokens == int((text.segments[:2] >= 0).sum())
    assert_whole(resume(path), unbroken, text)


Usage = namedtuple("Usage", "total used free")


def test_a_full_disk_gives_one_error_and_keeps_the_shards(
    resume, unbroken: Recording, text: PackedTokens, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "r.vlens"

    def usage(folder: object) -> Usage:
        full = any(path.glob("shards/*.h5")) and any(path.glob("manifest.json"))
        return Usage(10**12, 0, 1000 if full else 10**12)

    with monkeypatch.context() as patched:
        patched.setattr("visitlens.hooks.recording.store.commit.shutil.disk_usage", usage)
        with pytest.raises(
            StorageError, match=r"1\.0 kB free\. Free some space and run the same command again"
        ) as caught:
            resume(path)
    assert caught.value.errno == errno.ENOSPC
    assert not leftovers(path) and Recording(path).tokens == int((text.segments[:2] >= 0).sum())
    assert_whole(resume(path), unbroken, text)


def test_a_disk_too_small_is_said_before_anything_is_computed(
    resume, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    monkeypatch.setattr(
        "visitlens.hooks.recording.store.commit.shutil.disk_usage", lambda folder: Usage(10**9, 0, 10**6)
    )
    with pytest.raises(StorageError, match=r"to write, 1\.0 MB free"):
        resume(tmp_path / "r.vlens", on_progress=lambda done, total: seen.append(done))
    assert not seen and not list(tmp_path.rglob("*.h5"))
