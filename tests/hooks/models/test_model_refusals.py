"""What the native model and its configuration refuse, and that a configuration and a seed say all."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from visitlens.errors import CheckpointError, InputError
from visitlens.hooks.capture.generation import generate
from visitlens.hooks.models.config import LoopedMoEConfig
from visitlens.hooks.models.looped_moe import LoopedMoE
from visitlens.hooks.text.packed_tokens import PackedTokens

ModelFactory = Callable[..., LoopedMoE]
TextFactory = Callable[..., PackedTokens]


@pytest.mark.parametrize(
    ("tokens", "segments", "message"),
    [
        ([[0, 61]], None, r"0\.\.60, got 0\.\.61: is this the model's tokenizer"),
        ([[-1, 3]], None, r"0\.\.60, got -1\.\.3"),
        ([3, 4], None, r"\[context, position\].*got shape \(2,\)"),
        ([[]], None, r"at least one, got shape \(1, 0\)"),
        ([[3] * 65], None, "65 positions exceed the model's context of 64"),
        ([[3, 4]], [[0]], r"segment ids \(1, 1\) and token ids \(1, 2\) must have one shape"),
    ],
)
def test_impossible_inputs_are_refused(tokens: list, segments: list | None, message: str, make_model) -> None:
    with pytest.raises(InputError, match=message):
        make_model(2)(torch.tensor(tokens).long(), None if segments is None else torch.tensor(segments))


def test_other_calls_that_can_not_work_are_refused(make_model: ModelFactory) -> None:
    model, tokens = make_model(2), torch.tensor([[0, 4, 5]])
    with pytest.raises(InputError, match="'logits', 'loss' or 'none', got 'both'"):
        model(tokens, return_type="both")
    with pytest.raises(InputError, match="one document per context"):
        model(tokens, torch.zeros_like(tokens), cache=model.new_cache())
    with pytest.raises(InputError, match="65 positions"):
        generate(model, torch.zeros(1, 60, dtype=torch.long), 6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_heads": 3}, "num_heads must be a multiple of num_kv_heads, got 4 and 3"),
        ({"head_dim": 5}, "even head_dim, got 5"),
        ({"experts_per_token": 11}, "11 experts per token of only 10"),
        ({"expert_dim": 0}, "expert_dim must be at least 1, got 0"),
        ({"loop_start": 3, "loop_stop": 6}, r"within layers 0\.\.3"),
        ({"num_layers": 0}, "at least one layer"),
    ],
)
def test_impossible_configurations_are_refused(changes: dict, message: str, make_model: ModelFactory) -> None:
    with pytest.raises(InputError, match=message):
        make_model(2, **changes)


def test_a_configuration_survives_its_dictionary(make_model: ModelFactory) -> None:
    config = make_model(3, qk_norm=True).config
    assert LoopedMoEConfig.from_dict(config.to_dict()) == config
    other = make_model(3, qk_norm=False).config
    assert LoopedMoEConfig.from_dict(other.to_dict()).sha256 == other.sha256 != config.sha256
    with pytest.raises(CheckpointError, match=r"unknown fields \['depth'\], missing fields \['vocab_size'\]"):
        LoopedMoEConfig.from_dict({"depth": 3, **{k: v for k, v in config.to_dict().items() if k != "vocab_size"}})


def test_the_same_seed_gives_the_same_weights_and_another_seed_others(make_model: ModelFactory) -> None:
    one, same, other = (make_model(2, seed=seed).blocks[1].mlp.W_in for seed in (4, 4, 5))
    assert torch.equal(one, same) and not torch.equal(one, other)


# TransformerLens' calls: one line that says what there is


TOKENS = torch.tensor([[0, 4, 5, 6]])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("typo", r"no hook point 'typo'; names are hook_embed and blocks\.LAYER\.visit\.VISIT\.POINT, layers 0 to 3"),
        ("blocks.9.attn.hook_z", "no hook point 'blocks.9.attn.hook_z'; names are"),
        ("blocks.1.visit.2.attn.hook_y", r"no hook point 'attn\.hook_y' in layer 1; it has hook_resid_pre, "),
        ("blocks.1.visit.3.attn.hook_z", "no visit 3 of layer 1: it runs 2 times"),
        (None, "no hook point None"),
    ],
)
def test_a_name_that_matches_nothing_is_told(name: str, message: str, make_model: ModelFactory) -> None:
    model = make_model(2)
    with pytest.raises(InputError, match=message):
        model.run_with_cache(TOKENS, names_filter=[name])
    with pytest.raises(InputError, match=message):
        model.run_with_hooks(TOKENS, fwd_hooks=[(name, lambda value, hook: value)])
    assert not any(point.has_hooks() for point in model.hook_dict.values())


def test_a_name_without_a_visit_is_every_visit_to_read_and_must_be_said_to_change(make_model: ModelFactory) -> None:
    model = make_model(2)
    names = [f"blocks.1.visit.{visit}.attn.hook_z" for visit in (1, 2)]
    for name in ("blocks.1.attn.hook_z", "blocks.1.visit.*.attn.hook_z"):
        assert list(model.run_with_cache(TOKENS, names_filter=name)[1]) == names
    seen: list[str] = []
    model.run_with_hooks(
        TOKENS, fwd_hooks=[("blocks.1.visit.*.attn.hook_z", lambda value, hook: seen.append(hook.name))]
    )
    assert seen == names
    with pytest.raises(InputError, match=r"layer 1 runs 2 times: name the visit, blocks\.1\.visit\.1\.attn\.hook_z"):
        model.run_with_hooks(TOKENS, fwd_hooks=[("blocks.1.attn.hook_z", lambda value, hook: value)])
    once = model.run_with_hooks(TOKENS, fwd_hooks=[("blocks.0.attn.hook_z", lambda value, hook: 0 * value)])
    assert not torch.equal(once, model(TOKENS)), "a layer that runs once needs no visit"


def test_a_hook_function_that_returns_another_shape_is_told(make_model: ModelFactory) -> None:
    name = "blocks.0.visit.1.attn.hook_z"
    with pytest.raises(InputError, match=rf"{name} returned a value of shape \(1, 4, 1, 4\), expected \(1, 4, 4, 4\)"):
        make_model(2).run_with_hooks(TOKENS, fwd_hooks=[(name, lambda value, hook: value[:, :, :1])])


def test_a_text_where_token_ids_belong_is_told(make_model: ModelFactory) -> None:
    model = make_model(2)
    for work in (lambda: model("text"), lambda: model.run_with_cache("text"), lambda: model.run_with_hooks("text")):
        with pytest.raises(InputError, match=r"got 'text': a text is run by vl\.load\(\.\.\.\)\.run\(text\)"):
            work()
