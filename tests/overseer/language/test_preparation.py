"""Evidence of parity: what is compared at an update, and who is asked; test_training has runs with a fault."""

import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from penstock.curriculum import Curriculum, CurriculumConfig
from penstock.environments import Example, SingleTurnEnvironment
from penstock.inference import ScriptedContext
from penstock.learner.config import WarmStartConfig
from penstock.overseer.config_loading import load_config
from penstock.overseer.language import preparation
from penstock.overseer.language.preparation import (
    PROBE_TOKENS,
    ParityCheck,
    Preparation,
    answers_cut_short,
    sampled_first_by,
    warm_start_lessons,
)
from penstock.overseer.supervisor.messages import Identity, Peer
from penstock.rollout import RolloutManager
from penstock.text import Tokenizer
from penstock.types import (
    Completion,
    Decoding,
    MismatchError,
    RLExample,
    Rollout,
    RolloutBatch,
    RolloutGroup,
    RolloutMetadata,
    TrainingBatch,
    UnreachableError,
    fold,
)

PROMPT, RESPONSE = np.array([1, 2], np.int32), np.arange(3, 11, dtype=np.int32)


def example(step: int, off: float = 0.0, response: int = 8) -> RLExample:
    """The engine's side says −1 + `off` for every token; the learner's −1."""
    length = 2 + response
    mask = np.arange(length) >= 2
    return RLExample(
        tokens=np.concatenate((PROMPT, np.arange(response))).astype(np.int32),
        loss_mask=mask,
        segment_ids=np.ones(length, np.int32),
        position_ids=np.arange(length, dtype=np.int32),
        advantage=np.zeros(length, np.float32),
        generator_log_probs=np.where(mask, -1 + off, 0).astype(np.float32),
        reference_log_probs=None,
        temperature=np.ones(length, np.float32),
        weight_steps=np.where(mask, step, -1).astype(np.int32),
        rollout_ids=("",),
    )


class Learner:
    """Scores everything with −1; its decoder is the name of its version."""

    def __init__(self) -> None:
        self.step, self.scored = 0, []

    @property
    def decoder(self) -> str:
        return f"decoder {self.step}"

    def score(self, examples, decoder=None):
        self.scored += [decoder] * len(examples)
        return [np.full(len(example.tokens), -1, np.float32) for example in examples]


class Cluster:
    """The learner's context: engines that answer with `off`, and what arrived."""

    def __init__(self, *engines: str) -> None:
        self.engines, self.off, self.dead, self.asked = engines, dict.fromkeys(engines, 0.0), set(), []
        self.arrived: list[Any] = []
        self.marked: list[tuple[Any, ...]] = []
        self.silent: set[str] = set()
        self.draining: set[str] = set()
        self.limits_s: list[float] = []
        self.prompts: list[np.ndarray] = []

    @property
    def view(self) -> Any:
        peers = [
            Peer(
                Identity("inference", int(name[-1]), 0),
                {"digests": name not in self.silent, "draining": name in self.draining},
            )
            for name in self.engines
        ]
        return SimpleNamespace(of=lambda role: peers if role == "inference" else [])

    def caller(self, name: str) -> Any:
        def call(method: str, *args: Any, timeout_s: float) -> Any:
            assert method != "canary" or timeout_s == args[-1] + preparation.CALL_S
            return self.answer(name, method, *args)

        return SimpleNamespace(call=call)

    def answer(self, name: str, method: str, *args: Any) -> Any:
        if name == "replay-0" and name in self.dead:
            raise UnreachableError("gone")
        if method == "arrived_under":
            of_version = [each for each in self.arrived if each[0].weight_steps[-1] == args[0]]
            return [each for each in of_version][: args[1] * max(1, len(self.engines))]
        if method == "mark_engine":
            self.marked.append(args)
            return None
        assert method == "canary"
        version, prompts, most, limit_s = args
        self.limits_s.append(limit_s)
        self.prompts = prompts
        self.asked.append((name, version, [len(prompt) for prompt in prompts]))
        if name in self.dead:
            raise UnreachableError("gone")
        off = np.full(4, -1 + self.off[name], np.float32)
        steps = np.full(4, version[1], np.int32)
        return [Completion(p, RESPONSE[:4], off, steps, version[1], version[0], "", "stop") for p in prompts]


def canaries_wait(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """No canary is answered until it is set."""
    answer, may_answer = cluster.answer, threading.Event()

    def slow(name: str, method: str, *args: Any) -> Any:
        assert method != "canary" or may_answer.wait(30)
        return answer(name, method, *args)

    monkeypatch.setattr(cluster, "answer", slow)
    return may_answer


def check_of(cluster: Cluster, **parity: Any) -> ParityCheck:
    from penstock.learner.config import ParityConfig

    learner = SimpleNamespace(parity=ParityConfig(**parity), row_length=64)
    config = SimpleNamespace(learner=learner, model=SimpleNamespace(dtype="float32"))
    return ParityCheck(cluster, config, 2, lambda: False)  # type: ignore[arg-type]


def update(check: ParityCheck, learner: Learner, *examples: RLExample) -> dict[str, float]:
    check.begin(learner, TrainingBatch("id", learner.step, examples, (), {}))  # type: ignore[arg-type]
    learner.step += 1
    return dict(check.end(learner))  # type: ignore[arg-type]


def test_a_batch_of_the_own_version_is_judged_before_anything_is_applied_and_asks_nobody():
    cluster, learner = Cluster("inference-0"), Learner()
    check = check_of(cluster, sequences=2)
    metrics = update(check, learner, *[example(0)] * 5)
    assert metrics["train/parity_checked"] == 16 and metrics["train/parity_kl"] == 0
    assert learner.scored == ["decoder 0"] * 2 and cluster.asked == []
    with pytest.raises(MismatchError, match="version 1: inference-0 and the learner"):
        check.begin(learner, TrainingBatch("id", 1, (example(1, off=1.0),) * 2, (), {}))  # type: ignore[arg-type]


def test_of_a_version_that_gave_none_each_engine_is_asked_and_scored_by_the_arrays_of_before_the_update():
    cluster, learner = Cluster("inference-0", "inference-1"), Learner()
    learner.step = 5
    check = check_of(cluster)
    metrics = update(check, learner, example(4), example(4), example(4, response=20))
    assert sorted(cluster.asked) == [(f"inference-{i}", (2, 5), [2, 21]) for i in (0, 1)]
    assert set(learner.scored) == {"decoder 5"}
    assert metrics["train/parity_checked"] == 16 and metrics["train/parity_kl/inference-1"] == 0
    assert metrics["train/parity_unchecked"] == 0 and metrics["time/parity"] >= 0
    cluster.off["inference-1"] = 0.7
    with pytest.raises(MismatchError, match="version 6: inference-1 and the learner"):
        update(check, learner, example(5))


def test_what_arrived_under_the_version_spares_the_only_engine_a_canary():
    cluster, learner = Cluster("inference-0"), Learner()
    learner.step, cluster.arrived = 3, [(example(3), ("inference-0#0",)), (example(2), ())]
    metrics = update(check_of(cluster), learner, example(2))
    assert cluster.asked == [] and metrics["train/parity_checked"] == 8


def test_what_arrived_longer_than_a_row_is_not_compared():
    cluster, learner, by = Cluster("inference-0"), Learner(), ("inference-0#0",)
    learner.step, cluster.arrived = 3, [(example(3, response=63), by), (example(3, response=62), by)]  # rows of 64
    metrics = update(check_of(cluster), learner, example(2))
    assert cluster.asked == [] and metrics["train/parity_checked"] == 62


def test_of_short_answers_as_many_are_taken_as_are_evidence_and_nobody_is_asked():
    cluster, learner = Cluster("inference-0"), Learner()
    metrics = update(check_of(cluster), learner, *[example(0, response=3)] * 5)
    assert metrics["train/parity_checked"] == 9 and cluster.asked == []
    cluster.arrived = [(example(1, response=3), ("inference-0#0",))] * 2
    assert update(check_of(cluster), learner, example(0))["train/parity_checked"] == 6 + 8
    assert len(cluster.asked) == 1  # of which two are too few
    learner.step, cluster.arrived = 2, []
    assert update(check_of(cluster), learner, *[example(2, response=3)] * 2)["train/parity_checked"] == 6 + 16


@pytest.mark.parametrize(("answers", "asked"), [((3, 3, 3, 3), 3), ((1, 20, 20, 20, 1), 8), ((20,) * 4, 1)])
def test_where_answers_are_short_as_many_are_asked_for_as_are_evidence(answers, asked):
    cluster, learner = Cluster("inference-0"), Learner()
    learner.step = 5
    update(check_of(cluster), learner, *[example(4, response=length) for length in answers])
    assert cluster.asked == [("inference-0", (2, 5), [2] * asked + [1 + max(answers)])]


def test_what_is_asked_leaves_room_for_an_answer_in_a_row():
    cluster, learner = Cluster("inference-0"), Learner()
    learner.step, mask = 5, np.arange(60) >= 55
    long = replace(example(4, response=58), loss_mask=mask, tokens=np.arange(60, dtype=np.int32))
    update(check_of(cluster, canary_tokens=16), learner, long)  # in rows of 64
    expected = [np.arange(7, 55), np.arange(7, 55), np.arange(48)]  # the prompt's end twice, the longest's beginning
    assert [prompt.tolist() for prompt in cluster.prompts] == [each.tolist() for each in expected]


def test_a_canary_is_not_waited_for_where_its_version_sampled_enough_meanwhile(monkeypatch):
    cluster, learner = Cluster("inference-0"), Learner()
    learner.step, check = 3, check_of(cluster, wait_s=60.0)
    may_answer = canaries_wait(cluster, monkeypatch)
    check.begin(learner, TrainingBatch("id", 3, (example(2),), (), {}))  # type: ignore[arg-type]
    cluster.arrived = [(example(3), ("inference-0#0",))]
    learner.step += 1
    assert check.end(learner)["train/parity_checked"] == 8 and not may_answer.is_set()  # type: ignore[arg-type]
    may_answer.set()


def test_of_several_engines_each_that_arrivals_name_is_judged_by_them_and_the_others_are_asked():
    cluster, learner = Cluster("inference-0", "inference-1"), Learner()
    learner.step = 3
    one, other = ("inference-1#0",), ("inference-0#7",)
    cluster.arrived = [(example(3), one), (example(3, response=9), one), (example(3), other), (example(3), one + other)]
    metrics = update(check_of(cluster), learner, example(3), example(3))
    assert [name for name, *_ in cluster.asked] == ["inference-0"]  # another incarnation of it answered
    assert metrics["train/parity_checked"] == 4 * 2 + (8 + 9) + 2 * 8
    kinds = {"inference-0", "inference-1", "rollouts"}
    assert {f"train/parity_kl/{kind}" for kind in kinds} <= metrics.keys()
    assert metrics["train/parity_unchecked"] == 0 and cluster.marked == []
    cluster.arrived = [(example(4, off=1.0), one)]
    with pytest.raises(MismatchError, match="version 4: inference-1 and the learner"):
        update(check_of(cluster), learner, example(4))


def test_an_engine_may_take_as_long_as_the_update_did_and_the_wait_after_it(monkeypatch):
    cluster, learner, now = Cluster("inference-0"), Learner(), [100.0]
    monkeypatch.setattr(preparation.time, "perf_counter", lambda: now[0])
    learner.step, check = 5, check_of(cluster, wait_s=2.0)
    for seconds in (30.0, 7.0, 0.0):
        check.begin(learner, TrainingBatch("id", learner.step, (example(4),), (), {}))  # type: ignore[arg-type]
        now[0] += seconds
        learner.step += 1
        assert check.end(learner)["train/parity_checked"] == 8  # type: ignore[arg-type]
    assert cluster.limits_s == [preparation.FIRST_ANSWER_S, 32.0, 9.0]
    cluster.engines, cluster.off = ("inference-0", "inference-1"), {"inference-0": 0.0, "inference-1": 0.0}
    for _ in range(2):  # the second one is asked for the first time
        assert update(check, learner, example(4))["train/parity_checked"] == 16
    assert cluster.limits_s[3:] == [preparation.FIRST_ANSWER_S] * 2 + [2.0] * 2


def test_an_engine_that_is_asked_for_the_first_time_may_compile_its_answer(monkeypatch):
    cluster, learner = Cluster("inference-0"), Learner()
    learner.step, check = 5, check_of(cluster, wait_s=0.01)
    may_answer = canaries_wait(cluster, monkeypatch)
    threading.Timer(0.3, may_answer.set).start()
    assert update(check, learner, example(4))["train/parity_checked"] == 8
    may_answer.clear()
    assert update(check, learner, example(5))["train/parity_unchecked"] == 1  # now it has `wait_s`
    may_answer.set()


def test_a_request_to_finish_ends_the_wait_for_an_engine_that_compiles_its_first_answer(monkeypatch):
    cluster, learner, told = Cluster("inference-0"), Learner(), []
    may_answer = canaries_wait(cluster, monkeypatch)
    learner.step, check = 5, check_of(cluster)
    config = SimpleNamespace(
        learner=SimpleNamespace(parity=check._config, row_length=64),
        model=SimpleNamespace(dtype="float32"),
        inference=SimpleNamespace(external=None),
    )
    component = SimpleNamespace(
        shared=object(), config=config, settings=SimpleNamespace(lineage=2), learner=learner, coming_batch=None,
        finishing=False,
    )  # fmt: skip
    preparation = Preparation(cluster, component)  # type: ignore[arg-type]
    preparation.before_update(TrainingBatch("id", 5, (example(4),), (), {}))
    learner.step += 1
    ending = threading.Thread(target=lambda: told.append(preparation.after_update()), daemon=True)
    ending.start()
    ending.join(0.2)
    assert ending.is_alive()
    component.finishing = True
    ending.join(10)
    assert [metrics["train/parity_unchecked"] for metrics in told] == [1], "the version can be saved"
    may_answer.set()
    preparation.close()


def test_servers_that_share_the_card_sleep_during_the_update_once_they_have_answered(monkeypatch):
    cluster, learner, calls, events = Cluster("inference-0", "inference-1"), Learner(), [], []
    may_answer, wait = canaries_wait(cluster, monkeypatch), preparation.wait
    answer, coming = cluster.answer, lambda: None

    def record(name: str, method: str, *args: Any) -> Any:
        calls.append((name, method))
        if method not in ("sleep", "wake"):
            return answer(name, method, *args)
        assert len(cluster.asked) == 2, "both have answered"
        if (name, method) == ("inference-0", "wake"):
            raise UnreachableError("gone")

    def wait_for(*given: Any) -> Any:
        may_answer.set()
        return wait(*given)

    monkeypatch.setattr(cluster, "answer", record)
    monkeypatch.setattr(preparation, "wait", wait_for)
    cluster.event = lambda kind, **fields: events.append((kind, fields))  # type: ignore[attr-defined]
    learner.step = 5
    config = SimpleNamespace(
        learner=SimpleNamespace(parity=check_of(cluster)._config, row_length=64),
        model=SimpleNamespace(dtype="float32"),
        inference=SimpleNamespace(external=SimpleNamespace(colocate=True)),
        weights=SimpleNamespace(fetch_timeout_s=1.0),
    )
    component: Any = SimpleNamespace(
        shared=object(), config=config, settings=SimpleNamespace(lineage=2), learner=learner, coming_batch=coming,
        finishing=False,
    )  # fmt: skip
    made = Preparation(cluster, component)  # type: ignore[arg-type]
    try:
        made.before_update(TrainingBatch("id", 5, (example(4),), (), {}))
        assert calls[-2:] == [("inference-0", "sleep"), ("inference-1", "sleep")]
        assert learner.coming is coming  # type: ignore[attr-defined]
        learner.step += 1
        made.after_update()
    finally:
        may_answer.set()
        made.close()
    assert calls[-2:] == [("inference-0", "wake"), ("inference-1", "wake")]
    assert events == [("server_not_told", {"server": "inference-0#0", "what": "wake", "reason": "gone"})]


def test_what_is_found_of_an_engine_that_tells_no_digests_stands_in_for_them():
    cluster, learner = Cluster("inference-0", "inference-1"), Learner()
    cluster.silent, learner.step = {"inference-1"}, 5
    update(check_of(cluster), learner, example(4))
    assert cluster.marked == [("inference-1#0", 2, 5, "")]
    cluster.dead = {"inference-1"}
    update(check_of(cluster, wait_s=1.0), learner, example(4))
    assert len(cluster.marked) == 1  # no evidence is no verdict
    cluster.dead, cluster.off["inference-1"] = set(), 0.7
    with pytest.raises(MismatchError):
        update(check_of(cluster), learner, example(5))
    assert cluster.marked[1][:3] == ("inference-1#0", 2, 7) and "inference-1 and the learner" in cluster.marked[1][3]


def test_an_engine_that_does_not_answer_is_counted_and_ends_nothing():
    cluster, learner = Cluster("inference-0", "inference-1"), Learner()
    learner.step, cluster.dead = 1, {"inference-1"}
    metrics = update(check_of(cluster, wait_s=1.0), learner, example(0))
    assert (metrics["train/parity_checked"], metrics["train/parity_unchecked"]) == (8, 1)
    assert sorted(name for name, *_ in cluster.asked) == ["inference-0", "inference-1"]  # once each


def test_an_engine_that_is_about_to_end_is_not_asked():
    cluster, learner = Cluster("inference-0", "inference-1"), Learner()
    learner.step, cluster.draining = 1, {"inference-1"}
    metrics = update(check_of(cluster), learner, example(0))
    assert [name for name, *_ in cluster.asked] == ["inference-0"] and metrics["train/parity_unchecked"] == 0


def test_while_no_engine_is_known_what_arrived_is_judged():
    cluster, learner = Cluster(), Learner()
    learner.step, check, cluster.arrived = 3, check_of(cluster), [(example(3), ())]
    assert update(check, learner, example(2))["train/parity_checked"] == 8 and cluster.asked == []
    cluster.arrived = [(example(4, off=1.0), ())]
    with pytest.raises(MismatchError, match="version 4: rollouts and the learner"):
        update(check, learner, example(3))


def test_where_enough_arrived_during_three_updates_nobody_is_asked_before_the_next_is_made():
    cluster, learner, asked = Cluster("inference-0"), Learner(), []
    learner.step, check = 3, check_of(cluster)
    for arriving in (True, True, False, True, True, True, True, False, True):
        step, before = learner.step, len(cluster.asked)
        check.begin(learner, TrainingBatch("id", step, (example(step - 1),), (), {}))  # type: ignore[arg-type]
        check.wait_for_canaries()
        ahead = len(cluster.asked) - before
        cluster.arrived = [(example(step), ("inference-0#0",))] * arriving
        learner.step += 1
        found = check.end(learner)  # type: ignore[arg-type]
        assert found["train/parity_checked"] == 8 * arriving + 8 * max(ahead, not arriving)
        asked.append((ahead, len(cluster.asked) - before))
    assert asked == [(1, 1)] * 6 + [(0, 0), (0, 1), (1, 1)]
    assert learner.scored[-1] == "decoder 11"


def test_a_replay_that_does_not_answer_ends_nothing():
    cluster, learner = Cluster("inference-0"), Learner()
    learner.step, cluster.dead, cluster.silent = 1, {"replay-0"}, {"inference-0"}
    assert update(check_of(cluster), learner, example(0))["train/parity_checked"] == 8
    assert cluster.marked == []


def test_updates_between_two_checks_compare_nothing():
    cluster, learner = Cluster("inference-0"), Learner()
    check = check_of(cluster, every=2)
    found = [bool(update(check, learner, example(step))) for step in range(4)]
    assert found == [True, False, True, False]


def probe(*scores: float) -> float | None:
    """Two rollouts of eight tokens whose engine says −1 for every one; the learner says `scores`."""
    logprobs, rewards = np.full(8, -1, np.float32), np.zeros(8, np.float32)
    metadata, decoding = RolloutMetadata("probe", 0.0, 0), Decoding(top_p=0.9)
    rollouts = tuple(
        Rollout("cats", "0", PROMPT, RESPONSE, logprobs, rewards, 0.0, metadata, decoding=decoding) for _ in scores
    )

    def sample_batch(*_: object, decoding: Decoding, **more: object) -> tuple[RolloutBatch, dict]:
        assert decoding == Decoding(top_p=0.9, max_output_tokens=PROBE_TOKENS)
        return RolloutBatch((RolloutGroup("cats:0", rollouts),)), {}

    nothing_sampled = replace(rollouts[0], response_logprobs=rewards, response_mask=np.zeros(8, np.bool_))
    rollouts += (nothing_sampled,)
    context = SimpleNamespace(tokenizer=None)
    manager = SimpleNamespace(sample_batch=sample_batch, context=context)
    lesson = SimpleNamespace(
        sampling_params=SimpleNamespace(decoding=lambda _: replace(decoding, max_output_tokens=512))
    )
    cluster, events = Cluster("inference-0"), []
    cluster.event = lambda kind, **fields: events.append((kind, fields))  # type: ignore[attr-defined]
    learner = SimpleNamespace(
        step=0,
        score=lambda examples: [np.full(10, score, np.float32) for score in scores],
        rounding=lambda examples: None,
    )
    config = SimpleNamespace(curriculum=SimpleNamespace(lessons={"cats": lesson}), learner=None)
    check = check_of(cluster)
    config.learner = SimpleNamespace(parity=check._config, row_length=64)
    config.model = SimpleNamespace(dtype="float32")
    component = SimpleNamespace(
        shared=SimpleNamespace(manager=manager), config=config, settings=SimpleNamespace(lineage=0), learner=learner
    )
    kl = Preparation(cluster, component).probe()  # type: ignore[arg-type]
    assert events[0][0] == "parity" and events[0][1]["tokens"] == 16 and events[0][1]["kl"] == kl
    return kl


def test_the_probe_says_how_far_engine_and_learner_are_apart():
    assert probe(-1.0, -1.0) == 0
    assert probe(-1.0, -1.0001) == pytest.approx(2.5e-9, rel=0.1)
    with pytest.raises(MismatchError, match="at start-up: KL 0.0288, .* over 16 tokens in float32"):
        probe(-1.25, -1.25)


@pytest.mark.parametrize("scores", [(np.nan, np.nan), (-1.0, np.nan)])
def test_scores_that_are_no_numbers_are_a_mismatch(scores: tuple[float, float]):
    with pytest.raises(MismatchError, match="KL inf"):
        probe(*scores)


class Spelling(SingleTurnEnvironment):
    """Answers of four letters, and one longer word in four."""

    examples = [Example(str(n), "Spell it:", answer="a b c d e f" if n % 4 == 0 else "abcd") for n in range(64)]

    def score(self, example, text, completion):
        return 0.0


def manager_of(lessons: dict[str, Any], **environments: Any) -> RolloutManager:
    context = ScriptedContext(Tokenizer.load("penstock"), ["abcd"])
    return RolloutManager(
        Curriculum(CurriculumConfig.model_validate({"lessons": lessons})), context, 0, 0, environments
    )


def test_solutions_that_the_policy_would_never_be_let_finish_are_told_before_the_warm_start():
    environment = {"env_class": "penstock.environments.CatsEnvironment"}
    lessons = {"spelling": {"environment": environment, "sampling_params": {"max_output_tokens": 8}}}
    manager, config = manager_of(lessons, spelling=Spelling()), WarmStartConfig(steps=1, batch_size=32)
    count = sum(
        len(reference.response) > 4 for reference in Spelling().reference_examples(32, fold(0, "warm_start", 0))
    )
    assert 0 < count < 32
    assert answers_cut_short(manager, "spelling", config, 0) == (
        f"{count} of 32 worked answers are longer than sampling_params.max_output_tokens (8), up to 12 tokens: the "
        "policy will be cut before it ends one; raise the limit, or shorten solutions"
    )
    lessons["spelling"]["sampling_params"]["max_output_tokens"] = 12
    assert answers_cut_short(manager_of(lessons, spelling=Spelling()), "spelling", config, 0) == ""


def test_a_warm_start_is_by_default_on_the_lessons_that_wait_for_no_other():
    environment = {"env_class": "penstock.environments.CatsEnvironment"}
    lessons = {"first": {"environment": environment}, "later": {"environment": environment}}
    lessons["later"]["dependencies"] = [{"dependency_id": "first"}]  # type: ignore[assignment]
    manager = manager_of(lessons, first=Spelling(), later=Spelling())
    assert warm_start_lessons(manager, WarmStartConfig(steps=1)) == ["first"]
    assert warm_start_lessons(manager, WarmStartConfig(steps=1, lessons=["later"])) == ["later"]


def test_a_version_s_evidence_begins_with_what_it_sampled():
    swapped = example(3)
    swapped.weight_steps[-1] = 4
    assert sampled_first_by(swapped, 3) and not sampled_first_by(swapped, 4)


@pytest.mark.parametrize("recipe", ["arithmetic", "calculator"])
def test_the_solutions_of_recipes_fit(recipe):
    config = load_config(recipe)
    assert config.learner.warm_start is not None
    manager = RolloutManager(Curriculum(config.curriculum), ScriptedContext(Tokenizer.load("penstock"), ["1"]), 0)
    lessons = warm_start_lessons(manager, config.learner.warm_start)
    assert lessons
    assert [answers_cut_short(manager, each, config.learner.warm_start, 0) for each in lessons] == [""] * len(lessons)
