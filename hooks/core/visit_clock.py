"""Which step is running now; refuses a model that leaves its plan."""

from __future__ import annotations

from visitlens.errors import PlanError
from visitlens.hooks.core.loop_plan import ExecutionPlan, Step


class VisitClock:
    """Follows one forward. Call `enter` when a physical layer begins, `finish` when the forward ends.

    With `may_halt`, a loop may end early: visits beyond a layer's first may be left out, and are `skipped`.
    """

    def __init__(self, plan: ExecutionPlan, may_halt: bool = False) -> None:
        self.plan, self.may_halt = plan, may_halt
        self.skipped: list[Step] = []
        self._next = 0

    def enter(self, layer: int) -> Step:
        """The step that begins now.

        Raises:
            PlanError: another layer was due, or the plan has already ended.
        """
        if self._next == len(self.plan):
            raise PlanError(f"layer {layer} ran after the plan's last step, {self.plan.steps[-1]}")
        due = self.plan.steps[self._next]
        if due.layer != layer and not self._skip_to(layer):
            raise PlanError(f"layer {layer} ran where {due} was due: the model and its plan disagree")
        step = self.plan.steps[self._next]
        self._next += 1
        return step

    def _skip_to(self, layer: int | None) -> bool:
        """Whether the loop may have ended, so that this layer (None: the end) comes next."""
        at = self._next
        while self.may_halt and at < len(self.plan) and self.plan.steps[at].visit > 1:
            if self.plan.steps[at].layer == layer:
                break
            at += 1
        found = (
            at < len(self.plan) and self.plan.steps[at].layer == layer if layer is not None else at == len(self.plan)
        )
        if found:
            self.skipped += self.plan.steps[self._next : at]
            self._next = at
        return found

    def finish(self) -> None:
        """Ready for the next forward; `skipped` stays until that begins a new clock.

        Raises:
            PlanError: steps of the plan didn't run.
        """
        self._skip_to(None)
        ran, self._next = self._next, 0
        if ran != len(self.plan):
            raise PlanError(f"the forward ended before {self.plan.steps[ran]}: {ran} of {len(self.plan)} steps ran")
