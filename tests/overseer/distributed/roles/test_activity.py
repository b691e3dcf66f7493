from penstock.overseer.distributed.roles.activity import Activity


def test_work_that_overlaps_counts_once_and_waiting_inside_it_is_idle():
    now = 0.0
    activity = Activity(clock=lambda: now)
    now = 5.0
    activity.begin()  # before, nothing counts
    now = 6.0
    with activity.busy():
        now = 7.0
        with activity.busy():
            now = 9.0
            with activity.waiting():
                now = 10.0  # the other one works
        now = 11.0
        with activity.waiting():
            now = 14.0
            assert activity.read() == (5.0, 4.0)
    now = 16.0
    assert activity.read() == (5.0, 6.0)
