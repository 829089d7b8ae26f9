"""The Mixture-of-Experts feed-forward: each token through its k SwiGLU experts, weighted by its gates.

    out[t] = sum_j gate[t, j] * (silu(x W_gate[e]) * (x W_up[e])) W_down[e],   e = experts[t, j]

Shapes: `x [token, H]`, `experts`, `gates [token, k]`, `w_in [E, H, 2F]` (gate half, then up half),
`w_out [E, F, H]`. Three implementations compute it:

- `grouped`: rows sorted by expert, one `torch.nn.functional.grouped_mm` per projection;
- `loop`: the same sort, one matrix product per expert that has tokens (float64, odd strides, wide H);
- `dense`: every expert on every token, for E = k.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm, silu

from visitlens.errors import InputError

IMPLEMENTATIONS = ("grouped", "loop", "dense")
_MatrixProduct = Callable[[Tensor, Tensor, Tensor], Tensor]
_WIDE = 256  # from this H on, per-expert sgemm beats grouped_mm on CPU


def grouped_experts(
    x: Tensor, experts: Tensor, gates: Tensor, w_in: Tensor, w_out: Tensor, implementation: str = "auto"
) -> Tensor:
    """Output [token, H] of the chosen experts. `implementation` forces one; "auto" picks by shape and dtype.

    Raises:
        InputError: an unknown implementation, a forced `grouped` that these strides or dtype rule out, an expert that
            there isn't.
    """
    chosen = _choose(x, experts, w_in, w_out) if implementation == "auto" else implementation
    if chosen == "dense":
        return _dense(x, experts, gates, w_in, w_out)
    if chosen == "loop":
        return _sorted(x, experts, gates, w_in, w_out, _loop_mm)
    if chosen == "grouped":
        if not _grouped_fits(x, w_in, w_out):
            raise InputError(
                f"grouped_mm needs float32, bfloat16 or float16 rows of a multiple of 16 bytes; got {x.dtype} with "
                f"H={x.shape[1]}, F={w_out.shape[1]}. Use implementation='loop'."
            )
        return _sorted(x, experts, gates, w_in, w_out, _grouped_mm)
    raise InputError(f"expected implementation 'auto' or one of {IMPLEMENTATIONS}, got {implementation!r}")


def expert_outputs(x: Tensor, experts: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
    """[token, k, H] what each chosen expert gives, before its gate: k times the memory of the weighted sum."""
    tokens, k = experts.shape
    rows, ones = x.repeat_interleave(k, dim=0), x.new_ones(tokens * k, 1)
    return grouped_experts(rows, experts.reshape(-1, 1), ones, w_in, w_out).view(tokens, k, w_out.shape[2])


def expert_rows(x: Tensor, experts: Tensor, gates: Tensor, w_in: Tensor, w_out: Tensor, first: int) -> Tensor:
    """[token, k, H] what each chosen expert adds, where `w_in`, `w_out` hold experts `first` and on alone; 0 for the others.

    Each row is the one that `grouped_experts` sums up, so slices of the experts together make its output exactly.
    """
    flat = experts.reshape(-1)
    mine = ((flat >= first) & (flat < first + len(w_in))).nonzero().squeeze(1)
    rows = x.new_zeros(flat.numel(), w_out.shape[2])
    if mine.numel():
        order = mine[flat[mine].argsort(stable=True)]
        mm = _loop_mm if _best(x, w_in, w_out) == "loop" else _grouped_mm
        rows[order] = _rows(x, flat - first, gates, order, w_in, w_out, mm)
    return rows.view(*experts.shape, w_out.shape[2])


def _choose(x: Tensor, experts: Tensor, w_in: Tensor, w_out: Tensor) -> str:
    return "dense" if w_in.shape[0] == experts.shape[1] else _best(x, w_in, w_out)


def _best(x: Tensor, w_in: Tensor, w_out: Tensor) -> str:
    wide_on_cpu = x.device.type == "cpu" and x.shape[1] >= _WIDE
    return "grouped" if _grouped_fits(x, w_in, w_out) and not wide_on_cpu else "loop"


def _grouped_fits(x: Tensor, w_in: Tensor, w_out: Tensor) -> bool:
    aligned = all(n * x.element_size() % 16 == 0 for n in (x.shape[1], w_in.shape[2], w_out.shape[1]))
    return aligned and x.dtype in (torch.float32, torch.bfloat16, torch.float16) and x.shape[0] > 0


def _grouped_mm(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    # The last offset is the row count: `_sorted` has checked it.
    return grouped_mm(rows, weight, offs=counts.cumsum(0).to(torch.int32))


def _loop_mm(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    parts = rows.split(counts.tolist())
    return torch.cat([part @ w for part, w in zip(parts, weight.unbind(0), strict=True)])


def _sorted(x: Tensor, experts: Tensor, gates: Tensor, w_in: Tensor, w_out: Tensor, mm: _MatrixProduct) -> Tensor:
    flat = experts.reshape(-1)
    order = flat.argsort(stable=True)
    out = _rows(x, flat, gates, order, w_in, w_out, mm)
    back = torch.empty_like(order)
    back[order] = torch.arange(order.numel(), device=order.device)
    return out[back].view(*experts.shape, w_out.shape[2]).sum(1)  # summed in rank order: the same for any batch


def _rows(
    x: Tensor, flat: Tensor, gates: Tensor, order: Tensor, w_in: Tensor, w_out: Tensor, mm: _MatrixProduct
) -> Tensor:
    """[len(order), H]: choices `order` of all [token x k], sorted by their expert `flat`."""
    counts = torch.bincount(flat[order], minlength=w_in.shape[0])
    if len(counts) != w_in.shape[0]:  # rows past the last offset would get garbage for a gradient, silently
        raise InputError(f"expected experts in 0..{w_in.shape[0] - 1}, got {len(counts) - 1}")
    gate, up = mm(x[order // gates.shape[1]], w_in, counts).chunk(2, dim=-1)
    inner = silu(gate) * up * gates.reshape(-1)[order].unsqueeze(-1).to(x.dtype)
    return mm(inner, w_out, counts)


def _dense(x: Tensor, experts: Tensor, gates: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
    num_experts, hidden, width = w_in.shape
    per_expert = torch.zeros(x.shape[0], num_experts, dtype=x.dtype, device=x.device)
    per_expert = per_expert.scatter_add(1, experts, gates.to(x.dtype))
    gate, up = (x @ w_in.permute(1, 0, 2).reshape(hidden, -1)).view(x.shape[0], num_experts, width).chunk(2, dim=-1)
    inner = silu(gate) * up * per_expert.unsqueeze(-1)
    return inner.flatten(1) @ w_out.reshape(-1, hidden)
