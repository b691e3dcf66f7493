"""Agents: what they ask becomes the rollout, whatever they are, and what goes wrong is named."""

import sys
import threading
import time
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from tests.environments import agents_of_tests as agents
from tests.text.test_chat_templates import directory  # noqa: F401  (a fixture)

from penstock.environments import AgentEnvironment, Example
from penstock.inference import AgentEndpoint, EngineConfig, ScriptedContext
from penstock.text import Tokenizer
from penstock.types import ConfigError, Decoding, EnvironmentFailure, RunFailed, Stopped

CALL = '<tool_call>{"name": "multiply", "arguments": {"a": 6, "b": 7}}</tool_call>'
SHOWN = '\n<tool_call>\n{"name": "multiply", "arguments": {"a": 6, "b": 7}}\n</tool_call>'
"""The same call as the template of the tests writes it."""
DECODING = Decoding(temperature=0.8, max_output_tokens=200)


class Served(ScriptedContext):
    """Scripted answers, which agents can ask for."""

    def __init__(self, codec, answers, **arguments: Any) -> None:
        super().__init__(codec, answers, **arguments)
        self.endpoint = AgentEndpoint(EngineConfig(max_seq_len=4096), codec)

    def session(self, decoding: Decoding, seed: int):
        self.opened = self.endpoint.open(self, decoding, seed)
        return self.opened


class Asked(AgentEnvironment):
    examples = tuple(Example(f"p{number}", "What is 6 times 7?", "42") for number in range(20))


@pytest.fixture
def served(directory):  # noqa: F811
    contexts: list[Served] = []

    def make(answers, ordered=True, of=Served) -> Served:
        contexts.append(of(Tokenizer.load(directory("qwen2.5")), answers, ordered=ordered))
        return contexts[-1]

    yield make
    for context in contexts:
        context.endpoint.close()


def play(context: Served, environment: AgentEnvironment, n: int = 1):
    groups, metrics = environment.sample(context, 1, n, DECODING, 3, "train")
    return groups[0].rollouts, metrics


def contexts_of(rollout, codec) -> list[tuple[str, str]]:
    """Of each sample what was shown, and what was sampled last."""
    tokens = np.concatenate([rollout.prompt_tokens, rollout.response_tokens])
    sampled = np.concatenate([np.zeros(len(rollout.prompt_tokens), bool), rollout.response_mask])
    found = []
    for start, stop in zip(rollout.sample_starts, [*rollout.sample_starts[1:], len(tokens)], strict=True):
        last = start + np.flatnonzero(~sampled[start:stop])[-1] + 1
        found.append((codec.decode(tokens[start:last], False), codec.decode(tokens[last:stop], False)))
    return found


def test_the_tool_loop_of_the_official_client_is_a_rollout(served):
    """The template writes a call otherwise than the policy did, so what follows is another sample."""
    context = served([CALL, "42"])
    (rollout,), metrics = play(context, Asked(agents.tool_loop))
    assert (rollout.episode_reward, rollout.token_rewards[-1], rollout.finish_reason) == (1.0, 1.0, "stop")
    assert (metrics["answers"], metrics["samples"], metrics["overridden"]) == (2.0, 2.0, 2.0)
    (first, called), (second, answered) = contexts_of(rollout, context.tokenizer)
    assert called == f"{CALL}<|im_end|>" and answered == "42<|im_end|>"
    told = "<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert second == f"{first}{SHOWN}<|im_end|>\n{told}"
    assert rollout.response_logprobs[rollout.response_mask].tolist() == [-0.5] * int(rollout.response_mask.sum())
    decodings = [call.decoding for call in context.calls]
    assert [(d.temperature, d.max_output_tokens) for d in decodings] == [(0.8, 120)] * 2, "the lesson's, but its limit"
    assert all(call.n == 1 for call in context.calls) and len({call.seeds[0] for call in context.calls}) == 2


@pytest.mark.parametrize(
    ("sampling", "lessons", "overridden"),
    [
        ({"temperature": 1.0}, DECODING, 1),  # which is what the lesson's is where nobody says
        ({"temperature": 1.0}, replace(DECODING, temperature=1.0), 0),
        ({"top_k": -1}, replace(DECODING, top_k=5), 1),
        ({"top_p": 1.0, "top_k": None}, DECODING, 0),
        ({}, replace(DECODING, top_k=5), 0),
    ],
)
def test_what_a_request_names_and_does_not_get_is_counted(served, sampling, lessons, overridden):
    session = served(["42"]).session(lessons, 3)
    body = {"model": "policy", "prompt": "6 times 7?", **sampling}
    asked = httpx.post(
        f"{session.base_url}/completions", json=body, headers={"authorization": f"Bearer {session.api_key}"}
    )
    assert asked.status_code == 200 and session.overridden == overridden
    session.close()


def test_requests_that_go_on_with_one_another_token_by_token_are_one_sample(served):
    context = served(["41", "42"])
    (rollout,), metrics = play(context, Asked(agents.asking_twice))
    assert rollout.episode_reward == 1.0 and rollout.sample_starts == (0,)
    assert (metrics["answers"], metrics["samples"], metrics["overridden"]) == (2.0, 1.0, 0.0)
    tokens = np.concatenate([rollout.prompt_tokens, rollout.response_tokens])
    np.testing.assert_array_equal(tokens[: rollout.turns[-1].start], context.calls[1].prompts[0])
    assert [turn.role for turn in rollout.turns] == ["user", "assistant", "user", "assistant"]
    said = context.tokenizer.decode(rollout.response_tokens[rollout.response_mask], False)
    assert said == "41<|im_end|>42<|im_end|>"


def test_streams_of_agents_tell_what_whole_answers_tell(served):
    """Log-probabilities and token ids come with the pieces of a stream: of n answers, each its own."""
    told: dict[int, list[Any]] = {0: [], 1: []}

    def streaming(base_url, api_key, example):
        with agents.client(base_url, api_key) as client:
            asked = [{"role": "user", "content": example.prompt}]
            more = {"return_token_ids": True}
            for chunk in client.chat.completions.create(
                model="x", messages=asked, n=2, logprobs=True, stream=True, stop="!", extra_body=more
            ):
                for choice in chunk.choices:
                    told[choice.index].append(choice)
        return 1.0

    context = served(["it is 41!", "42"])
    play(context, Asked(streaming))
    for index, said in enumerate(["it is 41", "42"]):
        text = "".join(choice.delta.content or "" for choice in told[index])
        entries = [entry for choice in told[index] if choice.logprobs for entry in choice.logprobs.content]
        tokens = [token for choice in told[index] for token in getattr(choice, "token_ids", [])]
        assert text == said and tokens[: len(said.split())]
        assert [entry.logprob for entry in entries] == [-0.5] * len(tokens)
        assert context.tokenizer.decode(tokens).startswith(said)


def test_seconds_of_an_agent_are_of_tools_but_for_its_requests_and_what_it_does_after_the_last(served):
    class Slow(Served):
        """Each answer takes 40 ms."""

        def generate(self, *asked):
            time.sleep(0.04)
            taken = {"timings": {"decode_s": 0.04}, "finished_s": time.monotonic()}
            return [[replace(done, **taken) for done in answers] for answers in super().generate(*asked)]

    def dawdling(base_url, api_key, example):
        with agents.client(base_url, api_key) as client:
            for pause_s in (0.03, 0.05):
                client.completions.create(model="x", prompt="?")
                time.sleep(pause_s)
        return 0.5

    context = served(["41", "42"], of=Slow)
    began = time.monotonic()
    (rollout,), _ = play(context, Asked(dawdling))
    took_s, timings = time.monotonic() - began, rollout.timings
    assert timings["decode_s"] == 0.08 and timings["tool_s"] >= 0.03 and timings["reward_s"] >= 0.05
    assert timings.keys() == {"decode_s", "tool_s", "reward_s"} and sum(timings.values()) <= took_s


def test_requests_beside_one_another_are_samples_of_their_own(served):
    """Two conversations in turns, and two answers to one prompt: by hand, four samples."""

    def branching(base_url, api_key, example):
        with agents.client(base_url, api_key) as client:
            a, b = ([{"role": "user", "content": text}] for text in ("A", "B"))
            for messages in (a, b, a):
                answer = client.chat.completions.create(model="x", messages=messages)
                messages += [answer.choices[0].message.model_dump(include={"role", "content"})]
                messages += [{"role": "user", "content": "go on"}]
            client.chat.completions.create(model="x", messages=[{"role": "user", "content": "C"}], n=2)
        return 0.5

    context = served(["a1", "b1", "a2", "c1", "c2"])
    (rollout,), metrics = play(context, Asked(branching))
    ends = [said.removesuffix("<|im_end|>") for _, said in contexts_of(rollout, context.tokenizer)]
    assert ends == ["a2", "b1", "c1", "c2"] and metrics["samples"] == 4.0 and metrics["answers"] == 5.0
    said = context.tokenizer.decode(rollout.response_tokens[rollout.response_mask])
    assert said == "a1a2b1c1c2", "each written once, sample by sample"


@pytest.mark.parametrize("streamed", [False, True])
def test_what_an_agent_waits_for_no_more_is_no_answer(served, streamed):
    """A client that asks again once its time is up saw the second answer alone."""
    answered, late = threading.Event(), threading.Event()

    class Slow(Served):
        """The first answer comes once the second was given."""

        def generate(self, *asked):
            done = super().generate(*asked)
            if len(self.calls) == 1:
                answered.wait(60)
                late.set()
            return done

    def impatient(base_url, api_key, example):
        messages = [{"role": "user", "content": example.prompt}]
        with agents.client(base_url, api_key) as client:
            with pytest.raises(openai.APITimeoutError):
                list(client.with_options(timeout=0.3).chat.completions.create(
                    model="x", messages=messages, stream=streamed))  # fmt: skip
            client.chat.completions.create(model="x", messages=messages)
            answered.set()
            assert late.wait(60)
            time.sleep(0.2)  # it would be taken meanwhile
        return 0.5

    context = served(["unseen", "42"], ordered=False, of=Slow)
    (rollout,), metrics = play(context, Asked(impatient))
    assert context.tokenizer.decode(rollout.response_tokens[rollout.response_mask]) == "42"
    assert metrics["answers"] == metrics["samples"] == 1.0


SCRIPT = """
import json, os, sys, urllib.request
problem = json.loads(sys.stdin.readline())
body = {"model": "m", "messages": [{"role": "user", "content": problem["prompt"]}], "stop": "4"}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions", json.dumps(body).encode(),
    {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"})
said = json.load(urllib.request.urlopen(request, timeout=280))["choices"][0]["message"]["content"]
print("it said", repr(said))
print(0.25 if said == problem["answer"] else 0.75)
print()
"""


def test_a_program_is_given_url_key_and_problem_and_prints_its_reward(served, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # which nothing answers
    context = served(["42"])
    (rollout,), _ = play(context, Asked([sys.executable, "-c", SCRIPT]))
    assert rollout.episode_reward == 0.25
    assert context.calls[0].decoding.stop_strings == ("4",)
    assert context.tokenizer.decode(context.calls[0].prompts[0], False).count("What is 6 times 7?") == 1


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import sys; sys.exit('no harness today')", "ended with exit status 1: no harness today"),
        ("pass", "printed nothing"),
        ("print('done')", "the agent's last line is 'done': it must be the reward"),
        ("print(1.0)", "the policy answered the agent nothing about 'p"),
        ("import time; time.sleep(60)", "took longer than max_seconds = 0.5"),
    ],
)
def test_a_program_that_fails_fails_its_group_by_name(served, program, message):
    seconds = 0.5 if "sleep" in program else 60.0
    with pytest.raises(EnvironmentFailure, match=message):
        play(served(["42"]), Asked([sys.executable, "-c", program], max_seconds=seconds))


def test_a_program_that_is_not_there_is_named(served):
    with pytest.raises(EnvironmentFailure, match="env_args.agent '/no/agent' cannot be started"):
        play(served(["42"]), Asked(["/no/agent"]))


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        (lambda url, key, example: 1 / 0, "raised ZeroDivisionError"),
        (lambda url, key, example: sys.exit(3), "raised SystemExit: 3"),
        (lambda url, key, example: None, "agent returned None: it must return a finite number"),
        (lambda url, key, example: np.zeros(2), "agent returned array.*: it must return a finite number"),
        (agents.cancelled, "raised RuntimeError: CancelledError"),
        (lambda url, key, example: threading.Event().wait(), "took longer than max_seconds = 0.5"),
    ],
)
def test_a_function_that_fails_fails_its_group_by_name(served, agent, message):
    with pytest.raises(EnvironmentFailure, match=message):
        play(served(["42"]), Asked(agent, max_seconds=0.5 if "longer" in message else 60.0))


def test_an_answer_is_scored_where_the_class_has_a_score(served):
    class Scored(Asked):
        def score(self, example, answer):
            return len(answer) / 10

    def agent(url, key, example):
        with agents.client(url, key) as client:
            return client.completions.create(model="m", prompt="x").choices[0].text

    (rollout,), _ = play(served(["42"]), Scored(agent))
    assert rollout.episode_reward == pytest.approx(0.2)


def test_a_key_is_good_for_its_rollout_alone(served):
    kept = {}

    def agent(url, key, example):
        kept[key] = url
        with pytest.raises(openai.AuthenticationError), agents.client(url, f"{key[:-1]}x") as stranger:
            stranger.models.list()
        with agents.client(url, key) as client:
            assert client.models.list().data[0].id == "policy"
            client.completions.create(model="m", prompt="x")
        return 1.0

    play(served(["42"]), Asked(agent), n=2)
    assert len(kept) == 2, "a key for each rollout"
    for key, url in kept.items():
        answer = httpx.get(f"{url}/models", headers={"authorization": f"Bearer {key}"}, trust_env=False)
        assert answer.status_code == 401
        foreign = httpx.get(f"{url}/models", headers={"host": "evil.example"}, trust_env=False)
        assert foreign.status_code == 421


def test_agents_go_at_the_same_time_but_where_order_counts(served):
    met = threading.Barrier(3, timeout=280)

    def meeting(url, key, example):
        met.wait()
        return tell(url, key, example)

    def tell(url, key, example):
        with agents.client(url, key) as client:
            return float(client.completions.create(model="m", prompt="x").choices[0].text)

    rollouts, _ = play(served(["1", "2", "3"], ordered=False), Asked(meeting), n=3)
    assert sorted(rollout.episode_reward for rollout in rollouts) == [1.0, 2.0, 3.0]
    rollouts, _ = play(served(["1", "2", "3"]), Asked(tell), n=3)
    assert [rollout.episode_reward for rollout in rollouts] == [1.0, 2.0, 3.0]


def test_what_the_policy_fails_with_is_not_the_agents_fault(served):
    class Broken(Served):
        def generate(self, *asked):
            raise RunFailed("the engine is gone")

    context = served(["42"])
    broken = Broken(context.tokenizer, ["42"])
    try:
        with pytest.raises(RunFailed, match="the engine is gone"):
            play(broken, Asked(agents.tool_loop))
    finally:
        broken.endpoint.close()


def test_a_prompt_that_is_too_long_is_told_to_the_agent(served):
    def agent(url, key, example):
        with agents.client(url, key) as client:
            for stream in (False, True):
                with pytest.raises(openai.BadRequestError, match="leaves no room") as refused:
                    client.completions.create(model="m", prompt="x" * 5000, stream=stream)
                assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "prompt")
            return float(client.completions.create(model="m", prompt="x").choices[0].text)

    (rollout,), metrics = play(served(["42"]), Asked(agent))
    assert rollout.episode_reward == 42.0 and metrics["answers"] == 1.0


@pytest.mark.parametrize(
    "asked", [{"logprobs": 2}, {"logprobs": 0, "echo": True}, {"extra_body": {"prompt_logprobs": 0}}]
)
def test_alternatives_and_scores_are_refused_and_sampled_log_probabilities_told(served, asked):
    def agent(url, key, example):
        with agents.client(url, key) as client:
            with pytest.raises(openai.BadRequestError, match="during a run: leave out"):
                client.completions.create(model="m", prompt="x", **asked)
            choice = client.completions.create(model="m", prompt="x", logprobs=0).choices[0]
            return float(choice.text) * len(set(choice.logprobs.token_logprobs))

    (rollout,), metrics = play(served(["42"]), Asked(agent))
    assert rollout.episode_reward == 42.0 and metrics["answers"] == 1.0


def test_a_closed_endpoint_opens_for_nobody(served):
    context = served(["42"])
    play(context, Asked(lambda url, key, example: agents.asker(url, key, example)))
    context.endpoint.close()
    with pytest.raises(Stopped, match="was closed"):
        context.session(DECODING, 0)


def test_arguments_that_make_no_sense_are_refused(tmp_path):
    for agent in ([], ["python3", 5], 5):
        with pytest.raises(ConfigError, match="env_args.agent is .*: it must be a function, its path, or a list"):
            Asked(agent)
    with pytest.raises(ConfigError, match="max_seconds is 0"):
        Asked(agents.sampler, max_seconds=0)
    problems = tmp_path / "sums.jsonl"
    problems.write_text('{"prompt": "1+1?", "answer": "2"}\n{"prompt": "1+2?", "answer": "3"}\n')
    made = AgentEnvironment("tests.environments.agents_of_tests.sampler", path=str(problems))
    assert [example.answer for example in made.examples] == ["2", "3"]
    with pytest.raises(ConfigError, match="has no reference solutions"):
        made.reference_examples(1, 0)


def test_without_an_endpoint_the_key_that_opens_it_is_named(served):
    plain = ScriptedContext(served(["42"]).tokenizer, ["42"])
    with pytest.raises(ConfigError, match="inference.endpoint: true"):
        Asked(agents.sampler).sample(plain, 1, 1, DECODING, 0, "train")
