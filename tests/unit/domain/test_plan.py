"""Plans refuse what no fleet can be."""

from __future__ import annotations

import pytest

from coral_tasks.domain.errors import ValidationFailed
from coral_tasks.domain.names import Market, RegionId, TemplateId
from coral_tasks.domain.plan import MAX_COUNT, PlannedInstances


@pytest.mark.parametrize(("count", "kept"), [(0, 0), (MAX_COUNT + 1, 0), (10**19, 0), (2, 3), (2, -1)])
def test_counts_that_cannot_be_are_refused(count: int, kept: int) -> None:
    """At least one instance, no more than the arrays of the check hold, none kept beyond them."""
    with pytest.raises(ValidationFailed, match=r"(count|num_kept) must be between"):
        PlannedInstances(
            template=TemplateId("t"), region=RegionId("r"), market=Market.ON_DEMAND, count=count, num_kept=kept
        )
