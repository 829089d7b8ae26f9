"""`visitlens experiment` as a person uses it."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

Run = Callable[..., tuple[int, str, str]]


def test_the_list_says_what_each_answers_and_takes(run: Run) -> None:
    code, out, _ = run("experiment", "--list")
    assert code == 0
    assert "mechanism_ledger   The mechanism ledger: which part of a later visit earns its gain.  [--set visits]" in out


def test_on_the_bundled_model_and_text_by_default(run: Run) -> None:
    code, out, err = run("experiment", "skip_visit", "--max-tokens", 500)
    assert code == 0, err
    assert "EvalSet(" in out and "What a visit of the loop span is worth [nats a token]" in out and "2·1" in out


def test_json_on_stdout_is_nothing_else(run: Run) -> None:
    code, out, _ = run("experiment", "convergence", "--max-tokens", 500, "--set", "loops=4", "--json")
    results = json.loads(out)
    assert code == 0 and results["experiment"] == "convergence"
    assert results["results"]["visit_size"]["labels"]["visit"] == ["1", "2", "3", "4"]
    assert "definition" in results["results"]["visit_size"]["measure"]


def test_prompts_and_a_file(run: Run, tmp_path) -> None:
    out = tmp_path / "loops.json"
    code, printed, _ = run(
        "experiment", "loop_count", "--dyck", 1, "--shots", "1,2", "--set", "loops=1,2", "--out", out
    )
    assert code == 0 and printed.strip() == str(out)
    labels = json.loads(out.read_text())["results"]["accuracy"]["labels"]
    assert labels["slice"] == ["dyck", "1 shot", "2 shots"] and labels["loops"] == ["1", "2"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name an experiment"),
        (["mechanism"], "no experiment 'mechanism'"),
        (["readout", "--set", "loops=3"], "has no option loops"),
        (["convergence", "--set", "loops"], "--set name=value"),
        (["convergence", "--max-tokens", "300", "--set", "loops=0"], "at least 1 visit"),
        (["mechanism_ledger", "--max-tokens", "300", "--set", "visits=1,3"], "visits 1 <= a < b <= 2"),
        (["patching", "--max-tokens", "300"], "--dyck"),
        (["readout", "--dyck", "-1"], "1 or more"),
        (["readout", "--text", "nowhere.txt"], "no such file"),
        (["readout", "--model", "nowhere"], "no such checkpoint folder"),
        (["skip_visit", "--model", "assets/models/baseline", "--max-tokens", "300"], "unlooped"),
    ],
)
def test_bad_input_is_one_clear_error(arguments, said, run: Run, monkeypatch, request) -> None:
    monkeypatch.chdir(request.config.rootpath)
    code, _, err = run("experiment", *arguments)
    assert code == 1 and err.count("error:") == 1 and "Traceback" not in err and said in err
