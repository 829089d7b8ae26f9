"""What leads a text, what a text file is and what a tokenizer carries, on the command line and in a notebook."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

import visitlens as vl
from visitlens.probe.reading.recorded_run import open_recording

Run = Callable[..., tuple[int, str, str]]
WORDS = ["!", "<bos>", "<eos>", "<pad>", *(f"w{i}" for i in range(4, 61))]
BOS, EOS = 1, 2


def words() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="!"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<bos>", "<eos>", "<pad>"])
    return tokenizer


def save(folder: Path, tokenizer: Tokenizer | None = None, **ids: int | None) -> Path:
    """A small Llama of transformers, with its tokenizer."""
    transformers = pytest.importorskip("transformers", reason="the extra visitlens[sources] is optional")
    sizes = {
        "vocab_size": 61,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
    }
    given = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, **ids}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**sizes, **given, max_position_embeddings=64)
    transformers.LlamaForCausalLM(config).eval().save_pretrained(folder)
    (tokenizer or words()).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def silent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that names no special tokens."""
    return save(tmp_path_factory.mktemp("silent"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "text.jsonl"
    documents = [" ".join(f"w{4 + (i * 7 + n) % 57}" for i in range(n)) for n in (6, 40, 10)]
    file.write_text("".join(json.dumps({"text": t}) + "\n" for t in documents))
    return file


def tokens_of(path: Path) -> np.ndarray:
    recording = open_recording(path).recording
    return recording.token_table((0, recording.tokens), ("id",))["id"]


def recorded(run: Run, *arguments: object) -> str:
    code, _, err = run("record", *arguments, "--level", "tokens", "--no-checks")
    assert code == 0, err
    return err


def test_no_token_is_made_up_and_every_command_says_so(run: Run, silent: Path, text: Path, tmp_path: Path) -> None:
    err = recorded(run, silent, text, "-o", tmp_path / "a.vlens")
    said = "led by no token: the configuration has no bos_token_id, and the tokenizer itself puts none in front"
    assert said in err
    ids = tokens_of(tmp_path / "a.vlens")
    assert len(ids) == 6 + 40 + 10 and 0 not in ids
    assert said in run("info", tmp_path / "a.vlens")[1]
    assert said in run("inspect", silent, "--no-checks")[1]
    ends = open_recording(tmp_path / "a.vlens").recording.provenance["special_tokens"]
    assert ends["bos"]["id"] is None and ends["eos"]["id"] is None


def test_what_leads_can_be_said_by_name_or_id(run: Run, silent: Path, text: Path, tmp_path: Path) -> None:
    for bos in ("<bos>", BOS):
        err = recorded(run, silent, text, "--bos", bos, "-o", tmp_path / f"{bos}.vlens")
        assert "led by <bos> (1): asked for" in err and "warning" not in err
        assert tokens_of(tmp_path / f"{bos}.vlens")[[0, 7, 48]].tolist() == [BOS] * 3
    err = recorded(run, silent, text, "--bos", "!", "-o", tmp_path / "ordinary.vlens")
    assert "warning: the leading token is '!' (0; asked for), an ordinary token of text" in err
    assert "an ordinary token of text" in run("info", tmp_path / "ordinary.vlens")[1]
    code, _, err = run("record", silent, text, "--bos", "<s>", "-o", tmp_path / "no.vlens")
    assert code == 1 and "expected a leading token as an id in 0..60" in err and not (tmp_path / "no.vlens").exists()


def test_inspect_holds_the_configurations_tokens_against_the_tokenizer(run: Run, text: Path, tmp_path: Path) -> None:
    folder = save(tmp_path / "m", bos_token_id=0, eos_token_id=EOS)
    guards = json.loads(run("inspect", folder, "--json")[1])["guards"]
    (found,) = [guard for guard in guards if guard["name"] == "tokens at document ends"]
    assert found["ok"] is None and "'!' (0; the configuration's bos_token_id), an ordinary token" in found["detail"]
    few = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    other = save(tmp_path / "other", few, bos_token_id=BOS, eos_token_id=EOS)
    out = run("inspect", other)[1]
    assert "FAIL tokens at document ends: the configuration's bos_token_id 1 is no token of the tokenizer" in out
    code, _, err = run("record", other, text, "-o", tmp_path / "a.vlens")
    assert code == 1 and "is it this model's?" in err


def test_a_saved_truncation_and_padding_change_no_recording(run: Run, text: Path, tmp_path: Path) -> None:
    carrying = words()
    carrying.enable_truncation(16)
    carrying.enable_padding(pad_id=3, pad_token="<pad>")
    ids = {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": 3}
    for name, tokenizer in (("plain", words()), ("carrying", carrying)):
        recorded(run, save(tmp_path / name, tokenizer, **ids), text, "-o", tmp_path / f"{name}.vlens")
    plain, other = (tokens_of(tmp_path / f"{name}.vlens") for name in ("plain", "carrying"))
    assert len(plain) == 56 + 3 * 2 and np.array_equal(plain, other)
    assert len(vl.load(tmp_path / "carrying").run("w4 " * 40).token_ids[0]) == 41


def test_the_callers_transformers_tokenizer_is_neither_believed_nor_changed(silent: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words(), pad_token="<pad>")
    tokenizer("w4 w5 w6", truncation=True, max_length=2)
    model = vl.load(transformers.AutoModelForCausalLM.from_pretrained(silent), tokenizer=tokenizer, bos="<bos>")
    assert model.run("w4 w5 w6").token_ids.tolist() == [[BOS, 4, 5, 6]]
    assert model.with_loops and model.sample(["w4 w5 w6 w7"]).contexts.tokens[0, :5].tolist() == [BOS, 4, 5, 6, 7]
    assert tokenizer.backend_tokenizer.truncation["max_length"] == 2


def test_one_rule_for_record_sample_run_and_the_live_probe(run: Run, tmp_path: Path) -> None:
    folder = save(tmp_path / "m", bos_token_id=BOS, eos_token_id=EOS)
    (tmp_path / "t.jsonl").write_text(json.dumps({"text": "<bos> w4 w5"}) + "\n")
    recorded(run, folder, tmp_path / "t.jsonl", "-o", tmp_path / "a.vlens")
    model = vl.load(folder)
    found: list[Any] = [
        tokens_of(tmp_path / "a.vlens")[:-1],
        model.sample(["<bos> w4 w5"]).contexts.tokens[0, :3],
        model.run("<bos> w4 w5").token_ids[0],
        model.trace("<bos> w4 w5").token_ids,
    ]
    assert [[int(i) for i in ids] for ids in found] == [[BOS, 4, 5]] * 4


def test_a_text_file_is_one_prompt_and_says_so_or_one_a_line(run: Run, tmp_path: Path) -> None:
    folder = save(tmp_path / "m", bos_token_id=BOS, eos_token_id=None)
    (tmp_path / "prompts.txt").write_text("w4 w5\n\nw6 w7 w8\n")
    err = recorded(run, folder, tmp_path / "prompts.txt", "--generate", 2, "-o", tmp_path / "one.vlens")
    assert "prompts.txt is one document, so one prompt; --by-line takes each line as one" in err
    assert open_recording(tmp_path / "one.vlens").recording.documents == 1
    err = recorded(run, folder, tmp_path / "prompts.txt", "--generate", 2, "--by-line", "-o", tmp_path / "two.vlens")
    assert "one prompt" not in err
    ids = tokens_of(tmp_path / "two.vlens").tolist()
    assert ids[:3] == [BOS, 4, 5] and ids[5:9] == [BOS, 6, 7, 8] and len(ids) == 11


def test_empty_documents_are_counted_and_kept_as_a_warning(run: Run, silent: Path, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"text": "w4 w5"}\n{"text": ""}\n{"text": " "}\n')
    err = recorded(run, silent, tmp_path / "t.jsonl", "-o", tmp_path / "a.vlens")
    said = "empty: 2 of 3 documents have no token and are left out"
    assert said in err and said in run("info", tmp_path / "a.vlens")[1]
    assert "2 without a token left out" in repr(vl.load(silent).sample(["w4 w5", "", " "]))


def test_special_tokens_written_out_are_said_and_can_be_text(run: Run, tmp_path: Path) -> None:
    folder = save(tmp_path / "m", bos_token_id=BOS, eos_token_id=EOS)
    (tmp_path / "t.jsonl").write_text('{"text": "w4 <eos> w5"}\n')
    err = recorded(run, folder, tmp_path / "t.jsonl", "-o", tmp_path / "a.vlens")
    assert "1 document holds some written out, taken as tokens; --special-as-text takes them as text" in err
    assert tokens_of(tmp_path / "a.vlens").tolist() == [BOS, 4, EOS, 5, EOS]
    assert "special tokens:" not in recorded(
        run, folder, tmp_path / "t.jsonl", "--special-as-text", "-o", tmp_path / "b.vlens"
    )


@pytest.mark.parametrize("option", [("--context", 0), ("--max-tokens", 0)])
def test_0_is_no_missing_number(run: Run, silent: Path, text: Path, tmp_path: Path, option: tuple[str, int]) -> None:
    code, _, err = run("record", silent, text, *option, "-o", tmp_path / "a.vlens")
    assert code == 1 and "at least" in err and "got 0" in err


def test_half_of_a_surrogate_pair_is_one_line_in_every_way_in(run: Run, silent: Path, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"text": "good"}\n{"text": "w4 \\ud83d"}\n')
    code, _, err = run("record", silent, tmp_path / "t.jsonl", "-o", tmp_path / "a.vlens")
    assert code == 1 and "t.jsonl:2" in err and "Traceback" not in err
    model = vl.load(silent)
    for work in (lambda: model.run("w4 \ud83d"), lambda: model.sample(["w4 \ud83d"])):
        with pytest.raises(vl.VisitlensError, match="half of a surrogate pair"):
            work()


def test_adapting_a_model_leaves_it_in_its_own_mode_and_reads_it_in_evaluation_mode(silent: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(silent, attention_dropout=0.5).train()
    model.model.layers[0].eval()
    adapted = vl.adapt(model)
    tokens = torch.tensor([[4, 5, 6, 7]])
    with torch.no_grad():
        assert torch.equal(adapted(tokens), adapted(tokens)), "nothing drops out while it is read"
        with vl.capture(adapted, ["PV"]):
            adapted(tokens)
    assert model.training and model.model.layers[1].self_attn.training and not model.model.layers[0].training
