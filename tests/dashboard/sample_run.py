"""A run directory in the middle of its third update, written with the public writers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np

from penstock.rundir import JsonLinesLog, RunDirectory, write_examples, write_records
from penstock.text import Tokenizer
from penstock.types import Decoding, RLExample, Rollout, RolloutMetadata, RolloutRecord, Turn

TOKENIZER = Tokenizer.load("penstock")
HOSTILE = "\x1b[2J\x1b[31mred\rgone [bold]not bold[/bold] \u202eesrever\u2066 a\u200bb\x9b1m\ttab 猫😀\nend"

Said = Sequence[tuple[str, str]]


WHOLE = {"generate_s": 0.25}
SPENT = {**WHOLE, "wait_s": 0.02, "prefill_s": 0.05, "decode_s": 0.1, "tool_s": 0.03, "reward_s": 0.01}
"""Seconds by stage, which leave 50 ms of the whole."""
SPENT_BY_TURN = {
    2: {"wait_s": 0.02, "prefill_s": 0.03, "decode_s": 0.06},
    3: {"tool_s": 0.03},
    4: {"rest_s": 0.01, "prefill_s": 0.02, "decode_s": 0.04, "reward_s": 0.01},
}
"""The same by turn; 10 ms of the rest lie before the second response."""


def rollout(
    rollout_id: str,
    said: Said,
    reward: float,
    weight_steps: Sequence[int] = (0,),
    timestamp: float = 1000.0,
    timings: Mapping[str, float] = WHOLE,
    of_turns: Mapping[int, Mapping[str, float]] = MappingProxyType({}),
) -> RolloutRecord:
    """A conversation; what the assistant says is sampled, half of it by the first of the weight steps."""
    tokens: list[int] = []
    mask: list[bool] = []
    turns: list[Turn] = []
    for role, text in said:
        ids = TOKENIZER.encode(text).tolist() + ([TOKENIZER.eos_token_id] if role == "assistant" else [])
        took = tuple(of_turns.get(len(turns), {}).items())
        turns.append(Turn(role, text, len(tokens), len(tokens) + len(ids), took))  # type: ignore[arg-type]
        tokens += ids
        mask += [role == "assistant"] * len(ids)
    prompt = next(turn.start for turn in turns if turn.role == "assistant")
    response, sampled = np.array(tokens[prompt:], np.int32), np.array(mask[prompt:])
    rewards = np.zeros(len(response), np.float32)
    rewards[-1] = reward
    steps = np.array([weight_steps[i * len(weight_steps) // len(response)] for i in range(len(response))], np.int32)
    group_id = rollout_id.rpartition("/")[0]
    lesson_id = group_id.partition("-")[0]
    made = Rollout(
        env_name=f"{lesson_id}_env",
        env_example_id="7",
        prompt_tokens=np.array(tokens[:prompt], np.int32),
        response_tokens=response,
        response_logprobs=np.where(sampled, -np.linspace(0.01, 4, len(response)), 0).astype(np.float32),
        token_rewards=rewards,
        episode_reward=reward,
        metadata=RolloutMetadata("worker-0", timestamp, min(weight_steps)),
        rollout_id=rollout_id,
        lesson_id=lesson_id,
        response_mask=sampled,
        response_weight_steps=np.where(sampled, steps, -1).astype(np.int32),
        turns=tuple(turns),
        decoding=Decoding(max_output_tokens=64),
        timings=timings,
    )
    return RolloutRecord(made, group_id, f"{lesson_id}_env:7")


def group(group_id: str, answers: Sequence[tuple[str, float]], weight_steps: Sequence[int] = (0,), **named) -> list:
    """Answers to one question with their rewards."""
    return [
        rollout(f"{group_id}/{index}", [("user", "Say cat."), ("assistant", text)], reward, weight_steps, **named)
        for index, (text, reward) in enumerate(answers)
    ]


def example(records: Sequence[RolloutRecord], advantages: Sequence[float]) -> RLExample:
    """One row of a batch; several rollouts share it end to end."""
    made = [record.rollout for record in records]
    lengths = [len(r.prompt_tokens) + len(r.response_tokens) for r in made]
    masks = [np.concatenate([np.zeros(len(r.prompt_tokens), bool), r.response_mask]) for r in made]
    mask = np.concatenate(masks)
    advantage = np.concatenate([np.where(m, a, 0) for m, a in zip(masks, advantages, strict=True)])
    total = sum(lengths)
    return RLExample(
        tokens=np.concatenate([np.concatenate([r.prompt_tokens, r.response_tokens]) for r in made]),
        loss_mask=mask,
        segment_ids=np.repeat(np.arange(1, len(made) + 1), lengths).astype(np.int32),
        position_ids=np.concatenate([np.arange(length) for length in lengths]).astype(np.int32),
        advantage=advantage.astype(np.float32),
        generator_log_probs=np.zeros(total, np.float32),
        reference_log_probs=None,
        temperature=np.ones(total, np.float32),
        weight_steps=np.zeros(total, np.int32),
        rollout_ids=tuple(r.rollout_id for r in made),
    )


def write_run(path: Path) -> RunDirectory:
    """Updates 0 and 1 are done, update 2 is being computed.

    ``cats-0-0`` was trained by update 0, ``cats-0-1`` and ``tools-0-0`` by update 1, ``cats-0-10`` is in the batch of
    update 2, ``cats-0-2`` waits, ``cats-0-3`` was dropped; ``cats-0-4`` is in flight, ``cats-0-5`` was aborted there.
    """
    directory = RunDirectory.create(path, {"model": {"tokenizer": None, "path": None}})
    first = group("cats-0-0", [("dog", 0.0), ("cat cat", 0.5), ("cat", 1.0), ("cat", 1.0)])
    second = group("cats-0-1", [("a dog\nor two", 0.0), ("cat", 1.0)], (0, 1), timestamp=1001.0)
    tools = [
        rollout(
            "tools-0-0/0",
            [("system", "Use <calc>."), ("user", "2*3="), ("assistant", "<calc>2*3</calc>"),
             ("tool", "<result>6</result>"), ("assistant", "6")],
            1.0, (1,), 1002.0, SPENT, SPENT_BY_TURN,
        ),
        rollout("tools-0-0/1", [("system", "Use <calc>."), ("user", "2*3="), ("assistant", "5")], -0.5, (1,), 1002.0),
    ]  # fmt: skip
    training = group("cats-0-10", [("猫 cat", 0.25), ("cat", 0.75)], (1,), timestamp=1003.0)
    waiting = group("cats-0-2", [(HOSTILE, 0.5), ("cat", 0.5)], (2,), timestamp=1004.0)
    dropped = group("cats-0-3", [("dog", 0.0), ("cat", 1.0)], (0,), timestamp=1000.5)
    for name, records in {"a": first + dropped, "b": second + tools, "c": training + waiting}.items():
        write_records(directory.rollouts / f"part-{name}.parquet", records)
    batches = {
        0: [example([r], [a]) for r, a in zip(first, (-0.8, -0.2, 0.5, 0.5), strict=True)],
        1: [example([r], [a]) for r, a in zip(second, (-1, 1), strict=True)] + [example(tools, (1.5, -1.5))],
        2: [example([r], [a]) for r, a in zip(training, (-0.5, 0.5), strict=True)],
    }
    for step, examples in batches.items():
        write_examples(directory.batches / f"batch_{step}_1.parquet", examples, f"batch_{step}_1", step, 0)
    _write_logs(directory, {0: first, 1: second + tools}, dropped)
    return directory


def _write_logs(directory: RunDirectory, trained: dict[int, list[RolloutRecord]], dropped: list[RolloutRecord]) -> None:
    fates = JsonLinesLog(directory.fates_path)

    def write(rollout_id: str, fate: str, reason: str, step: int) -> None:
        fates.append(
            {"rollout_id": rollout_id, "fate": fate, "reason": reason, "step": step, "lineage": 0, "time": 1.0}
        )

    write("cats-0-0/0", "rolled_back", "an earlier line, which does not count", 9)
    for step, records in trained.items():
        for record in records:
            write(record.rollout.rollout_id, "trained", f"trained by update {step}", step)
    for record in dropped:
        write(record.rollout.rollout_id, "stale_step", "weight step 0 is too old", 2)
    for index in range(2):
        write(f"cats-0-5/{index}", "aborted", "the update waited too long", 1)
    write("cats-0-2/0", "rolled_back", "taken back by the next line", 1)
    write("cats-0-2/0", "waiting", "returned by a resume", 1)
    fates.close()
    tickets = JsonLinesLog(directory.tickets_path)
    sizes = {"cats-0-0": 4, "cats-0-1": 2, "tools-0-0": 2, "cats-0-2": 2, "cats-0-3": 2, "cats-0-4": 3, "cats-0-5": 2}
    for index, (ticket_id, size) in enumerate({**sizes, "cats-0-10": 2}.items()):
        tickets.append({
            "ticket_id": ticket_id, "lesson_id": ticket_id.partition("-")[0], "index": index, "rollouts": size,
            "admitted_step": 0, "deadline_step": 1, "lineage": 0, "time": 1.0,
        })  # fmt: skip
    tickets.close()
    directory.write_status({"state": "running", "step": 2, "steps": 10, "lineage": 0})
