"""TransformerLens and nnsight as sources: the same events as the adapter's, by visit; and what both lose on their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import visitlens as vl
from visitlens.errors import InputError, PlanError
from visitlens.hooks.adapters.adapt import adapt
from visitlens.hooks.capture.step_values import StepValues
from visitlens.hooks.core.sites import SITES
from visitlens.probe.measures.collector import StatisticsCollector
from visitlens.probe.measures.statistic import Geometry

pytest.importorskip("transformers", reason="the extra visitlens[sources] is optional")
TOKENS = torch.randint(3, 61, (2, 16), generator=torch.Generator().manual_seed(6))
SEGMENTS = torch.tensor([[0] * 7 + [1] * 9, [2] * 7 + [3] * 6 + [-1] * 3])
SIZES: dict[str, Any] = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4}
SIZES |= {"max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}


@pytest.fixture(scope="module")
def hrm() -> nn.Module:
    """HRM-Text: layers 0 and 1 run six times, 2 and 3 twice."""
    import transformers

    config = transformers.AutoConfig.for_model(
        "hrm_text", **SIZES, head_dim=4, num_hidden_layers=2, H_cycles=2, L_cycles=3
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape))
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def bridge(hrm: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Any:
    boot = pytest.importorskip(
        "transformer_lens.model_bridge.sources.transformers", reason="older TransformerLens"
    ).boot
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder: Path = tmp_path_factory.mktemp("hrm")
    hrm.save_pretrained(folder)  # type: ignore[operator]  # a model of transformers
    vocabulary = {"<bos>": 0, "<eos>": 1, "<pad>": 2} | {f"w{i}": i for i in range(3, 61)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return boot(str(folder))


@pytest.fixture(scope="module")
def visits(bridge: Any) -> Any:
    return vl.from_transformer_lens(bridge)


def steps_of(model: Any) -> list[tuple[int, int]]:
    return [(step.layer, step.visit) for step in model.plan.steps]


# TransformerLens


def test_a_bridge_has_the_steps_and_the_values_of_the_adapter(hrm: nn.Module, visits: Any) -> None:
    own = adapt(hrm)
    assert steps_of(visits) == steps_of(own)
    sites = [site for site in SITES if site not in visits.config.missing]
    assert {"resid", "X", "Q", "K", "V", "P", "O", "attn_write", "moe_in", "moe_write", "resid_out"} == set(sites)
    with vl.capture(visits, sites) as through_bridge:
        logits = visits(TOKENS, SEGMENTS)
    with vl.capture(own, sites) as direct:
        expected = own(TOKENS, SEGMENTS)
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-3, equal_nan=True)
    for step in own.plan.steps:
        for site in sites:
            a, b = through_bridge.at(site, step.index), direct.at(site, step.index)
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3, equal_nan=True)


def test_clean_to_clean_patching_changes_nothing_at_any_visit(visits: Any, bridge: Any) -> None:
    """TransformerLens' own cache keeps the last visit, and patching it into all of them moves the logits."""
    logits, cache = visits.run_with_cache(TOKENS)
    for step in visits.plan.steps:
        for point in ("hook_in", "attn.hook_rot_q", "mlp.hook_out"):
            name = f"{visits.blocks[step.layer]}.visit.{step.visit}.{point}"
            patched = visits.run_with_hooks(TOKENS, [(name, lambda value, hook: cache[hook.name])])
            assert torch.equal(patched, logits), name
    clean, last = bridge.run_with_cache(TOKENS)
    own = bridge.run_with_hooks(TOKENS, fwd_hooks=[("L_blocks.0.hook_in", lambda v, hook: last["L_blocks.0.hook_in"])])
    assert float((own - clean).detach().abs().max()) > 1e-2


def test_interventions_through_a_bridge_are_those_through_the_adapter(hrm: nn.Module, visits: Any) -> None:
    own = adapt(hrm)
    sites = [site for site in SITES if site not in visits.config.missing]
    plain = visits(TOKENS, SEGMENTS)
    with vl.capture(visits, sites) as clean:
        visits(TOKENS, SEGMENTS)
    with vl.intervene(visits, *(vl.do.replace(site, clean) for site in sites)):
        assert torch.equal(visits(TOKENS, SEGMENTS).nan_to_num(), plain.nan_to_num())
    for change in (
        vl.do.take("K", layer=0, visit=3),
        vl.do.zero("P", head=1, token=[3, 12]),
        vl.do.skip(layer=1, visit=2),
    ):
        with vl.intervene(visits, change), vl.intervene(own, change):
            logits, expected = visits(TOKENS, SEGMENTS), own(TOKENS, SEGMENTS)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-3, equal_nan=True)
        assert not torch.allclose(logits.nan_to_num(), plain.nan_to_num(), atol=1e-3)


def test_the_residual_is_its_writes(visits: Any) -> None:
    _, cache = visits.run_with_cache(TOKENS)
    for step in visits.plan.steps:
        prefix = f"{visits.blocks[step.layer]}.visit.{step.visit}"
        total = cache[f"{prefix}.hook_in"] + cache[f"{prefix}.attn.hook_out"] + cache[f"{prefix}.mlp.hook_out"]
        torch.testing.assert_close(total, cache[f"{prefix}.hook_out"], atol=1e-5, rtol=1e-5)


def test_ablating_one_visit_differs_from_ablating_all(visits: Any) -> None:
    def silence(value: torch.Tensor, hook: Any) -> torch.Tensor:
        return torch.zeros_like(value)

    second = visits.run_with_hooks(TOKENS, [("L_blocks.0.visit.2.attn.hook_out", silence)])
    every = visits.run_with_hooks(TOKENS, [("L_blocks.0.visit.*.attn.hook_out", silence)])
    assert not torch.equal(second, every) and not torch.equal(second, visits(TOKENS))
    seen = visits.run_with_cache(TOKENS, names_filter="L_blocks.0.attn.hook_out")[1]
    assert list(seen) == [f"L_blocks.0.visit.{v}.attn.hook_out" for v in range(1, 7)]


def test_stopping_and_the_cache_speak_of_the_same_visit(visits: Any) -> None:
    _, cache = visits.run_with_cache(TOKENS)
    for step in visits.plan.steps:
        name = f"{visits.blocks[step.layer]}.visit.{step.visit}.hook_in"
        assert torch.equal(visits.run_to(TOKENS, step.layer, step.visit), cache[name])
    with pytest.raises(InputError, match="no visit 3 of layer 2"):
        visits.run_to(TOKENS, 2, 3)


def test_familiar_call_shapes(visits: Any) -> None:
    _, cache = visits.run_with_cache(TOKENS, names_filter=lambda name: name.endswith("hook_rot_q"), pos_slice=-1)
    assert len(cache) == len(visits.plan) and cache["H_blocks.1.visit.2.attn.hook_rot_q"].shape == (2, 1, 4, 4)
    full = visits.run_with_cache(
        TOKENS[:1], names_filter=["L_blocks.1.visit.4.attn.hook_pattern"], pos_slice=slice(3, 5)
    )[1]
    assert full["L_blocks.1.visit.4.attn.hook_pattern"].shape == (1, 4, 2, 16)
    alias = visits.run_with_cache(TOKENS[:1], names_filter="L_blocks.0.hook_resid_pre", remove_batch_dim=True)[1]
    assert alias["L_blocks.0.visit.6.hook_resid_pre"].shape == (16, 16)
    seen: list[Any] = []
    visits.run_with_hooks(TOKENS, [("L_blocks.1.visit.3.mlp.hook_out", lambda value, hook: seen.append(hook))])
    assert [(hook.layer, hook.visit, hook.name) for hook in seen] == [(1, 3, "L_blocks.1.visit.3.mlp.hook_out")]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("L_blocks.0.hook_in", r"L_blocks.0 runs 6 times: name the visit, L_blocks.0.visit.1.hook_in"),
        ("L_blocks.0.visit.7.hook_in", "no visit 7 of L_blocks.0: it runs 6 times"),
        ("L_blocks.0.visit.2.hook_inn", "no hook point 'hook_inn' in L_blocks.0; it has hook_in"),
        ("M_blocks.0.visit.1.hook_in", "no hook point 'M_blocks.0.visit.1.hook_in'; blocks are L_blocks.0"),
    ],
)
def test_a_wrong_name_is_refused_with_what_there_is(visits: Any, name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        visits.run_with_hooks(TOKENS, [(name, lambda value, hook: None)])


def test_a_bridge_goes_through_the_statistics(visits: Any) -> None:
    collector = StatisticsCollector(Geometry.of(visits.plan, visits.config.to_dict()), 4)
    with vl.capture(visits, sorted(collector.sites)) as captured:
        visits(TOKENS, SEGMENTS, return_type="none")
    collector.update(StepValues(captured, SEGMENTS, "torch"), torch.arange(29) % 4)
    totals = collector.take()
    assert totals["top8_overlap"].count.any() and totals["sink_mass"].count.any()
    assert "update_cosine" in collector.left_out


def test_what_is_no_bridge_is_refused(hrm: nn.Module) -> None:
    with pytest.raises(InputError, match="expected a TransformerLens TransformerBridge, got HrmText"):
        vl.from_transformer_lens(hrm)


# nnsight


def test_nnsight_gives_the_same_events(hrm: nn.Module) -> None:
    """Its own `.output` is the first visit, and its cache a list without labels."""
    nnsight = pytest.importorskip("nnsight", reason="the extra visitlens[sources] is optional")
    source, own = vl.from_nnsight(nnsight.NNsight(hrm)), adapt(hrm)
    sites = [site for site in SITES if site not in source.config.missing]
    assert set(sites) == {"resid", "X", "O", "attn_write", "moe_in", "moe_write", "resid_out"}
    assert steps_of(source) == steps_of(own)
    with vl.capture(source, sites) as through, vl.capture(own, sites) as direct:
        logits = source(TOKENS, SEGMENTS)
        expected = own(TOKENS, SEGMENTS)
    assert logits is not None and torch.equal(logits.nan_to_num(), expected.nan_to_num())
    for step in own.plan.steps:
        for site in sites:
            a, b = through.at(site, step.index), direct.at(site, step.index)
            assert torch.equal(a.nan_to_num(), b.nan_to_num()), (site, step)
    assert not torch.equal(through.get("resid", 0, 1), through.get("resid", 0, 2))
    assert torch.equal(source(TOKENS), own(TOKENS)) and source(TOKENS, return_type="none") is None


def test_nnsight_refuses_what_it_cannot_see_and_a_plan_that_is_not_the_models(hrm: nn.Module) -> None:
    nnsight = pytest.importorskip("nnsight", reason="the extra visitlens[sources] is optional")
    source = vl.from_nnsight(nnsight.NNsight(hrm))
    with (
        pytest.raises(InputError, match="no site 'Q': nnsight's cache keeps inputs and outputs"),
        vl.capture(source, ["Q"]),
    ):
        pass
    cycles, hrm.config.L_cycles = hrm.config.L_cycles, 2  # type: ignore[union-attr]  # a model of transformers
    try:
        with vl.capture(source, ["resid"]), pytest.raises(PlanError, match="expected 6 runs of layer 0, nnsight saw"):
            source(TOKENS)
    finally:
        hrm.config.L_cycles = cycles  # type: ignore[union-attr]  # as above
    with pytest.raises(InputError, match="expected an nnsight LanguageModel or NNsight, got HrmText"):
        vl.from_nnsight(hrm)


def test_interventions_through_nnsight_are_those_through_the_adapter(hrm: nn.Module) -> None:
    """To the bit, and a capture inside sees what they made."""
    nnsight = pytest.importorskip("nnsight", reason="the extra visitlens[sources] is optional")
    source, own, do = vl.from_nnsight(nnsight.NNsight(hrm)), adapt(hrm), vl.do
    sites = [site for site in SITES if site not in source.config.missing]
    plain = source(TOKENS, SEGMENTS).nan_to_num()
    with vl.capture(source, sites) as clean:
        source(TOKENS, SEGMENTS)
    with vl.intervene(source, *(do.replace(site, clean) for site in sites)):
        assert torch.equal(source(TOKENS, SEGMENTS).nan_to_num(), plain)
    for chain in (
        [do.zero("attn_write", layer=0, visit=3), do.scale("X", 1.3), do.add("resid", 0.5, layer=2, token=[3, 8])],
        [do.take("X", layer=1, visit=4)],
        [do.skip(layer=1, visit=2)],
        [do.swap("attn_write", layer=0), do.mean("moe_in", layer=2), do.resample("moe_write", layer=3)],
    ):
        seen = []
        for model in (source, own):
            with vl.intervene(model, chain[0]), vl.intervene(model, *chain[1:]), vl.capture(model, sites) as captured:
                seen.append((model(TOKENS, SEGMENTS).nan_to_num(), captured))
        (through, a), (direct, b) = seen
        assert torch.equal(through, direct) and not torch.equal(through, plain), chain
        for step in own.plan.steps:
            for site in sites:
                assert torch.equal(a.at(site, step.index).nan_to_num(), b.at(site, step.index).nan_to_num())
    assert torch.equal(source(TOKENS, SEGMENTS).nan_to_num(), plain)


def test_interventions_through_nnsight_say_what_cannot_be(
    hrm: nn.Module, remotable: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    nnsight = pytest.importorskip("nnsight", reason="the extra visitlens[sources] is optional")
    source = vl.from_nnsight(nnsight.NNsight(hrm))
    with pytest.raises(InputError, match="no site 'Q': nnsight's cache keeps"), vl.intervene(source, vl.do.zero("Q")):
        pass
    wide = vl.do.add("X", torch.ones(3))
    with vl.intervene(source, wide), pytest.raises(InputError, match=r"expected a value that fits .*16\) at step 0"):
        source(TOKENS)
    with vl.intervene(source, vl.do.zero("X", layer=0, visit=6)):
        monkeypatch.setattr(hrm.config, "L_cycles", 2)
        with pytest.raises(PlanError, match="a visit to be changed never came"), pytest.warns(UserWarning):
            source(TOKENS)
        monkeypatch.undo()
    remote = vl.from_nnsight(remotable, remote=True)
    message = r"remote=True runs the trace as in another: .*tracer\.iter\[visit - 1\]"
    with pytest.raises(InputError, match=message), vl.intervene(remote, vl.do.zero("X")):
        pass


@pytest.fixture(scope="module")
def remotable(hrm: nn.Module, bridge: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """HRM-Text as a server would know it: by a name."""
    nnsight = pytest.importorskip("nnsight", reason="the extra visitlens[sources] is optional")
    import transformers

    folder = tmp_path_factory.mktemp("named")
    bridge.tokenizer.save_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return nnsight.LanguageModel(hrm, tokenizer=tokenizer)


@pytest.mark.parametrize("remote", ["local", True])
def test_the_remote_path_gives_the_same_events(
    remote: bool | str, remotable: Any, hrm: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trace is serialised, read back where this code's own modules are hidden, as on a server, and run. `remote=True` goes
    through nnsight's backend of that name, whose server is stood in for."""
    from nnsight.intervention.backends import local
    from nnsight.intervention.backends import remote as backends

    asked: list[str] = []

    class Server(local.LocalSimulationBackend):
        def __init__(self, model_key: str, **options: Any) -> None:
            asked.append(model_key)
            super().__init__(remotable)

    monkeypatch.setattr(backends, "RemoteBackend", Server)
    monkeypatch.setattr(type(remotable), "_remoteable_model_key", lambda self: "tiny")
    source, own = vl.from_nnsight(remotable, remote=remote), adapt(hrm)
    sites = ["resid", "attn_write", "moe_in"]
    with vl.capture(source, sites) as through, vl.capture(own, sites) as direct:
        logits, expected = source(TOKENS, SEGMENTS), own(TOKENS, SEGMENTS)
    assert torch.equal(logits.nan_to_num(), expected.nan_to_num())  # type: ignore[union-attr]  # tensors
    for step in own.plan.steps:
        for site in sites:
            a, b = through.at(site, step.index), direct.at(site, step.index)
            assert torch.equal(a.nan_to_num(), b.nan_to_num()), (site, step)
    batches = len({7, 9, 6})  # documents of one length run together
    assert len(asked) == (batches if remote is True else 0) and all(key.endswith(":tiny") for key in asked)


def test_remote_needs_a_name_that_a_server_knows(hrm: nn.Module) -> None:
    nnsight = pytest.importorskip("nnsight", reason="the extra visitlens[sources] is optional")
    with pytest.raises(
        InputError, match="NNsight has no name that a server knows it by; wrap it in nnsight's LanguageModel"
    ):
        vl.from_nnsight(nnsight.NNsight(hrm), remote=True)


def test_a_model_that_writes_over_what_nnsight_keeps_is_found_out(hrm: nn.Module) -> None:
    nnsight = pytest.importorskip("nnsight", reason="the extra visitlens[sources] is optional")
    layer: Any = hrm.get_submodule("model.L_module.layers.1")
    handle = layer.mlp.register_forward_pre_hook(lambda _, args: (args[0].mul_(2),))
    try:
        source = vl.from_nnsight(nnsight.NNsight(hrm))
        with vl.capture(source, ["resid"]):
            source(TOKENS)
        said = r"nnsight's 'moe_in' at step 1 \(layer 1, visit 1\) .* writes over it in place"
        with vl.capture(source, ["moe_in"]), pytest.raises(InputError, match=said):
            source(TOKENS)
    finally:
        handle.remove()


def test_nnsight_refuses_visits_that_leave_tokens_out() -> None:
    nnsight = pytest.importorskip("nnsight", reason="the extra visitlens[sources] is optional")
    from tests.hooks.adapters.remote_code.tiny_ragged import Halting, HaltingFamily

    with pytest.raises(InputError, match="leaves tokens out of visits, and nnsight's cache doesn't say which"):
        vl.from_nnsight(nnsight.NNsight(Halting()), HaltingFamily())
