"""Chance accuracy of DCLM's core tasks, as DCLM publishes it, and centred accuracy (SMELT Eq. 11). Torch-free.

Source: mlfoundations/dclm, eval/eval_meta_data.csv ("Random baseline", the v2 values that SMELT's Appendix E names), commit
361714bdd60bb9b7f4b2d8354cebbf0dec0c329e. They aren't all one over the number of choices: BoolQ's is the share of its majority class.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from visitlens.errors import InputError
from visitlens.probe.scaling.table import RunTable


class CoreTask(NamedTuple):
    """A task of DCLM Core: DCLM's name, category, demonstrations in SMELT's evaluation, chance accuracy (a share)."""

    name: str
    category: str
    shots: int
    chance: float


_READING, _WORLD, _SENSE = "Reading Comprehension", "World Knowledge", "Commonsense Reasoning"
_LANGUAGE, _SYMBOLS = "Language Understanding", "Symbolic Problem Solving"
CORE = (
    CoreTask("boolq", _READING, 10, 0.62),
    CoreTask("coqa", _READING, 0, 0.0),
    CoreTask("squad", _READING, 10, 0.0),
    CoreTask("arc_challenge", _WORLD, 10, 0.25),
    CoreTask("arc_easy", _WORLD, 10, 0.25),
    CoreTask("bigbench_qa_wikidata", _WORLD, 10, 0.0),
    CoreTask("jeopardy", _WORLD, 10, 0.0),
    CoreTask("commonsense_qa", _SENSE, 10, 0.403),
    CoreTask("copa", _SENSE, 0, 0.5),
    CoreTask("openbook_qa", _SENSE, 0, 0.25),
    CoreTask("piqa", _SENSE, 10, 0.5),
    CoreTask("bigbench_language_identification", _LANGUAGE, 10, 0.25),
    CoreTask("hellaswag", _LANGUAGE, 10, 0.25),
    CoreTask("hellaswag_zeroshot", _LANGUAGE, 0, 0.25),
    CoreTask("lambada_openai", _LANGUAGE, 0, 0.0),
    CoreTask("winograd", _LANGUAGE, 0, 0.5),
    CoreTask("winogrande", _LANGUAGE, 0, 0.5),
    CoreTask("agi_eval_lsat_ar", _SYMBOLS, 3, 0.25),
    CoreTask("bigbench_cs_algorithms", _SYMBOLS, 10, 0.0),
    CoreTask("bigbench_dyck_languages", _SYMBOLS, 10, 0.0),
    CoreTask("bigbench_operators", _SYMBOLS, 10, 0.0),
    CoreTask("bigbench_repeat_copy_logic", _SYMBOLS, 10, 0.0),
)
MMLU = CoreTask("mmlu_fewshot", "MMLU", 5, 0.25)
CHANCE = {task.name: task.chance for task in (*CORE, MMLU)}


def centred(score: np.ndarray | float, chance: np.ndarray | float) -> np.ndarray:
    """(score - chance) / (1 - chance): 0 at chance, 1 where all is right (Eq. 11).

    >>> float(centred(0.81, 0.62))
    0.5000000000000001
    """
    return (np.asarray(score, dtype=np.float64) - chance) / (1 - np.asarray(chance, dtype=np.float64))


def known_chance(table: RunTable) -> np.ndarray:
    """[row] the table's own `chance`, else DCLM's by the task's name; NaN where neither says."""
    given = table.columns.get("chance", np.full(len(table), np.nan))
    tasks = table["task"].tolist()
    return np.array([CHANCE.get(task, np.nan) if np.isnan(c) else c for task, c in zip(tasks, given, strict=True)])


def chance_of(table: RunTable) -> np.ndarray:
    """[row] as `known_chance`, of rows with scores.

    Raises:
        InputError: tasks that have neither (names them).
    """
    found = known_chance(table)
    if unknown := sorted(set(table["task"][np.isnan(found)].tolist())):
        raise InputError(
            f"{table.name}: no chance accuracy of {', '.join(unknown)}; give it in a column chance (DCLM's own tasks have theirs)"
        )
    return found
