"""A tokenizer whose pattern panics or takes ages: one error that names it, and nothing else stands still."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from visitlens.app.live.job_queue import JobQueue
from visitlens.errors import InputError
from visitlens.hooks.text import tokenizer as module
from visitlens.hooks.text.encoder import TextEncoder
from visitlens.hooks.text.tokenizer import encoded
from visitlens.probe.samples.dyck_prompts import encode_with_offsets

TEXT = "a" * 400 + "b"


@pytest.fixture(scope="module")
def exploding() -> Tokenizer:
    made = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    return made


def test_a_panic_is_an_input_error_at_every_place_that_reads_text(exploding: Tokenizer) -> None:
    with pytest.raises(BaseException) as raised:
        exploding.encode(TEXT)
    assert not isinstance(raised.value, Exception), "not the attack that it is meant to be"
    encoder = TextEncoder.of(exploding, SimpleNamespace())
    for read in (
        lambda: encoder.ids(TEXT),
        lambda: encoder.documents(["a", TEXT]),
        lambda: encode_with_offsets(exploding, TEXT),
    ):
        with pytest.raises(InputError, match=r"tokenizer can't read .*PanicException"):
            read()


def test_a_tokenizer_that_takes_ages_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_SECONDS", 0.05)

    class Slow:
        def encode_batch(self, texts: list[str], **_: Any) -> list[Any]:
            time.sleep(2)
            return []

    with pytest.raises(InputError, match="a text of 3 characters in 0 s"):
        encoded(Slow(), ["abc"])  # pyright: ignore[reportArgumentType]


def test_a_job_may_die_of_anything_and_the_next_one_runs(exploding: Tokenizer) -> None:
    jobs = JobQueue()

    def ends(on_progress: object) -> None:
        raise SystemExit("over")

    died = [jobs.submit("a", lambda on_progress: exploding.encode(TEXT)), jobs.submit("a", ends)]
    lives = jobs.submit("b", lambda on_progress: 17)
    assert jobs.wait(lives, 60).status == "done" and jobs.result(lives) == 17
    said = [jobs.state(id_) for id_ in died]
    assert [state.status for state in said] == ["failed", "failed"]
    assert "PanicException" in said[0].message and "SystemExit" in said[1].message
    jobs.close()
