import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.batch.group_pool import RankIndex


@given(st.lists(st.tuples(st.sampled_from(["append", "absent", "mark", "unmark", "keep"]), st.integers(0, 60))))
def test_ranks_agree_with_a_list_of_flags(operations):
    ranks, flags = RankIndex(), []
    for operation, argument in operations:
        if operation in ("append", "absent"):
            ranks.append(operation == "append")
            flags.append(operation == "append")
        elif operation in ("mark", "unmark") and flags:
            ranks.mark(argument % len(flags), operation == "mark")
            flags[argument % len(flags)] = operation == "mark"
        elif operation == "keep":
            kept = [slot for slot in range(len(flags)) if slot % 3 != argument % 3]
            ranks.keep(np.array(kept, np.int64))
            flags = [flags[slot] for slot in kept]
        present = [slot for slot, flag in enumerate(flags) if flag]
        assert len(ranks) == len(present)
        assert [ranks.select(rank) for rank in range(len(ranks))] == present


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8, 9, 1000])
def test_all_present_slots_have_their_own_rank(size):
    ranks = RankIndex()
    for _ in range(size):
        ranks.append(True)
    assert [ranks.select(rank) for rank in range(size)] == list(range(size))
    assert 0 in ranks
    ranks.mark(0, False)
    assert 0 not in ranks and len(ranks) == size - 1
