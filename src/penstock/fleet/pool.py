"""All simulator processes of one rollout worker: started, watched, restarted, ended.

One thread owns a pool: it polls, gets arrivals, and acts. Everything that a process says, its death, and the fork
server's answers wake one epoll; whatever is no arrival leads to one pass over the processes (`_look_after`), which
starts those that are due, kills those past a deadline, and gives up those that fail too often. The hot path has no such
pass. Descriptors are closed only after the events at hand: a number that is closed and given out again within one round
would get the other's event.

Invariants: a process that died takes its k simulators and no others; each action that was taken is answered by exactly
one arrival, or counted as abandoned when its process is given up; nothing that was started outlives `close`, nor the
worker's own death.
"""

import os
import select
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Generic, TypeVar

import numpy as np

from penstock.fleet.config import FleetConfig, assign_tasks
from penstock.fleet.env_process import GiveUp, ProcessSlot, ProcessState, RestartRecord
from penstock.fleet.fork_client import FORK_SERVER_END_S, ForkReply, ForkServerClient
from penstock.fleet.messages import EnvWorkerSpec, episode_seed
from penstock.fleet.policy import OnEvent
from penstock.fleet.process_tree import end_descendants_of_fork_server, kill_group
from penstock.fleet.shared_block import FrameArea
from penstock.fleet.steps import Leaves, StepArrival
from penstock.types import ConfigError, NoProgressError, RunFailed, Spaces

T = TypeVar("T")


class DescriptorWatch(Generic[T]):
    """Readable descriptors and their handlers, which give a T or None."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[], T | None]] = {}
        self._retired: list[int] = []

    def add(self, fd: int, handler: Callable[[], T | None]) -> None:
        """Calls `handler` whenever `fd` is readable."""
        self._epoll.register(fd, select.EPOLLIN)
        self._handlers[fd] = handler

    def drop(self, fd: int) -> None:
        """Watches `fd` no more; one that is not watched is fine."""
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def retire(self, fds: Iterable[int]) -> None:
        """Watches these no more, and closes them at the next `close_retired`."""
        for fd in fds:
            self.drop(fd)
            self._retired.append(fd)

    def close_retired(self) -> None:
        """Closes what was retired; not while events of one round are being handled."""
        for fd in self._retired:
            os.close(fd)
        self._retired.clear()

    def wait(self, timeout_s: float, found: list[T]) -> bool:
        """Waits for events and calls their handlers.

        Args:
            timeout_s: Longest wait for the first event.
            found: What handlers gave is appended.

        Returns:
            Whether a handler gave nothing: something other than a T has happened.
        """
        handlers, other = self._handlers, False
        for fd, _ in self._epoll.poll(timeout_s):
            handler = handlers.get(fd)
            result = None if handler is None else handler()
            if result is None:
                other = True
            else:
                found.append(result)
        return other

    def close(self) -> None:
        """Closes what was retired, and the epoll."""
        self.close_retired()
        self._epoll.close()


class SpaceCheck:
    """All simulators of a fleet share one form of observations and of actions: whoever differs is refused by name.

    It has the spaces of the first simulator that was made, and which tasks agreed so far. Bounds of 64-bit integers are
    the widest of all tasks.

    Attributes:
        tasks: Tasks of which a simulator was made.
    """

    def __init__(self) -> None:
        self.tasks: list[str] = []
        self._spaces: Spaces | None = None
        self._closed = False

    @property
    def spaces(self) -> Spaces:
        """Of all simulators.

        Raises:
            RunFailed: none was made yet.
        """
        if self._spaces is None:
            raise RunFailed("the simulators' spaces are not known yet: start the pool first")
        return self._spaces

    def adopt(self, task: str, spaces: Spaces) -> None:
        """Takes the spaces of a simulator that was made.

        Raises:
            ConfigError: they need other arrays than the first one's.
        """
        if self._closed:
            return
        self._spaces = (self._spaces or spaces).widened(spaces)
        if task not in self.tasks:
            self.tasks.append(task)
        for side in ("observations", "actions"):
            first, other = self._spaces.forms(side), spaces.forms(side)
            if first != other:
                raise ConfigError(
                    f"task {task!r} has {side} {other}, other than {first} of task {self.tasks[0]!r}: tasks of one "
                    "fleet share their spaces; wrap one of them, or run them apart"
                )

    def close(self) -> None:
        """Nobody is refused any more: who comes now is ended, and must not keep others from being ended, too."""
        self._closed = True


_OUTPUT_TAIL = 500  # characters of a simulator's output


def describe_exit(process: ProcessSlot, status: int, output_tail: str) -> str:
    """The reason of an end.

    Args:
        process: The process that ended; not released yet.
        status: As `os.waitpid` gives it.
        output_tail: The end of what it wrote to its output.
    """
    if process.failure is not None:
        failure = process.failure
        return f"{failure.where} (slot {failure.slot}) raised {failure.kind}: {failure.message}"
    said = f"; it last wrote: {output_tail[-_OUTPUT_TAIL:].strip()}" if output_tail.strip() else ""
    if process.reason:
        return process.reason + said
    if os.WIFSIGNALED(status):
        return f"it was ended by {signal.Signals(os.WTERMSIG(status)).name}{said}"
    return f"it ended by itself with code {os.waitstatus_to_exitcode(status)}{said}"


def given_up_in_words(process: ProcessSlot) -> str:
    """Its last failure, and the limit that it passed."""
    return f"{process.reason}; {process.limit}"


def raise_if_all_given_up(processes: Sequence[ProcessSlot]) -> None:
    """Nothing comes any more from processes that were all given up.

    Raises:
        RunFailed: they were; with the last one's failure, the limit that it passed, and its key.
    """
    if all(process.stage is ProcessState.QUARANTINED for process in processes):
        last = processes[-1]
        raise RunFailed(
            f"all {len(processes)} simulator processes were given up; the last one (task {last.task!r}): "
            f"{given_up_in_words(last)}"
        )


_MOST_ASKED = 16  # requests to the fork server that wait for their answer
_TRIES_OF_CODE = 3  # of a process that raises what another attempt does not mend
_HOPELESS = "no simulator of its task has ever answered an action, and another attempt does not mend its code"
_CLOSE_S = 1.0  # for simulators to close in good order


class SimulatorPool:
    """Simulator processes behind one `poll` and one `act`.

    Args:
        config: Tasks, processes, limits.
        worker_id: Of the rollout worker; a part of every seed.
        seed: Of the run.
        on_event: Called with ``nursery_ready``, ``nursery_ended``, ``nursery_left_behind``, ``simulator_started``,
            ``simulator_failed``, ``simulator_fault``, ``simulator_retired`` and ``simulator_quarantined``, in the
            thread that polls; each names the `worker_id` as ``worker``.
        worker_index: Which of the fleet's workers, for its part of the tasks.

    Attributes:
        tasks: Task of each slot.
        env_names: Environment id of each slot.
        num_slots: n.
    """

    def __init__(
        self, config: FleetConfig, worker_id: str, seed: int, on_event: OnEvent = lambda name, fields: None,
        worker_index: int = 0,
    ) -> None:  # fmt: skip
        self._config, self._worker_id, self._seed = config, worker_id, seed
        self._on_event: OnEvent = lambda name, fields: on_event(name, {"worker": worker_id, **fields})
        by_process = assign_tasks(config, worker_index)
        rows = self._rows = config.envs_per_process
        self.tasks = tuple(task for task in by_process for _ in range(rows))
        self.env_names = tuple(config.tasks[task].id for task in self.tasks)
        self.num_slots = len(self.tasks)
        self._agreed = SpaceCheck()
        slots, limits = np.arange(self.num_slots).reshape(-1, rows), config.limits
        self._processes = tuple(
            ProcessSlot(number, task, slots[number], limits, self._agreed.adopt, config.parts_per_process)
            for number, task in enumerate(by_process)
        )
        self._watch: DescriptorWatch[StepArrival] = DescriptorWatch()
        self._tickets: dict[int, ProcessSlot] = {}
        self._next_ticket = self._live_slots = 0
        self._fork_server: ForkServerClient | None = None
        self._fork_server_due_s = self._next_look_s = 0.0
        self._fork_server_record = RestartRecord(limits)
        self._left_out: dict[str, str] = {}  # what ended a fork server that imported it, which the next one does not
        shortest_s = min(limits.spawn_timeout_s, limits.reset_timeout_s, limits.step_timeout_s)
        self._look_interval_s = min(0.25, shortest_s / 5)
        self._held: list[StepArrival] = []
        self._fatal: Exception | None = None
        self._closed = False

    # --- what a rollout worker uses -------------------------------------------------------------------------------

    @property
    def spaces(self) -> Spaces:
        """Of all simulators; known after `start`.

        Raises:
            RunFailed: before.
        """
        return self._agreed.spaces

    @property
    def live_slots(self) -> int:
        """Slots whose process is up: a batch need not wait for others."""
        return self._live_slots

    def given_up(self) -> Mapping[int, str]:
        """Slots of quarantined processes: nothing comes from them any more. With last reason and limit."""
        lost = (process for process in self._processes if process.stage is ProcessState.QUARANTINED)
        return {slot: given_up_in_words(process) for process in lost for slot in process.slots.tolist()}

    def start(self, timeout_s: float) -> None:
        """Starts all processes and waits until one of each task is up; the others come while the worker polls.

        Raises:
            ConfigError: a simulator cannot be made as configured, or tasks have different spaces.
            RunFailed: all processes failed for good.
            NoProgressError: it took longer than `timeout_s`.
        """
        deadline_s = time.monotonic() + timeout_s
        wanted = set(self.tasks)
        while missing := wanted - set(self._agreed.tasks):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                last = next((f": {process.reason}" for process in self._processes if process.reason), "")
                raise NoProgressError(f"no simulator of task {min(missing)!r} was made within {timeout_s:g} s{last}")
            self._held = self.poll(min(left_s, 1.0)) + self._held
            for task in missing:
                raise_if_all_given_up([process for process in self._processes if process.task == task])

    def poll(self, timeout_s: float) -> list[StepArrival]:
        """What arrived; waits for the first where there is none yet.

        Args:
            timeout_s: Longest wait; 0: none.

        Returns:
            At most one arrival of each part of a process; empty after `timeout_s`.

        Raises:
            RunFailed: every process was given up, or a policy's action was outside its space.
            ConfigError: see `start`.
        """
        arrivals, self._held = self._held, []
        until_s = time.monotonic() + timeout_s
        while True:
            wait_s = 0.0 if arrivals else max(0.0, min(until_s, self._next_look_s) - time.monotonic())
            other_news = self._watch.wait(wait_s, arrivals)
            now_s = time.monotonic()
            if other_news or now_s >= self._next_look_s:
                self._look_after(now_s)
                arrivals += self._held
                self._held = []
            if arrivals or now_s >= until_s:
                return arrivals

    def act(self, process: int, actions: Leaves, part: int = 0) -> None:
        """Answers the last arrival of a part of a process.

        Args:
            process: Index of the process in the pool.
            actions: By leaf name, [n, …].
            part: Of the process.

        Raises:
            ValueError: it has no open arrival, or an array has a wrong shape.
        """
        arrival = self._processes[process].act(actions, part)
        if arrival is not None:
            self._held.append(arrival)

    def film_area(self, process: int) -> FrameArea | None:
        """Where a process's pictures lie; the caller's between its arrival and `act`. None where there is none."""
        return self._processes[process].film

    def counts(self) -> dict[str, int]:
        """Processes ``live``, ``respawning`` and ``quarantined``; ``restarts`` after failures; lost actions.

        ``faults`` are actions lost with their process and answered so; ``abandoned`` those that are lost and never will
        be answered, since the process was given up.
        """
        stages = [process.stage for process in self._processes]
        quarantined = [process for process in self._processes if process.stage is ProcessState.QUARANTINED]
        live = stages.count(ProcessState.UP)
        return {
            "live": live,
            "respawning": len(stages) - live - len(quarantined),
            "quarantined": len(quarantined),
            "restarts": sum(process.record.restarts for process in self._processes),
            "faults": sum(process.lost_actions for process in self._processes),
            "abandoned": sum(process.abandoned_actions for process in quarantined),
        }

    def process_ids(self) -> tuple[int | None, ...]:
        """Process id of each process; None where there is none now."""
        return tuple(process.pid for process in self._processes)

    def close(self) -> None:
        """Ends every process and what it started: in good order where it can, by force after a second."""
        if self._closed:
            return
        self._closed = True
        self._agreed.close()
        for process in self._processes:
            self._announce(process, time.monotonic())
            process.close()
        deadline_s = time.monotonic() + _CLOSE_S
        while self._tickets and self._fork_server is not None and (left_s := deadline_s - time.monotonic()) > 0:
            self._watch.wait(left_s, [])
            self._drop_hung_up()
        if self._fork_server is not None and not self._fork_server.close():
            self._tell_left_behind(self._fork_server)
        for process in self._processes:
            self._watch.retire(process.release())
        self._held.clear()  # arrivals that nobody took: they are views of memory that would stay open
        self._watch.close()

    # --- one pass over the processes ------------------------------------------------------------------------------

    def _look_after(self, now_s: float) -> None:
        """Starts what is due, kills what is late, and says when to look again."""
        self._raise_if_lost()
        self._next_look_s = now_s + self._look_interval_s
        self._drop_hung_up()
        if self._fork_server is None and now_s >= self._fork_server_due_s:
            self._open_fork_server()
        elif (
            self._fork_server is not None
            and (late := self._fork_server.overdue(now_s, self._config.limits)) is not None
        ):
            self._lose_fork_server(late)
        asked = sum(process.stage is ProcessState.ASKED for process in self._processes)
        for process in self._processes:
            if process.stage is ProcessState.WAITING:
                if process.due_s > now_s:
                    self._next_look_s = min(self._next_look_s, process.due_s)
                elif asked < _MOST_ASKED and self._spawn(process, now_s):
                    asked += 1
                continue
            self._announce(process, now_s)
            self._tell_faults(process)
            if (late := process.overdue(now_s)) is not None and process.stage is ProcessState.ASKED:
                self._lose_fork_server(late)
                break
            elif late is not None:
                process.kill(late, now_s)
            elif process.gone_for_good(now_s):
                self._forget_process(process, process.reason or "it ended, and its fork server did not say how")
        self._watch.close_retired()
        self._live_slots = self._rows * sum(process.stage is ProcessState.UP for process in self._processes)
        self._raise_if_lost()

    def _drop_hung_up(self) -> None:
        """An ended socket is readable for ever."""
        for process in self._processes:
            if process.hung_up and process.descriptors():
                self._watch.drop(process.descriptors()[0])

    def _spawn(self, process: ProcessSlot, now_s: float) -> bool:
        if self._fork_server is None:
            return False
        ticket = self._next_ticket
        channel = process.open_channel(ticket, now_s)
        try:
            sent = self._fork_server.spawn(ticket, self._spec(process), channel)
        finally:
            channel.close()
        if not sent:
            self._watch.retire(process.withdraw())
            return False
        self._next_ticket += 1
        self._tickets[ticket] = process
        self._watch.add(process.descriptors()[0], process.receive)
        return True

    def _announce(self, process: ProcessSlot, now_s: float) -> None:
        """Tells of a process that is up, once; before it is ended at the latest, so that its seeds are known."""
        if process.announced or process.stage is not ProcessState.UP or process.pid is None:
            return
        process.announced, slots = True, process.slots.tolist()
        self._on_event("simulator_started", {
            **process.to_values(), "seconds": now_s - process.begun_s, "seed": self._seed, "slots": slots,
            "first_seeds": [episode_seed(self._seed, self._worker_id, slot, process.life, 0) for slot in slots],
        })  # fmt: skip

    def _tell_faults(self, process: ProcessSlot) -> None:
        while process.faults:
            self._on_event("simulator_fault", {**process.to_values(), **asdict(process.faults.pop(0))})

    def _spec(self, process: ProcessSlot) -> EnvWorkerSpec:
        task, limits = self._config.tasks[process.task], self._config.limits
        return EnvWorkerSpec(
            self._worker_id, self._seed, process.number, process.life, tuple(process.slots.tolist()), process.task,
            task.id, task.kwargs, limits.max_fast_resets, limits.restart_interval_s, self._config.decorrelate_steps,
            self._config.video.every_episodes > 0, self._config.parts_per_process, limits.max_failures_in_row,
        )  # fmt: skip

    # --- the end of a process -------------------------------------------------------------------------------------

    def _forget_process(self, process: ProcessSlot, reason: str, counted: bool = True) -> None:
        """Forgets a process that ended, and decides what follows."""
        self._hold_unread(process)
        self._tell_faults(process)
        self._tickets.pop(process.ticket if process.ticket is not None else -1, None)
        failure, retired, fields = process.failure, process.retired, process.to_values()
        self._watch.retire(process.release())
        process.stage, process.due_s, process.reason = ProcessState.WAITING, time.monotonic(), reason
        self._next_look_s = process.due_s
        if retired and not self._closed:
            self._on_event("simulator_retired", fields)
        if retired or self._closed:
            return
        fields |= {"reason": reason, "traceback": failure.traceback if failure else ""}
        self._on_event("simulator_failed", fields)
        if failure is not None and failure.blame == "policy":
            self._fatal = RunFailed(f"task {process.task!r}: {failure.message}")
        elif failure is not None and failure.blame == "config" and process.task not in self._agreed.tasks:
            self._fatal = ConfigError(f"task {process.task!r}: {failure.message}")
        elif counted:
            hopeless = failure is not None and failure.blame == "code" and self._never_worked(process)
            self._restart_or_quarantine(process, fields, hopeless)

    def _hold_unread(self, process: ProcessSlot) -> None:
        while (arrival := process.drain()) is not None:
            self._held.append(arrival)

    def _never_worked(self, process: ProcessSlot) -> bool:
        """It failed often enough to tell, and no simulator of its task has ever answered an action."""
        if self._config.limits.max_failures_in_row is None or process.record.restarts < _TRIES_OF_CODE - 1:
            return False
        return not any(other.record.has_answered for other in self._processes if other.task == process.task)

    def _restart_or_quarantine(self, process: ProcessSlot, fields: Mapping[str, Any], hopeless: bool) -> None:
        verdict = GiveUp(_HOPELESS) if hopeless else process.record.failed(process.due_s)
        if isinstance(verdict, GiveUp):
            process.stage, process.limit = ProcessState.QUARANTINED, verdict.reason
            self._on_event("simulator_quarantined", {**fields, "limit": verdict.reason})
        else:
            process.due_s += verdict

    def _raise_if_lost(self) -> None:
        if self._fatal is not None:
            raise self._fatal
        raise_if_all_given_up(self._processes)

    # --- the fork server ----------------------------------------------------------------------------------------------

    def _open_fork_server(self) -> None:
        self._fork_server = ForkServerClient([task.id for task in self._config.tasks.values()], left_out=self._left_out)
        self._watch.add(self._fork_server.fileno(), self._poll_fork_server)

    def _poll_fork_server(self) -> None:
        assert self._fork_server is not None
        answers = self._fork_server.receive()
        if answers is None:
            self._lose_fork_server("it ended")
            return
        for answer in answers:
            self._take_answer(answer)

    def _take_answer(self, answer: ForkReply) -> None:
        values = answer.values
        if "preloaded" in values:
            self._on_event("nursery_ready", {"seconds": values["preloaded"], "troubles": values["troubles"]})
        elif "spawned" in values:
            self._fork_server_record.answered()
            self._take_process(int(values["spawned"]), int(values["pid"]), answer.pidfd)
        elif "failed" in values and (process := self._tickets.get(int(values["failed"]))) is not None:
            self._forget_process(process, str(values["reason"]))
        elif "exited" in values and (process := self._tickets.get(int(values["exited"]))) is not None:
            self._hold_unread(process)
            self._forget_process(process, describe_exit(process, int(values["status"]), str(values["output_tail"])))

    def _take_process(self, ticket: int, pid: int, pidfd: int | None) -> None:
        process = self._tickets.get(ticket)
        assert pidfd is not None
        if process is None:  # it was given up before it was there
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
            return
        process.forked(pid, pidfd, time.monotonic())

        def ended() -> None:
            self._watch.drop(pidfd)
            process.ended()

        self._watch.add(pidfd, ended)

    def _lose_fork_server(self, reason: str) -> None:
        """Its end took all processes along; another fork server starts them again, and none of them is to blame."""
        assert self._fork_server is not None
        fork_server, self._fork_server = self._fork_server, None
        if fork_server.importing is not None:
            reason = f"{reason}, while it imported simulator {fork_server.importing!r}"
            self._left_out[fork_server.importing] = reason
        self._watch.drop(fork_server.fileno())
        if not fork_server.kill():
            self._tell_left_behind(fork_server)
        for process in tuple(self._tickets.values()):
            if process.pid is not None:
                kill_group(process.pid)
            self._forget_process(process, f"the fork server that started it is gone: {reason}", counted=False)
        end_descendants_of_fork_server(fork_server.pid)
        verdict = self._fork_server_record.failed(now_s := time.monotonic())
        if isinstance(verdict, GiveUp):
            self._fatal = RunFailed(f"the simulators' fork server: {reason}; {verdict.reason}")
        else:
            self._fork_server_due_s = now_s + verdict
        self._on_event("nursery_ended", {"reason": reason})

    def _tell_left_behind(self, fork_server: ForkServerClient) -> None:
        reason = (
            f"the simulators' fork server was killed; {FORK_SERVER_END_S:g} s later it had not ended: it is left behind"
        )
        self._on_event("nursery_left_behind", {"pid": fork_server.pid, "reason": reason})
