"""Models that look right to a reader and aren't what an adapter says: right numbers, or a refusal that says why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import visitlens as vl
from visitlens.errors import CheckpointError, InputError, PlanError
from visitlens.hooks.audit.guards import conditions, sample_tokens
from visitlens.hooks.capture.capture import capture
from visitlens.hooks.capture.step_values import StepValues
from visitlens.hooks.loading.load_model import load_model
from visitlens.hooks.recording.maintain.validate import validate
from visitlens.probe.measures.statistic import Geometry, site_rms
from visitlens.probe.statistics.residual_norms import ResidualNorms

TRUST: dict[str, Any] = {"trust_remote_code": True}
RUN = """        x = self.blocks[0](self.embed(ids) + self.place.weight[: ids.shape[1]])
        for _ in range(self.visits):
            for block in self.blocks[1:]:
                x = block(x)
"""


@pytest.fixture
def changed(folder: Callable[..., Path]) -> Callable[..., Path]:
    """Factory: the documented folder with pieces of its code replaced."""

    def build(*pieces: tuple[str, str, str]) -> Path:
        made = folder()
        for file, old, new in pieces:
            code = (made / file).read_text()
            assert code.count(old) == 1, (file, old)
            (made / file).write_text(code.replace(old, new))
        return made

    return build


# Layout


def test_layers_that_take_positions_first_are_refused(changed: Callable[..., Path]) -> None:
    """Attention transposes back: the model is right, and what its layers take is [position, context, width]."""
    turned = RUN.replace(
        "self.embed(ids) + self.place.weight[: ids.shape[1]]",
        "(self.embed(ids) + self.place.weight[: ids.shape[1]]).transpose(0, 1)",
    )
    own = changed(
        ("model.py", RUN, f"{turned}        x = x.transpose(0, 1)\n"),
        (
            "model.py",
            "x = x + self.attn(self.norm1(x))",
            "x = x + self.attn(self.norm1(x).transpose(0, 1)).transpose(0, 1)",
        ),
    )
    model: Any = load_model(own, **TRUST)
    with (
        capture(model, ["resid"]),
        pytest.raises(InputError, match=r"shape \(12, 2, 16\).*\[position, context, \.\.\.\]"),
    ):
        model(torch.randint(3, 61, (2, 12)))


def test_layers_with_more_positions_than_tokens_are_refused(
    changed: Callable[..., Path], words: Path, tmp_path: Path
) -> None:
    """Padding to a multiple of 8, which 24 tokens don't show: the guard runs at the length of the text's documents too."""
    padded = RUN.replace(
        "x = self.blocks[0](self.embed(ids) + self.place.weight[: ids.shape[1]])",
        "x = self.embed(ids) + self.place.weight[: ids.shape[1]]\n        x = self.blocks[0](F.pad(x, (0, 0, 0, -x.shape[1] % 8)))",
    )
    own = changed(("model.py", RUN, f"{padded}        x = x[:, : ids.shape[1]]\n"))
    model: Any = load_model(own, **TRUST)
    with capture(model, ["resid"]), pytest.raises(InputError, match=r"4 positions more than there are tokens"):
        model(torch.randint(3, 61, (2, 12)))
    with pytest.raises((InputError, PlanError), match="positions more than there are tokens"):
        vl.record(own, words, tmp_path / "r.vlens", model_options=TRUST)


def test_a_site_with_its_tokens_in_another_order_fails_its_guard(changed: Callable[..., Path]) -> None:
    """The router sees flat tokens, positions first: their number is right, their order isn't."""
    own = changed(
        (
            "model.py",
            "_, chosen, gates = self.router(x)",
            "order = x.transpose(0, 1).flatten(0, 1)\n        _, chosen, gates = (y.unflatten(0, (x.shape[1], -1)).transpose(0, 1) for y in self.router(order))",
        ),
    )
    model: Any = load_model(own, **TRUST)
    found = {guard.name: guard for guard in conditions(model, sample_tokens(model))}
    assert found["documents"].ok and found["layout"].ok is False and "router" in found["layout"].detail


# Loaders


TABLE = (
    "model.py",
    "self.norm, self.head = nn.RMSNorm(hidden), nn.Linear(hidden, vocabulary)",
    "self.norm, self.head = nn.RMSNorm(hidden), nn.Linear(hidden, vocabulary)\n"
    "        self.register_buffer('turn', torch.polar(torch.ones(context, hidden // 2), torch.outer(torch.arange(context), 0.9 ** torch.arange(hidden // 2))), persistent=False)",
)
TURNED = (
    "model.py",
    "return self.head(self.norm(x))",
    "x = torch.view_as_real(torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous()) * self.turn[: ids.shape[1]]).flatten(2).to(x)\n        return self.head(self.norm(x))",
)


@pytest.mark.parametrize("again", [False, True])
def test_a_loader_that_makes_a_complex_table_real_is_refused(again: bool, changed: Callable[..., Path]) -> None:
    """Torch warns of it once a process, and the logits are off by a third."""
    cast = ("visitlens_loader.py", "model.to(device)", "model.to(device, dtype)")
    own = changed(TABLE, TURNED, cast)
    for _ in range(1 + again):
        with pytest.raises(CheckpointError, match=r"complex tensor real.*without \.to\(dtype\)"):
            load_model(own, **TRUST)


@torch.no_grad()
def test_the_documented_loader_keeps_a_complex_table(changed: Callable[..., Path]) -> None:
    own = changed(TABLE, TURNED)
    tokens = torch.randint(3, 61, (1, 12))
    exact, rounded = (load_model(own, dtype=dtype, **TRUST) for dtype in ("float32", "bfloat16"))
    assert rounded.model.turn.is_complex() and rounded.model.embed.weight.dtype == torch.bfloat16  # type: ignore[union-attr]
    a, b = exact(tokens), rounded(tokens)
    assert (
        float((a - b.float()).norm() / a.norm()) < 0.05
    )  # bfloat16 has 8 bits; without the imaginary part it is 0.3 and more


# Widths


@torch.no_grad()
@pytest.mark.parametrize("name", ["zamba", "zamba2"])
def test_a_norm_is_divided_by_its_own_width(name: str, adapted: Callable[..., Any]) -> None:
    """X of the shared block is [hidden, embedding]: a unit RMS norm has size 1, whatever the residual's width is."""
    model = adapted(name)
    segments = torch.zeros(1, 12, dtype=torch.long)
    with capture(model, sorted(ResidualNorms.sites - set(model.config.missing))) as captured:
        model(torch.randint(3, 61, (1, 12)), segments)
    geometry = Geometry.of(model.plan, model.config.to_dict())
    values = StepValues(captured, segments)
    step = next(s.index for s in model.plan.steps if s.index not in model.absent_steps().get("X", {}))
    x = captured.at("X", step)[0].double()
    assert x.shape[-1] == 2 * model.config.hidden_size
    found = site_rms(values, geometry, "X")[:, step]
    torch.testing.assert_close(
        found.double(), x.square().mean(-1).sqrt(), rtol=1e-5, atol=0
    )  # float32 norms of 32 numbers


def test_what_a_recording_has_no_room_for_is_refused_and_what_is_written_opens(
    make_hf: Callable[..., Any], save_tokenizer: Callable[[Path], None], words: Path, tmp_path: Path
) -> None:
    make_hf("zamba2").save_pretrained(tmp_path / "zamba2")
    save_tokenizer(tmp_path / "zamba2")
    out = tmp_path / "r.vlens"
    with pytest.raises(
        InputError, match=r"X of this model is \(32,\) a token, and a recording keeps \(16,\): leave X out"
    ):
        vl.record(tmp_path / "zamba2", words, out, level="activations", sites=("resid", "X"))
    rec = vl.record(tmp_path / "zamba2", words, out, level="activations", sites=("resid", "Q"))
    assert rec.recording.complete and validate(out).exit_code == 0


# Routers, logits, families


def test_a_sigmoid_router_that_is_read_as_a_softmax_fails_its_guard() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 61, "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    layers = {"num_hidden_layers": 3, "intermediate_size": 24, "moe_intermediate_size": 8, "first_k_dense_replace": 1}
    experts = {"num_experts_per_tok": 3, "n_routed_experts": 7, "n_shared_experts": 1}
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.Glm4MoeConfig(**sizes, **layers, **experts))
    read = vl.adapt(model.eval(), family="qwen3_moe")
    guards = {guard.name: guard for guard in conditions(read, sample_tokens(read))}
    assert guards["router"].ok is False and "softmax router" in guards["router"].detail


def test_routers_that_are_a_softmax_pass_their_guard(adapted: Callable[..., Any]) -> None:
    for name in ("qwen3_moe", "olmoe", "mixtral", "gpt_oss"):
        model = adapted(name)
        assert {g.name: g.ok for g in conditions(model, sample_tokens(model))}["router"] is True, name


def test_logits_of_the_last_position_alone_are_refused_with_the_remedy(changed: Callable[..., Path]) -> None:
    own = changed(("model.py", "return self.head(self.norm(x))", "return self.head(self.norm(x))[:, -1:]"))
    with pytest.raises(InputError, match=r"logits of shape \(2, 1, 61\).*expected one row a token"):
        load_model(own, **TRUST)(torch.randint(3, 61, (2, 12)))


def test_a_family_that_does_not_fit_is_refused_with_what_to_write(make_hf: Callable[..., Any]) -> None:
    with pytest.raises(InputError, match=r"doesn't fit this Llama.*qk_nope_head_dim.*`order`"):
        vl.adapt(make_hf("llama"), family="deepseek_v3")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_experts_of_any_width_run_in_any_precision(dtype: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 61, "hidden_size": 18, "num_attention_heads": 3, "num_key_value_heads": 3}
    experts = {"num_hidden_layers": 2, "intermediate_size": 7, "num_experts_per_tok": 3, "num_local_experts": 5}
    model = transformers.AutoModelForCausalLM.from_config(transformers.MixtralConfig(**sizes, **experts))
    with pytest.raises(InputError, match=r'set_experts_implementation\("eager"\)'):
        vl.adapt(model.eval())(torch.randint(3, 61, (1, 12)))
    model.save_pretrained(tmp_path)
    logits = load_model(tmp_path, dtype=dtype)(torch.randint(3, 61, (1, 12)))
    assert logits is not None and bool(logits.isfinite().all())
