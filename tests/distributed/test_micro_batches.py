"""Under FSDP2 every rank runs as many micro-batches as the one with most, and asks the others once in a step."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from torch import nn

from hf_private.distributed.fsdp import Shards
from hf_private.distributed.ranks import Ranks


class Others(Ranks):
    """Ranks of which another one has three micro-batches."""

    asked = 0

    def largest(self, number: int) -> int:
        self.asked += 1
        return max(number, 3)


@pytest.mark.parametrize("form", [list, iter])
@pytest.mark.parametrize(("own", "dummies"), [([], 3), (["a"], 2), (["a", "b", "c", "d"], 0)])
def test_dummies_fill_up_what_a_rank_has_fewer(own: list, dummies: int, form: Callable[[list], Iterable[Any]]) -> None:
    ranks = Others()
    shards = Shards(nn.Linear(3, 2), ranks, dummy=lambda: "dummy")
    shards.modules = [nn.Linear(3, 2)]  # as if it were sharded
    found = list(shards.micro_batches(form(own)))
    assert found == [(batch, True) for batch in own] + [("dummy", False)] * dummies
    assert ranks.asked == 1
