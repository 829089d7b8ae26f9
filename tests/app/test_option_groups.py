"""Options in groups: one table for the library and the command line, and a request that is made of either."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.main import get_command

from visitlens.app import cli
from visitlens.app.commands import ablate, record
from visitlens.app.terminal.option_groups import ReadOptions, TextOptions
from visitlens.errors import InputError
from visitlens.hooks.capture.sampling import Sampling
from visitlens.hooks.recording.format.schema import LEVELS
from visitlens.probe.analyses.results.modes import MODES
from visitlens.probe.jobs.engines import ENGINES
from visitlens.probe.jobs.request import Generation, ModelSpec, RunRequest, TextSpec


def options_of(command: str) -> set[str]:
    found = get_command(cli.app).commands[command].params  # pyright: ignore[reportAttributeAccessIssue]
    return {option for parameter in found for option in parameter.opts}


@pytest.mark.parametrize("command", ["record", "ablate", "experiment", "inspect", "app"])
def test_every_command_that_loads_a_model_reads_it_by_the_same_options(command: str) -> None:
    assert {"--steps", "--state-seed", "--trust-remote-code", "--family", "--tie-copies"} <= options_of(command)


def test_choices_are_the_librarys_own() -> None:
    assert (
        list(record.Level) == list(LEVELS) and list(record.Engine) == list(ENGINES) and list(ablate.Mode) == list(MODES)
    )


def test_only_what_was_asked_for_is_passed_on_and_0_is_a_number() -> None:
    assert ReadOptions().given() == {}
    assert ReadOptions(state_seed=0, tie_copies=True, family="ouro").given() == {
        "state_seed": 0,
        "family": "ouro",
        "tie_copies": True,
    }
    assert TextOptions(bos="none").given() == {"bos": "none", "special_as_text": False, "by_line": False}
    assert TextOptions().given()["bos"] is None


def test_a_request_is_made_of_options_by_their_own_names() -> None:
    request = RunRequest.of(
        "m", "t.txt", "o", level="tokens", batch=2, dtype="bfloat16", max_tokens=9, generate=4, temperature=0.5, seed=3,
        model_options={"steps": 2}, workers=2,
    )  # fmt: skip
    assert request.model == ModelSpec(checkpoint=Path("m"), dtype="bfloat16", options={"steps": 2})
    assert request.text == TextSpec(path=Path("t.txt"), max_tokens=9) and request.out == Path("o")
    assert (request.keep.level, request.keep.batch, request.workers) == ("tokens", 2, 2)
    assert request.generate == Generation(new_tokens=4, sampling=Sampling(0.5, 1.0, 3))
    assert RunRequest.of("m", "t", "o").generate is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bacth": 2}, "no option 'bacth'; there are activation_tokens, attention, batch, "),
        ({"generate": -1}, "a number of tokens to generate, got -1"),
        ({"seed": 3}, "is of sampling: say how many tokens"),
        ({"temperature": 0.5}, "is of sampling: say how many tokens"),
        ({"generate": 3, "top_p": 0.5}, "give a temperature above 0 too"),
        ({"workers": 0}, "at least one worker, got 0"),
        ({"threads": 0}, "at least one thread, got 0"),
        ({"engine": "spark"}, "an engine among process, ray, got 'spark'"),
        ({"dtype": "int8"}, "a dtype among float32, .*, got 'int8'"),
        ({"level": "all"}, "level"),
    ],
)
def test_what_can_not_be_asked_for_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        RunRequest.of("m", "t", "o", **options)


def test_a_command_is_told_what_it_does_not_take(run: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    code, _, err = run("record", "smelt", tmp_path, "-o", tmp_path / "a.vlens", "--level", "all")
    assert code == 2 and all(level in err for level in LEVELS)
