"""What replay needs of one piece of experience, whatever it holds: a language rollout or a simulator fragment.

Containers (`RolloutGroup`, `RolloutBatch`, `RolloutRecord`, `TrainingBatch`) say by their type argument what is in
them. Without one they hold what language policies make, which is what most of the code is about; replay, which looks
into neither kind, says `Experience` and `TrainingExample`.
"""

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from penstock.types.rollouts import RolloutMetadata


class Experience(Protocol):
    """Read only. `Rollout`, `PackedRollout` and `SampleFragment` are of this form."""

    @property
    def rollout_id(self) -> str:
        """Its group's id, a slash, and its index there."""
        ...

    @property
    def group_id(self) -> str:
        """The group that it belongs to; a fragment is a group of one."""
        ...

    @property
    def env_name(self) -> str:
        """Its environment: capacity and batch makers go by it."""
        ...

    @property
    def env_example_id(self) -> str:
        """Which of the environment's problems; for simulators, the slot."""
        ...

    @property
    def lesson_id(self) -> str:
        """Its lesson or task: tolerances go by it."""
        ...

    @property
    def metadata(self) -> "RolloutMetadata | None":
        """Who made it, when, under which weights; None until that is attached."""
        ...

    @property
    def episode_reward(self) -> float:
        """What it earned."""
        ...

    @property
    def newest_weight_step(self) -> int:
        """The newest version behind any of it; a resume goes by it."""
        ...

    @property
    def oldest_weight_step(self) -> int | None:
        """The oldest version behind any of it, where that is known."""
        ...

    @property
    def sampled_tokens(self) -> int:
        """How many tokens or steps of it can be learned from."""
        ...

    @property
    def defect(self) -> str | None:
        """Why no update could learn from it, whatever its age; None where one could."""
        ...


class TrainingExample(Protocol):
    """Read only. `RLExample` and `FragmentExample` are of this form."""

    @property
    def rollout_ids(self) -> tuple[str, ...]:
        """The experience that it was made of."""
        ...


if TYPE_CHECKING:
    from typing_extensions import TypeVar  # defaults of type variables are of Python 3.13

    from penstock.types.packed import AnyRollout
    from penstock.types.training import RLExample

    AnyExperience = TypeVar("AnyExperience", bound=Experience, default=AnyRollout, covariant=True)
    AnyExample = TypeVar("AnyExample", bound=TrainingExample, default=RLExample, covariant=True)
else:
    from typing import TypeVar

    AnyExperience = TypeVar("AnyExperience", covariant=True)
    AnyExample = TypeVar("AnyExample", covariant=True)
