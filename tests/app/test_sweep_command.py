"""`visitlens ladder sweep` and `ladder run --forks` as a person uses them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from visitlens.probe.model.bundled import PAIR


def test_a_sweep_is_printed_and_written(run: Callable, tmp_path: Path) -> None:
    arguments = (
        "--axis",
        "count",
        "--values",
        "1,2",
        "--steps",
        "4,2,4,2",
        "--mean-document",
        "280",
        "--out",
        tmp_path,
    )
    code, out, err = run("ladder", "sweep", PAIR["baseline"], *arguments)
    assert code == 0, err
    assert "can't rank neighbours" in out and "hidden_size" in out
    listed = json.loads((tmp_path / "sweep.json").read_text())["points"]
    assert [(p["name"], p["visits"]) for p in listed] == [("count-1", 1), ("count-2", 2)]
    config = json.loads((tmp_path / "count-2" / "config.json").read_text())
    assert config["visits"] == 2 and config["hidden_size"] <= listed[0]["hidden_size"]


def test_forks_and_tokens_are_one_or_the_other(run: Callable, tmp_path: Path) -> None:
    config = PAIR["baseline"] / "config.json"
    for arguments in (("--tokens", "1e5", "--forks", "10"), ("--forks", "10"), ()):
        code, _, err = run("ladder", "run", config, "--out", tmp_path, *arguments)
        assert code == 1 and "give --tokens, or --forks with --decay-tokens" in err
    code, _, err = run("ladder", "run", config, "--out", tmp_path, "--forks", "20,10", "--decay-tokens", "1e4")
    assert code == 1 and "rising numbers of updates" in err
