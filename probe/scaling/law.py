"""The scaling law of Eq. 2, fitted to one architecture at a time: coefficients, residuals, and whether the runs can carry it. Torch-free.

The fit is SMELT's (Section 4.3): Huber loss (delta 1e-3) of log loss, L-BFGS-B. Three things keep it from stopping early: losses are
summed, not averaged, and scaled by 1e6; ln F, ln D and ln(1-S) are centred, so that exponents and coefficients hardly interact; and
eight starts, of which the best is kept. The gradient is analytic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np

from visitlens.errors import InputError, UnavailableError
from visitlens.probe.measures.measure import Measure, StatArray
from visitlens.probe.scaling.drawn import DrawnArray
from visitlens.probe.scaling.surface import COEFFICIENTS, Surface
from visitlens.probe.scaling.table import RunTable, describe

DELTA = 1e-3
"""Where the Huber loss turns from squares to absolute values, in nats of log loss."""
SCALE = 1e6
ILL_CONDITIONED = 1e4
HORIZONS, LEVELS = 3, 2
"""The fewest different D a scale and the fewest S that identify the law."""
_EXPONENTS = ((1e-3, 3.0), (-3.0, 3.0), (1e-3, 3.0))
_FREE = (None, None)

COEFFICIENT = Measure(
    "scaling_coefficient",
    "Scaling-law coefficients",
    ("arch", "coefficient"),
    "E in nats; A, K in nats times FLOPs^a, tokens^c; exponents without unit",
    "E, A, K, a, b, c of L = E + A (1-S)^b / F^a + K / D^c, fitted to one architecture's endpoints.",
    "4.3, Eq. 2",
)
RESIDUAL = Measure(
    "scaling_residual",
    "Residuals of the scaling law",
    ("endpoint",),
    "nats per token",
    "Measured minus fitted validation loss of each endpoint.",
    "4.3",
)


@dataclass(frozen=True)
class Window:
    """What the endpoints span: compute in FLOPs, FLOPs per token, tokens."""

    compute: tuple[float, float]
    flops_per_token: tuple[float, float]
    tokens: tuple[float, float]

    @classmethod
    def of(cls, table: RunTable) -> Window:
        spans = [(float(v.min()), float(v.max())) for v in (table["F"] * table["D"], table["F"], table["D"])]
        return cls(*spans)


@dataclass(frozen=True)
class Fit:
    """One architecture's surface, and the endpoints that it was fitted to.

    `condition` is that of the Jacobian of log loss by ln E, ln A, ln K, a, b, c; `warnings` are sentences.
    """

    arch: str
    surface: Surface
    endpoints: RunTable
    condition: float
    window: Window
    warnings: tuple[str, ...]

    @cached_property
    def fitted(self) -> np.ndarray:
        """[endpoint] nats."""
        table = self.endpoints
        return self.surface.loss(table["F"], table["S"], table["D"])

    @property
    def residuals(self) -> np.ndarray:
        """[endpoint] measured minus fitted, nats."""
        return self.endpoints["loss"] - self.fitted

    @property
    def rmse(self) -> float:
        """Nats on the loss itself."""
        return float(np.sqrt(np.mean(self.residuals**2)))

    def residual_stat(self) -> StatArray:
        labels = [describe(self.endpoints, i) for i in range(len(self.endpoints))]
        return StatArray(RESIDUAL, self.residuals, {"endpoint": labels}, aggregation="one endpoint each")


@dataclass(frozen=True)
class Problem:
    """The fit of one architecture as an optimiser sees it: centred log variables [endpoint], and log loss."""

    f: np.ndarray
    s: np.ndarray
    d: np.ndarray
    log_loss: np.ndarray
    centre: np.ndarray

    @classmethod
    def of(cls, table: RunTable) -> Problem:
        logs = np.stack([np.log(table["F"]), np.log1p(-table["S"]), np.log(table["D"])])
        centre = logs.mean(1)
        f, s, d = logs - centre[:, None]
        return cls(f, s, d, np.log(table["loss"]), centre)

    def log_terms(self, parameters: np.ndarray) -> np.ndarray:
        """[term, endpoint]: logs of E, of the capacity term and of the data term. Parameters: ln E, their logs at the centre, a, b, c."""
        e, capacity, data, a, b, c = parameters
        return np.stack([np.full_like(self.f, e), capacity + b * self.s - a * self.f, data - c * self.d])

    def objective(self, parameters: np.ndarray, weights: np.ndarray) -> tuple[float, np.ndarray]:
        """Scaled sum of Huber losses over endpoints, `weights [endpoint]` times each, and its gradient [parameter]."""
        log_fit, shares = _softmax(self.log_terms(parameters))
        error = log_fit - self.log_loss
        size = np.abs(error)
        huber = np.where(size <= DELTA, 0.5 * error**2, DELTA * (size - 0.5 * DELTA))
        slope = SCALE * weights * np.clip(error, -DELTA, DELTA)
        return SCALE * float(weights @ huber), _by_parameter(shares, *self._logs) @ slope

    def condition(self, parameters: np.ndarray) -> float:
        """Of the Jacobian of log loss by ln E, ln A, ln K, a, b, c: how much the worst mixture of them hides behind the best."""
        shares = _softmax(self.log_terms(parameters))[1]
        f, s, d = (logs + centre for logs, centre in zip(self._logs, self.centre, strict=True))
        return float(np.linalg.cond(_by_parameter(shares, f, s, d)))

    @property
    def _logs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.f, self.s, self.d

    def surface(self, parameters: np.ndarray) -> Surface:
        """`parameters` [..., parameter] in the law's own coefficients."""
        e, capacity, data, a, b, c = np.moveaxis(np.asarray(parameters), -1, 0)
        f, s, d = self.centre
        return Surface(np.exp(e), np.exp(capacity + a * f - b * s), np.exp(data + c * d), a, b, c)

    def parameters(self, surface: Surface) -> np.ndarray:
        """The inverse of `surface`."""
        f, s, d = self.centre
        x = surface
        return np.array([np.log(x.E), np.log(x.A) - x.a * f + x.b * s, np.log(x.K) - x.c * d, x.a, x.b, x.c], float)

    def starts(self) -> list[np.ndarray]:
        """Eight: the irreducible share, and both exponents, each low and high."""
        level, lowest = float(np.exp(self.log_loss.mean())), float(np.exp(self.log_loss.min()))
        found = []
        for share, a, c in product((0.6, 0.9), (0.2, 0.5), (0.3, 0.7)):
            floor = share * lowest
            rest = np.log(max(level - floor, 1e-3) / 2)
            found.append(np.array([np.log(floor), rest, rest, a, 0.2, c]))
        return found

    def minimise(self, start: np.ndarray, weights: np.ndarray, *, fixed: Sequence[float] = ()) -> tuple[Any, bool]:
        """scipy's result from one start, and whether it converged. `fixed` holds the exponents where they are."""
        bounds = [_FREE] * 3 + ([(v, v) for v in fixed] if len(fixed) else list(_EXPONENTS))
        found = _optimizer()(
            self.objective,
            start,
            args=(weights,),
            jac=True,
            method="L-BFGS-B",
            bounds=bounds,
            options={"ftol": 1e-14, "gtol": 1e-7, "maxiter": 5000, "maxfun": 20000, "maxcor": 30},
        )
        return found, bool(np.isfinite(found.fun)) and found.nit < 5000


def fit_law(endpoints: RunTable, arch: str, levels: Sequence[str] = ()) -> Fit:
    """Fits Eq. 2 to the endpoints of one architecture.

    Args:
        endpoints: as `RunTable.endpoints` gives them.
        levels: those to fit; all by default. The paper leaves S = 0 out.

    Raises:
        InputError: no such architecture or level; too few horizons, levels, scales or endpoints to identify six coefficients.
        UnavailableError: scipy isn't installed.
    """
    mine = chosen(endpoints, arch, levels)
    refuse_unidentified(mine, arch)
    problem = Problem.of(mine)
    weights = np.ones(len(mine))
    results = [problem.minimise(start, weights) for start in problem.starts()]
    converged = [found for found, ok in results if ok]
    if not converged:
        raise InputError(
            f"{mine.name}: none of {len(results)} starts of the fit of {arch} converged; look at its losses"
        )
    best = min(converged, key=lambda found: found.fun)
    condition = problem.condition(best.x)
    return Fit(
        arch, problem.surface(best.x), mine, condition, Window.of(mine), _warnings(mine, best.x, condition, arch)
    )


def fit_laws(table: RunTable, levels: Sequence[str] = ()) -> dict[str, Fit]:
    """`fit_law` for every architecture of a table, the same way."""
    ends = table.endpoints()
    return {arch: fit_law(ends, arch, levels) for arch in ends.archs}


def coefficients(fits: Mapping[str, Fit], draws: Mapping[str, Surface] | None = None) -> StatArray:
    """[arch, coefficient], with the refits of a bootstrap as replicates where there are `draws`."""
    values = np.stack([fit.surface.as_array() for fit in fits.values()])
    replicates = None if draws is None else np.stack([draws[arch].as_array() for arch in fits], 1)
    counts = ", ".join(f"{arch}: {len(fit.endpoints)}" for arch, fit in fits.items())
    labels = {"arch": list(fits), "coefficient": list(COEFFICIENTS)}
    return DrawnArray(COEFFICIENT, values, labels, replicates, aggregation=f"fitted to endpoints ({counts})")


def chosen(endpoints: RunTable, arch: str, levels: Sequence[str] = ()) -> RunTable:
    """The endpoints of an architecture at these levels, or at all.

    Raises:
        InputError: there are none; names those there are.
    """
    if arch not in endpoints.archs:
        raise InputError(f"{endpoints.name} has no architecture {arch!r}; it has {', '.join(endpoints.archs)}")
    known = endpoints.ordered("level", "S")
    if unknown := [level for level in levels if level not in known]:
        raise InputError(f"{endpoints.name} has no level {', '.join(unknown)}; it has {', '.join(known)}")
    keep = endpoints["arch"] == arch
    if levels:
        keep &= np.isin(endpoints["level"], list(levels))
    if not keep.any():
        raise InputError(f"{endpoints.name}: {arch} has no endpoint at level {', '.join(levels)}")
    return endpoints.where(keep)


def refuse_unidentified(table: RunTable, arch: str) -> None:
    """Raises InputError where the design can't tell the six coefficients apart, with the reason."""
    name = f"{table.name}: the scaling law of {arch} can't be fitted: "
    scales = table.ordered("scale", "F")
    horizons = {scale: len(np.unique(table["D"][table["scale"] == scale])) for scale in scales}
    if max(horizons.values()) == 1 and len(scales) > 1:
        raise InputError(
            f"{name}D is fixed by scale (one token count each), so what more tokens and what more FLOPs per token do can't be "
            f"told apart; at least {HORIZONS} token counts a scale are needed, for example decay branches of one run"
        )
    if few := [f"{scale} has {n}" for scale, n in horizons.items() if n < HORIZONS]:
        raise InputError(f"{name}each scale needs {HORIZONS} token counts (D) or more; {', '.join(few)}")
    if len(np.unique(table["S"])) < LEVELS:
        raise InputError(f"{name}all runs have S = {table['S'][0]:g}; b needs {LEVELS} sparsity levels or more")
    if len(scales) < 2:
        raise InputError(f"{name}there is only the scale {scales[0]}; a needs runs at 2 or more")
    if len(table) < len(COEFFICIENTS) + 1:
        raise InputError(f"{name}{len(table)} endpoints for {len(COEFFICIENTS)} coefficients leave no residual")


def _warnings(table: RunTable, parameters: np.ndarray, condition: float, arch: str) -> tuple[str, ...]:
    found = []
    if condition > ILL_CONDITIONED:
        found.append(
            f"{arch}: condition number {condition:.1e}, above {ILL_CONDITIONED:.0e}: the runs hardly tell the coefficients apart, "
            "so small errors of the losses change them much"
        )
    if (table["S"] == 0).any() and (table["S"] > 0).any():
        found.append(
            f"{arch}: runs at S = 0 are fitted together with sparse ones; the paper leaves them out, as another regime"
        )
    for value, (low, high), letter in zip(parameters[3:], _EXPONENTS, "abc", strict=True):
        if value <= low or value >= high:
            found.append(f"{arch}: the exponent {letter} came to its bound of {value:g}; the runs don't determine it")
    return tuple(found)


def _by_parameter(shares: np.ndarray, f: np.ndarray, s: np.ndarray, d: np.ndarray) -> np.ndarray:
    """[parameter, endpoint] derivatives of log loss, from the terms' shares of the loss."""
    e, capacity, data = shares
    return np.stack([e, capacity, data, -capacity * f, capacity * s, -data * d])


def _softmax(log_terms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Log of the sum of terms [endpoint], and each term's share of it [term, endpoint]."""
    top = log_terms.max(0)
    terms = np.exp(log_terms - top)
    total = terms.sum(0)
    return top + np.log(total), terms / total


def _optimizer() -> Any:
    try:
        from scipy.optimize import minimize
    except ImportError as error:
        raise UnavailableError("fits need scipy: pip install 'visitlens[scaling]'") from error
    return minimize
