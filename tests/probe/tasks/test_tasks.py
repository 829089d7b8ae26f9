"""Tasks: generators whose answers are right, task files, and training that resumes exactly."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from visitlens.errors import InputError
from visitlens.probe.tasks import task_file
from visitlens.probe.tasks.batch import Generator
from visitlens.probe.tasks.brackets import CLOSERS, FIRST_CLOSER, OPENERS, Brackets
from visitlens.probe.tasks.hops import FIRST_HOP, Hops
from visitlens.probe.tasks.stream import TaskStream, held_out
from visitlens.probe.tasks.task_file import Example, read_task, write_task

HOPS = Hops(hops=3, sizes=(6, 7), symbols=9, queries=10)
BRACKETS = Brackets(kinds=4, depth=4, shots=3)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_every_answer_of_hops_follows_the_edges_of_its_context() -> None:
    drawn = HOPS.batch(rng(), 20, stage=3)
    asked = set()
    for row, scored in zip(drawn.tokens.tolist(), drawn.scored, strict=True):
        first = next(i for i, token in enumerate(row) if FIRST_HOP <= token < FIRST_HOP + 4)
        edges = dict(zip(row[1:first:2], row[2:first:2], strict=True))
        assert sorted(edges) == sorted(edges.values()) and len(edges) in HOPS.sizes
        queries = [(row[i - 2], row[i - 1], row[i]) for i in np.flatnonzero(scored)]
        assert len(queries) == 10 == len(set(queries))
        for hops, symbol, answer in queries:
            k = hops - FIRST_HOP + 1
            at = symbol
            for _ in range(k):
                at = edges[at]
                assert at != symbol  # one cycle, longer than the hops: the symbol itself is never right
            assert at == answer
            asked.add(k)
    assert asked == {1, 2, 3}


def test_a_stage_of_hops_asks_for_no_more_hops_and_its_facets_say_how_many() -> None:
    drawn = HOPS.batch(rng(), 8, stage=2)
    marks = drawn.tokens[:, :-2][drawn.scored[:, 2:]] - FIRST_HOP + 1
    assert set(marks.tolist()) == {1, 2}
    np.testing.assert_array_equal(drawn.facets["k"][drawn.scored], marks)
    np.testing.assert_array_equal(drawn.facets["query"][drawn.scored], np.tile(np.arange(10), 8))


def test_brackets_close_in_reverse_by_the_pairs_of_their_own_context() -> None:
    pairings = []
    drawn = BRACKETS.batch(rng(), 30, stage=4)
    words = ["<bos>", "<eos>", "<pad>", "Input:", "Output:", *OPENERS, *CLOSERS]
    for row, scored, shown in zip(drawn.tokens, drawn.scored, drawn.facets["shown"], strict=True):
        text = " ".join(words[token] for token in row[1:])
        pairs: dict[str, str] = {}
        at = 0
        for shot in text.split("Input: ")[1:]:
            opened, closed = (part.split() for part in shot.split("Output:"))
            assert len(opened) == len(closed) == len(set(opened))
            before = dict(pairs)
            for opener, closer in zip(opened[::-1], closed, strict=True):
                assert pairs.setdefault(opener, closer) == closer
                place = np.flatnonzero(scored)[at]
                assert words[row[place]] == closer and bool(shown[place]) == (opener in before)
                at += 1
        assert at == scored.sum() and len(set(pairs.values())) == len(pairs) <= 4
        pairings.append(tuple(sorted(pairs.items())))
    assert len(set(pairings)) == 30


def test_a_first_shot_tells_nothing_of_its_closers() -> None:
    """Over many contexts each closer is as frequent after each opener: 1 in 8, within four standard errors."""
    drawn = Brackets(kinds=4, depth=1, shots=0).batch(rng(), 4000, stage=1)
    opener, closer = drawn.tokens[:, 2], drawn.tokens[:, 4] - FIRST_CLOSER
    for one in np.unique(opener):
        counts = np.bincount(closer[opener == one], minlength=8)
        expected = counts.sum() / 8
        assert np.all(np.abs(counts - expected) < 4 * np.sqrt(expected * 7 / 8))


@pytest.mark.parametrize("task", [HOPS, BRACKETS], ids=["hops", "brackets"])
def test_a_task_s_tokenizer_spells_its_contexts_and_reads_its_examples(task: Hops | Brackets) -> None:
    tokenizer = Tokenizer.from_str(json.dumps(task.tokenizer_json()))
    assert tokenizer.get_vocab_size() == task.vocab_size
    row = task.batch(rng(), 1, task.stages).tokens[0].tolist()
    text = tokenizer.decode(row[1:], skip_special_tokens=False)
    assert tokenizer.encode(text, add_special_tokens=False).ids == row[1:]
    for example in task.examples(rng(), 3):
        encoded = tokenizer.encode(example.text, add_special_tokens=False)
        assert "<pad>" not in encoded.tokens
        assert all(span in encoded.offsets for span in example.scored)
        if example.corrupted is not None:
            twin = tokenizer.encode(example.corrupted, add_special_tokens=False)
            assert twin.offsets == encoded.offsets and twin.ids != encoded.ids
            assert all(example.corrupted[slice(*s)] == example.text[slice(*s)] for s in example.scored)


def test_the_edges_named_as_roles_lead_from_the_symbol_to_the_answer() -> None:
    for example in HOPS.examples(rng(), 20):
        k = int(example.facets["k"][0])
        at = example.text[slice(*example.roles["symbol"][0])]
        for hop in range(1, k + 1):
            source, target = example.text[slice(*example.roles[f"edge {hop}"][0])].split()
            assert source == at
            at = target
        assert at == example.text[slice(*example.scored[0])]
        assert f"edge {k + 1}" not in example.roles


def test_a_corrupted_twin_of_hops_has_another_answer() -> None:
    for example in HOPS.examples(rng(), 20):
        assert example.corrupted is not None
        *pairs, k, symbol, answer = example.corrupted.split()
        edges = dict(zip(pairs[::2], pairs[1::2], strict=True))
        for _ in range(int(k)):
            symbol = edges[symbol]
        assert symbol != answer


def test_the_nearest_shot_shows_every_pair_that_is_scored_whatever_the_number_of_shots() -> None:
    examples = BRACKETS.examples(rng(), 10, shots=(0, 1, 3))
    for none, one, three in zip(examples[:10], examples[10:20], examples[20:], strict=True):
        assert three.text.endswith(one.text) and one.text.endswith(none.text)
        nearest, query = one.text.split("Input: ")[1:]
        assert set(query.split("Output: ")[1].split()[:3]) <= set(nearest.split("Output: ")[1].split())
        assert [one.text[slice(*span)] for span in one.scored] == query.split("Output: ")[1].split()[:3]


@pytest.mark.parametrize("task", [HOPS, BRACKETS], ids=["hops", "brackets"])
def test_a_stream_goes_on_where_it_was_and_never_draws_held_out_contexts(task: Generator) -> None:
    stream = TaskStream(task, batch=3, seed=5)
    stream.stage = 2
    stream.next_batch()
    state = json.loads(json.dumps(stream.state()))
    following = stream.next_batch()
    again = TaskStream(task, batch=3, seed=5)
    again.restore(state)
    for mine, theirs in zip(again.next_batch(), following, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    tokens, segments, _ = following
    assert [len(set(row)) for row in segments.tolist()] == [1, 1, 1] and len(set(segments[:, 0].tolist())) == 3
    assert held_out(task, 3, stage=2).tokens.tolist() != tokens.tolist()
    assert held_out(task, 3, part=1).tokens.tolist() != held_out(task, 3, part=2).tokens.tolist()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Hops(hops=5), "1 to 4 hops, got 5"),
        (lambda: Hops(hops=3, sizes=(3, 6)), "longer than 3 hops"),
        (lambda: Hops(sizes=(9,), symbols=8), r"got \(9,\) of 8"),
        (lambda: Brackets(kinds=3, depth=4), "depth 4, 3 kinds"),
        (lambda: Brackets(shots=-1), "-1 shots"),
    ],
)
def test_sizes_that_make_no_task_are_refused_with_what_was_expected(make: type, words: str) -> None:
    with pytest.raises(InputError, match=words):
        make()


def test_a_task_file_gives_back_what_was_written(tmp_path: Path) -> None:
    examples = [*HOPS.examples(rng(), 2), *BRACKETS.examples(rng(), 2, shots=(0, 2))]
    write_task(tmp_path / "task.jsonl", examples)
    assert read_task(tmp_path / "task.jsonl") == examples


def test_an_answer_is_scored_without_the_space_before_it() -> None:
    example = Example.from_json({"prompt": "two and two make", "answer": " four", "corrupted": "two and one make"})
    assert example.text[slice(*example.scored[0])] == "four"
    assert example.corrupted == "two and one make four"
    newline = Example.of_answer("ab", "\n")
    assert newline.scored == ((2, 3),)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("[1]", "expected a JSON object, got list"),
        ('{"prompt": "a"}', "expected prompt and answer, or text and scored, got prompt"),
        ('{"prompt": "a", "answer": "b", "text": "ab"}', "got answer, prompt, text"),
        ('{"prompt": "a", "answer": ""}', "the answer to 'a' is empty"),
        ('{"text": "ab", "scored": []}', "nothing is scored"),
        ('{"text": "ab", "scored": [[1, 3]]}', r"within the 2 characters of 'ab', got \[1, 3\]"),
        ('{"text": "ab", "scored": [[1.0, 2]]}', r"expected a list of \[start, stop\]"),
        ('{"text": "ab", "scored": [[0, 1]], "roles": {"x": [[2, 2]]}}', "x: expected spans"),
        ('{"text": "ab", "scored": [[0, 1]], "facets": {"k": [1]}}', "facets: expected names and their labels"),
        ('{"text": "ab", "scored": [[0, 1]], "answers": 1}', "unknown keys answers"),
        ('{"text": 3, "scored": [[0, 1]]}', "text: expected a text, got 3"),
        ("{", "line 2"),
    ],
)
def test_a_line_that_is_no_example_is_named_with_its_number(tmp_path: Path, line: str, words: str) -> None:
    file = tmp_path / "task.jsonl"
    file.write_text('{"prompt": "a", "answer": "b"}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(InputError, match=words) as error:
        read_task(file)
    assert "line 2" in str(error.value)


def test_a_task_file_without_an_example_says_what_belongs_there(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n", encoding="utf-8")
    with pytest.raises(InputError, match="holds no example"):
        read_task(tmp_path / "empty.jsonl")
    with pytest.raises(InputError, match="not a readable task file"):
        read_task(tmp_path / "none.jsonl")


def test_the_examples_on_the_page_and_in_the_module_are_examples(request: pytest.FixtureRequest) -> None:
    page = (request.config.rootpath / "docs" / "tasks.md").read_text(encoding="utf-8")
    module = task_file.__doc__ or ""
    lines = [line[: line.rindex("}") + 1] for line in (page + module).splitlines() if line.startswith('    {"')]
    examples = [Example.from_json(json.loads(line)) for line in lines]
    assert [example.text[slice(*example.scored[0])] for example in examples] == ["Paris", "b", "b", "b"]
