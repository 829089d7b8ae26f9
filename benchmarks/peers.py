"""What looking costs, against TransformerLens' and nnsight's own caches, on one looped model and the same tensors.

    python benchmarks/peers.py --out benchmarks/results/peers.json

HRM-Text with random weights (L layers run six times, H layers twice): transformers' own code, a looped family that a
TransformerLens bridge loads as it is. Kept are the step inputs, both norms' outputs and both writes. Ratios are to the plain
forward of the same model without a cache, CPU time, one thread, medians over interleaved rounds with their 95 % intervals. The peers keep what they
keep: TransformerLens the last visit of each, nnsight all visits without labels. visitlens tells glibc to keep freed memory, which
speeds up whatever runs after it in the process, the peers too. Memory is the peak resident set of one run less that of a plain
forward, in processes of its own: the median of seven, since where freed memory lies differs from one to the next.
"""

from __future__ import annotations

import copy
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from interleaved import interleaved, spread

from visitlens.hooks.adapters.adapt import adapt
from visitlens.hooks.capture.capture import capture

SITES = ("resid", "X", "attn_write", "moe_in", "moe_write")
POINTS = ("hook_in", "ln1.hook_out", "attn.hook_out", "ln2.hook_out", "mlp.hook_out")
MODULES = ("", "input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
WAYS = ("plain", "visitlens", "nnsight", "TransformerLens")
PROCESSES = 7  # whose memory is measured


def main(
    out: Annotated[Path, typer.Option(help="JSON file for the results")] = Path("peers.json"),
    rounds: Annotated[int, typer.Option(help="interleaved rounds")] = 7,
    hidden: Annotated[int, typer.Option(help="hidden size")] = 256,
    tokens: Annotated[int, typer.Option(help="tokens per context")] = 512,
    contexts: Annotated[int, typer.Option(help="contexts per forward")] = 4,
    memory_of: Annotated[str, typer.Option(help="internal: prints the peak memory of one way")] = "",
) -> None:
    """Times the ways in turn, then measures the memory of each in processes of its own."""
    torch.set_num_threads(1)
    if memory_of:
        ways = _ways(hidden, tokens, contexts, ("plain", memory_of))
        peaks = [_peak_mb(ways[way]) for way in ("plain", "plain", memory_of)]
        print(peaks[2] - peaks[1])
        return
    ways = _ways(hidden, tokens, contexts, WAYS)
    seconds, ratios = interleaved(ways, rounds)
    against = {f"visitlens / {peer}": ratios["visitlens"] / ratios[peer] for peer in WAYS[2:]}
    sizes = ("--hidden", str(hidden), "--tokens", str(tokens), "--contexts", str(contexts))
    peaks = {name: sorted(_memory(name, sizes) for _ in range(PROCESSES)) for name in WAYS[1:]}
    steps = 16
    report = {
        "machine": platform.processor() or platform.machine(),
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {name: version(name) for name in ("torch", "transformers", "transformer-lens", "nnsight")},
        "model": f"hrm_text, hidden {hidden}, {steps} steps; {contexts} contexts of {tokens} tokens; {rounds} rounds",
        "seconds_plain": seconds,
        "ratio_to_plain_forward": {name: spread(each) for name, each in ratios.items()},
        "ratio_to_peers": {name: spread(each) for name, each in against.items()},
        "payload_mb": len(SITES) * steps * contexts * tokens * hidden * 4 / 1e6,
        "map_mb": contexts * (hidden // 64) * tokens**2 * 4 / 1e6,
        "peak_memory_mb_over_plain": {name: statistics.median(mb) for name, mb in peaks.items()},
        "lowest_and_highest_peak_mb": {name: (mb[0], mb[-1]) for name, mb in peaks.items()},
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


def _ways(hidden: int, tokens: int, contexts: int, names: tuple[str, ...]) -> dict[str, Callable[[], Any]]:
    model = make_model(hidden, tokens)  # each peer has a copy: nnsight puts its own forward into every module for good
    ids = torch.randint(3, 500, (contexts, tokens), generator=torch.Generator().manual_seed(0))

    def plain() -> Any:
        with torch.no_grad():
            return model(ids, use_cache=False).logits

    def ours() -> Callable[[], Any]:
        adapted = adapt(model)
        with capture(adapted, ()):  # from here on memory is kept: the plain forward is measured under the same setting
            pass

        def run() -> Any:
            with torch.no_grad(), capture(adapted, SITES) as captured:
                return adapted(ids), captured

        return run

    def nnsight() -> Callable[[], Any]:
        from nnsight import NNsight

        lm: Any = NNsight(copy.deepcopy(model))
        layers = [layer for stack in (lm.model.L_module, lm.model.H_module) for layer in stack.layers]
        modules = [layer if not path else getattr(layer, path) for layer in layers for path in MODULES]

        def run() -> Any:
            with torch.no_grad(), lm.trace(ids, use_cache=False) as tracer:
                cache = tracer.cache(modules=modules, include_inputs=True)
                result = lm.output.save()
            return result, cache

        return run

    def transformer_lens() -> Callable[[], Any]:
        bridge = make_bridge(model)
        kept = [f"{stack}_blocks.{i}.{point}" for stack in "LH" for i in range(2) for point in POINTS]

        def run() -> Any:
            with torch.no_grad():
                return bridge.run_with_cache(ids, names_filter=kept)

        return run

    builders = {
        "plain": lambda: plain,
        "visitlens": ours,
        "nnsight": nnsight,
        "TransformerLens": transformer_lens,
    }
    return {name: builders[name]() for name in names}


def make_model(hidden: int, tokens: int) -> Any:
    import transformers

    sizes = {"vocab_size": 512, "hidden_size": hidden, "intermediate_size": 2 * hidden, "head_dim": 64}
    ids = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    config = transformers.AutoConfig.for_model(
        "hrm_text",
        **sizes,
        **ids,
        num_attention_heads=hidden // 64,
        num_hidden_layers=2,
        max_position_embeddings=max(tokens, 64),
    )
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)


def make_bridge(model: Any) -> Any:
    """A bridge of the same weights; TransformerLens wants a folder with a tokenizer."""
    import transformers
    from tokenizers import Tokenizer, models
    from transformer_lens.model_bridge.sources.transformers import boot

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tokenizer = Tokenizer(models.WordLevel({"<bos>": 0, "<eos>": 1, "<pad>": 2}, unk_token="<pad>"))
        special = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
        transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
        return boot(folder)


def _peak_mb(run: Callable[[], Any]) -> float:
    """Peak resident set during one run (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts afresh from what is resident now
    kept = run()
    status = Path("/proc/self/status").read_text()
    del kept
    return int(status.split("VmHWM:")[1].split()[0]) / 1000


def _memory(way: str, sizes: tuple[str, ...]) -> float:
    command = [sys.executable, __file__, "--memory-of", way, *sizes]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    return float(result.stdout.split()[-1])


if __name__ == "__main__":
    typer.run(main)
