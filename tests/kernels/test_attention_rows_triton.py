"""The Triton kernels in Triton's interpreter, against the float64 maps of the tiled version; and compiled for a GPU.

The interpreter multiplies no bfloat16 (float16 stands for it). It is switched on by the environment before Triton is imported: so in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from visitlens.errors import InputError
from visitlens.kernels.attention.rows import row_statistics
from visitlens.kernels.segments import Segments

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton isn't installed")

INTERPRETED = """
import dataclasses, math, sys
import torch
from visitlens.kernels.attention.rows import row_statistics, visit_overlaps
from visitlens.kernels.segments import Segments

torch.set_num_threads(1)

def draw(visits, tokens, heads, kv_heads, d, dtype=torch.float32):
    g = torch.Generator().manual_seed(tokens)
    return [(torch.randn(tokens, heads, d, generator=g).to(dtype), torch.randn(tokens, kv_heads, d, generator=g).to(dtype))
            for _ in range(visits)]

def compare(name, visits, bounds, **options):
    segments = Segments(bounds)
    ours = visit_overlaps(visits, segments, implementation="triton", top_keys=True, **options)
    theirs = visit_overlaps([(q.double(), k.double()) for q, k in visits], segments, top_keys=True, **options)
    for one, two in zip(ours.rows, theirs.rows, strict=True):
        for field in dataclasses.fields(one):
            a, b = getattr(one, field.name), getattr(two, field.name)
            if field.name == "top_keys":
                assert torch.equal(a, b), (name, (a != b).nonzero()[:5])
            elif b is not None:
                torch.testing.assert_close(a.double(), b, atol=2e-5, rtol=1e-5, equal_nan=True, msg=lambda m: f"{name} {field.name}: {m}")
    pairs = [(ours.across[p], theirs.across[p]) for p in theirs.across]
    for one, two in pairs + list(zip(ours.control or [], theirs.control or [], strict=True)):
        torch.testing.assert_close(one.mass_overlap.double(), two.mass_overlap, atol=2e-5, rtol=0, equal_nan=True)
        assert torch.equal(one.top1_match, two.top1_match) and torch.equal(one.top8_shared, two.top8_shared), name

compare("tile borders", draw(2, 130, 2, 1, 16), (0, 1, 2, 65, 130))
everything = dict(window=20, soft_cap=3.0, sinks=torch.tensor([0.0, 1.0, -math.inf]), scale=0.4,
                  bias=torch.randn(3, 40, generator=torch.Generator().manual_seed(1)), token_sets=torch.arange(70)[None] % 3 == torch.arange(3)[:, None])
compare("every feature, three visits, odd heads, d = 42, float16", draw(3, 70, 3, 1, 42, torch.float16), (0, 3, 40, 70), **everything)
ties = [(torch.ones(40, 2, 4), (torch.arange(40) % n).view(40, 1, 1).expand(40, 1, 4).clone()) for n in (1.0, 3.0)]
compare("ties", ties, (0, 40))
(q, k), = draw(1, 30, 2, 1, 8)
k[20] = math.nan
compare("nan", [(q, k)], (0, 10, 30), window=5)
rows = row_statistics(torch.ones(20, 2, 1), torch.full((20, 1, 1), -math.inf), Segments((0, 20)), implementation="triton")
assert rows.entropy.isnan().all() and rows.sink_mass.isnan().all()
empty = visit_overlaps([(torch.empty(0, 4, 8), torch.empty(0, 2, 8))] * 2, Segments((0,)), implementation="triton")
assert empty.rows[0].entropy.shape == empty.across[0, 1].top1_match.shape == (0, 4)
print("as expected")
"""

COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from visitlens.kernels.attention import rows_triton as kernels

pointers = dict(starts="*i32", sets="*i8", tops="*i64", q="*bf16", k="*bf16", q2="*bf16", k2="*bf16", scale="fp32", cap="fp32")
pointers |= dict.fromkeys(("sinks", "bias", "values", "log_sums", "other_log_sums", "out"), "*fp32")
constants = dict(HAS_SINKS=False, SETS=0, SET_SLOTS=1, HAS_CAP=False, HAS_BIAS=False, D=42, WIDTH=64, ROWS=64, KEYS=64)
for kernel in (kernels._rows, kernels._compare):
    given = {n: constants[n] for n in kernel.arg_names if n in constants}
    types = {n: "constexpr" if n in given else pointers.get(n, "i32") for n in kernel.arg_names}
    source = ASTSource(kernel, types, {(kernel.arg_names.index(n),): value for n, value in given.items()})
    assert "cubin" in triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm
print("compiled")
"""


def run(code: str, **environment: str) -> str:
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300, env=kept | environment
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_interpreted_kernels_agree_with_float64() -> None:
    assert "as expected" in run(INTERPRETED, TRITON_INTERPRET="1")


def test_kernels_compile_for_a_gpu(tmp_path) -> None:
    """To machine code for sm_90, which needs no GPU."""
    assert "compiled" in run(COMPILED, TRITON_CACHE_DIR=str(tmp_path))


def test_triton_is_refused_on_the_cpu() -> None:
    with pytest.raises(InputError, match="takes tensors on a GPU; got cpu"):
        row_statistics(torch.ones(4, 1, 8), torch.ones(4, 1, 8), Segments((0, 4)), implementation="triton")
