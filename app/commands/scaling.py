"""`visitlens scaling`: scaling laws, compute saved, downstream residuals and few-shot gaps of a table of runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from visitlens.app.terminal.console import Theme, comma_separated, progress_shown, warnings_once
from visitlens.errors import InputError

if TYPE_CHECKING:
    from visitlens.probe.scaling.study import Study

scaling = typer.Typer(
    no_args_is_help=True,
    help="Scaling laws and downstream gains of a table of runs: CSV, JSON, Parquet, or a ladder's folder (docs/scaling.md).",
)

Table = Annotated[
    Path, typer.Argument(help="CSV, JSON or Parquet with arch, scale, level, F, S, D, loss; or a ladder's folder.")
]
Target = Annotated[
    str, typer.Option(help="Architecture that is compared; the one that isn't the reference by default.")
]
Reference = Annotated[str, typer.Option(help="Architecture it is compared with; the one called Baseline by default.")]
Levels = Annotated[
    str, typer.Option(help="Comma-separated sparsity levels to fit; all by default. The paper leaves S = 0 out.")
]
Budgets = Annotated[
    str, typer.Option(help="Comma-separated compute budgets in FLOPs; powers of ten that the runs span by default.")
]
DrawCount = Annotated[int, typer.Option("--draws", help="Draws of the cell bootstrap; 0 leaves intervals out.")]
Seed = Annotated[int, typer.Option(help="Of the bootstrap.")]
AsJson = Annotated[bool, typer.Option("--json", help="JSON instead of tables.")]
Lower = Annotated[str, typer.Option(help="Comma-separated tasks whose score is a loss: lower is better.")]
Formats = Annotated[str, typer.Option(help="Comma-separated: html, png, svg, pdf, json, csv.")]


@scaling.command()
def law(
    table: Table,
    levels: Levels = "",
    residuals: Annotated[bool, typer.Option("--residuals", help="Every endpoint's residual too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Fit L = E + A (1-S)^b / F^a + K / D^c to each architecture."""
    from visitlens.probe.scaling.law import coefficients, fit_laws
    from visitlens.probe.scaling.report import law_text
    from visitlens.probe.scaling.table import read_table

    fits = fit_laws(read_table(table), comma_separated(levels))
    if as_json:
        found = {
            arch: {
                "rmse": fit.rmse,
                "condition": fit.condition,
                "window": vars(fit.window),
                "warnings": fit.warnings,
                "residuals": fit.residual_stat().to_dict(),
            }
            for arch, fit in fits.items()
        }
        typer.echo(json.dumps({"coefficients": coefficients(fits).to_dict(), "fits": found}, indent=1))
        return
    typer.echo(law_text(fits, residuals))


@scaling.command()
def frontier(
    table: Table,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Folder for the figure; none is drawn without it.")
    ] = None,
    target: Target = "",
    reference: Reference = "",
    levels: Levels = "",
    budgets: Budgets = "",
    draws: DrawCount = 2000,
    seed: Seed = 0,
    formats: Formats = "html,png,svg,json",
    theme: Annotated[Theme, typer.Option(help="Colours.")] = Theme.light,
    as_json: AsJson = False,
) -> None:
    """The lowest loss for a budget, its best split into model size and tokens, and the compute saved."""
    with progress_shown() as show:
        study = _study(table, target, reference, levels, budgets, draws, seed, on_progress=partial(show, "refits"))
        _print_laws(study, ("frontier", "tpp", "gain"), as_json)
    if out is not None:
        _write(study, out, ("frontier", "law-fit"), formats, theme)


@scaling.command()
def gain(
    table: Table,
    target: Target = "",
    reference: Reference = "",
    levels: Levels = "",
    budgets: Budgets = "",
    draws: DrawCount = 2000,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """The share of compute that the target saves at the same loss (CE Gain), with its bracket."""
    with progress_shown() as show:
        study = _study(table, target, reference, levels, budgets, draws, seed, on_progress=partial(show, "refits"))
        study.need_pair("compute saved")
        _print_laws(study, ("gain",), as_json)


@scaling.command()
def tpp(
    table: Table,
    target: Target = "",
    reference: Reference = "",
    levels: Levels = "",
    budgets: Budgets = "",
    draws: DrawCount = 200,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Compute-optimal tokens per dense-equivalent parameter."""
    with progress_shown() as show:
        study = _study(table, target, reference, levels, budgets, draws, seed, on_progress=partial(show, "refits"))
        _print_laws(study, ("tpp",), as_json)


@scaling.command()
def subset(
    table: Table,
    by: Annotated[str, typer.Option(help="category or source; of sources the quartiles too.")] = "category",
    target: Target = "",
    reference: Reference = "",
    levels: Levels = "",
    budget: Annotated[float | None, typer.Option(help="FLOPs; the middle one of `gain` by default.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compute saved on parts of the text, with the exponents of the fit to all of it."""
    from visitlens.probe.scaling.figures.subset_gain import central
    from visitlens.probe.scaling.report import stat_table
    from visitlens.probe.scaling.subset import fit_parts, quartiles

    if by not in ("category", "source"):
        raise InputError(f"expected --by category or --by source, got {by!r}")
    study = _study(table, target, reference, levels, "", 0, 0)
    study.need_pair("compute saved")
    middle, level = central(study.laws.budgets, study.laws.levels)
    gains = fit_parts(study.table, study.fits, by, study.levels).gain(
        study.target, study.reference, middle if budget is None else budget, level.sparsity
    )
    found = [gains]
    if by == "source" and len(gains.values) >= 4:
        found.append(quartiles(study.table, gains, study.target, study.reference))
    if as_json:
        typer.echo(json.dumps([stat.to_dict() for stat in found], indent=1))
        return
    typer.echo(
        "\n\n".join(f"{stat.measure.title}, {stat.aggregation}:\n\n{stat_table(stat, '{:.1%}')}" for stat in found)
    )


@scaling.command()
def downstream(
    table: Table,
    tasks: Annotated[str, typer.Option(help="Comma-separated tasks; all by default.")] = "",
    lower: Lower = "",
    centre: Annotated[
        bool, typer.Option("--centre", help="Centred accuracy: 0 at chance, 1 where all is right.")
    ] = False,
    by: Annotated[str, typer.Option(help="scale or level.")] = "scale",
    above_chance: Annotated[
        float | None, typer.Option(help="Count wins where the reference is so far above chance.")
    ] = None,
    target: Target = "",
    reference: Reference = "",
    draws: DrawCount = 500,
    seed: Seed = 0,
    as_json: AsJson = False,
) -> None:
    """Downstream scores beyond what validation loss predicts, and wins."""
    from visitlens.probe.scaling.downstream import NEEDED, residuals_by, wins
    from visitlens.probe.scaling.report import downstream_text
    from visitlens.probe.scaling.study import lower_is_better

    if by not in ("scale", "level"):
        raise InputError(f"expected --by scale or --by level, got {by!r}")
    study = _study(table, target, reference, "", "", draws, seed, columns=NEEDED, lower=comma_separated(lower))
    lower_is_better(study.lower, study.tasks)
    found, counts = [], []
    for task in comma_separated(tasks) or study.tasks:
        one = study.downstream(task, centre and task not in study.lower)
        found.append((one, residuals_by(one, by, draws, seed)))
        filtered = None if task in study.lower else above_chance
        counts.append(wins(one.scores, study.target, study.reference, filtered))
    if as_json:
        rows = [
            {
                "task": one.scores.metric,
                "curve": vars(one.curve),
                "residuals": stat.to_dict(),
                "wins": vars(w),
                "warnings": one.warnings,
            }
            for (one, stat), w in zip(found, counts, strict=True)
        ]
        typer.echo(json.dumps(rows, indent=1))
        return
    typer.echo(downstream_text(study, found, counts))


@scaling.command()
def shots(
    table: Table,
    target: Target = "",
    reference: Reference = "",
    k: Annotated[
        str,
        typer.Option("--k", help="Comma-separated numbers of demonstrations; those that most tasks have by default."),
    ] = "",
    test: Annotated[str, typer.Option(help="TASK:K, the exact permutation test over its few-shot seeds.")] = "",
    as_json: AsJson = False,
) -> None:
    """Accuracy and gap by number of demonstrations."""
    from visitlens.probe.scaling.report import shots_text
    from visitlens.probe.scaling.shots import NEEDED, seed_test, shots_gap

    study = _study(table, target, reference, "", "", 0, 0, columns=NEEDED)
    study.need_pair("gaps")
    if test:
        task, _, number = test.rpartition(":")
        found = seed_test(study.table, study.target, study.reference, task, _whole(number, test))
        typer.echo(
            json.dumps(vars(found), indent=1)
            if as_json
            else f"{task}, k = {number}: {found.difference:+.4f} over {found.seeds} seeds, exact two-sided p = {found.p:.5f}"
        )
        return
    numbers = [_whole(part, k) for part in comma_separated(k)]
    gap = shots_gap(study.table, study.target, study.reference, numbers)
    if as_json:
        found = {
            "accuracy": gap.accuracy.to_dict(),
            "gap": gap.gap.to_dict(),
            "tasks": gap.tasks,
            "left_out": gap.left_out,
        }
        typer.echo(json.dumps(found, indent=1))
        return
    typer.echo(shots_text(gap))


@scaling.command()
def lengths(table: Table, target: Target = "", reference: Reference = "", as_json: AsJson = False) -> None:
    """Loss improvement by document length, beside what more experts and more parameters do."""
    from visitlens.probe.scaling.lengths import length_contrasts
    from visitlens.probe.scaling.report import stat_table

    study = _study(table, target, reference, "", "", 0, 0)
    study.need_pair("contrasts by length")
    found = length_contrasts(study.table, study.target, study.reference)
    if as_json:
        typer.echo(json.dumps([stat.to_dict() for stat in found], indent=1))
        return
    typer.echo(
        "\n\n".join(f"{stat.measure.title} ({stat.aggregation}):\n\n{stat_table(stat, '{:.2f}')}" for stat in found)
    )


@scaling.command()
def radar(
    table: Table,
    scale: Annotated[str, typer.Option(help="Scale of the pair.")],
    level: Annotated[str, typer.Option(help="Its sparsity level.")],
    target: Target = "",
    reference: Reference = "",
    as_json: AsJson = False,
) -> None:
    """Mean score of one pair by category."""
    from visitlens.probe.scaling.radar import radar as compare
    from visitlens.probe.scaling.report import stat_table

    study = _study(table, target, reference, "", "", 0, 0, columns=("arch", "scale", "level", "D", "task", "score"))
    study.need_pair("axes of a pair")
    found = compare(study.table, study.target, study.reference, scale, level)
    typer.echo(json.dumps(found.to_dict(), indent=1) if as_json else stat_table(found))


@scaling.command()
def figures(
    table: Annotated[Path | None, typer.Argument(help="As for the other commands.")] = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the files.")] = Path("figures"),
    only: Annotated[str, typer.Option(help="Comma-separated slugs; all that the table allows by default.")] = "",
    target: Target = "",
    reference: Reference = "",
    levels: Levels = "",
    budgets: Budgets = "",
    lower: Lower = "",
    draws: DrawCount = 2000,
    seed: Seed = 0,
    formats: Formats = "html,png,svg,json",
    theme: Annotated[Theme, typer.Option(help="Colours.")] = Theme.light,
    list_: Annotated[bool, typer.Option("--list", help="List the figures and where the paper has them.")] = False,
) -> None:
    """Draw figures from a table of runs."""
    from visitlens.probe.scaling.figure import registered

    if list_:
        for figure in registered():
            typer.echo(f"{figure.slug:<18} {figure.title} (SMELT {figure.paper})")
        return
    if table is None:
        raise InputError("name a table: visitlens scaling figures RUNS.csv --out FOLDER")
    with progress_shown() as show:
        refits = partial(show, "refits")
        study = _study(
            table,
            target,
            reference,
            levels,
            budgets,
            draws,
            seed,
            columns=("arch",),
            lower=comma_separated(lower),
            on_progress=refits,
        )
        _write(study, out, comma_separated(only) or None, formats, theme)


@scaling.command()
def paper(as_json: AsJson = False) -> None:
    """The paper's printed numbers beside those recomputed from its coefficients."""
    from visitlens.probe.scaling.paper import printed
    from visitlens.probe.scaling.report import paper_text

    typer.echo(json.dumps(printed(), indent=1) if as_json else paper_text())


@scaling.command()
def example(
    out: Annotated[Path, typer.Argument(help="A CSV to write.")],
    noise: Annotated[float, typer.Option(help="Nats of independent noise on each loss.")] = 0.005,
    seed: Seed = 0,
) -> None:
    """Write a table to start from: 144 runs at the paper's grid, losses made up from its printed surfaces."""
    from visitlens.probe.gallery.write_figures import write_file
    from visitlens.probe.scaling.paper import synthetic_runs
    from visitlens.probe.scaling.table import to_csv

    typer.echo(write_file(out, to_csv(synthetic_runs(noise, seed, decimals=4))))


def _study(
    table: Path, target: str, reference: str, levels: str, budgets: str, draws: int, seed: int, **options: Any
) -> Study:
    from visitlens.probe.scaling.study import Study
    from visitlens.probe.scaling.table import LAW, read_table

    rows = read_table(table, options.pop("columns", LAW))
    compute = tuple(_number(part, budgets) for part in comma_separated(budgets))
    return Study.of(
        rows, target, reference, levels=comma_separated(levels), budgets=compute, draws=draws, seed=seed, **options
    )


def _print_laws(study: Study, what: tuple[str, ...], as_json: bool) -> None:
    from visitlens.probe.scaling.report import laws_text

    laws = study.laws
    if not as_json:
        typer.echo(laws_text(laws, what))
        return
    makers: dict[str, Callable[[str], Any]] = {"frontier": laws.frontier, "tpp": laws.tpp}
    found: dict[str, Any] = {
        name: {arch: make(arch).to_dict() for arch in laws.archs} for name, make in makers.items() if name in what
    }
    if "gain" in what and laws.target:
        found["gain"] = laws.gain().to_dict()
    typer.echo(json.dumps({**found, "warnings": laws.warnings}, indent=1))


def _write(study: Study, out: Path, slugs: tuple[str, ...] | None, formats: str, theme: Theme) -> None:
    from visitlens.probe.scaling.figure import write_table_figures

    with warnings_once():
        written = write_table_figures(study, out, slugs, comma_separated(formats), theme=theme.value)
    for file in written:
        typer.echo(file)


def _number(text: str, whole: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise InputError(f"expected budgets in FLOPs such as 1e20,1e21, got {whole!r}")
    return value


def _whole(text: str, whole: str) -> int:
    if not text.strip().isdigit():
        raise InputError(f"expected a whole number of demonstrations, got {whole!r}")
    return int(text)
