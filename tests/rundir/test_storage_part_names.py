"""Names that carry their time."""

import uuid

import pytest

from penstock.rundir.storage import PartNames, StoredFile, made_at_s


def test_names_sort_by_time_even_within_one_tick_of_the_clock():
    times = iter([5.0, 5.0, 5.0, 4.0, 6.0])
    names = PartNames("rollouts", lambda: next(times))
    given = [names.next() for _ in range(5)]
    assert given == sorted(given) and len(set(given)) == 5
    assert uuid.UUID(given[0].removeprefix("rollouts/part-").removesuffix(".parquet")).version == 7


def test_the_age_is_in_the_name():
    name = PartNames("rollouts", lambda: 1_700_000_000.25).next()
    assert abs(made_at_s(StoredFile(name, 1, 9.0)) - 1_700_000_000.25) < 1e-3
    batch = "batches/batch_0123456789abcdef_1700000000250.parquet"
    assert made_at_s(StoredFile(batch, 1, 9.0)) == 1_700_000_000.25


def test_other_names_have_the_age_of_their_file():
    for name in (f"rollouts/part-{uuid.uuid4().hex}.parquet", "rollouts/old.parquet", "batches/batch_x_1.parquet"):
        assert made_at_s(StoredFile(name, 1, 9.0)) == 9.0


def test_a_file_takes_the_place_of_another_in_the_order():
    names = PartNames("rollouts", iter([1.0, 2.0, 3.0]).__next__)
    first, second, third = (names.next() for _ in range(3))
    merged = names.like(second)
    assert first < merged < third and merged != second
    assert made_at_s(StoredFile(merged, 1, 0.0)) == made_at_s(StoredFile(second, 1, 0.0))


@pytest.mark.attack
def test_names_follow_those_of_earlier_lives_although_the_clock_stepped_back():
    before = PartNames("rollouts", lambda: 100.0).next()
    asked = []

    def existing():
        asked.append(True)
        return [before, "rollouts/part-old.parquet"]

    names = PartNames("rollouts", lambda: 40.0, existing)
    assert not asked  # a reader's store lists nothing
    first, second = names.next(), names.next()
    assert before < first < second and len(asked) == 1
