"""What makes `reproduce` do its work anew."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from visitlens.probe.report.reproduce import _code_of


def test_every_source_file_counts_also_where_two_have_one_name(tmp_path: Path) -> None:
    files = [tmp_path / "hooks/base.py", tmp_path / "probe/a/base.py", tmp_path / "probe/b/base.py"]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x = 1\n")
    parts = {"hooks": tmp_path / "hooks", "probe": tmp_path / "probe"}
    seen = {_code_of(parts)}
    for file in files:
        file.write_text("x = 2\n")
        seen.add(_code_of(parts))
    assert len(seen) == 4


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_a_run_that_is_stopped(number: signal.Signals, tmp_path: Path) -> None:
    """However slow it is to be stopped, it isn't done before: its browser never draws."""
    browser = tmp_path / "browser"
    browser.write_text("#!/bin/sh\nexec sleep 110\n")
    browser.chmod(0o755)
    command = [sys.executable, "-m", "visitlens", "reproduce", "--out", str(tmp_path / "out"), "--prompts", "0"]
    environment = os.environ | {"BROWSER_PATH": str(browser)}
    run = subprocess.Popen([*command, "--workers", "2"], stderr=subprocess.PIPE, text=True, env=environment)
    assert run.stderr is not None
    line = run.stderr.readline()  # not on a terminal: a line at each quarter
    assert line.startswith(("looped: ", "baseline: ")), line
    workers = psutil.Process(run.pid).children(recursive=True)
    assert len(workers) >= 2
    run.send_signal(number)
    rest = run.communicate(timeout=600)[1]
    _, living = psutil.wait_procs(workers, timeout=600)
    assert not living
    if number == signal.SIGTERM:
        assert run.returncode == 128 + number and "Traceback" not in rest and "leaked" not in rest, rest
