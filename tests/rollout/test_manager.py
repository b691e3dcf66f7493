import sys
import time
from dataclasses import replace

import jax
import numpy as np
import pytest

from penstock.environments import Environment
from penstock.inference import EngineConfig, ScriptedContext
from penstock.model.language import PolicyConfig, load_policy, named_arrays, save_decoder
from penstock.rollout import RolloutManager
from penstock.types import (
    ConfigError,
    Decoding,
    EnvironmentFailure,
    PenstockError,
    Rollout,
    RolloutGroup,
    RolloutMetadata,
    Stopped,
    WeightVersion,
    as_seed,
)


class OneMethodEnvironment(Environment):
    """An environment that does what its test says."""

    def __init__(self, behave) -> None:
        super().__init__("custom")
        self.behave = behave
        self.closed = False

    def sample(self, inference_ctx, n_examples, n_generations, decoding, prng_key, mode):
        return self.behave()

    def close(self) -> None:
        self.closed = True


def managing(manager: RolloutManager, environment: Environment, **changes) -> RolloutManager:
    return RolloutManager(manager.curriculum, manager.context, seed=1, environments={"cats": environment}, **changes)


def test_rollouts_are_stamped_with_what_environments_must_not_know(manager: RolloutManager):
    batch, _ = manager.sample_batch("cats", 2, 3, "train", rng=5, weight_step=9, worker_id="w0")
    assert [group.group_id for group in batch.groups] == ["train-cats-5-0", "train-cats-5-1"]
    stamped = batch.groups[1].rollouts[2]
    assert stamped.rollout_id == "train-cats-5-1/2"
    assert stamped.lesson_id == "cats"
    # the engine's version, 4, wins over the 9 that the caller passed
    assert stamped.metadata == RolloutMetadata("w0", 99.0, weight_step=4, lineage=2)
    assert batch.metadata.weight_step == 4


def test_each_rollout_has_the_time_of_its_own_last_response(manager: RolloutManager, tokenizer):
    """Two turns of three conversations; what an environment adds after a response is not the policy's."""

    class Timed(ScriptedContext):
        """Each response is finished a second after the one before, the last of them just now."""

        def generate(self, *asked):
            (answers,) = super().generate(*asked)
            began = time.monotonic() - 10 + 3 * (len(self.calls) - 1)
            return [[replace(done, finished_s=began + position) for position, done in enumerate(answers)]]

    class TwoTurns(OneMethodEnvironment):
        def sample(self, inference_ctx, n_examples, n_generations, decoding, prng_key, mode):
            prompt = np.array([1, 2], np.int32)
            turns = [inference_ctx.generate([prompt], 3, decoding, [turn])[0] for turn in range(2)]
            return [RolloutGroup("custom:1", (*map(self.talk, (1, 0), turns[1]), self.silent(prompt)))], {}

        def talk(self, extra, done):
            tail = np.zeros(extra, np.int32)
            tokens = np.append(done.response_tokens, tail)
            logprobs = np.append(done.response_logprobs, tail).astype(np.float32)
            mask = np.arange(len(tokens)) < len(done.response_tokens)
            return Rollout("custom", "1", done.prompt_tokens, tokens, logprobs, 0 * logprobs, 0.0, response_mask=mask)

        def silent(self, prompt):
            zeros = np.zeros(1, np.float32)
            return Rollout("custom", "1", prompt, np.array([5], np.int32), zeros, zeros, 0.0)

    environment = TwoTurns(lambda: None)
    timed = managing(manager, environment, clock=lambda: 99.0)
    context = Timed(tokenizer, ["a cat", "a cat", "no", "two cats", "two cats", "none"])
    (group,) = timed.sample_batch("cats", 1, 3, context=context)[0].groups
    times = [rollout.metadata.timestamp for rollout in group.rollouts]
    # the second turn's responses ended 7 and 6 seconds before, and of equal ones each has a time of its own
    assert times == [pytest.approx(92.0, abs=2.0), pytest.approx(times[0] + 1.0, abs=1e-6), 99.0]


def test_a_rollout_says_what_it_took_stage_by_stage_and_whole(manager: RolloutManager, tokenizer):
    spent = {"wait_s": 0.01, "prefill_s": 0.01, "decode_s": 0.03}

    class Slow(ScriptedContext):
        """Says how 50 of the 60 ms were spent that it takes."""

        def generate(self, *asked):
            time.sleep(0.06)
            (answers,) = super().generate(*asked)
            return [[replace(done, finished_s=time.monotonic(), timings=spent) for done in answers]]

    began = time.monotonic()
    batch, _ = manager.sample_batch("cats", 1, 2, context=Slow(tokenizer, ["a cat", "no"]))
    took_s = time.monotonic() - began
    for rollout in batch.rollouts():
        assert set(rollout.timings) == {*spent, "reward_s", "generate_s"}
        assert {stage: rollout.timings[stage] for stage in spent} == spent
        assert 0.06 <= rollout.timings["generate_s"] <= took_s - rollout.timings["reward_s"]


def test_the_engines_that_answered_are_noted_whatever_an_environment_passes_on(manager: RolloutManager, tokenizer):
    class Servers(ScriptedContext):
        """Every call is answered by another server, but for the third."""

        def generate(self, *asked):
            engine = f"inference-{len(self.calls) % 2}#4"
            return [[replace(done, engine=engine) for done in answer] for answer in super().generate(*asked)]

    class TwoTurns(OneMethodEnvironment):
        def sample(self, inference_ctx, n_examples, n_generations, decoding, prng_key, mode):
            prompts = [np.array([1, 2], np.int32)]
            answers = [inference_ctx.generate(prompts, 1, decoding, [turn]) for turn in range(3)]
            tokens = answers[0][0][0].response_tokens
            zeros = np.zeros(len(tokens), np.float32)
            rollout = Rollout("custom", "1", prompts[0], tokens, zeros, zeros, 0.0)
            return [RolloutGroup("custom:1", (rollout,))], {}

    environment = TwoTurns(lambda: None)
    servers = Servers(tokenizer, ["a"])
    group = managing(manager, environment).sample_batch("cats", 1, 1, context=servers)[0].groups[0]
    assert group.rollouts[0].metadata.engines == ("inference-0#4", "inference-1#4")
    plain = manager.sample_batch("cats", 1, 1, rng=5)[0].groups[0]
    assert plain.rollouts[0].metadata.engines == ()


def test_the_callers_group_ids_are_used_and_seeds_select_examples(manager: RolloutManager):
    first, _ = manager.sample_batch("cats", 1, 2, rng=5, group_ids=["cats-0-17"])
    again, _ = manager.sample_batch("cats", 1, 2, rng=5, group_ids=["cats-0-17"])
    assert first.groups[0].rollouts[1].rollout_id == "cats-0-17/1"
    assert first.groups[0].key == again.groups[0].key
    keys = {manager.sample_batch("cats", 1, 1, rng=seed)[0].groups[0].key for seed in range(12)}
    assert len(keys) > 3


def test_an_empty_batch_is_a_defined_result(manager: RolloutManager):
    empty = managing(manager, OneMethodEnvironment(lambda: ([], {"problems_left": 0.0})))
    batch, metrics = empty.sample_batch("cats", 1, 3)
    assert (batch.groups, batch.metadata, metrics) == ((), None, {"problems_left": 0.0})
    with pytest.raises(EnvironmentFailure, match="lesson 'cats' gave no group for"):
        empty.evaluate_lesson("cats")  # no rollouts have no mean


@pytest.mark.parametrize(
    ("raised", "said"), [(KeyError("answer"), "KeyError: 'answer'"), (SystemExit(3), "SystemExit: 3")]
)
def test_an_environment_that_raises_is_a_failed_group_with_its_name(manager: RolloutManager, raised, said):
    def behave():
        raise raised

    failing = managing(manager, OneMethodEnvironment(behave))
    with pytest.raises(EnvironmentFailure, match=f"CatsEnvironment of lesson 'cats' raised {said}"):
        failing.sample_batch("cats", 1, 3)


def test_the_wrong_number_of_groups_is_refused(manager: RolloutManager):
    group = manager.sample_batch("cats", 1, 2)[0].groups[0]
    doubling = managing(manager, OneMethodEnvironment(lambda: ([group, group], {})))
    with pytest.raises(EnvironmentFailure, match="returned 2 groups for 1 examples"):
        doubling.sample_batch("cats", 1, 2, group_ids=["cats-0-0"])


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (([None], {}), "group 0 is None"),
        ((None, {}), "returned None"),
        (([], {"accuracy": float("nan")}), "metric 'accuracy' is nan"),
        (None, "environment 'custom': sample returned None: it must return two, a list of RolloutGroup and a dict"),
        (([], {}, 3), "sample returned .* it must return two"),
    ],
)
def test_what_is_malformed_is_a_failed_group_not_a_crash(manager: RolloutManager, returned, message: str):
    malformed = managing(manager, OneMethodEnvironment(lambda: returned))
    with pytest.raises(EnvironmentFailure, match=message):
        malformed.sample_batch("cats", 1, 2)


def test_an_evaluation_whose_engine_is_stopped_counts_for_nothing(manager: RolloutManager):
    group = manager.sample_batch("cats", 1, 1, "eval")[0].groups[0]
    aborted = replace(group, rollouts=(replace(group.rollouts[0], finish_reason="aborted"),))
    cut_short = managing(manager, OneMethodEnvironment(lambda: ([aborted], {})))
    with pytest.raises(Stopped, match="lesson 'cats' was cut short"):
        cut_short.evaluate_lesson("cats", 1)
    assert cut_short.curriculum.progress("cats").evaluation is None


def test_only_a_full_evaluation_updates_the_curriculum(manager: RolloutManager):
    stats, batch = manager.evaluate_lesson("cats", eval_type="micro_eval", weight_step=3)
    assert len(batch.groups) == manager.curriculum.config.micro_eval_n_examples
    assert manager.curriculum.progress("cats").evaluation is None
    stats, batch = manager.evaluate_lesson("cats", eval_type="eval", weight_step=3)
    assert len(batch.groups) == 5
    assert manager.curriculum.progress("cats").evaluation == pytest.approx(stats.success_rate)


def test_every_evaluation_asks_the_same_held_out_prompts(manager: RolloutManager):
    keys = [[group.key for group in manager.evaluate_lesson("cats")[1].groups] for _ in range(2)]
    trained = {manager.sample_batch("cats", 1, 1, rng=seed)[0].groups[0].key for seed in range(200)}
    assert keys[0] == keys[1]
    assert not trained & set(keys[0])


def test_evaluate_curriculum_has_every_lesson(manager: RolloutManager):
    results = manager.evaluate_curriculum("micro_eval")
    assert list(results) == ["cats"]
    stats, batch = results["cats"]
    assert stats.groups == len(batch.groups) == 4


def test_training_groups_move_the_smoothed_success(manager: RolloutManager):
    group = manager.sample_batch("cats", 1, 3)[0].groups[0]
    manager.update_training_stats(group)
    expected = np.mean([reward >= 0.5 for reward in group.rewards])
    assert manager.curriculum.progress("cats").success == pytest.approx(expected)


def test_weights_reach_the_engine_or_are_refused(manager: RolloutManager):
    seen = []
    served = managing(manager, OneMethodEnvironment(lambda: ([], {})), set_weights=lambda v, a: seen.append((v, a)))
    served.update_model(WeightVersion(0, 1), {"a": 1})
    assert seen == [(WeightVersion(0, 1), {"a": 1})]
    with pytest.raises(PenstockError, match="fixed weights"):
        manager.update_model(WeightVersion(0, 1), {})


def test_shutdown_closes_environments_and_its_own_engine(manager: RolloutManager):
    environment, stopped = OneMethodEnvironment(lambda: ([], {})), []
    owning = managing(manager, environment, stop_engine=lambda: stopped.append(True))
    owning.shutdown()
    assert environment.closed
    assert stopped == [True]


def test_an_environment_that_cannot_be_closed_keeps_nothing_else_open(manager: RolloutManager):
    stopped = []
    broken = managing(manager, OneMethodEnvironment(lambda: ([], {})), stop_engine=lambda: stopped.append(True))
    broken.environment("cats").close = lambda: 1 // 0
    with pytest.raises(ZeroDivisionError):
        broken.shutdown()
    assert stopped == [True]


def test_an_environment_that_ends_the_process_when_it_is_closed_does_not(manager: RolloutManager):
    broken = managing(manager, OneMethodEnvironment(lambda: ([], {})))
    broken.environment("cats").close = lambda: sys.exit(3)
    with pytest.raises(EnvironmentFailure, match="OneMethodEnvironment.close raised SystemExit: 3"):
        broken.shutdown()


def test_groups_of_evaluations_are_named_by_label_lineage_and_step(manager: RolloutManager):
    _, batch = manager.evaluate_lesson("cats", 2, "micro_eval", weight_step=3)
    assert [group.group_id for group in batch.groups] == ["micro_eval-cats-2-3-0", "micro_eval-cats-2-3-1"]
    _, batch = manager.evaluate_lesson("cats", 1, "eval", weight_step=3, label="after")
    assert batch.groups[0].rollouts[0].rollout_id == "after-cats-2-3-0/0"


def test_a_report_decides_nothing_and_asks_problems_of_its_own(manager: RolloutManager):
    decided = {group.key for group in manager.evaluate_lesson("cats", 200, "eval")[1].groups}
    before = manager.curriculum.progress("cats").evaluation
    _, batch = manager.evaluate_lesson("cats", 200, "report")
    assert not decided & {group.key for group in batch.groups}
    assert manager.curriculum.progress("cats").evaluation == before
    assert len(manager.evaluate_lesson("cats", None, "report")[1].groups) == manager.curriculum.config.eval_n_examples


def test_an_environment_without_problems_for_reports_is_asked_for_its_held_out_ones(manager: RolloutManager):
    modes = []

    class Noting(OneMethodEnvironment):
        def sample(self, inference_ctx, n_examples, n_generations, decoding, prng_key, mode):
            modes.append(mode)
            return manager.environment("cats").sample(
                inference_ctx, n_examples, n_generations, decoding, prng_key, mode
            )

    managing(manager, Noting(None)).evaluate_lesson("cats", 2, "report")
    assert modes == ["eval"]


def test_an_evaluation_of_which_every_group_failed_has_no_result(manager: RolloutManager):
    broken = managing(manager, OneMethodEnvironment(lambda: 1 / 0))
    with pytest.raises(EnvironmentFailure, match="7 groups failed, all that were asked for: .*ZeroDivisionError"):
        broken.evaluate_lesson("cats", 7, "report")


def test_unknown_words_are_errors_of_ours(manager: RolloutManager):
    with pytest.raises(ConfigError, match="lesson 'dogs' is not in the curriculum: its lessons are cats"):
        manager.sample_batch("dogs", 1, 1)
    with pytest.raises(ConfigError, match="lesson 'dogs'"):
        manager.evaluate_curriculum(lessons=["dogs"])
    with pytest.raises(ConfigError, match="eval_type is 'full': it must be one of eval, micro_eval, report"):
        manager.evaluate_lesson("cats", eval_type="full")
    assert manager.curriculum.progress("cats").evaluation is None


def test_an_empty_batch_is_warned_of(manager: RolloutManager, caplog: pytest.LogCaptureFixture):
    managing(manager, OneMethodEnvironment(lambda: ([], {}))).sample_batch("cats", 4, 3)
    (record,) = caplog.records
    assert record.levelname == "WARNING" and record.name == "penstock.rollout.manager"
    assert "lesson 'cats' gave no group for 4 examples: the batch is empty" in record.getMessage()
    caplog.clear()
    manager.sample_batch("cats", 0, 3)  # nothing was asked for
    assert not caplog.records


def test_jax_keys_select_examples_as_numbers_do(manager: RolloutManager):
    key = jax.random.key(7)
    batches = [manager.sample_batch("cats", 3, 1, rng=rng)[0] for rng in (key, jax.random.PRNGKey(7), as_seed(key))]
    assert len({tuple(group.key for group in batch.groups) for batch in batches}) == 1
    assert {batch.groups[0].group_id for batch in batches} == {f"train-cats-{as_seed(key)}-0"}


def test_the_keywords_of_evaluations(manager: RolloutManager):
    stats, batch = manager.evaluate_lesson("cats", rng=8, weight_step=6, worker_id="w9")
    assert {rollout.metadata.worker_id for rollout in batch.rollouts()} == {"w9"}
    assert batch.groups[0].group_id == "eval-cats-2-6-0"
    own = [group.key for group in manager.evaluate_lesson("cats", 5)[1].groups]
    assert own == [group.key for group in manager.evaluate_lesson("cats", 5, rng=1)[1].groups]  # the run's seed
    assert own != [group.key for group in batch.groups]
    found = manager.evaluate_curriculum("micro_eval", weight_step=6, eval_n_examples=2, worker_id="w9", rng=8)
    (stats, batch) = found["cats"]
    assert stats.groups == 2 and batch.groups[0].rollouts[0].metadata.worker_id == "w9"
    assert batch.groups[0].group_id == "micro_eval-cats-2-6-0"


TINY = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}


@pytest.mark.slow
def test_from_configs_starts_and_owns_its_engine(curriculum, tokenizer, tmp_path):
    decoder = load_policy(PolicyConfig.model_validate({"init": TINY}), 3, tokenizer)
    saved = tmp_path / "policy"
    save_decoder(decoder, saved, tokenizer)
    inference = EngineConfig(max_slots=4, max_seq_len=48, prefill_rows=2)
    configs = (curriculum.config, inference)
    said = []
    for model, codec in ((decoder, tokenizer), (saved, saved)):
        with RolloutManager.from_configs({}, *configs, codec, model, seed=1) as manager:
            (stats, batch) = manager.evaluate_curriculum(eval_n_examples=2)["cats"]
            assert stats.rollouts == 2
            said.append([rollout.response_tokens.tolist() for rollout in batch.rollouts()])
            assert {rollout.metadata.weight_step for rollout in batch.rollouts()} == {0}
            context = manager.context
            manager.update_model(WeightVersion(0, 5), named_arrays(decoder))
            batch, _ = manager.sample_batch("cats", 1, 2)
            assert {rollout.metadata.weight_step for rollout in batch.rollouts()} == {5}
        with pytest.raises(Stopped):
            context.generate([np.array([1], np.int32)], 1, Decoding(max_output_tokens=2), [0])
    assert said[0] == said[1]


def test_from_configs_takes_environments_by_lesson(curriculum, tokenizer):
    decoder = load_policy(PolicyConfig.model_validate({"init": TINY}), 3, tokenizer)
    inference = EngineConfig(max_slots=4, max_seq_len=48, prefill_rows=2)
    own = OneMethodEnvironment(lambda: ([], {"own": 1.0}))
    with RolloutManager.from_configs({"cats": own}, curriculum.config, inference, tokenizer, decoder) as manager:
        assert manager.sample_batch("cats", 0, 1)[1] == {"own": 1.0}
    assert own.closed
    with pytest.raises(ConfigError, match="environments has 'dogs', which is no lesson: the curriculum's are cats"):
        RolloutManager.from_configs({"dogs": own}, curriculum.config, inference, tokenizer, decoder)


def test_problems_are_asked_by_number_where_they_are_given(manager: RolloutManager):
    environment = manager.environment("cats")
    numbers = [5, 0]
    batch, _ = manager.sample_batch("cats", 2, 1, rng=3, problems=numbers)
    assert [group.key for group in batch.groups] == [
        f"cats:{environment.train_examples()[number].example_id}" for number in numbers
    ]
