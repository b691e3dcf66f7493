"""A user's own problems and rewards."""

import json
import logging
import os
from pathlib import Path

import pytest
from tests.waiting import wait_until

from penstock.environments import JsonlEnvironment
from penstock.environments.jsonl import reward_arguments
from penstock.types import ConfigError, EnvironmentFailure

PROBLEMS = str(Path(__file__).parents[2] / "examples" / "data" / "word_problems.jsonl")
CHAT = [{"role": "user", "content": "What is 1+2?"}]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def rewards_file(tmp_path, body):
    path = tmp_path / "rewards.py"
    path.write_text(body)
    return f"{path}:reward"


@pytest.fixture
def make():
    made = []

    def build(path=PROBLEMS, **arguments):
        made.append(JsonlEnvironment(path, **{"prompt_column": "question", **arguments}))
        return made[-1]

    yield build
    for environment in made:
        environment.close()


def test_word_problems_graded_by_their_final_answer(make, policy, decoding):
    environment = make(prompt_format="Question: {question}\nAnswer:")
    assert len(environment.train_examples()) + len(environment.eval_examples()) == 20

    def solve(prompt, j, seed):
        answer = answers[prompt.removeprefix("Question: ").removesuffix("\nAnswer:")]
        return f"it is #### {answer if j else 'unknown'}<eos>"

    rows = [json.loads(line) for line in Path(PROBLEMS).read_text().splitlines()]
    answers = {row["question"]: row["answer"].rpartition("#### ")[2] for row in rows}
    groups, _ = environment.sample(policy(solve), 16, 2, decoding, 0, "train")
    assert [group.rewards.tolist() for group in groups] == [[0.0, 1.0]] * 16


def test_the_split_is_by_prompt_and_never_moves(tmp_path, make):
    rows = [{"question": f"q{i}", "answer": str(i)} for i in range(100)]
    before = make(write(tmp_path / "a.jsonl", rows), eval_fraction=0.2)
    after = make(write(tmp_path / "b.jsonl", [*rows[::-1], {"question": "new", "answer": "1"}]), eval_fraction=0.2)
    held_out = {e.prompt for e in before.eval_examples()}
    assert 8 <= len(held_out) <= 35
    assert held_out <= {e.prompt for e in after.eval_examples()} <= held_out | {"new"}


def test_rows_with_equal_prompts_stay_on_one_side_and_apart(tmp_path, make):
    rows = [{"question": f"q{i % 10}", "answer": str(i % 20)} for i in range(40)]
    environment = make(write(tmp_path / "a.jsonl", rows), eval_fraction=0.3)
    train, held_out = environment.train_examples(), environment.eval_examples()
    assert not {e.prompt for e in train} & {e.prompt for e in held_out}
    ids = [e.example_id for e in [*train, *held_out]]
    assert len(set(ids)) == 40


def test_a_file_of_held_out_problems_wins_over_training(tmp_path, make, caplog):
    train = write(tmp_path / "t.jsonl", [{"question": q, "answer": "1"} for q in "abcd"])
    held_out = write(tmp_path / "e.jsonl", [{"question": q, "answer": "1"} for q in "dx"])
    with caplog.at_level(logging.WARNING):
        environment = make(train, eval_path=held_out)
    assert [e.prompt for e in environment.train_examples()] == ["a", "b", "c"]
    assert [e.prompt for e in environment.eval_examples()] == ["d", "x"]
    assert "1 training rows have held-out prompts: left out" in caplog.text


@pytest.mark.parametrize(
    ("prompt", "template", "rendered"),
    [
        ("Hi", "auto", "Hi"),
        ("Hi", "chat", "[user]Hi\n[assistant]"),
        (CHAT, "auto", "[user]What is 1+2?\n[assistant]"),
        (CHAT, "plain", "What is 1+2?"),
    ],
)
def test_templates(tmp_path, make, policy, decoding, prompt, template, rendered):
    path = write(tmp_path / "a.jsonl", [{"question": prompt, "answer": "3"}])
    environment = make(
        path, eval_path=write(tmp_path / "e.jsonl", [{"question": "x", "answer": "1"}]), template=template
    )
    context = policy("3<eos>")
    environment.sample(context, 1, 1, decoding, 0, "train")
    assert context.tokenizer.decode(context.calls[0][0][0]) == rendered


def test_what_the_chat_template_is_given_is_the_rows_own_or_the_environments(tmp_path, make):
    tool, other = {"function": {"name": "add"}}, {"function": {"name": "multiply"}}
    rows = [
        {"question": CHAT, "answer": "3"},
        {"question": CHAT, "answer": "4", "tools": [other], "chat_template_kwargs": {"enable_thinking": True}},
        {"question": "plain", "answer": "5", "tools": [other]},
    ]
    path = write(tmp_path / "a.jsonl", rows)
    given = {"tools": [tool], "enable_thinking": False}
    held_out = write(tmp_path / "e.jsonl", [{"question": "x", "answer": "1"}])
    environment = make(path, eval_path=held_out, chat_template_kwargs=given)
    first, second, plain = environment.train_examples()
    assert environment.chat_template_kwargs(first) == given
    assert environment.chat_template_kwargs(second) == {"tools": [other], "enable_thinking": True}
    assert environment.chat_template_kwargs(plain) == {}
    assert environment.references(second)[0].chat_template_kwargs == {"tools": [other], "enable_thinking": True}


def test_a_users_function_sees_trls_arguments(tmp_path, make, policy, decoding):
    reward = rewards_file(
        tmp_path,
        "def reward(prompts, completions, completion_ids, level, answer, finish_reason, **columns):\n"
        "    assert len(prompts) == len(completions) == len(completion_ids) == len(level) == 3\n"
        "    assert prompts[0] == 'two?' and answer == ['2'] * 3 and columns['question'] == ['two?'] * 3\n"
        "    assert set(columns) == {'question', 'trainer_state', 'log_extra', 'log_metric'}, columns\n"
        "    assert columns['trainer_state'].global_step == 5\n"
        "    assert completion_ids[0] == [ord('a'), 3] and finish_reason == ['stop'] * 3\n"
        "    return [len(text) / 10 + l for text, l in zip(completions, level)]\n",
    )
    path = write(tmp_path / "a.jsonl", [{"question": q, "answer": "2", "level": 1} for q in ("two?", "three?")])
    environment = make(
        path, eval_path=write(tmp_path / "e.jsonl", [{"question": "three?", "answer": 3}]), reward=reward
    )
    groups, _ = environment.sample(policy(lambda p, j, s: "a" * (j + 1) + "<eos>"), 1, 3, decoding, 0, "train")
    assert groups[0].rewards.tolist() == pytest.approx([1.1, 1.2, 1.3])


def test_messages_stay_messages_for_the_function(policy, decoding):
    from penstock.environments import Example

    context = policy("3<eos>")
    ((completion,),) = context.generate([context.tokenizer.encode("x")], 1, decoding, [0])
    arguments = reward_arguments(Example("1", CHAT, "3", {"question": CHAT, "prompts": "mine"}), [completion])
    assert arguments["prompts"] == [CHAT]
    assert arguments["completions"] == [[{"role": "assistant", "content": "3"}]]
    assert arguments["answer"] == ["3"]


def test_a_broken_function_fails_the_group_with_a_clear_line(tmp_path, make, policy, decoding):
    reward = rewards_file(
        tmp_path,
        "def reward(completions, **columns):\n"
        "    return [float('nan') if text == 'bad' else 1.0 for text in completions]\n",
    )
    environment = make(reward=reward)
    bad = set()

    def sometimes(prompt, j, seed):
        bad.add(prompt) if len(bad) < 2 else None
        return "bad<eos>" if prompt in bad else "good<eos>"

    groups, metrics = environment.sample(policy(sometimes), 6, 2, decoding, 0, "train")
    assert len(groups) == 4 and metrics["failed_groups"] == 2.0
    with pytest.raises(EnvironmentFailure, match="rewards.py:reward returned nan as reward 0: it must return"):
        environment.sample(policy("bad<eos>"), 1, 2, decoding, 0, "train")


def test_the_reward_of_cut_answers(make, policy, decoding):
    said = "it is #### 1"
    for truncated_reward, expected in ((None, 0.0), (-0.5, -0.5)):
        environment = make(truncated_reward=truncated_reward)
        groups, _ = environment.sample(policy(said), 1, 2, decoding, 0, "train")
        assert groups[0].rewards.tolist() == [expected] * 2


def test_references_are_the_answers(make):
    references = make(prompt_format="Q: {question}\nA:").reference_examples(5, 0)
    assert all(r.prompt.startswith("Q: ") and "#### " in r.response for r in references)


def test_without_an_answer_column(tmp_path, make):
    path = write(tmp_path / "a.jsonl", [{"question": q} for q in "abcdefgh"])
    environment = make(path, answer_column=None, reward=rewards_file(tmp_path, "def reward(**c):\n    return [1.0]\n"))
    with pytest.raises(ConfigError, match="has no reference solutions"):
        environment.reference_examples(1, 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt_column": "qestion"}, r"prompt_column 'qestion': in row 1 of .*did you mean 'question'"),
        (
            {"answer_column": "solution"},
            "answer_column 'solution': in row 1 of .* does not exist.*: there are question, answer; set it to null",
        ),
        (
            {"prompt_format": "{query}"},
            r"'\{query\}' does not fit row 1 of .*: KeyError\('query'\); its columns are question, answer",
        ),
        ({"eval_fraction": 1.5}, "eval_fraction is 1.5: it takes a number between 0 and 1"),
        ({"reward_processes": 0}, "env_args.reward_processes is 0: it must be at least 1"),
        ({"reward_timeout_s": 0}, "env_args.reward_timeout_s is 0: it must be more than 0"),
        (
            {"reward": "penstock.environments.rewards.final_anser"},
            r"has no 'final_anser' \(did you mean 'final_answer'\?\)",
        ),
        ({"reward": "nowhere.f"}, "reward 'nowhere.f': no module named 'nowhere'"),
        ({"path": "nowhere.jsonl"}, "env_args.path 'nowhere.jsonl': no such file"),
        ({"eval_path": PROBLEMS}, "every prompt is also in env_args.eval_path"),
        ({"max_rows": 1}, "has only one distinct prompt"),
        ({"max_rows": -5}, "max_rows is -5: it must be at least 1, or null for all"),
        ({"truncated_reward": float("nan")}, "truncated_reward is nan: rewards lie within"),
        ({"reward_timeout_s": float("nan")}, "reward_timeout_s is nan: it must be more than 0"),
        ({"reward_start_timeout_s": 0}, "reward_start_timeout_s is 0: it must be more than 0"),
        ({"reward_weights": 0.5}, "reward_weights is 0.5: it must be a list of numbers, one per function"),
        (
            {"reward_weights": {"final_answer": 1}},
            "reward_weights is {'final_answer': 1}: it must be a list of numbers",
        ),
        ({"template": "chta"}, "template is 'chta': it must be one of auto, plain, chat"),
        (
            {"prompt_format": "{question.text}"},
            "prompt_format '{question.text}' does not fit row 1 of .*AttributeError",
        ),
        (
            {"prompt_format": '{"q": {question}}'},
            "does not fit row 1 of .*a brace that is meant as one is written twice",
        ),
    ],
)
def test_bad_input_is_one_clear_line(make, arguments, message):
    with pytest.raises(ConfigError, match=message) as error:
        make(**arguments)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("prompt", [3, [], ["a"], [{"role": "user"}]])
def test_prompts_that_are_neither_text_nor_messages(tmp_path, make, prompt):
    path = write(tmp_path / "a.jsonl", [{"question": prompt, "answer": "1"}])
    with pytest.raises(ConfigError, match="expected text, or a list of messages with role and content"):
        make(path)


def test_a_path_may_be_a_path(tmp_path, make):
    rows = [{"question": f"q{i}", "answer": str(i)} for i in range(40)]
    path = Path(write(tmp_path / "a.jsonl", rows))
    assert make(path).train_examples() == make(str(path)).train_examples()


def test_a_column_that_some_rows_lack_is_none_in_them(tmp_path, make):
    rows = [{"question": f"q{i}", "answer": str(i), **({"level": i} if i % 2 else {})} for i in range(40)]
    environment = make(write(tmp_path / "a.jsonl", rows))
    levels = {example.answer: example.columns["level"] for example in environment.train_examples()}
    assert levels == {answer: int(answer) if int(answer) % 2 else None for answer in levels}


def test_prompts_that_hold_the_answer_already_are_warned_of(tmp_path, make, caplog):
    answered = [*CHAT, {"role": "assistant", "content": "3"}]
    rows = [
        {"question": [{**answered[0], "content": f"{i}"}, answered[1]][: 1 + i % 2], "answer": "3"} for i in range(40)
    ]
    make(write(tmp_path / "a.jsonl", rows))
    assert "a.jsonl: 20 of 40 prompts end with a message of the assistant" in caplog.text


SEVERAL = """
def right(completions, answer, **columns):
    return [float(text == a) for text, a in zip(completions, answer)]

def brief(completions, log_metric, log_extra, trainer_state, **columns):
    log_extra("words", completions)
    log_metric("longest", max(map(len, completions)))
    log_metric("step", trainer_state.global_step)
    log_metric("nothing", float("nan"))
    return [None if text.startswith("a") else float(len(text)) for text in completions]

def never(completions, **columns):
    return [None] * len(completions)
"""


@pytest.fixture
def several(tmp_path, make):
    path = tmp_path / "rewards.py"
    path.write_text(SEVERAL)
    rows = write(tmp_path / "a.jsonl", [{"question": "two?", "answer": "2"}])
    held_out = write(tmp_path / "e.jsonl", [{"question": "three?", "answer": "3"}])

    def build(*names, **arguments):
        reward = [name if "." in name else f"{path}:{name}" for name in names]
        return make(rows, eval_path=held_out, reward=reward, **arguments)

    return build


def answers(*texts):
    return lambda prompt, j, seed: texts[j] + "<eos>"


def test_several_functions_are_weighed_and_each_has_its_metrics(several, policy, decoding, caplog):
    environment = several("right", "brief", "penstock.environments.rewards.last_number", reward_weights=[1.0, -0.1, 2])
    with caplog.at_level(logging.INFO):
        groups, metrics = environment.sample(policy(answers("2", "bbb", "aa 2")), 1, 3, decoding, 0, "train")
        wait_until(lambda: "log_metric('nothing'" in caplog.text, "what it said was not shown")
    assert groups[0].rewards.tolist() == pytest.approx([1 - 0.1 + 2, -0.3, 2.0])
    assert [rollout.rewards_by_function for rollout in groups[0].rollouts] == [
        (("right", 1.0), ("brief", 1.0), ("last_number", 1.0)),
        (("right", 0.0), ("brief", 3.0), ("last_number", 0.0)),
        (("right", 0.0), ("brief", None), ("last_number", 1.0)),
    ]
    third = 2**0.5 / 3
    assert metrics == pytest.approx(
        {
            "failed_groups": 0.0,
            "rewards/right/mean": 1 / 3,
            "rewards/right/std": third,
            "rewards/right/applicable_fraction": 1.0,
            "rewards/brief/mean": 2.0,
            "rewards/brief/std": 1.0,
            "rewards/brief/applicable_fraction": 2 / 3,
            "rewards/brief/longest": 4.0,
            "rewards/brief/step": 5.0,
            "rewards/last_number/mean": 2 / 3,
            "rewards/last_number/std": third,
            "rewards/last_number/applicable_fraction": 1.0,
        }
    )
    assert "words: ['2', 'bbb', 'aa 2']" in caplog.text
    assert "log_metric('nothing', nan): left out, because it is no finite number" in caplog.text


def test_functions_that_are_given_as_objects_run_in_this_process(several, policy, decoding, tmp_path, make):
    seen = []

    def right(completions, answer, log_metric, trainer_state, **columns):
        seen.append((os.getpid(), columns["question"][0], trainer_state.global_step))
        columns["question"].clear()  # its own copy
        log_metric("asked", len(answer))
        return [float(text == wanted) for text, wanted in zip(completions, answer, strict=True)]

    async def brief(completions):
        return [None, *map(len, completions[1:])]

    rows = write(tmp_path / "o.jsonl", [{"question": "two?", "answer": "2"}, {"question": "three?", "answer": "3"}])
    reward = [right, brief, "penstock.environments.rewards.last_number", lambda question: [len(question) / 2] * 2]
    environment = make(rows, reward=reward, reward_weights=[1.0, -0.1, 2.0, 0.5], eval_fraction=0.5)
    (group,), metrics = environment.sample(policy(answers("2", "3")), 1, 2, decoding, 0, "train")
    right_one = [1.0, 0.0] if seen[0][1] == "two?" else [0.0, 1.0]
    assert group.rewards.tolist() == pytest.approx([3 * right_one[0] + 0.5, 3 * right_one[1] - 0.1 + 0.5])
    assert seen[0][0] == os.getpid() and seen[0][2] == 5
    assert metrics["rewards/right/asked"] == 2.0 and metrics["rewards/<lambda>/mean"] == 1.0
    environment.close()
    environment.sample(policy(answers("2", "3")), 2, 2, decoding, 0, "train")  # there was nothing to end


@pytest.mark.parametrize("raised", [ValueError("no"), SystemExit(1)])
def test_a_function_in_this_process_that_raises_fails_its_group(several, policy, decoding, tmp_path, make, raised):
    def moody(completions):
        raise raised

    rows = write(tmp_path / "o.jsonl", [{"question": "two?", "answer": "2"}, {"question": "three?", "answer": "3"}])
    environment = make(rows, reward=moody)
    with pytest.raises(EnvironmentFailure, match=rf"^reward function moody raised {type(raised).__name__}: (no|1)$"):
        environment.sample(policy(answers("2", "3")), 1, 2, decoding, 0, "train")
    environment = make(rows, reward=lambda completions: [1.0])
    with pytest.raises(EnvironmentFailure, match="reward function <lambda> returned 1 rewards for 2 completions"):
        environment.sample(policy(answers("2", "3")), 1, 2, decoding, 0, "train")


def test_lambdas_are_told_apart_and_what_is_no_function_is_refused(tmp_path, make):
    rows = write(tmp_path / "o.jsonl", [{"question": "two?", "answer": "2"}, {"question": "three?", "answer": "3"}])
    one, other = (lambda completions: [0.0]), (lambda completions: [1.0])
    make(rows, reward=[one, other])
    with pytest.raises(ConfigError, match="names 'object:tests.environments.test_jsonl.*<lambda>' twice"):
        make(rows, reward=[one, one])
    with pytest.raises(ConfigError, match="env_args.reward is 3: give a function, or the name of one"):
        make(rows, reward=[3])
    with pytest.raises(ConfigError, match=r"'object:__main__.f' was given as a Python object, .* by reward=…, or name"):
        make(rows, reward="object:__main__.f")


def test_answers_to_which_no_function_applies_earn_nothing_and_are_warned_of_once(several, policy, decoding, caplog):
    environment = several("never", "brief")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            groups, metrics = environment.sample(policy(answers("a", "bb")), 1, 2, decoding, 0, "train")
    assert groups[0].rewards.tolist() == [0.0, 2.0]
    assert metrics["rewards/never/applicable_fraction"] == 0.0 and "rewards/never/mean" not in metrics
    assert caplog.text.count("1 of 2 answers to one prompt earn 0, because every reward function (never, brief)") == 1


def test_a_cut_answer_has_its_own_reward_instead_of_the_sum(several, policy, decoding):
    environment = several("right", "brief", truncated_reward=-1.0)
    groups, _ = environment.sample(policy(lambda p, j, s: "bb"), 1, 2, decoding, 0, "train")
    assert groups[0].rewards.tolist() == [-1.0, -1.0]


def test_functions_called_alike_are_told_apart_by_their_files(several, policy, decoding, tmp_path):
    (tmp_path / "others.py").write_text(SEVERAL)
    environment = several("right", f"{tmp_path}/others.py:right")
    _, metrics = environment.sample(policy(answers("2")), 1, 1, decoding, 0, "train")
    assert metrics["rewards/rewards.right/mean"] == metrics["rewards/others.right/mean"] == 1.0


@pytest.mark.parametrize(
    ("names", "arguments", "message"),
    [
        ([], {}, "env_args.reward is empty: name at least one"),
        (["right", "right"], {}, r"env_args.reward names '.*rewards.py:right' twice: name it once"),
        (
            ["right", "brief"],
            {"reward_weights": [1]},
            "reward_weights has 1 number for 2 functions",
        ),
        (["right"], {"reward_weights": [float("inf")]}, r"reward_weights is \[inf\]: weights are finite numbers"),
        (["right", "brif"], {}, r"has no 'brif' \(did you mean 'brief'\?\)"),
    ],
)
def test_functions_and_weights_that_do_not_fit(several, names, arguments, message):
    with pytest.raises(ConfigError, match=message):
        several(*names, **arguments)
