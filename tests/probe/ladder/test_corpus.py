"""A prepared corpus: what it holds, what it leaves out with counts, and the training stream drawn from it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from visitlens.errors import InputError
from visitlens.hooks.text.documents import Document
from visitlens.probe.ladder.corpus import ROW, Corpus, SpecialTokens, TokenizedDocuments, prepare
from visitlens.probe.ladder.stream import TrainingStream

BOS, EOS, PAD = 1, 2, 3


def letters(*special: str) -> Tokenizer:
    """A token a character."""
    vocabulary = {name: i for i, name in enumerate(("<unk>", *special))}
    vocabulary |= {chr(c): len(vocabulary) + i for i, c in enumerate([10, *range(32, 127)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens(list(special))
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    letters("<s>", "</s>", "<pad>").save(str(path))
    return path


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_files_named_by_split_keep_it_and_categories_are_kept(tmp_path: Path, tokenizer_file: Path) -> None:
    source = tmp_path / "text"
    source.mkdir()
    write(source / "a.train.jsonl", [{"text": "abc", "category": "code"}, {"text": "hello", "category": "web"}])
    write(source / "a.validation.jsonl", [{"text": "xyz", "category": "web"}])
    corpus = prepare(source, tokenizer_file, tmp_path / "corpus")
    assert corpus.special == SpecialTokens(BOS, EOS, PAD)
    assert corpus.categories == ("code", "web")
    decode = letters("<s>", "</s>", "<pad>")
    first = corpus.train[0]
    assert first[0] == BOS and first[-1] == EOS and first.dtype == np.int32
    assert [decode.id_to_token(int(i)) for i in first[1:-1]] == list("abc")
    assert [len(corpus.train), len(corpus.validation), corpus.train.num_tokens] == [2, 1, 12]
    assert corpus.report["documents"] == {
        "train": {"code": {"documents": 1, "tokens": 5}, "web": {"documents": 1, "tokens": 7}},
        "validation": {"web": {"documents": 1, "tokens": 5}},
    }


def test_without_names_the_split_is_by_the_documents_own_tokens(tmp_path: Path, tokenizer_file: Path) -> None:
    texts = [f"document {i}" for i in range(400)]
    one = prepare([Document(t) for t in texts], tokenizer_file, tmp_path / "a", validation_share=0.2)
    other = prepare([Document(t) for t in reversed(texts)], tokenizer_file, tmp_path / "b", validation_share=0.2)
    held = [{c.validation[i].tobytes() for i in range(len(c.validation))} for c in (one, other)]
    assert held[0] == held[1] and 50 < len(held[0]) < 110
    assert not held[0] & {one.train[i].tobytes() for i in range(len(one.train))}


def test_what_is_no_document_is_left_out_and_counted(tmp_path: Path, tokenizer_file: Path) -> None:
    lines = [json.dumps({"text": f"good {i}"}).encode() for i in range(60)]
    lines += [b'{"text": ""}', b"{", b'{"text": "caf\xe9"}', b'{"text": 3}']
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    corpus = prepare(tmp_path / "a.jsonl", tokenizer_file, tmp_path / "corpus", validation_share=0.3)
    assert len(corpus.train) + len(corpus.validation) == 60
    assert corpus.report["skipped"] == {
        "without a token": 1, "no object with text": 1, "not UTF-8": 1, "text is no string": 1
    }  # fmt: skip


def test_a_prepared_corpus_is_opened_and_not_made_for_something_else(tmp_path: Path, tokenizer_file: Path) -> None:
    source = write(tmp_path / "a.jsonl", [{"text": f"text {i}"} for i in range(80)])
    made = prepare(source, tokenizer_file, tmp_path / "corpus", validation_share=0.3)
    stamp = (tmp_path / "corpus" / "train.tokens.npy").stat().st_mtime_ns
    assert prepare(source, tokenizer_file, tmp_path / "corpus", validation_share=0.3).report == made.report
    assert (tmp_path / "corpus" / "train.tokens.npy").stat().st_mtime_ns == stamp
    with pytest.raises(InputError, match="a corpus with another validation_share; choose another folder"):
        prepare(source, tokenizer_file, tmp_path / "corpus", validation_share=0.4)
    with pytest.raises(InputError, match=r"expected a prepared corpus in .*nowhere"):
        Corpus.open(tmp_path / "nowhere")


def test_reading_can_stop_early(tmp_path: Path, tokenizer_file: Path) -> None:
    source = write(tmp_path / "a.jsonl", [{"text": f"text {i:04}"} for i in range(2000)])
    corpus = prepare(source, tokenizer_file, tmp_path / "corpus", max_tokens=3000)
    assert 3000 <= corpus.train.num_tokens + corpus.validation.num_tokens < 3000 + 256 * 11


@pytest.mark.parametrize(("special", "missing"), [((), "BOS"), (("<s>",), "EOS")])
def test_a_tokenizer_without_bos_or_eos_is_refused(special: tuple, missing: str, tmp_path: Path) -> None:
    letters(*special).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(InputError, match=f"the tokenizer has no {missing} token among .*with --{missing.lower()}"):
        prepare([Document("x")], tmp_path / "tokenizer.json", tmp_path / "corpus")


def test_special_tokens_of_other_names_can_be_named(tmp_path: Path) -> None:
    tokenizer = letters("<go>", "<halt>")
    assert SpecialTokens.of(tokenizer, "<go>", "<halt>") == SpecialTokens(bos=1, eos=2, pad=2)
    with pytest.raises(InputError, match="no token '<stop>'"):
        SpecialTokens.of(tokenizer, "<go>", "<stop>")
    assert SpecialTokens.of(letters("<|endoftext|>")) == SpecialTokens(bos=1, eos=1, pad=1)


def test_text_for_one_split_only_is_refused(tmp_path: Path, tokenizer_file: Path) -> None:
    with pytest.raises(InputError, match="no document for train or validation: 0 documents have a token"):
        prepare([Document("")], tokenizer_file, tmp_path / "a")
    with pytest.raises(InputError, match="no document for validation: 1 documents have a token"):
        prepare([Document("abc")], tokenizer_file, tmp_path / "b", validation_share=0.0)


# The stream


def documents_of(lengths: list[int]) -> TokenizedDocuments:
    """Distinct ids per document, BOS first."""
    parts = [np.array([BOS, *(100 + i * 1000 + np.arange(n - 1))]) for i, n in enumerate(lengths)]
    rows = np.zeros(len(lengths), dtype=ROW)
    rows["length"], rows["start"] = lengths, np.cumsum(lengths) - lengths
    return TokenizedDocuments(np.concatenate(parts).astype(np.int32), rows)


def stream_of(documents: TokenizedDocuments, **options) -> TrainingStream:
    options = {"context": 16, "batch": 3, "dyck_share": 0.0} | options
    return TrainingStream(documents, SpecialTokens(BOS, EOS, PAD), letters("<s>", "</s>", "<pad>"), **options)


@given(lengths=st.lists(st.integers(2, 60), min_size=1, max_size=12), context=st.integers(4, 20))
@settings(max_examples=40)
def test_an_epoch_holds_every_token_once_and_segments_begin_with_bos(lengths: list[int], context: int) -> None:
    stream = stream_of(documents_of(lengths), context=context, batch=2)
    seen: list[int] = []
    while stream.state()["epoch"] == 0:
        tokens, segments = stream.next_batch()
        assert tokens.shape == segments.shape == (2, context)
        for row, ids in zip(tokens, segments, strict=True):
            assert row[0] == BOS and (row[1:][np.diff(ids) > 0] == BOS).all() and (np.diff(ids) >= 0).all()
            seen += row[row >= 100].tolist()
    once = [t for i, n in enumerate(lengths) for t in range(100 + i * 1000, 100 + i * 1000 + n - 1)]
    assert sorted(seen[: len(once)]) == once


def test_a_document_larger_than_everything_is_cut_into_pieces_shuffled_among_the_others() -> None:
    stream = stream_of(documents_of([5000, 20, 20]), context=16, batch=1)
    rows = [stream.next_batch()[0][0] for _ in range(30)]
    owners = [set((row[row >= 100] // 1000).tolist()) for row in rows]
    starts = [int(row[row >= 100][0]) for row in rows]
    assert starts != sorted(starts) and any(owners)


def test_dyck_prompts_take_their_share_of_tokens() -> None:
    stream = stream_of(documents_of([50] * 40), context=400, batch=2, dyck_share=0.3)
    for _ in range(20):
        stream.next_batch()
    state = stream.state()
    assert state["dyck_tokens"] / (state["dyck_tokens"] + state["text_tokens"]) == pytest.approx(0.3, abs=0.03)
    with pytest.raises(InputError, match="must lie in"):
        stream_of(documents_of([5]), dyck_share=1.0)


@pytest.mark.parametrize("after", [0, 1, 7, 40])
def test_a_restored_stream_goes_on_exactly_there(after: int) -> None:
    documents = documents_of([50, 3, 9, 31, 200])
    one = stream_of(documents, dyck_share=0.2, seed=5)
    for _ in range(after):
        one.next_batch()
    state = json.loads(json.dumps(one.state()))
    other = stream_of(documents, dyck_share=0.2, seed=5)
    other.restore(state)
    for _ in range(12):
        for a, b in zip(one.next_batch(), other.next_batch(), strict=True):
            np.testing.assert_array_equal(a, b)


def test_the_order_depends_on_the_seed_and_on_the_epoch() -> None:
    documents = documents_of([10] * 50)

    def epoch_starts(seed: int, epochs: int) -> list[int]:
        stream = stream_of(documents, seed=seed, context=11, batch=1)
        return [int(stream.next_batch()[0][0, 1]) for _ in range(50 * epochs)]  # a document fills a context

    assert epoch_starts(0, 1) != epoch_starts(1, 1)
    twice = epoch_starts(0, 2)
    assert sorted(twice[:50]) == sorted(twice[50:]) and twice[:50] != twice[50:]


def test_both_models_of_a_pair_see_the_same_sequences(tmp_path: Path, tokenizer_file: Path) -> None:
    """Jobs of a pair differ in their model alone."""
    from visitlens.probe.ladder.grid_training import jobs_of
    from visitlens.probe.ladder.mini_grid import NANO

    texts = [Document(f"text number {i} " * 9) for i in range(80)]
    corpus = prepare(texts, tokenizer_file, tmp_path / "corpus", validation_share=0.2)
    baseline, looped = jobs_of(NANO, corpus, tmp_path, cells=["24K-S0"], tokens=1000)
    assert (baseline.recipe, baseline.corpus) == (looped.recipe, looped.corpus)
    assert baseline.config.context_length == looped.config.context_length
    assert baseline.config != looped.config and looped.config.visits == 2
    assert baseline.config.vocab_size == looped.config.vocab_size == letters("<s>", "</s>", "<pad>").get_vocab_size()
