"""Which adapter reads a checkpoint: by name, after copies are tied, or none and why; and code that doesn't run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import visitlens as vl
from visitlens.errors import InputError
from visitlens.hooks.adapters.adapt import adapt
from visitlens.hooks.audit.tied_copies import copied_layers, tie_copies
from visitlens.hooks.capture.capture import capture

Run = Callable[..., tuple[int, str, str]]
TOKENS = torch.randint(3, 61, (2, 12), generator=torch.Generator().manual_seed(3))


def unrolled(make_hf: Callable[..., Any]) -> Any:
    """A Llama whose layers 1 and 3 are copies of 0 and 2 but for a norm, as a recursive one is when it was saved."""
    model = make_hf("llama", num_hidden_layers=5)
    layers = model.model.layers
    for source, copy in ((0, 1), (2, 3)):
        layers[copy].load_state_dict(layers[source].state_dict())
        layers[copy].input_layernorm.weight.mul_(1.5)
    return model


def test_copies_are_found_and_tied_again(make_hf: Callable[..., Any]) -> None:
    model = unrolled(make_hf)
    groups = [["model.layers.0", "model.layers.1"], ["model.layers.2", "model.layers.3"]]
    assert copied_layers(model) == groups and not copied_layers(make_hf("llama"))
    plain = adapt(model)(TOKENS)
    assert not adapt(model).plan.looped_layers
    assert tie_copies(model) == groups and not copied_layers(model)
    tied = adapt(model)
    assert [(s.layer, s.visit) for s in tied.plan.steps] == [(0, 1), (0, 2), (1, 1), (1, 2), (2, 1)]
    with capture(tied, ["resid"]):
        assert torch.equal(tied(TOKENS), plain)  # type: ignore[arg-type]  # tensors
    norms = [layer.input_layernorm.weight for layer in model.model.layers[:2]]
    assert not torch.equal(*norms), "what differs stays apart"


def test_the_commands_read_copies_as_visits(
    make_hf: Callable[..., Any], save_tokenizer: Callable[[Path], None], words: Path, tmp_path: Path, run: Run
) -> None:
    unrolled(make_hf).save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    code, out, _ = run("inspect", tmp_path / "model", "--no-checks")
    assert code == 0 and "layers.0, layers.1 hold equal weights in separate Parameters" in out
    code, out, _ = run("inspect", tmp_path / "model", "--no-checks", "--tie-copies", "--json")
    ties = {(tie["layer"], tie["component"]): tie["status"] for tie in json.loads(out)["ties"]}
    assert code == 0 and ties[0, "self_attn"] == "tied" and ties[0, "input_layernorm"] == "untied"
    out_path = tmp_path / "r.vlens"
    code, _, err = run("record", tmp_path / "model", words, "--out", out_path, "--tie-copies", "--no-checks")
    assert code == 0, err
    rec = vl.open(out_path)
    assert rec.plan.looped_layers == (0, 1) and rec.recording.provenance["model_options"] == {"tie_copies": True}
    judged = ("--metric", "text", "--text", words, "--max-tokens", 20)
    code, _, err = run("ablate", out_path, "--model", tmp_path / "model", *judged)
    assert code == 0, err
    assert vl.open(out_path).ablations()["text-zero"].effect.labels["layer"] == [0, 1], "read as recorded"
    make_hf("llama").save_pretrained(tmp_path / "plain")
    code, _, err = run("inspect", tmp_path / "plain", "--tie-copies")
    assert code == 1 and "no layers that are copies of one another" in err.replace("\n", " ")


def test_a_family_by_name(make_hf: Callable[..., Any], tmp_path: Path, run: Run) -> None:
    """A model type of somebody's own, whose layers are built like Llama's."""
    model: Any = make_hf("llama")
    plain = adapt(model)(TOKENS)
    model.config.model_type = "somebodys_llama"
    with pytest.raises(InputError, match=r"no adapter for model type 'somebodys_llama'; .* \(--family\)"):
        adapt(model)
    assert torch.equal(adapt(model, "llama")(TOKENS), plain)  # type: ignore[arg-type]  # tensors
    with pytest.raises(InputError, match="no adapter for model type 'lama'"):
        adapt(model, "lama")
    with pytest.raises(InputError, match=r"the adapter Dory doesn't fit this LlamaForCausalLM: .*n_input_layers"):
        adapt(model, "dory")
    with pytest.raises(InputError, match="llama takes no option 'steps'"):
        adapt(model, "llama", steps=2)
    model.config.model_type = "llama"
    model.save_pretrained(tmp_path / "m")
    code, out, _ = run("inspect", tmp_path / "m", "--no-checks", "--family", "mixture_of_recursions")
    assert code == 0 and "MixtureOfRecursions" in out
    code, _, err = run("inspect", tmp_path / "m", "--family", "nobody")
    assert code == 1 and "'nobody'" in err and "mixtral" in err


def test_a_family_that_pools_its_sequence_is_refused_with_the_reason(tmp_path: Path, words: Path, run: Run) -> None:
    import transformers

    sizes = {"d_model": 8, "n_head": 2, "d_head": 4, "d_inner": 8, "vocab_size": 30}
    config = transformers.FunnelConfig(block_sizes=[1, 1], num_decoder_layers=1, **sizes)
    transformers.FunnelForMaskedLM(config).save_pretrained(tmp_path / "funnel")
    code, out, _ = run("inspect", tmp_path / "funnel")
    assert code == 0 and "pools the sequence between blocks" in out and "funnel.encoder.blocks.0.0" in out
    code, _, err = run("record", tmp_path / "funnel", words, "--out", tmp_path / "r")
    assert code == 1 and "a position is no token of the text" in err.replace("\n", " ")


CODE = """
from transformers import PreTrainedConfig, PreTrainedModel
class OldConfig(PreTrainedConfig):
    model_type = "huginn_raven"
class OldModel(PreTrainedModel):
    config_class = OldConfig
    _tied_weights_keys = ["lm_head.weight"]
    def __init__(self, config):
        super().__init__(config)
        raise AttributeError("'list' object has no attribute 'keys'")
"""


def test_code_of_a_checkpoint_that_no_longer_runs_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "old"
    folder.mkdir()
    (folder / "modeling_old.py").write_text(CODE)
    names = {"AutoConfig": "modeling_old.OldConfig", "AutoModelForCausalLM": "modeling_old.OldModel"}
    (folder / "config.json").write_text(
        json.dumps({"model_type": "huginn_raven", "auto_map": names, "transformers_version": "4.47.1"})
    )
    from safetensors.torch import save_file

    save_file({"x": nn.Parameter(torch.zeros(1)).data}, folder / "model.safetensors", {"format": "pt"})
    code, _, err = run("inspect", folder, "--trust-remote-code")
    said = err.replace("\n", " ")
    assert (
        code == 1
        and "its own code doesn't run under transformers" in said
        and "pip install 'transformers==4.47.1'" in said
    )
