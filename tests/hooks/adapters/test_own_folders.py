"""A folder that brings its own loader, from record to the live probe, as a person uses it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.hooks.adapters import own_folders
from tests.hooks.adapters.own_folders import FOLDERS, LOADER, STEPS

import visitlens as vl
from visitlens.app.live.read_as import of_other_code, read_as
from visitlens.app.live.service import LiveService
from visitlens.app.view.registry import Registry
from visitlens.app.view.view import Context, checkpoint_folder
from visitlens.errors import InputError
from visitlens.hooks.core.sites import SITES
from visitlens.hooks.loading.load_model import load_model, resolve, weights_sha256
from visitlens.hooks.models.checkpoint_files import code_sha256
from visitlens.probe.analyses.ablation.ablate_recording import AblationRequest, ablate_recording
from visitlens.probe.live.live_run import LiveRun

Run = Callable[..., tuple[int, str, str]]
TRUST = "--trust-remote-code"
TOKENS = torch.randint(3, 61, (2, 12), generator=torch.Generator().manual_seed(3))
CACHED = """
from types import SimpleNamespace

MEMORY = []


def remember(k, v):
    if MEMORY:
        past, step = MEMORY[-1], MEMORY[-1]["step"]
        past["step"] += 1
        held = past.get(step, (k[:, :, :0], v[:, :, :0]))
        past[step] = k, v = torch.cat([held[0], k], 2), torch.cat([held[1], v], 2)
    return k, v


class Cached(LoopedMoE):
    def forward(self, ids, use_cache=False, past_key_values=None):
        if not use_cache:
            return super().forward(ids)
        past = {**(past_key_values or {"length": 0}), "step": 0}
        before, past["length"] = past["length"], past["length"] + ids.shape[1]
        MEMORY.append(past)
        x = self.blocks[0](self.embed(ids) + self.place.weight[before : past["length"]])
        for _ in range(self.visits):
            for block in self.blocks[1:]:
                x = block(x)
        return SimpleNamespace(logits=self.head(self.norm(x)), past_key_values=MEMORY.pop())
"""


@pytest.mark.parametrize("kind", FOLDERS)
def test_from_record_to_the_live_probe(
    kind: str, folder: Callable[..., Path], words: Path, run: Run, tmp_path: Path
) -> None:
    own, out = folder(kind), tmp_path / "r.vlens"
    code, text, err = run("inspect", own, TRUST, "--json")
    assert code == 0, err
    found = json.loads(text)
    assert [step["layer"] for step in found["steps"]] == STEPS[kind]
    assert all(guard["ok"] is not False for guard in found["guards"])

    code, _, err = run("record", own, words, "-o", out, TRUST, "--level", "tokens", "--context", 48)
    assert code == 0, err
    rec = vl.open(out)
    assert [step.layer for step in rec.plan.steps] == STEPS[kind] and rec.expert_overlap().counts.all()  # type: ignore[union-attr]  # known
    provenance = rec.recording.provenance
    assert provenance["code_sha256"] == code_sha256(own) and provenance["weights_sha256"] == weights_sha256(own)
    assert run("validate", out)[0] == run("info", out)[0] == 0
    code, _, err = run("figures", out, "-o", tmp_path / "figures", "--formats", "html", "--only", "update-cosine")
    assert code == 0 and (tmp_path / "figures" / "update-cosine.html").is_file(), err

    judged = ("--model", own, "--text", words, "--max-tokens", 40, TRUST)
    code, _, err = run("ablate", out, *judged, "--metric", "text")
    assert code == 0 and set(rec.ablations()) == {"text-zero"}, err
    code, text, err = run("experiment", "skip_visit", *judged, "--json")
    assert code == 0 and json.loads(text)["results"], err

    context = Context(Registry([out]), checkpoint_folder(own), model_options={"trust_remote_code": True})
    assert context.texts.texts(rec, [0, 3]) == ["<bos>", "w3"]
    options = context.model_options
    service = LiveService(own, options=lambda weights: read_as(context.registry.entries(), weights, options))
    job = service.probe("tab", "w3 w4 w5")
    assert service.jobs.wait(job, 60).status == "done"
    probed = service.find(job, LiveRun)
    service.jobs.close()
    assert of_other_code(context.registry.entries(), probed.model) == []
    assert of_other_code(context.registry.entries(), {**probed.model, "code_sha256": "0" * 64}) == ["r"]
    assert (probed.logits == vl.load(own, trust_remote_code=True).run("w3 w4 w5").logits.numpy()).all()


@torch.no_grad()
def test_what_is_read_can_be_changed(folder: Callable[..., Path]) -> None:
    """A clean run's own values change nothing; visit 1's experts at visit 2 are what a hook by hand makes of them."""
    own = folder()
    model: Any = load_model(own, trust_remote_code=True)
    plain = model(TOKENS)
    for site in set(SITES) - {"P"} - set(model.config.missing):
        with vl.intervene(model, vl.do.take(site, source=2, visit=2)):
            assert torch.equal(model(TOKENS), plain), site
    seen = list[torch.Tensor]()

    def by_hand(router: Any, arguments: Any, result: Any) -> Any:
        seen.append(result[1])
        scores = result[0].softmax(-1)
        return (result[0], seen[0], scores.gather(-1, seen[0])) if len(seen) == 2 else None

    handle = model.model.blocks[1].moe.router.register_forward_hook(by_hand)
    expected = model(TOKENS)
    handle.remove()
    assert not torch.equal(*seen)
    with vl.intervene(model, vl.do.take("experts", layer=1, visit=2)):
        assert torch.equal(model(TOKENS), expected) and not torch.equal(expected, plain)

    outside = "scores, k = self.router(x)\n        gates, chosen = scores.softmax(-1).topk(k)"
    taken = "        gates, chosen = scores.softmax(-1).topk(self.k)\n        return scores, chosen, gates"
    code = (own / "model.py").read_text().replace(taken, "        return scores, self.k")
    (own / "model.py").write_text(code.replace("_, chosen, gates = self.router(x)", outside))
    model = load_model(own, trust_remote_code=True)
    assert torch.equal(model(TOKENS), plain)
    with vl.intervene(model, vl.do.scale("router", 2.0)):
        assert not torch.equal(model(TOKENS), plain)
    with (
        pytest.raises(InputError, match=r"experts can't be changed at .*: no top k over the 8 experts ran inside"),
        vl.intervene(model, vl.do.take("experts", visit=2)),
    ):
        model(TOKENS)


def test_levels_workers_and_generation_are_those_of_any_model(
    folder: Callable[..., Path], words: Path, run: Run, tmp_path: Path
) -> None:
    own = folder()
    here = ("record", own, words, TRUST, "--context", 48, "--no-checks")
    for name, options in {
        "one": ("--level", "activations", "--sites", "Q,moe_write"),
        "two": ("--level", "activations", "--sites", "Q,moe_write", "--workers", 2, "--shard-tokens", 40),
        "maps": ("--level", "maps", "--steps", 3),
    }.items():
        code, _, err = run(*here, "-o", tmp_path / name, *options)
        assert code == 0, err
    one, two = (vl.open(tmp_path / name).recording for name in ("one", "two"))
    assert len(two.shards) > 1 and len(one.shards) == 1
    assert (one.activation("Q", layer=2, visit=2) == two.activation("Q", layer=2, visit=2)).all()
    assert vl.open(tmp_path / "maps").plan.visits == {0: 1, 1: 3, 2: 3}
    assert run("compare", tmp_path / "one", tmp_path / "two")[0] == 0

    code, _, err = run(*here, "-o", tmp_path / "written", "--generate", 3)
    assert code == 1 and "can't generate token by token: the forward of LoopedMoE takes no use_cache" in err
    model = (own / "model.py").read_text().replace("is_causal=True", "is_causal=x.shape[1] > 1") + CACHED
    model = model.replace("        return self.out(", "        k, v = remember(k, v)\n        return self.out(")
    (own / "model.py").write_text(model)
    loader = (own / LOADER).read_text().replace("import LoopedMoE", "import Cached as LoopedMoE")
    (own / LOADER).write_text(loader.replace("return result\n", 'return getattr(result, "logits", result)\n'))
    code, _, err = run(*here[:-1], "-o", tmp_path / "written", "--generate", 3)
    assert code == 0, err  # the cached run was held against one forward
    assert vl.open(tmp_path / "written").phase("decode").tokens > 0


def test_the_code_runs_only_when_it_is_trusted_whatever_a_recording_says(
    folder: Callable[..., Path], words: Path, run: Run, tmp_path: Path
) -> None:
    own, out, ran = folder(), tmp_path / "r.vlens", tmp_path / "ran"
    (own / LOADER).write_text((own / LOADER).read_text() + f"\n\nopen({str(ran)!r}, 'a').close()\n")
    code, _, err = run("record", own, words, "-o", out, TRUST, "--no-checks", "--context", 48)
    assert code == 0 and ran.exists(), err
    ran.unlink()
    said = f"{own / LOADER} would be run to load this model: read it, then say --trust-remote-code"
    for command in (
        ("record", own, words, "-o", out),
        ("inspect", own),
        ("experiment", "skip_visit", "--model", own),
    ):
        code, _, err = run(*command)
        assert code == 1 and said in err and err.count("error:") == 1
    code, _, err = run("ablate", out, "--model", own, "--metric", "text")
    assert code == 1 and "isn't believed in that: read them, and give --trust-remote-code again" in err
    entries = Registry([out]).entries()
    with pytest.raises(InputError, match="give --trust-remote-code again"):
        LiveService(own, options=lambda weights: read_as(entries, weights, {}))._loaded()
    with pytest.raises(InputError, match="would be run"):
        vl.load(own)
    assert not ran.exists()


def test_a_recording_is_of_its_code_and_options(
    folder: Callable[..., Path], words: Path, run: Run, tmp_path: Path
) -> None:
    own, out = folder(), tmp_path / "r.vlens"
    here = ("record", own, words, "-o", out, TRUST, "--no-checks", "--context", 48)
    assert run(*here)[0] == run(*here)[0] == 0
    code, _, err = run(*here, "--steps", 2)
    assert code == 1 and "another configuration (model_options differs)" in err
    judged = ("ablate", out, "--model", own, TRUST, "--metric", "text", "--text", words, "--max-tokens", 40)
    below = own / "parts"
    below.mkdir()
    (own / "a.py").mkdir()  # no file, and a link that leads back
    (own / "loop").symlink_to(own)
    (own / "gone.py").symlink_to(tmp_path / "nowhere")
    linked = tmp_path / "linked"
    linked.mkdir()
    (own / "elsewhere").symlink_to(linked)
    for changed in (own / "model.py", own / "config.json", below / "new.py", linked / "new.py"):
        before = changed.read_text() if changed.exists() else None
        changed.write_text(f"{before or ''}\n")
        code, _, err = run(*here)
        assert code == 1 and "the code in the model's folder (*.py, config.json) differs" in err
        code, _, err = run(*judged)
        assert (
            code == 1 and f"{own}: the code in this folder (*.py, config.json) has changed since {out} was made" in err
        )
        changed.unlink() if before is None else changed.write_text(before)
    code, _, err = run(*judged)
    assert code == 0, err

    (own / LOADER).write_text((own / LOADER).read_text().replace("steps=None", "steps=None, shift=0.0"))
    shifted = {"trust_remote_code": True, "shift": 0.5}
    vl.record(own, words, tmp_path / "s.vlens", model_options=shifted, context_length=48, checks=False)
    request = {"recording": tmp_path / "s.vlens", "checkpoint": own, "metric": "text", "text": words, "max_tokens": 40}
    with pytest.raises(InputError, match="options that this visitlens doesn't know"):
        ablate_recording(AblationRequest(**request, model_options={"trust_remote_code": True}))
    assert ablate_recording(AblationRequest(**request, model_options=shifted))


def test_folders_keep_their_code_to_themselves(folder: Callable[..., Path]) -> None:
    """Both have a `model.py`; what a forward imports later is found too, and code that has changed is taken anew."""
    before, paths = set(sys.modules), list(sys.path)
    documented, moeut = folder("documented"), folder("moeut")
    (documented / "late.py").write_text("import model\n\nGAIN = 2.0 if model.LoopedMoE else 0\n")
    (documented / "package").mkdir()
    (documented / "package" / "__init__.py").write_text("import package.inside\n\nONE = package.inside.ONE\n")
    (documented / "package" / "inside.py").write_text("ONE = 1.0\n")
    code = (documented / "model.py").read_text()
    late = "        import late\n        from package import ONE\n\n        return late.GAIN * ONE * self.head"
    (documented / "model.py").write_text(code.replace("        return self.head", late))
    first, second = (load_model(each, trust_remote_code=True) for each in (documented, moeut))
    assert [type(own.model).__name__ for own in (first, second)] == ["LoopedMoE", "TinyMoEUT"]  # type: ignore[union-attr]  # adapted
    logits: Any = first(TOKENS)
    (documented / "model.py").write_text(code)
    again: Any = load_model(documented, trust_remote_code=True)(TOKENS)
    assert torch.equal(logits, 2 * again)
    new = set(sys.modules) - before
    assert sys.path == paths and not new & {"model", "late", "package", LOADER.removesuffix(".py")}
    assert not list(documented.rglob("__pycache__"))


def test_a_mixture_of_recursions_is_a_folder_too(recursive: Any, tmp_path: Path) -> None:
    read: Any = load_model(own_folders.recursive(tmp_path / "mor"), trust_remote_code=True)
    assert read.plan == recursive.plan and torch.equal(read(TOKENS % 40), recursive(TOKENS % 40))


def test_weights_of_other_kinds_and_none(folder: Callable[..., Path], words: Path, run: Run, tmp_path: Path) -> None:
    own = folder()
    torch.save(load_file(own / "model.safetensors"), own / "weights.pt")
    (own / "model.safetensors").unlink()
    (own / LOADER).write_text(
        "import torch\n"
        + (own / LOADER)
        .read_text()
        .replace(
            'load_model(model, folder / "model.safetensors")',
            'model.load_state_dict(torch.load(folder / "weights.pt"))',
        )
    )
    code, _, err = run("record", own, words, "-o", tmp_path / "r", TRUST, "--no-checks", "--context", 48)
    assert code == 0, err
    assert vl.open(tmp_path / "r").provenance["weights_sha256"] == weights_sha256(own)
    (own / LOADER).write_text((own / LOADER).read_text().replace("    model.load_state_dict", "    # model.load_state"))
    (own / "weights.pt").unlink()
    code, _, err = run("record", own, words, "-o", tmp_path / "n", TRUST, "--no-checks", "--context", 48)
    assert code == 1 and "no weights there, by which a recording knows its model" in err and "save_model(model" in err
    assert not (tmp_path / "n").exists()


def test_a_bare_module_is_inspected_and_one_of_a_known_family_needs_no_adapter(
    folder: Callable[..., Path], make_hf: Callable[..., Any], run: Run
) -> None:
    own = folder()
    loud = "    print('loading')\n    torch.set_default_dtype(torch.float64)\n    model.visits ="
    whole = "import torch\n" + (own / LOADER).read_text().replace("    model.visits =", loud)
    (own / LOADER).write_text(whole.replace("vl.adapt(model.to(device), MyFamily())", "model.to(device)"))
    code, text, err = run("inspect", own, TRUST, "--json")
    assert code == 0, err
    found = json.loads(text)
    assert "loading" in err and torch.get_default_dtype() == torch.float32
    assert [step["layer"] for step in found["steps"]] == STEPS["documented"] and "proposed" in found["adapter"]
    assert run("inspect", own, TRUST, "--steps", 3, "--json")[1].count('"visit": 3') == 2
    code, _, err = run("inspect", own, TRUST, "--state-seed", 3)
    assert code == 1 and f"{own / LOADER}: load takes no option 'state_seed'; it takes steps" in err
    with pytest.raises(InputError, match="no adapter for model type None"):
        load_model(own, trust_remote_code=True)
    (own / LOADER).write_text(
        "import torch\n\n\ndef load(folder, *, dtype, device):\n    return torch.nn.Bilinear(3, 3, 3)\n"
    )
    code, _, err = run("inspect", own, TRUST)
    assert code == 1 and "Bilinear can't be called with token ids [context, position] alone (TypeError" in err

    llama = make_hf("llama")
    llama.model.layers[1].load_state_dict(llama.model.layers[0].state_dict())
    llama.save_pretrained(own)
    expected = vl.adapt(llama)(TOKENS)
    code = "from transformers import LlamaForCausalLM\n\n\ndef load(folder, *, dtype, device):\n"
    code += "    model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype)\n"
    for more, options in (("", {}), ("    model.config.model_type = 'somebodys'\n", {"family": "llama"})):
        (own / LOADER).write_text(f"{code}{more}    return model\n")
        read = load_model(own, trust_remote_code=True, **options)
        assert torch.equal(read(TOKENS), expected)  # type: ignore[arg-type]  # tensors
    tied = load_model(own, trust_remote_code=True, family="llama", tie_copies=True)
    assert [step.layer for step in tied.plan.steps] == [0, 0, 1]
    (own / LOADER).write_text(f"{code}    import visitlens\n    return visitlens.adapt(model)\n")
    tied = load_model(own, trust_remote_code=True, tie_copies=True)
    assert [step.layer for step in tied.plan.steps] == [0, 0, 1]
    with pytest.raises(InputError, match="load takes no option 'family'; it takes none"):
        load_model(own, trust_remote_code=True, family="llama")


def test_a_pair_is_reproduced(folder: Callable[..., Path], words: Path, run: Run, tmp_path: Path) -> None:
    looped, baseline = folder("documented", "looped"), folder("documented", "baseline")
    config = json.loads((baseline / "config.json").read_text())
    (baseline / "config.json").write_text(json.dumps({**config, "visits": 1}))
    pair = ("--looped", looped, "--baseline", baseline, "--text", words, "-o", tmp_path / "out", "--formats", "html")
    code, _, err = run("reproduce", *pair, TRUST, "--prompts", 2, "--workers", 1)
    assert code == 0 and "heads are judged by the loss on text" in err, err  # its tokenizer knows no brackets
    assert vl.open(tmp_path / "out" / "looped.vlens").looped and (tmp_path / "out" / "report" / "report.html").is_file()
    code, _, err = run("reproduce", *pair[:-3], tmp_path / "other", "--workers", 1)
    assert code == 1 and "would be run to load this model" in err


def test_a_hub_s_folder_brings_weights_of_its_kind(
    folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    own, asked = folder(), list[list[str]]()

    def fetched(name: str, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        return str(own)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetched)
    assert resolve("somebody/model") == own and len(asked) == 1 and "*.pt" not in asked[0] and "*.py" in asked[0]
    (own / "model.safetensors").unlink()
    assert resolve("somebody/model") == own and "*.pt" in asked[-1]
