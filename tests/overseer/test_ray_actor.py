"""Ray's errors as people read them: one line that says what happened, whatever page Ray wrote."""

import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.overseer.supervisor.messages import Identity, Reply
from penstock.types import UnreachableError

pytestmark = pytest.mark.ray

HEAD = """The actor died unexpectedly before finishing this task.
\tclass_name: ComponentActor
\tactor_id: 576a8e76c45a096d49414aae01000000
\tpid: 26811
\tnamespace: penstock-run
\tip: 192.0.2.2
"""
DETAIL = (
    "Worker unexpectedly exits with a connection error code 2. End of file. Some common causes include: (1) the "
    "process was killed by the OOM killer due to high memory usage, (2) ray stop --force was called, or (3) the worker "
    "crashed unexpectedly due to SIGSEGV or another unexpected error."
)
KILLED = "it was killed or crashed (SIGKILL, out of memory, SIGSEGV)"


def died(text: str) -> BaseException:
    from ray.exceptions import ActorDiedError

    error = ActorDiedError()
    error.error_msg = HEAD + text
    return error


@pytest.mark.attack
@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR {DETAIL}", KILLED),
        (
            "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: "
            "Worker exits unexpectedly by a signal. Exit code: 1. The process receives a SIGTERM.",
            "its process was ended by SIGTERM",
        ),
        (
            "The actor is dead because its worker process has died. Worker exit type: NODE_OUT_OF_MEMORY …",
            "Ray ended its process, since its machine ran out of memory",
        ),
        ("The actor died because its node has died. Node Id: 12ab\n\tthe actor's node …", "its machine is gone"),
        ("The actor is dead because it was killed by `ray.kill`.", "it was ended by ray.kill"),
        ("The actor is dead because its owner has died. Owner Id: 01000000", "the process that started it is gone"),
        (
            "The actor is dead because its worker process has died. Worker exit type: INTENDED_USER_EXIT …",
            "its process ended by itself",
        ),
        ("The actor is dead because\n the moon " + "is full " * 100, "ActorDiedError: the moon is full"),
    ],
)
def test_a_death_is_one_line(text, words):
    from penstock.overseer.ray_actor import in_one_line

    told = in_one_line(died(text))
    assert told.startswith(words) and "\n" not in told and len(told) <= 220


def test_a_start_that_raised_says_what():
    from ray.exceptions import RayActorError

    from penstock.overseer.ray_actor import in_one_line

    text = (
        "The actor died because of an error raised in its creation task, ray::A.__init__()\n  File …\nKeyError: 'x'\n"
    )
    assert in_one_line(RayActorError(error_msg=text, actor_init_failed=True)) == "its start raised KeyError: 'x'"


def test_a_machine_that_was_taken_away_says_so():
    from ray.exceptions import RayActorError

    from penstock.overseer.ray_actor import in_one_line

    assert in_one_line(RayActorError(error_msg="…", preempted=True)) == "its machine was taken away"


def test_other_errors_are_cut_to_a_line():
    from ray.exceptions import RaySystemError

    from penstock.overseer.ray_actor import in_one_line

    told = in_one_line(RaySystemError("one\ntwo " * 100))
    assert told.startswith("RaySystemError: ") and "one two one" in told and "\n" not in told and len(told) <= 220


def test_a_cluster_that_does_not_say_where_an_actor_is_is_waited_for_within_the_limit(monkeypatch):
    import ray

    from penstock.overseer.ray_actor import ActorCalls, ActorDefaults

    asked, may_answer = [], threading.Event()

    def get_actor(name: str, namespace: str) -> SimpleNamespace:
        asked.append(name)
        assert may_answer.wait(30)
        if len(asked) == 1:
            raise ValueError("it has lost its control service")
        return SimpleNamespace(call=SimpleNamespace(remote=lambda sender, method, args: Reply(f"{method} by {sender}")))

    monkeypatch.setattr(ray, "get_actor", get_actor)
    monkeypatch.setattr(ray, "get", lambda answer, timeout: answer)
    calls = ActorCalls(ActorDefaults("runs", "0" * 8, Path("logs")))
    whom, sender = Identity("evaluator", 0, 1), Identity("learner", 0, 0)
    started = time.monotonic()
    for _ in range(2):
        with pytest.raises(UnreachableError, match="did not say within 0.1 s where evaluator-0#1 is"):
            calls.reach(whom, sender, "evaluation_state", (), 0.1)
    assert time.monotonic() - started < 20 and len(asked) == 1
    may_answer.set()
    with pytest.raises(UnreachableError, match="evaluator-0#1 is not there: ValueError: it has lost"):
        calls.reach(whom, sender, "evaluation_state", (), 20.0)
    for _ in range(2):  # looked for anew, and then known
        assert calls.reach(whom, sender, "evaluation_state", (), 20.0).result() == "evaluation_state by learner-0#0"
    assert asked == ["evaluator-0#1@00000000"] * 2
