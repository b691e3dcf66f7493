"""What is measured: simulators, how many, in what shape, and what was promised of it.

Every workload is one fleet of one rollout worker; `simulators` are (task, id, kwargs, how many). The peers get the same
simulators, made by the same function (`penstock.environments.simulators.make_simulator`), except where a peer has its
own (`Workload.envpool`).
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.fleet import FleetConfig
from penstock.fleet.config import SimulatorConfig

FRAME = (128, 128, 3)
SLOW_RESET_S, SLOW_TASK = 2.0, "slow"

Ideal = Literal["steps_per_s", "independent_steps", "independent_work", "others_during_reset"]
"""What a ratio compares with: a number of steps per second; as many steps, or as much simulators' work, as processes
that have nothing else to do; the other simulators' own rate while none is being reset."""


@dataclass(frozen=True, slots=True)
class Simulators:
    """So many of one kind."""

    id: str
    count: int
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])
    task: str = "task"


@dataclass(frozen=True, slots=True)
class Workload:
    """One row of the table.

    Attributes:
        name: For `--only`.
        words: For a person.
        simulators: All of them.
        envs_per_process: Our fleet's shape.
        parts_per_process: Likewise.
        batch_size: Likewise; None: half of them.
        least: The mark: steps per second, or the ratio where `ideal` is no number of steps.
        ideal: What the ratio is to.
        ideal_steps_per_s: Where that is a number; None: there is no ideal.
        seconds_factor: Measured so many times as long as others.
        least_seconds: And at least so long.
        peers: Which of them play it.
        envpool: EnvPool's name of it.
    """

    name: str
    words: str
    simulators: tuple[Simulators, ...]
    least: float
    ideal: Ideal = "steps_per_s"
    ideal_steps_per_s: float | None = None
    envs_per_process: int = 1
    parts_per_process: int = 1
    batch_size: int | None = None
    seconds_factor: float = 1.0
    least_seconds: float = 0.0
    peers: tuple[str, ...] = ("gymnasium",)
    envpool: str = ""

    @property
    def envs(self) -> int:
        """Simulators in all."""
        return sum(some.count for some in self.simulators)

    @property
    def marks_ratio(self) -> bool:
        """Whether the mark is of the ratio."""
        return self.ideal != "steps_per_s"

    def fleet_config(self) -> FleetConfig:
        """Of our fleet."""
        return FleetConfig(
            tasks={
                some.task: SimulatorConfig(id=some.id, kwargs=some.kwargs, share=some.count) for some in self.simulators
            },
            envs_per_worker=self.envs,
            envs_per_process=self.envs_per_process,
            parts_per_process=self.parts_per_process,
            batch_size=self.batch_size,
        )


def _sleeping(count: int, step_s: float, **more: Any) -> tuple[Simulators, ...]:
    return (Simulators("synthetic", count, {"observation_shape": FRAME, "step_s": step_s, **more}),)


_SLOW = (
    *_sleeping(31, 0.01),
    Simulators(
        "synthetic", 1,
        {"observation_shape": FRAME, "step_s": 0.01, "episode_steps": 100, "reset_s": SLOW_RESET_S}, SLOW_TASK,
    ),
)  # fmt: skip
_LOOPS = ("gymnasium", "pipes")

WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(
            "sleep32", "32 x 10 ms sleep, 128x128x3", _sleeping(32, 0.01), 2800, ideal_steps_per_s=3200,
            peers=(*_LOOPS, "rllib", "sample_factory"),
        ),
        Workload("sleep64", "64 x 10 ms sleep, 128x128x3", _sleeping(64, 0.01), 5200, ideal_steps_per_s=6400),
        Workload(
            "jitter32", "32 x 10 ms, lognormal, sigma 1", _sleeping(32, 0.01, jitter=1.0), 2700,
            ideal_steps_per_s=3200, peers=_LOOPS,
        ),
        Workload("sleep72x50", "72 x 50 ms sleep, 128x128x3", _sleeping(72, 0.05), 1300, ideal_steps_per_s=1440),
        Workload("zero", "32 x no work, 128x128x3", _sleeping(32, 0.0), 18_000, envs_per_process=16, peers=_LOOPS),
        Workload(
            "cartpole", "CartPole-v1", (Simulators("CartPole-v1", 128),), 40_000, envs_per_process=64,
            peers=("gymnasium", "envpool"), envpool="CartPole-v1",
        ),
        Workload(
            "crafter", "32 x Crafter, 64x64x3", (Simulators("crafter", 32),), 0.95, "independent_work",
            envs_per_process=16, seconds_factor=12,
        ),
        Workload(
            "ale", "256 x Pong, 84x84x4", (Simulators("atari:pong", 256),), 0.85, "independent_steps",
            envs_per_process=128, parts_per_process=2, batch_size=64, seconds_factor=5, peers=("gymnasium", "envpool"),
            envpool="Pong-v5",
        ),
        Workload(
            "slow_reset", "32 x 10 ms, one with 2 s resets", _SLOW, 31 / 32, "others_during_reset", seconds_factor=3,
            least_seconds=8,
        ),
    )
}  # fmt: skip
