"""Configuration of a simulator fleet, and which task each of its processes plays. Loads neither JAX nor Gymnasium."""

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class SimulatorConfig(BaseModel):
    """What one task is played in.

    Attributes:
        id: A built-in's id, any id that Gymnasium knows (``CartPole-v1``), or the dotted path of a callable that gives
            an environment (``my_package.worlds:make``).
        kwargs: Its arguments; plain values.
        share: Its part of all simulators, relative to the other tasks'.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    id: str
    kwargs: dict[str, Any] = {}
    share: float = Field(default=1.0, gt=0)


class SimulatorLimits(BaseModel):
    """How long a simulator may take, and what becomes of one that fails.

    Attributes:
        spawn_timeout_s: From the start of a process until its simulators are made.
        reset_timeout_s: For one reset.
        step_timeout_s: For one step.
        restart_interval_s: A process is replaced after so long, at an episode's end; None: never.
        max_fast_resets: So many resets in place, then the simulator is made anew; None: never.
        backoff_s: Wait before the first restart after a failure; it doubles with every further one in a row.
        max_backoff_s: Longest such wait.
        max_restarts: Restarts after failures in the life of one process slot; then it is quarantined; None: no limit.
        restarts_per_minute: More restarts after failures than this in a minute quarantine the slot, too.
        max_failures_in_row: So do so many failures in a row, none of whose lives answered an action; None: no limit.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    spawn_timeout_s: float = Field(default=120.0, gt=0)
    reset_timeout_s: float = Field(default=60.0, gt=0)
    step_timeout_s: float = Field(default=30.0, gt=0)
    restart_interval_s: float | None = Field(default=None, gt=0)
    max_fast_resets: int | None = Field(default=None, ge=1)
    backoff_s: float = Field(default=0.2, gt=0)
    max_backoff_s: float = Field(default=30.0, gt=0)
    max_restarts: int | None = Field(default=1000, ge=0)
    restarts_per_minute: int = Field(default=20, ge=1)
    max_failures_in_row: int | None = Field(default=8, ge=1)


class VideoConfig(BaseModel):
    """Films of chosen training episodes, in ``videos/`` of the run directory. Needs the extra ``gym``.

    Attributes:
        every_episodes: With every so many that begin in a worker, an episode is filmed; 0: none.
        fps: Frames per second of the film.
        most_frames: A film ends after so many.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    every_episodes: int = Field(default=0, ge=0)
    fps: int = Field(default=30, ge=1, le=1000)
    most_frames: int = Field(default=3000, ge=1)


class FleetConfig(BaseModel):
    """Simulators, the workers that drive them, and how their steps become fragments.

    Attributes:
        tasks: What is played, by task name; all share one space of observations and one of actions.
        workers: Rollout workers; each has processes, a policy and a queue of its own.
        envs_per_worker: Simulators of each.
        envs_per_process: Simulators in one process, stepped one after the other: for cheap ones. It divides
            `envs_per_worker`.
        parts_per_process: A process's simulators act in so many equal parts: it steps one while the policy decides for
            another. 2 is for few processes that keep every processor busy. It divides `envs_per_process`, and is 1
            where processes are replaced (`limits.restart_interval_s`) or filmed, since those act as wholes.
        batch_size: Most simulators in one inference, and never fewer than one part of a process has, since they are
            decided for together; None: half of them, so that the others step meanwhile.
        max_wait_ms: An inference that is not full begins so long after its first simulator came, once the policy is
            free. 0 is best where simulators are slower than the policy: what comes during an inference is decided in
            the next one, so batches grow by themselves under load. More saves inferences where each costs much.
        fragment_length: T, steps in a fragment.
        queue_fragments: Fragments of one worker that wait to be sent.
        full_queue: Where that is full: ``block`` lets its simulators wait, ``drop_oldest`` drops and counts.
        send_timeout_s: Longest that one fragment may take to be sent.
        max_staleness: Steps by versions that lie further back are cut off before a fragment is sent; None: no limit.
        decorrelate_steps: Each simulator of a process's first life begins with a random number of random steps below
            this, which nobody is told of, so that episodes do not end in lockstep.
        limits: Deadlines and restarts.
        video: Films.
        stats_window: Episodes per task over which statistics are averaged.
        discount: Of the episode statistics' discounted return.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    tasks: dict[str, SimulatorConfig] = Field(min_length=1)
    workers: int = Field(default=1, ge=1, le=65536)
    envs_per_worker: int = Field(default=16, ge=1, le=65536)
    envs_per_process: int = Field(default=1, ge=1)
    parts_per_process: int = Field(default=1, ge=1, le=16)
    batch_size: int | None = Field(default=None, ge=1)
    max_wait_ms: float = Field(default=0.0, ge=0)
    fragment_length: int = Field(default=64, ge=1, le=65536)
    queue_fragments: int = Field(default=64, ge=1)
    full_queue: Literal["block", "drop_oldest"] = "block"
    send_timeout_s: float = Field(default=300.0, gt=0)
    max_staleness: int | None = Field(default=None, ge=0)
    decorrelate_steps: int = Field(default=0, ge=0, le=1_000_000)
    limits: SimulatorLimits = SimulatorLimits()
    video: VideoConfig = VideoConfig()
    stats_window: int = Field(default=100, ge=1)
    discount: float = Field(default=0.99, ge=0, le=1)

    @model_validator(mode="after")
    def _processes_are_full(self) -> Self:
        if self.envs_per_worker % self.envs_per_process:
            raise ValueError(
                f"envs_per_process is {self.envs_per_process}, which does not divide envs_per_worker = "
                f"{self.envs_per_worker}: choose a divisor"
            )
        if self.envs_per_process % self.parts_per_process:
            raise ValueError(
                f"parts_per_process is {self.parts_per_process}, which does not divide envs_per_process = "
                f"{self.envs_per_process}: choose a divisor"
            )
        if self.parts_per_process > 1 and self.acts_as_wholes is not None:
            raise ValueError(
                f"parts_per_process is {self.parts_per_process}, but with {self.acts_as_wholes} a process acts as a "
                "whole: set parts_per_process to 1"
            )
        if len(self.tasks) > self.workers * (self.envs_per_worker // self.envs_per_process):
            raise ValueError(
                f"tasks are {len(self.tasks)}, more than processes (workers × envs_per_worker / envs_per_process): "
                "every task needs one; raise envs_per_worker"
            )
        return self

    @property
    def acts_as_wholes(self) -> str | None:
        """The field because of which a process cannot act in parts; None: it can."""
        if self.limits.restart_interval_s is not None:
            return "limits.restart_interval_s"
        return "video.every_episodes" if self.video.every_episodes else None

    @property
    def processes_per_worker(self) -> int:
        """Processes of one worker."""
        return self.envs_per_worker // self.envs_per_process

    @property
    def envs_per_part(self) -> int:
        """Simulators that are decided for together."""
        return self.envs_per_process // self.parts_per_process

    @property
    def most_in_batch(self) -> int:
        """Most simulators in one inference: `batch_size` within what a part of a process and the worker have."""
        wanted = self.batch_size or self.envs_per_worker // 2
        return min(self.envs_per_worker, max(self.envs_per_part, wanted))


def assign_tasks(config: FleetConfig, worker_index: int = 0) -> tuple[str, ...]:
    """Tasks of one worker's processes.

    Every task gets one of the fleet's processes, the others go by share (largest remainder first). The sequence mixes
    them evenly, so that any stretch of it, such as one worker's, holds them in about these parts.

    Args:
        config: Tasks, workers, processes.
        worker_index: Which of `config.workers`; one beyond them (after scaling up) takes the same as the one it is
            modulo their number.

    Returns:
        A task name for each process of the worker.
    """
    per_worker = config.processes_per_worker
    counts = _counts({name: task.share for name, task in config.tasks.items()}, config.workers * per_worker)
    places = sorted(
        ((number + 0.5) / count, order, name)
        for order, (name, count) in enumerate(counts.items())
        for number in range(count)
    )
    begin = worker_index % config.workers * per_worker
    return tuple(name for _, _, name in places[begin : begin + per_worker])


def _counts(shares: dict[str, float], processes: int) -> dict[str, int]:
    """One process for each task, the rest by share; they add up to `processes`."""
    counts = dict.fromkeys(shares, 1)
    whole = sum(shares.values())
    for _ in range(processes - len(shares)):
        most_owed = max(shares, key=lambda name: shares[name] / whole * processes - counts[name])
        counts[most_owed] += 1
    return counts
