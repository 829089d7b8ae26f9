"""The cell bootstrap of the scaling law: CPU seconds of 2,000 draws of both fits on one core, and what gradient and warm start save.

python benchmarks/scaling.py --out benchmarks/results/scaling.json
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from interleaved import interleaved, spread
from machine import describe
from scipy.optimize import minimize

from visitlens.probe.scaling.bootstrap import bootstrap, cell_index, cell_weights, common_cells
from visitlens.probe.scaling.law import Fit, Problem, fit_laws
from visitlens.probe.scaling.paper import synthetic_runs

NOISE = {"Baseline": 0.00554, "SMELT": 0.00952}
"""The printed RMSE of both fits, in nats."""
DRAWS = 2000
COMPARED = 6


def refits(fit: Fit, way: str, draws: int = COMPARED) -> None:
    """Refits of one architecture: as `bootstrap` does, with eight starts, or without the analytic gradient."""
    cells = common_cells({fit.arch: fit.endpoints})
    problem, index = Problem.of(fit.endpoints), cell_index(fit.endpoints, cells)
    start = problem.parameters(fit.surface)
    for drawn in cell_weights(len(cells), draws, 0):
        weights = drawn[index].astype(np.float64)
        if way == "numeric gradient":
            minimize(
                lambda p, w=weights: problem.objective(p, w)[0],
                start,
                method="L-BFGS-B",
                options={"ftol": 1e-14, "maxiter": 5000},
            )
            continue
        for at in [start] if way == "warm start" else problem.starts():
            problem.minimise(at, weights)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--draws", type=int, default=DRAWS)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    fits = fit_laws(synthetic_runs(noise=NOISE))
    began = time.process_time()
    found = bootstrap(fits, options.draws)
    seconds = time.process_time() - began
    ways = {
        way: (lambda way=way: refits(fits["SMELT"], way)) for way in ("warm start", "eight starts", "numeric gradient")
    }
    first, ratios = interleaved(ways, options.rounds)
    result = {
        "machine": describe(),
        "bootstrap": {
            "draws": options.draws,
            "architectures": 2,
            "endpoints": 144,
            "cpu_seconds": round(seconds, 1),
            "failed": dict(found.failed),
        },
        "refit": {
            "milliseconds": round(1e3 * first / COMPARED, 2),
            "ratios": {name: spread(ratio) for name, ratio in ratios.items() if name != "warm start"},
        },
    }
    text = json.dumps(result, indent=1) + "\n"
    print(text, end="")
    if options.out:
        options.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
