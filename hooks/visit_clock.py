"""Which step is running now; refuses a model that leaves its plan."""

from __future__ import annotations

from visitlens.hooks.loop_plan import ExecutionPlan, Step
from visitlens.kernels.errors import PlanError


class VisitClock:
    """Follows one forward. Call `enter` when a physical layer begins, `finish` when the forward ends."""

    def __init__(self, plan: ExecutionPlan) -> None:
        self.plan = plan
        self._next = 0

    def enter(self, layer: int) -> Step:
        """The step that begins now.

        Raises:
            PlanError: another layer was due, or the plan has already ended.
        """
        if self._next == len(self.plan):
            raise PlanError(f"layer {layer} ran after the plan's last step, {self.plan.steps[-1]}")
        due = self.plan.steps[self._next]
        if due.layer != layer:
            raise PlanError(f"layer {layer} ran where {due} was due: the model and its plan disagree")
        self._next += 1
        return due

    def finish(self) -> None:
        """Ready for the next forward.

        Raises:
            PlanError: steps of the plan didn't run.
        """
        ran, self._next = self._next, 0
        if ran != len(self.plan):
            raise PlanError(f"the forward ended before {self.plan.steps[ran]}: {ran} of {len(self.plan)} steps ran")
