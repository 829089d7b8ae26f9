"""Checkpoints that bring their own Python: from a folder, and by a hub name from the local cache, with --trust-remote-code."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.hooks.adapters.remote_code.mended import modeling_tiny_huginn, modeling_tiny_ouro
from transformers import modeling_rope_utils
from transformers.utils.generic import ModelOutput

import visitlens as vl
from visitlens.app.live.read_as import read_as
from visitlens.app.live.service import LiveService
from visitlens.app.view.registry import Registry
from visitlens.errors import CheckpointError, InputError
from visitlens.hooks.adapters.adapt import adapt
from visitlens.hooks.loading.load_model import load_model
from visitlens.probe.jobs.as_recorded import as_recorded

Run = Callable[..., tuple[int, str, str]]
CODE = {
    "huginn_raven": (modeling_tiny_huginn, "TinyHuginn", [0, *[1, 2] * 3, 3]),
    "ouro": (modeling_tiny_ouro, "TinyOuro", [0, 1] * 4),
}
TOKENS = torch.randint(3, 40, (2, 12), generator=torch.Generator().manual_seed(5))


@pytest.fixture
def checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save_tokenizer: Callable[..., None]
) -> Callable[[str], tuple[Path, Any]]:
    """Factory: a folder with weights, tokenizer, modelling file and auto_map, and the model that it holds."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))

    def build(kind: str) -> tuple[Path, Any]:
        module, name, _ = CODE[kind]
        torch.manual_seed(2)
        model = getattr(module, name)()
        file, folder = Path(str(module.__file__)), tmp_path / kind
        model.config.auto_map = {
            "AutoConfig": f"{file.stem}.{name}Config",
            "AutoModelForCausalLM": f"{file.stem}.{name}",
        }
        model.save_pretrained(folder)
        shutil.copy(file, folder)
        save_tokenizer(folder)
        return folder, model.eval().requires_grad_(False)

    return build


@pytest.mark.parametrize("kind", CODE)
def test_a_folder_with_its_own_code_is_recorded(
    kind: str, checkpoint: Callable[[str], tuple[Path, Any]], words: Path, run: Run, tmp_path: Path
) -> None:
    folder, model = checkpoint(kind)
    loaded = load_model(folder, trust_remote_code=True)
    assert [step.layer for step in loaded.plan.steps] == CODE[kind][2]
    assert torch.equal(loaded(TOKENS), adapt(model)(TOKENS))  # type: ignore[arg-type]  # tensors
    out = tmp_path / "run.vlens"
    code, _, err = run("record", folder, words, "--out", out, "--context", 40, "--trust-remote-code", "--steps", 2)
    assert code == 0, err
    rec = vl.open(out)
    looped = [n for n, visits in rec.plan.visits.items() if visits > 1]
    assert rec.plan.visits[looped[0]] == 2 and rec.stat("stage_cosine").counts.all()  # type: ignore[union-attr]  # known
    options = ("--metric", "text", "--text", words, "--steps", 2, "--trust-remote-code")
    code, _, err = run("ablate", out, "--model", folder, *options)
    assert code == 0, err
    code, _, err = run("record", folder, words, "--out", tmp_path / "n.vlens")
    assert code == 1 and "transformers can't load it" in err and "trust" in err
    code, text, _ = run("inspect", folder, "--trust-remote-code", "--no-checks")
    assert code == 0 and kind in text


@pytest.mark.parametrize("kind", CODE)
def test_code_of_older_releases_runs_and_its_mending_stays_its_own(
    kind: str, checkpoint: Callable[[str], tuple[Path, Any]], run: Run
) -> None:
    import transformers

    before = [(place, dict(vars(place))) for place in (transformers.masking_utils, modeling_rope_utils, ModelOutput)]
    folder, model = checkpoint(kind)
    with pytest.raises((AttributeError, KeyError, TypeError)):
        auto = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
        auto(TOKENS)
    for _ in range(2):  # once more in the same process: mended already
        loaded = load_model(folder, trust_remote_code=True)
        assert torch.equal(loaded(TOKENS), adapt(model)(TOKENS))  # type: ignore[arg-type]  # tensors
    assert all(vars(place) == held for place, held in before)
    code, out, err = run("inspect", folder, "--trust-remote-code", "--json")
    guards = {guard["name"]: guard["ok"] for guard in json.loads(out)["guards"]}
    assert code == 0 and guards["cached generation"] and guards["observation"], err


def test_the_random_state_is_of_its_seed_and_ablate_reads_a_model_as_recorded(
    checkpoint: Callable[[str], tuple[Path, Any]], words: Path, run: Run, tmp_path: Path
) -> None:
    folder, out, trust = checkpoint("huginn_raven")[0], tmp_path / "run.vlens", "--trust-remote-code"
    here = ("--out", out, "--context", 40, trust, "--no-checks", "--steps", 2)
    code, _, err = run("record", folder, words, *here, "--state-seed", 3, "--max-tokens", 80)
    assert code == 0, err
    rec, trusted = vl.open(out), {"trust_remote_code": True}
    assert rec.recording.provenance["model_options"] == {"trust_remote_code": True, "steps": 2, "state_seed": 3}
    assert rec.recording.config["state_seed"] == 3
    assert "the initial state is drawn with seed 3" in run("info", out)[1]
    for seed in ((), ("--state-seed", 0)):
        code, _, err = run("record", folder, words, *here, *seed)
        assert code == 1 and "another configuration (model (state_seed) differs" in err
    assert run("record", folder, words, *here, "--state-seed", 3)[0] == 0, "the same seed goes on"
    other = tmp_path / "other.vlens"
    assert run("record", folder, words, "--out", other, *here[2:])[0] == 0
    assert not (vl.open(other).stat("resid_rms").values == vl.open(out).stat("resid_rms").values).all()

    judged = ("ablate", out, "--model", folder, "--metric", "text", "--text", words, "--max-tokens", 40)
    code, _, err = run(*judged)
    assert code == 1 and "read them, and give --trust-remote-code again" in err and err.count("error:") == 1
    for wrong, said in (
        (("--steps", 4), "recorded with --steps 2, not 4: leave --steps out"),
        (("--state-seed", 0), "recorded with --state-seed 3, not 0"),
    ):
        code, _, err = run(*judged, trust, *wrong)
        assert code == 1 and said in err and err.count("error:") == 1
    assert run(*judged, trust)[0] == run(*judged, trust, "--steps", 2, "--state-seed", 3, "--again")[0] == 0
    code, _, err = run("ablate", other, *judged[2:], trust, "--state-seed", 5)
    assert code == 1 and "recorded with --state-seed 0, not 5" in err

    probed = LiveService(folder, options=lambda weights: read_as(Registry([out]).entries(), weights, trusted))
    assert probed._loaded().config.state_seed == 3 and len(probed._loaded().plan) == 6
    entries = Registry([out, other]).entries()
    weights = str(rec.provenance["weights_sha256"])
    with pytest.raises(InputError, match=r"other with --state-seed 0, run with --state-seed 3\. Start .* --state-seed"):
        read_as(entries, weights, trusted)
    assert read_as(entries, weights, {**trusted, "state_seed": 9}) == {"steps": 2, **trusted, "state_seed": 9}
    assert read_as(entries, "another model's", trusted) == trusted
    with pytest.raises(InputError, match=r"^run\.vlens: .* give --trust-remote-code again"):
        read_as(entries, weights, {"steps": 2, "state_seed": 3})

    code, text, _ = run("inspect", folder, trust, "--no-checks", "--state-seed", 7)
    assert code == 0 and "drawn with seed 7" in text
    by_seed = [
        run("experiment", "skip_visit", "--model", folder, trust, "--text", words, "--max-tokens", 40, *seed, "--json")
        for seed in ((), ("--state-seed", 0), ("--state-seed", 1))
    ]
    assert by_seed[0] == by_seed[1] and by_seed[0][0] == by_seed[2][0] == 0 and by_seed[0][1] != by_seed[2][1]


@pytest.mark.parametrize("command", ["record", "inspect", "experiment"])
def test_a_state_seed_is_refused_where_nothing_is_random(
    command: str, checkpoint: Callable[[str], tuple[Path, Any]], words: Path, run: Run, tmp_path: Path
) -> None:
    ouro, trust = checkpoint("ouro")[0], ("--trust-remote-code", "--state-seed", 1)
    for model, options, said in (
        (ouro, trust, "ouro takes no option 'state_seed': its loop starts from no random state; it takes steps"),
        (
            "smelt",
            trust[1:],
            "the native model takes no options, got 'state_seed': its loop starts from no random state",
        ),
    ):
        how = {
            "record": (model, words, "-o", tmp_path / "r.vlens"),
            "inspect": (model,),
            "experiment": ("skip_visit", "--model", model),
        }
        code, _, err = run(command, *how[command], *options)
        assert code == 1 and said in err.replace("\n", " ") and err.count("error:") == 1
    assert run("inspect", ouro, "--state-seed", -1)[0] == 2


@pytest.mark.parametrize(
    "said",
    [
        *[{"steps": 0}, {"steps": 10**9}, {"state_seed": True}, {"family": 5}, {"trust_remote_code": 1}, {"code": "x"}],
        *["steps", [], {"steps": None, "tie_copies": False}],
    ],
)
def test_what_a_recording_says_of_its_model_is_checked(said: Any) -> None:
    about = {"provenance": {"model_options": said}, "config": {"state_seed": 3}}
    rec: Any = SimpleNamespace(recording=SimpleNamespace(place="r.vlens", **about))
    if not said or "tie_copies" in said:
        given = {"steps": 2, "state_seed": 3}
        assert as_recorded(rec, {**given, "tie_copies": False}) == given
        rec.recording.provenance = {"model_options": given}
        assert as_recorded(rec, {"steps": None}) == given
        return
    with pytest.raises(InputError, match=r"r\.vlens: its model was read with options that this visitlens doesn't know"):
        as_recorded(rec, {})


def test_a_hub_name_is_the_same_from_the_cache(
    checkpoint: Callable[[str], tuple[Path, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, model = checkpoint("ouro")
    hub = tmp_path / "hub"
    shutil.copytree(folder, hub / "models--somebody--tiny-ouro" / "snapshots" / "abc")
    (hub / "models--somebody--tiny-ouro" / "refs").mkdir()
    (hub / "models--somebody--tiny-ouro" / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    loaded = load_model("somebody/tiny-ouro", trust_remote_code=True)
    assert torch.equal(loaded(TOKENS), adapt(model)(TOKENS))  # type: ignore[arg-type]  # tensors
    with pytest.raises(CheckpointError, match="somebody/other: no such folder, and the hub doesn't give it"):
        load_model("somebody/other")
