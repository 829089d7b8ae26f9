"""What the intervals and tests are worth: how often they hold what they promise, on made-up data and on the bundled model's documents.

    python benchmarks/coverage.py                      # minutes: benchmarks/results/coverage.json and docs/uncertainty.md
    python benchmarks/coverage.py --only intervals     # one part; the others stay as they were

Nothing is timed. Each case draws documents whose truth is known, makes the interval as every page does (`mean_of`, `product_of`,
`combine`), and counts how often the truth lies inside; beside it the percentile bootstrap that was used before. `--recording` takes
a recording of the bundled looped model over the bundled text, with a Dyck ablation; without it one is made (ten minutes).
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from coverage_page import page

from visitlens.probe.measures.estimate import mean_of, product_of
from visitlens.probe.measures.intervals import holm
from visitlens.probe.measures.measure import Measure, StatArray
from visitlens.probe.measures.sign_flips import flip_test

RESULTS = Path(__file__).parent / "results" / "coverage.json"
PAGE = Path(__file__).parents[1] / "docs" / "uncertainty.md"
SIZES = (5, 8, 10, 30, 94, 1000)
PROMPTS = (8, 16, 32, 128)
HEADS = 24
CLAIMS = 21
REPLICATES = 1000  # of the percentile bootstrap
MEASURE = Measure("simulated", "Simulated", ("run",), "units", "", "ours")
Sums = tuple[np.ndarray, np.ndarray]
Rng = np.random.Generator


@dataclass(frozen=True)
class Case:
    """`draw(rng, documents, runs)` gives sums [document, run], one or two measures of them; `combine` makes the statistic of both;
    `truth` is what it is of."""

    draw: Callable[[Rng, int, int], list[Sums]]
    truth: float
    combine: Callable[[Any, Any], Any] | None = None
    heavy: bool = False


def lengths(rng: Rng, n: int, runs: int, spread: float) -> np.ndarray:
    return np.ceil(rng.lognormal(5, spread, (n, runs)))


def normal(rng: Rng, n: int, runs: int) -> list[Sums]:
    return [(rng.normal(size=(n, runs)), np.ones((n, runs)))]


def skewed(rng: Rng, n: int, runs: int) -> list[Sums]:
    """Values lognormal(1), lengths lognormal(1.25): a document in a hundred is eighteen times as long as the usual one."""
    count = lengths(rng, n, runs, 1.25)
    return [(count * rng.lognormal(0, 1, (n, runs)), count)]


DEPENDENT, SPREAD = 0.4, 0.9


def dependent(rng: Rng, n: int, runs: int) -> list[Sums]:
    """Values lognormal(1) that go with the logarithm of the length, correlation 0.4, lengths lognormal(0.9)."""
    z = rng.normal(size=(n, runs))
    count = np.exp(5 + SPREAD * z)
    value = np.exp(DEPENDENT * z + np.sqrt(1 - DEPENDENT**2) * rng.normal(size=(n, runs)))
    return [(count * value, count)]


def norms(rng: Rng, n: int, runs: int) -> list[Sums]:
    """Lognormal norms at two visits of documents of one length, that go together."""
    one, *others = (rng.normal(size=(n, runs)) for _ in range(3))
    count = np.ones((n, runs))
    return [(scale * np.exp(0.8 * one + 0.6 * other), count) for scale, other in zip((2.0, 1.0), others, strict=True)]


def paired(rng: Rng, n: int, runs: int) -> list[Sums]:
    """Two measures of the same documents that differ by a t of three degrees."""
    first = 10 * rng.normal(size=(n, runs))
    return [(first + rng.standard_t(3, (n, runs)), np.ones((n, runs))), (first, np.ones((n, runs)))]


CASES = {
    "mean, normal": Case(normal, 0.0),
    "ratio of lognormal norms": Case(norms, 2.0, np.divide),
    "paired difference, t of 3 degrees": Case(paired, 0.0, np.subtract),
    "mean, lognormal values, uneven lengths": Case(skewed, float(np.exp(0.5)), heavy=True),
    "mean, lognormal values that grow with length": Case(
        dependent, float(np.exp(((SPREAD + DEPENDENT) ** 2 + 1 - DEPENDENT**2 - SPREAD**2) / 2)), heavy=True
    ),
}


def rate(inside: np.ndarray, known: np.ndarray) -> dict[str, float]:
    """Coverage among intervals that there are, and how many there are."""
    there = float(known.mean())
    return {"coverage": round(float(inside[known].mean()), 3) if there else -1.0, "reported": round(there, 3)}


def interval_of(case: Case, sums: list[Sums]) -> StatArray:
    """As from a recording's sums."""
    labels = {"run": range(sums[0][0].shape[1])}
    stats = [mean_of(MEASURE, each, labels, groups="documents") for each in sums]
    return stats[0].combine(stats[1], case.combine, MEASURE) if case.combine else stats[0]


def percentile(case: Case, sums: list[Sums], weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The percentile bootstrap over documents."""
    with np.errstate(divide="ignore", invalid="ignore"):
        means = [(weights @ total) / (weights @ count) for total, count in sums]
        drawn = case.combine(*means) if case.combine else means[0]
    low, high = np.nanquantile(drawn, [0.025, 0.975], axis=0)
    return low, high


def grouped(sums: list[Sums], groups: int, rng: Rng) -> list[Sums]:
    """Documents in fewer groups by a hash, as in recordings of more documents than groups."""
    n = len(sums[0][0])
    place = np.zeros((groups, n))
    place[rng.integers(0, groups, n), np.arange(n)] = 1
    return [(place @ total, place @ count) for total, count in sums]


def coverage(case: Case, n: int, runs: int, seed: int = 0, groups: int | None = None) -> dict[str, float]:
    """Of a case at n documents."""
    rng = np.random.default_rng([seed, n])
    sums = case.draw(rng, n, runs)
    if groups:
        sums = grouped(sums, groups, rng)
    stat = interval_of(case, sums)
    low, high = stat.interval()
    found = rate((low <= case.truth) & (case.truth <= high), np.isfinite(low))
    hashed = grouped(sums, 128, rng) if n > 128 and not groups else sums
    size = len(hashed[0][0])
    weights = rng.multinomial(size, np.full(size, 1 / size), REPLICATES).astype(float)
    before = percentile(case, hashed, weights)
    inside = (before[0] <= case.truth) & (case.truth <= before[1])
    return found | {"before": round(float(inside.mean()), 3)}


def intervals(runs: int) -> dict[str, Any]:
    """Coverage of means, ratios and differences."""
    rows: dict[str, Any] = {}
    for name, case in CASES.items():
        rows[name] = {"heavy": case.heavy, "sizes": {n: coverage(case, n, runs) for n in SIZES}}
        rows[name]["groups"] = {
            "94 documents in 8 groups": coverage(case, 94, runs, groups=8),
            "1,000 in 128": coverage(case, 1000, runs, groups=128),
        }
    return rows


# Squares: load-aware chance and load imbalance

CONCENTRATION = 26
"""Of a document's expert shares about the text's, so that the plug-in is too large by 18 % at 10 documents and 96 experts."""


def loads(rng: Rng, n: int, runs: int, experts: int) -> tuple[Sums, Sums, float, float]:
    """Shares of tokens by expert at two visits [document, run, expert], the sum over experts of their product and of the first squared."""
    popular = rng.lognormal(0, 0.5, (2, experts))
    one, other = (each / each.sum() for each in popular)
    later = (one + other) / 2
    count = np.repeat(lengths(rng, n, runs, 0.4)[..., None], experts, axis=2)
    gamma = [rng.standard_gamma(CONCENTRATION * each, (n, runs, experts)) for each in (one, other)]
    first, second = (each / each.sum(-1, keepdims=True) for each in gamma)
    sums = (first * count, count), ((first + second) / 2 * count, count)
    return *sums, float((one * later).sum()), float((one**2).sum())


def squares(runs: int, sizes: tuple[int, ...] = (8, 10, 30, 94), at_once: int = 25) -> dict[str, Any]:
    """Bias and coverage of load-aware chance and load imbalance, plug-in and over pairs of documents."""
    rows: dict[str, Any] = {}
    for experts in (96, 504):
        for n in sizes:
            found: dict[str, list[np.ndarray]] = {}
            for part in range(runs // at_once):
                rng = np.random.default_rng([experts, n, part])
                first, second, chance, square = loads(rng, n, at_once, experts)
                labels = {"run": range(at_once), "expert": range(experts)}
                measure = Measure("load", "Load", ("run", "expert"), "units", "", "ours")
                for name, other, truth in (("load-aware chance", second, chance), ("load imbalance", first, square)):
                    mean = product_of(measure, first, other, labels).mean("expert")
                    stat = mean.combine(experts, np.multiply, mean.measure)
                    low, high = stat.interval()
                    plug = [total.sum(0) / count.sum(0) for total, count in (first, other)]
                    values = (low <= truth) & (truth <= high), np.isfinite(low), stat.values / truth - 1
                    values += ((plug[0] * plug[1]).sum(-1) / truth - 1,)
                    for key, array in zip(("inside", "known", "bias", "plug-in"), values, strict=True):
                        found.setdefault(f"{name}/{key}", []).append(array)
            whole = {key: np.concatenate(parts) for key, parts in found.items()}
            for name in ("load-aware chance", "load imbalance"):
                row = rate(whole[f"{name}/inside"], whole[f"{name}/known"])
                row |= {key: round(float(whole[f"{name}/{key}"].mean()), 3) for key in ("bias", "plug-in")}
                rows.setdefault(f"{name}, E = {experts}", {})[n] = row
    return rows


# The bundled model's own documents, drawn again


def bundled(recording: Path, runs: int) -> dict[str, Any]:
    """Coverage where documents are drawn from those of a recording, which so are all there are."""
    import visitlens as vl

    rec = vl.open(recording)
    pairs = rec.plan.visit_pairs()
    steps = [[getattr(pair, side).index for pair in pairs] for side in ("earlier", "later")]

    def of(name: str, *at: Any) -> Sums:
        totals = rec.sums(name)
        return tuple(
            array[(slice(None), *at)].reshape(len(array), -1).mean(1) for array in (totals.total, totals.count)
        )

    looped = [rec.plan.pairs.index(pair) for pair in pairs]
    sources: dict[str, tuple[list[Sums], Any]] = {
        "sink mass": ([of("sink_mass")], None),
        "sink mass, visit 2 - visit 1": ([of("sink_mass", at) for at in steps[::-1]], np.subtract),
        "expert overlap": ([of("shared_expert_count", looped)], None),
        "stage cosine": ([of("stage_cosine", looped)], None),
        "top-8 overlap": ([of("top8_overlap", looped)], None),
        "norm ratio, MoE write": ([of("moe_write_rms", at) for at in steps[::-1]], np.divide),
    }
    rows: dict[str, Any] = {}
    for name, (population, combine) in sources.items():
        whole = [total.sum() / count.sum() for total, count in population]
        truth = float(combine(*whole) if combine else whole[0])

        def draw(rng: Rng, n: int, runs: int, population: list[Sums] = population) -> list[Sums]:
            chosen = rng.integers(0, len(population[0][0]), (n, runs))
            return [(total[chosen], count[chosen]) for total, count in population]

        rows[name] = {n: coverage(Case(draw, truth, combine), n, runs) for n in SIZES[:-1]}
    return rows


# Tests of many heads, and families of claims


def effects(recording: Path) -> np.ndarray:
    """[prompt, head] the bundled model's own per-prompt changes of the loss when a head is ablated, less each head's mean."""
    import visitlens as vl

    change = vl.open(recording).ablations()["dyck-zero"].grouped_effect.total[:, -1]
    change = change.reshape(len(change), -1)
    return change - change.mean(0)


def nulls(own: np.ndarray) -> dict[str, tuple[bool, Callable[[Rng, int], np.ndarray]]]:
    """Name -> (whether flipping signs leaves its distribution, draw [prompt, head])."""

    def drawn(rng: Rng, n: int) -> np.ndarray:
        heads = rng.choice(own.shape[1], min(HEADS, own.shape[1]), replace=False)
        return own[rng.integers(0, len(own), n)][:, heads]

    return {
        "normal": (True, lambda rng, n: rng.normal(size=(n, HEADS))),
        "t of 3 degrees": (True, lambda rng, n: rng.standard_t(3, (n, HEADS))),
        "lognormal with either sign": (
            True,
            lambda rng, n: rng.lognormal(0, 1, (n, HEADS)) * rng.choice([-1, 1], (n, 1)),
        ),
        "lognormal less its mean": (False, lambda rng, n: rng.lognormal(0, 1, (n, HEADS)) - np.exp(0.5)),
        "the bundled model's, less their means": (False, drawn),
        "the bundled model's, with either sign": (True, lambda rng, n: drawn(rng, n) * rng.choice([-1, 1], (n, 1))),
    }


def tests(own: np.ndarray, runs: int) -> dict[str, Any]:
    """Size of one test, family-wise error of all, and both of the z test with Holm's correction that was used before."""
    rows: dict[str, Any] = {}
    for name, (exact, draw) in nulls(own).items():
        rows[name] = {"exact": exact, "sizes": {}}
        for n in PROMPTS:
            rng = np.random.default_rng([n, 7])
            counts = np.zeros(5)
            for _ in range(runs):
                x = draw(rng, n)
                test, z = flip_test(x, np.ones_like(x)), z_test(x)
                low, high = interval_of(Case(normal, 0.0), [(x, np.ones_like(x))]).interval()
                apart = (low > 0) | (high < 0)
                found = (test.p_family <= 0.05) & apart
                before = [(z <= 0.05).mean(), (holm(z) <= 0.05).any()]
                counts += [(test.p <= 0.05).mean(), (test.p_family <= 0.05).any(), found.any(), *before]
            keys = ("size", "family", "found", "size before", "family before")
            rows[name]["sizes"][n] = dict(zip(keys, np.round(counts / runs, 3).tolist(), strict=True))
    return rows


def z_test(x: np.ndarray) -> np.ndarray:
    """Two-sided p of the mean over its bootstrap standard error, which is that of the documents over √n."""
    from statistics import NormalDist

    score = np.abs(x.mean(0)) / np.where(x.std(0) > 0, x.std(0) / np.sqrt(len(x)), np.inf)
    return np.vectorize(lambda z: 2 * (1 - NormalDist().cdf(z)), otypes=[float])(score)


def power(runs: int) -> dict[str, Any]:
    """How often one head with an effect is found among 24, beside an oracle that knows the spread: z with Bonferroni."""
    rows: dict[str, Any] = {}
    shifts = {8: 2.0, 16: 1.1, 32: 0.7, 128: 0.33}
    bodies = {
        "normal": lambda rng, n: rng.normal(size=(n, HEADS)),
        "t of 3 degrees": lambda rng, n: rng.standard_t(3, (n, HEADS)) / np.sqrt(3),
        "lognormal, long tail to the effect's side": lambda rng, n: unit(rng.lognormal(0, 1, (n, HEADS))),
        "lognormal, long tail to the other side": lambda rng, n: -unit(rng.lognormal(0, 1, (n, HEADS))),
    }
    for name, draw in bodies.items():
        rows[name] = {}
        for n, shift in shifts.items():
            rng = np.random.default_rng([n, 11])
            counts = np.zeros(2)
            for _ in range(runs):
                x = draw(rng, n)
                x[:, 0] += shift
                oracle = abs(x[:, 0].mean()) * np.sqrt(n) > 3.078  # 5 % / 24, two-sided
                counts += [flip_test(x, np.ones_like(x)).p_family[0] <= 0.05, oracle]
            rows[name][n] = {"shift": shift} | dict(zip(("found", "oracle"), (counts / runs).tolist(), strict=True))
    return rows


def unit(x: np.ndarray) -> np.ndarray:
    """Lognormal(1) with mean 0 and deviation 1."""
    return (x - np.exp(0.5)) / np.sqrt((np.e - 1) * np.e)


def claims(runs: int, documents: int = 94) -> dict[str, float]:
    """With all of 21 claims null and half of their variance common: at least one decided, alone and with all in view."""
    rng = np.random.default_rng(21)
    wrong = np.zeros(2)
    for _ in range(runs):
        x = (rng.normal(size=(documents, 1)) + rng.normal(size=(documents, CLAIMS))) * np.sqrt(0.5)
        p = interval_of(Case(normal, 0.0), [(x, np.ones_like(x))]).p_values()
        wrong += [(p <= 0.05).any(), (holm(p) <= 0.05).any()]
    return dict(zip(("alone", "together"), np.round(wrong / runs, 3).tolist(), strict=True))


def make_recording(folder: Path) -> Path:
    """The bundled looped model over the bundled text, with the Dyck ablation of 128 prompts."""
    from visitlens.app.cli import main

    model, text, out = "assets/models/smelt", "assets/sample/heldout.jsonl.xz", folder / "looped.vlens"
    root = PAGE.parents[1]
    for arguments in (
        ["record", str(root / model), str(root / text), "--out", str(out)],
        ["ablate", str(out), "--model", str(root / model), "--prompts", "128"],
    ):
        main(arguments)
    return out


def main(
    runs: Annotated[int, typer.Option(help="draws of each case")] = 4000,
    only: Annotated[str, typer.Option(help="intervals, squares, bundled, tests, power or claims; all by default")] = "",
    recording: Annotated[Path | None, typer.Option(help="of the bundled looped model, with its ablation")] = None,
    out: Annotated[Path, typer.Option(help="JSON file for the results")] = RESULTS,
    write_page: Annotated[bool, typer.Option(help="also docs/uncertainty.md")] = True,
) -> None:
    """Runs the parts, one after another, and writes the page."""
    found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        if recording is None and (not only or only in ("bundled", "tests")):
            recording = make_recording(Path(folder))
        parts: dict[str, Callable[[], Any]] = {
            "intervals": lambda: intervals(runs),
            "squares": lambda: squares(runs // 8),
            "bundled": lambda: bundled(recording, runs) if recording else None,
            "tests": lambda: tests(effects(recording), runs // 4) if recording else None,
            "power": lambda: power(runs // 16),
            "claims": lambda: claims(runs // 2),
        }
        for name, part in parts.items():
            if only in ("", name):
                found[name] = part()
                found.setdefault("draws", {})[name] = runs
                typer.echo(name)
    out.write_text(json.dumps(found, indent=1) + "\n")
    found = json.loads(out.read_text())
    if write_page:
        PAGE.write_text(page(found))


if __name__ == "__main__":
    typer.run(main)
