"""Whatever a person does, in whatever order: the page says what its address says, nothing hangs, nothing fails, nothing leaves."""

from __future__ import annotations

from tests.support.walker import Walker


def test_a_walk_without_aim(meet, serve, folder, dense, checkpoint) -> None:
    visitor = meet(serve(folder, dense, checkpoint=checkpoint))
    refused = []
    visitor.page.on("response", lambda answer: answer.status >= 400 and refused.append(answer.url))
    visitor.open()
    walker = Walker(visitor, seed=2)
    walker.walk(40)
    assert not refused, walker.steps[-12:]
