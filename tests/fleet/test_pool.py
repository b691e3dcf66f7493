"""A pool of real processes none of which dies: trajectories, seeds, autoreset, replacement, steps that are faults."""

import gymnasium
import numpy as np
import pytest
from tests.fleet.driving import QUICK, cause, config_of, driven, lives, open_descriptors
from tests.fleet.fake_pool import FIRST, FakePending
from tests.fleet.toys import Counter, Nested
from tests.waiting import wait_until

from penstock.fleet.config import FleetConfig
from penstock.fleet.episode_statistics import EpisodeStatistics, EpisodeTracker
from penstock.fleet.messages import episode_seed
from penstock.fleet.pool import SimulatorPool
from penstock.fleet.rollout_loop import RolloutWorker
from penstock.fleet.steps import ActionBatch
from penstock.types import ConfigError, RunFailed


class _Still:
    """A policy that always does the same."""

    version = FIRST

    def decide(self, slots, observations, first):
        nothing = np.zeros(len(slots), np.float32)
        return FakePending(ActionBatch({"": np.zeros(len(slots), np.int64)}, nothing, nothing, FIRST), 0.0)


def _serial(env, slot, steps, seed=1, start=2, life=0):
    """What a plain loop over one simulator gives with the fleet's seeds: rows as `Driver` keeps them."""
    episode, total, length = 0, 0.0, 0
    observation, _ = env.reset(seed=episode_seed(seed, "w0", slot, life, episode))
    rows = [(observation, True, 0.0, False, False, None, 0.0, 0)]
    for count in range(steps):
        observation, reward, terminated, truncated, _ = env.step(count % 5 + start)
        total, length, final = total + reward, length + 1, None
        done = (0.0, 0)
        if terminated or truncated:
            final, done, episode = observation, (total, length), episode + 1
            total, length = 0.0, 0
            observation, _ = env.reset(seed=episode_seed(seed, "w0", slot, life, episode))
        rows.append((observation, final is not None, reward, terminated, truncated, final, *done))
    return rows


def _assert_same(rows, expected):
    for row, (observation, first, reward, terminated, truncated, final, total, length) in zip(
        rows, expected, strict=True
    ):
        assert row["observation"][""].tobytes() == observation.tobytes()
        assert (row["first"], row["terminated"], row["truncated"]) == (first, terminated, truncated)
        assert np.float32(reward) == row["reward"] and not row["fault"]
        assert row["has_final"] == (final is not None)
        assert final is None or row["final"][""].tobytes() == final.tobytes()
        assert (row["return"], row["length"]) == (total, length)


@pytest.mark.parametrize(("processes", "rows", "parts"), [(1, 1, 1), (2, 2, 1), (2, 4, 2)])
def test_a_fleet_and_a_serial_loop_with_the_same_seeds_are_equal_to_the_bit(processes, rows, parts):
    with driven(config_of(processes, rows, parts=parts, terminate_after=7, truncate_after=4)) as driver:
        driver.steps(25)
        driver.check_books()
        for slot in range(processes * rows):
            _assert_same(driver.rows[slot][:25], _serial(Counter(7, 4), slot, 24))


def test_cartpole_equals_its_serial_loop():
    with driven(config_of(1, 1, id="CartPole-v1")) as driver:
        env = gymnasium.make("CartPole-v1")
        driver.answer = lambda process: (
            driver.open.pop(process),
            driver.pool.act(process, {"": np.array([len(driver.rows[0]) % 2])}),
        )
        driver.steps(120)
        observation, _ = env.reset(seed=episode_seed(1, "w0", 0, 0, 0))
        episode = 0
        for count, row in enumerate(driver.rows[0][:120]):
            if count:
                observation, _, terminated, truncated, _ = env.step(count % 2)
                if terminated or truncated:
                    episode += 1
                    observation, _ = env.reset(seed=episode_seed(1, "w0", 0, 0, episode))
            assert row["observation"][""].tobytes() == observation.tobytes()
        assert episode > 1


def test_everything_that_a_space_can_be_comes_back_as_it_was_sent():
    with driven(config_of(1, 2, id="tests.fleet.toys:Nested")) as driver:
        driver.gather(5.0)
        leaves = {leaf.name: leaf for leaf in driver.pool.spaces.actions}
        assert {*leaves} == {"buttons", "camera", "both.0", "both.1"}
        actions = {name: leaf.zeros(2) for name, leaf in leaves.items()}
        actions["buttons"][1], actions["camera"][1] = (2, 1), (0.25, 3.0)
        actions["both.0"][1], actions["both.1"][:] = (1, 0, 1), -1
        actions["both.1"][1, :2] = [ord("b"), ord("c")]
        driver.pool.act(0, actions)
        driver.open.clear()
        driver.gather(5.0)
        seen = driver.rows[1][-1]["observation"]
        assert seen["buttons"].tolist() == [2, 1] and seen["camera"].tolist() == [0.25, 1.0]
        assert seen["both.0"].tolist() == [1, 0, 1] and seen["both.1"].tolist() == [98, 99, -1, -1, -1, -1]
        assert Nested().observation_space["both"][1].max_length == 6


def test_slots_processes_lives_workers_and_seeds_draw_differently():
    draws = []
    for seed, worker_id in ((1, "w0"), (1, "w1"), (2, "w0")):
        with driven(config_of(2, 2), seed, worker_id) as driver:
            driver.steps(1)
            draws += [driver.rows[slot][0]["observation"][""][0] for slot in range(4)]
    assert len(set(draws)) == 12
    assert episode_seed(1, "w0", 3, 0, 0) != episode_seed(1, "w0", 3, 1, 0)
    assert 0 <= episode_seed(1, "w0", 3, 0, 0) < 2**31


def test_fast_resets_are_followed_by_a_simulator_that_is_made_anew(tmp_path):
    made = tmp_path / "made"
    limits = QUICK.model_copy(update={"max_fast_resets": 2})
    with driven(config_of(1, 1, limits=limits, terminate_after=2, child=str(made))) as driver:
        driver.steps(13)  # 6 episodes ended: resets 0 1 2 | 0 1 2 | 0
        _assert_same(driver.rows[0][:13], _serial(Counter(2), 0, 12))
    assert len(made.read_text().splitlines()) == 3


def test_a_process_is_replaced_at_an_episodes_end_without_losing_a_step():
    limits = QUICK.model_copy(update={"restart_interval_s": 0.001, "backoff_s": 30.0})
    events = []
    with driven(config_of(1, 2, limits=limits, terminate_after=3), events=events) as driver:
        driver.steps(8)
        driver.check_books()
        counts = driver.pool.counts()
        rows = driver.rows[0]
    assert counts["restarts"] == counts["faults"] == 0
    assert [name for name, _ in events].count("simulator_retired") >= 2
    assert [row["terminated"] for row in rows[:8]] == [False, False, False, True, False, False, True, False]
    assert rows[3]["final"][""][1:].tolist() == [3.0, 9.0] and rows[3]["return"] == 2.25 and rows[3]["has_final"]
    assert rows[3]["first"] and rows[3]["observation"][""][1:].tolist() == [0.0, 0.0]
    assert rows[3]["observation"][""][0] == _serial(Counter(3), 0, 1, life=1)[0][0][0]


def test_episodes_that_a_replacement_cuts_are_told_from_whole_ones():
    limits = QUICK.model_copy(update={"restart_interval_s": 0.001})
    config = config_of(1, 2, id="tests.fleet.toys:Uneven", limits=limits)
    statistics = EpisodeStatistics(1000)
    with driven(config) as driver:
        tracker = EpisodeTracker(driver.pool.tasks, 1.0)
        worker = RolloutWorker(driver.pool, _Still(), config, tracker.add)
        wait_until(lambda: worker.run_once(0.1) and tracker.since(0)[0] >= 8)
        episodes = tracker.since(0)[1]
    lengths = {slot: [one.length for one in episodes if one.slot == slot] for slot in (0, 1)}
    assert set(lengths[0]) == {3} and lengths[1] and all(length % 3 == 0 for length in lengths[1])
    assert [one.cut for one in episodes] == [one.slot == 1 for one in episodes]
    statistics.add("w", 0, episodes)
    metrics = statistics.metrics()
    assert metrics["fleet/t/episodes"] == len(lengths[0]) and metrics["fleet/t/cut_episodes"] == len(lengths[1])


def test_decorrelated_starts_differ_and_repeat():
    def starts():
        config = config_of(1, 4, terminate_after=50).model_copy(update={"decorrelate_steps": 30})
        with driven(config) as driver:
            driver.steps(1)
            return [tuple(driver.rows[slot][0]["observation"][""]) for slot in range(4)]

    first = starts()
    assert len({steps for _, steps, _ in first}) > 1 and all(steps < 30 for _, steps, _ in first)
    assert first == starts()


def test_what_is_told_names_the_worker_and_the_seeds_of_each_slot():
    events = []
    with driven(config_of(2, 2), seed=8, worker_id="w5", events=events) as driver:
        driver.steps(1)
        driver.run_until(lambda: len([name for name, _ in events if name == "simulator_started"]) == 2)
    assert {fields["worker"] for _, fields in events} == {"w5"}
    for _, fields in (event for event in events if event[0] == "simulator_started"):
        assert (fields["life"], fields["seed"]) == (0, 8)
        assert fields["first_seeds"] == [episode_seed(8, "w5", slot, 0, 0) for slot in fields["slots"]]
        for slot, seed in zip(fields["slots"], fields["first_seeds"], strict=True):
            env = Counter()
            assert driver.rows[slot][0]["observation"][""].tolist() == env.reset(seed=seed)[0].tolist()


def test_tasks_share_processes_and_must_share_their_spaces():
    two = {
        "a": {"id": "tests.fleet.toys:Counter"},
        "b": {"id": "tests.fleet.toys:Counter", "kwargs": {"terminate_after": 2}},
    }
    with driven(FleetConfig(tasks=two, envs_per_worker=4, envs_per_process=2, limits=QUICK)) as driver:
        assert driver.pool.tasks == ("a", "a", "b", "b")
        driver.steps(3)
        assert not driver.rows[0][2]["terminated"] and driver.rows[2][2]["terminated"]
    two["b"] = {"id": "CartPole-v1"}
    with (
        pytest.raises(ConfigError, match="share their spaces"),
        driven(FleetConfig(tasks=two, envs_per_worker=2, limits=QUICK)) as driver,
    ):
        driver.steps(1)


@pytest.mark.slow
def test_a_pool_whose_tasks_differ_is_closed_whole_also_while_more_of_them_come():
    two = {"a": {"id": "tests.fleet.toys:Counter"}, "b": {"id": "CartPole-v1"}}
    before = open_descriptors()
    for _ in range(2):
        pool = SimulatorPool(FleetConfig(tasks=two, envs_per_worker=8, limits=QUICK), "w0", 1)
        with pytest.raises(ConfigError, match="share their spaces"):
            pool.start(20.0)
        fork_server = pool._fork_server
        pool.close()
        assert fork_server is not None and not lives(fork_server.pid)
    assert open_descriptors() == before


def test_a_closed_pool_keeps_no_memory_of_arrivals_that_nobody_took():
    before = open_descriptors()
    pool = SimulatorPool(FleetConfig(tasks={"a": {"id": "tests.fleet.toys:Counter"}}, limits=QUICK), "w0", 1)
    pool.start(20.0)
    wait_until(lambda: pool._held or pool._held.extend(pool.poll(0.0)), "an arrival that is held")
    pool.close()
    assert open_descriptors() == before


def test_a_process_steps_one_part_while_another_waits_for_its_actions():
    with driven(config_of(1, 4, parts=2)) as driver:
        driver.run_until(lambda: len(driver.open) == 2, act=False)
        for _ in range(5):
            driver.answer(1)
            assert driver.gather(5.0) == [1]
        assert [len(driver.rows[slot]) for slot in range(4)] == [1, 1, 6, 6] and 0 in driver.open
        with pytest.raises(ValueError, match=r"must have \(2,\)"):
            driver.pool.act(0, {"": np.zeros(4, np.int64)}, 1)
        driver.steps(3)
        driver.check_books()


def test_actions_answer_arrivals_one_for_one():
    with driven(config_of()) as driver:
        driver.gather(5.0)
        with pytest.raises(ValueError, match="must have"):
            driver.pool.act(0, {"": np.zeros(2, np.int64)})
        driver.answer(0)
        with pytest.raises(ValueError, match="no open arrival"):
            driver.pool.act(0, {"": np.zeros(1, np.int64)})


def test_a_poll_without_news_ends_in_time():
    with driven(config_of()) as driver:
        driver.gather(5.0)
        assert driver.pool.poll(0.0) == [] and driver.pool.poll(0.02) == []
        assert driver.pool.live_slots == 1


def test_spaces_are_unknown_before_the_start():
    pool = SimulatorPool(config_of(), "w0", 1)
    with pytest.raises(RunFailed, match="start the pool first"):
        _ = pool.spaces
    pool.close()
    pool.close()


@pytest.mark.attack
@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        ("blind", "the observation is nan at [0]: it must be finite"),
        ("beyond", "the observation is 3000000000.0 at [0], outside its space's bounds -2e+09 and 2e+09: declare those "
         "that its values have"),
        ("nan", "its reward is nan"),
        ("error", "it said: the engine stumbled"),
    ],
)  # fmt: skip
def test_a_step_that_went_wrong_is_told_while_its_process_and_its_neighbours_go_on(trouble, reason, tmp_path):
    events = []
    with driven(config_of(1, 2, trouble=str(tmp_path), terminate_after=1000), events=events) as driver:
        driver.steps(2)
        process = driver.pool.process_ids()
        cause(tmp_path / "step", trouble)
        driver.run_until(lambda: driver.faults(0) or driver.faults(1))
        driver.steps(5)
        (slot,) = (slot for slot in (0, 1) if driver.faults(slot))
        (number,) = driver.faults(slot)
        ends = trouble in ("blind", "beyond")
        row, neighbour = driver.rows[slot][number], driver.rows[1 - slot]
        assert (row["truncated"], row["first"], row["has_final"]) == (ends, ends, False) and not row["terminated"]
        assert not any(other["first"] for other in neighbour[1:]), "its neighbour's episode goes on"
        assert driver.pool.process_ids() == process and driver.pool.counts()["restarts"] == 0
        driver.check_books()
    told = {"process": 0, "task": "t", "life": 0, "pid": process[0], "worker": "w0", "slot": slot, "steps": 1}
    assert [fields for name, fields in events if name == "simulator_fault"] == [{**told, "reason": reason}]
    assert "simulator_failed" not in [name for name, _ in events]


@pytest.mark.attack
def test_thousands_of_steps_that_go_wrong_are_counted_and_told_now_and_then():
    events = []
    config = config_of(1, 2, id="tests.fleet.toys:Stumbling")
    with driven(config, events=events) as driver:
        driver.steps(600)
        faults = len(driver.faults(0)) + len(driver.faults(1))
    told = [fields["steps"] for name, fields in events if name == "simulator_fault"]
    assert faults > 1000 and faults - 2 <= sum(told) <= faults + 2 and len(told) < 30


@pytest.mark.attack
def test_one_that_shows_nothing_usable_at_all_is_given_up_with_observation_limit_and_key():
    limits = QUICK.model_copy(update={"backoff_s": 0.01, "max_restarts": 2, "max_failures_in_row": 3})
    gist = (
        "were given up.*stepping .slot 0. raised SimulatorValueError: the observation is nan.*in 3 steps in a row, "
        "fleet.limits.max_failures_in_row.*fleet.limits.max_restarts = 2 restarts: raise that if it is few"
    )
    with (
        pytest.raises(RunFailed, match=gist),
        driven(config_of(1, 1, id="tests.fleet.toys:Blind", limits=limits)) as driver,
    ):
        driver.steps(100)
