"""A head's attention map made from the Q and K of a recording at level `activations`, where no map is stored. No torch."""

from __future__ import annotations

import numpy as np

from visitlens.errors import RecordingError
from visitlens.probe.reading.recorded_run import RecordedRun

MOST_TOKENS = 4096
"""Of a document; a longer one is cut, which changes nothing for the queries that are left."""
_NEAR = 0.03  # of a share of mass: Q and K may be stored in half precision


def holds_qk(run: RecordedRun) -> bool:
    """Whether Q and K of every token are recorded."""
    options = run.recording.run["config"]["options"]
    return options["level"] == "activations" and {"Q", "K"} <= set(options["sites"])


def attention_from_qk(
    run: RecordedRun, layer: int, visit: int, head: int, tokens: tuple[int, int], rows: tuple[int, int] | None = None
) -> np.ndarray:
    """P [query, key] f4 of one head over one document: softmax(Q K^T / sqrt(d)), causal.

    Args:
        tokens: the document's first token and the one after its last, ordinals of the recording.
        rows: the queries wanted, counted from the document's start; all by default. Keys are always all.

    Raises:
        RecordingError: Q and K aren't recorded, or their softmax isn't this model's attention (windows, caps, biases):
            the sink mass that was recorded with them tells.
    """
    recording, (start, stop) = run.recording, tokens
    first, last = rows or (0, stop - start)
    stop = start + last  # no query sees further
    queries = recording.activation("Q", layer, visit, tokens=(start + first, stop), head=head).astype(np.float32)
    shared = recording.config["num_heads"] // recording.config["num_kv_heads"]
    keys = recording.activation("K", layer, visit, tokens=(start, stop), head=head // shared).astype(np.float32)
    found = np.zeros((last - first, tokens[1] - start), dtype=np.float32)
    seen = found[:, :last]
    np.matmul(queries * np.float32(queries.shape[-1] ** -0.5), keys.T, out=seen)
    future = seen[:, first:]
    future[np.triu_indices(last - first, 1)] = -np.inf
    seen -= seen.max(1, keepdims=True)
    np.exp(seen, out=seen)
    seen /= seen.sum(1, keepdims=True)
    _check(run, layer, visit, head, (start + first, stop), found)
    return found


def _check(run: RecordedRun, layer: int, visit: int, head: int, tokens: tuple[int, int], found: np.ndarray) -> None:
    if "sink_mass" not in run.measures:
        return
    step = run.plan.step(layer, visit).index
    recorded = run.recording.token_stat("sink_mass", tokens, step)[:, head]
    known = np.isfinite(recorded)
    if np.abs(recorded[known] - found[known, 0]).max(initial=0.0) > _NEAR:
        raise RecordingError(
            f"{run.name}: the attention of layer {layer}, head {head} isn't the plain softmax of its Q and K (a window, a cap, "
            "a bias, or no causal mask), so no map can be made from them; record short contexts with --level maps"
        )
