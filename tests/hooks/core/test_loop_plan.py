"""The order of steps, the pairs of visits, and the clock that holds a model to them."""

from __future__ import annotations

import pytest

from visitlens.errors import InputError, PlanError
from visitlens.hooks.core.loop_plan import ExecutionPlan, LoopSpec, Step, visit_choices
from visitlens.hooks.core.visit_clock import VisitClock


def layers_and_visits(plan: ExecutionPlan) -> list[tuple[int, int]]:
    return [(s.layer, s.visit) for s in plan.steps]


@pytest.mark.parametrize(
    ("visits", "expected"),
    [
        (1, [(0, 1), (1, 1), (2, 1), (3, 1)]),
        (2, [(0, 1), (1, 1), (2, 1), (1, 2), (2, 2), (3, 1)]),
        (3, [(0, 1), (1, 1), (2, 1), (1, 2), (2, 2), (1, 3), (2, 3), (3, 1)]),
    ],
)
def test_prelude_then_the_span_r_times_then_coda(visits: int, expected: list[tuple[int, int]]) -> None:
    plan = LoopSpec(4, range(1, 3), visits).plan()
    assert layers_and_visits(plan) == expected
    assert [s.index for s in plan.steps] == list(range(len(expected)))
    assert len(plan) == 4 + (visits - 1) * 2


@pytest.mark.parametrize("span", [range(0), range(2, 2), range(9, 9)])
def test_an_empty_span_is_the_baseline_whatever_the_visits(span: range) -> None:
    plan = LoopSpec(3, span, 5).plan()
    assert layers_and_visits(plan) == [(0, 1), (1, 1), (2, 1)]
    assert plan.looped_layers == () and plan.pairs == () and plan.visit_pairs() == ()


def test_the_span_may_be_every_layer() -> None:
    assert layers_and_visits(LoopSpec(2, range(2), 2).plan()) == [(0, 1), (1, 1), (0, 2), (1, 2)]


def test_two_visits_give_one_pair_a_looped_layer() -> None:
    plan = LoopSpec(4, range(1, 3), 2).plan()
    assert plan.looped_layers == (1, 2)
    assert [(p.earlier.index, p.later.index, p.layer) for p in plan.pairs] == [(1, 3, 1), (2, 4, 2)]
    assert plan.visit_pairs() == plan.pairs
    assert str(plan.pairs[0]) == "layer 1, visits 1 and 2"


def test_three_visits_give_every_pair_by_layer_then_visits() -> None:
    plan = LoopSpec(3, range(1, 3), 3).plan()
    pairs = [(p.layer, p.earlier.visit, p.later.visit) for p in plan.pairs]
    assert pairs == [(1, 1, 2), (1, 1, 3), (1, 2, 3), (2, 1, 2), (2, 1, 3), (2, 2, 3)]
    assert [(p.layer, p.earlier.visit, p.later.visit) for p in plan.visit_pairs()] == [(1, 1, 3), (2, 1, 3)]
    assert [(p.earlier.visit, p.later.visit) for p in plan.visit_pairs(2, 3)] == [(2, 3), (2, 3)]


def test_a_nested_order_counts_each_layers_visits() -> None:
    """A slow layer around two cycles of a fast one, twice: 0 0 1, 0 0 1."""
    plan = ExecutionPlan.from_layers([0, 0, 1, 0, 0, 1])
    assert layers_and_visits(plan) == [(0, 1), (0, 2), (1, 1), (0, 3), (0, 4), (1, 2)]
    assert plan.visits == {0: 4, 1: 2}
    assert len(plan.pairs) == 6 + 1
    assert [(p.layer, p.later.visit) for p in plan.visit_pairs()] == [(0, 4), (1, 2)]
    assert plan.step(0, 3) == Step(3, 0, 3)


@pytest.mark.parametrize("visits", [(0, 2), (2, 2), (2, 1), (1, 3)])
def test_visits_that_a_layer_does_not_have_are_refused(visits: tuple[int, int]) -> None:
    with pytest.raises(InputError, match=r"1 <= a < b <= 2 for layer 1"):
        LoopSpec(4, range(1, 3), 2).plan().visit_pairs(*visits)


def test_a_step_that_is_not_there_is_refused_with_what_there_is() -> None:
    with pytest.raises(InputError, match=r"no visit 2 of layer 0; visits per layer are \{0: 1, 1: 2"):
        LoopSpec(3, range(1, 2), 2).plan().step(0, 2)


@pytest.mark.parametrize(
    ("layers", "span", "visits", "message"),
    [
        (0, range(0), 1, "at least one layer"),
        (2, range(1), 0, "at least one layer and one visit"),
        (4, range(2, 5), 2, r"within layers 0\.\.3"),
        (4, range(-1, 2), 2, r"within layers 0\.\.3"),
        (4, range(0, 4, 2), 2, r"within layers 0\.\.3"),
    ],
)
def test_impossible_loops_are_refused(layers: int, span: range, visits: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        LoopSpec(layers, span, visits)


def test_a_plan_without_steps_is_refused() -> None:
    with pytest.raises(InputError, match="at least one step"):
        ExecutionPlan.from_layers([])


def test_the_clock_names_every_step_of_every_forward() -> None:
    plan = LoopSpec(3, range(1, 2), 2).plan()
    clock = VisitClock(plan)
    for _ in range(2):
        assert [clock.enter(s.layer) for s in plan.steps] == list(plan.steps)
        clock.finish()


def test_the_clock_refuses_a_layer_out_of_order() -> None:
    clock = VisitClock(LoopSpec(3, range(1, 2), 2).plan())
    clock.enter(0)
    clock.enter(1)
    with pytest.raises(PlanError, match=r"layer 2 ran where step 2 \(layer 1, visit 2\) was due"):
        clock.enter(2)


def test_the_clock_refuses_an_extra_layer() -> None:
    clock = VisitClock(LoopSpec(2, range(0), 1).plan())
    clock.enter(0)
    clock.enter(1)
    with pytest.raises(PlanError, match=r"layer 1 ran after the plan's last step, step 1 \(layer 1, visit 1\)"):
        clock.enter(1)


def test_the_clock_refuses_a_forward_that_ends_early_and_is_ready_again() -> None:
    clock = VisitClock(LoopSpec(2, range(0), 1).plan())
    clock.enter(0)
    with pytest.raises(PlanError, match=r"ended before step 1 \(layer 1, visit 1\): 1 of 2 steps"):
        clock.finish()
    assert clock.enter(0).index == 0


def test_choices_of_visits_are_each_alone_then_all() -> None:
    assert visit_choices(1) == ((1,),)
    assert visit_choices(3) == ((1,), (2,), (3,), (1, 2, 3))
