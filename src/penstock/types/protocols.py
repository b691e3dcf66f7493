"""The small protocols by which components meet, and how a config names an environment; none knows who wires it.

Every blocking call takes ``timeout_s`` and either returns in time or raises `NoProgressError`
(`Stopped` when the run is stopping), so that no wait is without a limit and a name.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from penstock.types.errors import EnvironmentFailure
from penstock.types.generation import Completion, Decoding, GenerationCall, WeightVersion
from penstock.types.rollouts import RolloutBatch, RolloutBatchStats, RolloutGroup
from penstock.types.training import Ticket, TrainingBatch

Mode = Literal["train", "eval", "report"]
"""Which problems: to train on; held out, to decide by (what is unlocked, what graduates); held out, to report on."""
Message = Mapping[str, Any]
"""A chat message: ``{"role": …, "content": …}``."""


@runtime_checkable
class TextCodec(Protocol):
    """Text to tokens and back; implemented by `penstock.text.Tokenizer`."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids, special ones included."""
        ...

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """int32 [n], without special tokens added; special tokens written in the text are recognised."""
        ...

    def decode(self, tokens: Sequence[int] | np.ndarray, skip_special_tokens: bool = True) -> str:
        """The text of tokens."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """What one token adds to a text, which may be a part of a character; empty where there is no such token."""
        ...

    def render(
        self,
        prompt: str | Sequence[Message],
        max_tokens: int | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final: bool = False,
    ) -> np.ndarray:
        """int32 [p]: a plain string as the tokenizer begins it, or messages through the chat template.

        Args:
            prompt: The text, or the conversation.
            max_tokens: A text that is longer than so many tokens can hold is refused before it is encoded; one that
                is not may have more tokens all the same. None: whatever its length.
            chat_template_kwargs: What the chat template is given beside the messages, such as `tools`.
            continue_final: The last message is not over: what comes next goes on with it.

        Raises:
            EnvironmentFailure: it is longer.
        """
        ...

    def render_text(
        self,
        prompt: str | Sequence[Message],
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final: bool = False,
    ) -> str:
        """What `render` encodes."""
        ...


@runtime_checkable
class InferenceContext(Protocol):
    """What an environment sees of a policy: tokens in, sampled tokens out."""

    @property
    def tokenizer(self) -> TextCodec:
        """The policy's tokenizer."""
        ...

    @property
    def ordered(self) -> bool:
        """Whether all prompts that can be asked must come in one call, so that a run goes the same way every time.

        Where not, threads of one environment may each ask for themselves, and none waits for another.
        """
        ...

    def generate(
        self, prompts: Sequence[np.ndarray], n: int, decoding: Decoding, seeds: Sequence[int]
    ) -> list[list[Completion]]:
        """Samples n responses to each prompt.

        Args:
            prompts: int32 [p] each.
            n: Responses per prompt; they share the prompt's prefill.
            decoding: How to sample; `stop_token_ids` empty means the tokenizer's.
            seeds: One per prompt; sample j draws from ``fold(seed, j)`` whatever else the engine does.

        Returns:
            For each prompt, n completions in order.

        Raises:
            EnvironmentFailure: a prompt leaves no room for a response within the engine's sequence length.
        """
        ...


@runtime_checkable
class ManyInferenceContext(InferenceContext, Protocol):
    """An inference context that takes several callers' requests in one atomic submission."""

    def generate(
        self, prompts: Sequence[np.ndarray], n: int, decoding: Decoding, seeds: Sequence[int]
    ) -> list[list[Completion]]:
        """`InferenceContext.generate` by `generate_many`, whose errors are its own; a class that derives has it."""
        (result,) = self.generate_many([GenerationCall(prompts, n, decoding, seeds)])
        if isinstance(result, EnvironmentFailure):
            raise result
        return result

    def generate_many(self, calls: Sequence[GenerationCall]) -> list[list[list[Completion]] | EnvironmentFailure]:
        """`generate` for each call, in order; the engine sees all of them at once.

        A call that cannot be served has its failure in its place and harms no other.
        """
        ...


@runtime_checkable
class AgentSession(Protocol):
    """Where the agent of one rollout asks the policy, and what it was answered."""

    @property
    def base_url(self) -> str:
        """Of an OpenAI-compatible API, its ``/v1`` included."""
        ...

    @property
    def api_key(self) -> str:
        """Of this rollout alone; worth nothing once the session is closed."""
        ...

    @property
    def overridden(self) -> int:
        """Requests that asked to be sampled otherwise than the lesson says."""
        ...

    def close(self) -> Sequence[Completion]:
        """Ends it; what was sampled, in the order of the requests. Raises why, where the policy could not be asked."""
        ...


@runtime_checkable
class AgentContext(InferenceContext, Protocol):
    """An inference context that programs can ask, too."""

    def session(self, decoding: Decoding, seed: int) -> AgentSession:
        """Opens an endpoint for one rollout.

        Args:
            decoding: How to sample, whatever the agent asks for; `max_output_tokens` bounds each answer.
            seed: Decides the noise, with the number of a request.

        Raises:
            ConfigError: there is none (`inference.endpoint`).
        """
        ...


@runtime_checkable
class WeightSink(Protocol):
    """Where the learner puts new weights."""

    def publish(self, version: WeightVersion, arrays: Mapping[str, Any]) -> None:
        """Makes a version available, whole.

        Args:
            version: Newer than every earlier one.
            arrays: JAX or NumPy arrays by name. They are kept by reference and must not change or be donated later.

        Raises:
            WeightsError: the version is not newer, the arrays' layout changed, or they could not be stored.
        """
        ...


@runtime_checkable
class WeightSource(Protocol):
    """Where an engine gets them."""

    def latest(self) -> WeightVersion | None:
        """The newest published version; the last known where nobody answers; None before the first."""
        ...

    def fetch(self, version: WeightVersion) -> Mapping[str, Any]:
        """The arrays of exactly that version, read-only, in the dtype in which they travelled.

        Raises:
            SupersededVersionError: it is not kept any more, or not published yet; says which is the newest.
            UnreachableError: whoever serves them is dead or silent.
            WeightsError: the arrays are damaged time and again, or are not those of the version before by name, shape
                and dtype, or belong to another job or token.
        """
        ...

    def wait_for(self, newer_than: WeightVersion | None, timeout_s: float) -> WeightVersion | None:
        """Blocks until there is something to fetch; None at the timeout.

        That is a version newer than `newer_than`, or the same version of a broadcaster that was started anew since the
        last fetch. One that cannot be reached is waited for.

        Raises:
            Stopped: this was closed.
            WeightsError: what is there belongs to another job or token.
        """
        ...


@runtime_checkable
class TicketSource(Protocol):
    """Admission of groups; docs/replay.md has its rules."""

    def acquire(self, most: int, timeout_s: float) -> list[Ticket]:
        """Between 1 and `most` tickets; an empty list at the timeout. Raises Stopped after `close`."""
        ...

    def set_serving_step(self, step: int) -> None:
        """The engine holds this version now; tickets admitted from here on are stamped with it."""
        ...

    def fail(self, ticket: Ticket, fate: Literal["invalid", "aborted"], reason: str) -> None:
        """Gives a ticket back unused: its place is free for a fresh one, its rollouts have that fate."""
        ...


@runtime_checkable
class RolloutSink(Protocol):
    """Where a rollout worker puts finished groups."""

    def add_batches(self, batches: Sequence[RolloutBatch[Any]]) -> None:
        """Takes rollouts over; every one has metadata. May block for back-pressure, within a limit.

        One that is meant for a single kind of experience may say so.
        """
        ...


@runtime_checkable
class BatchSource(Protocol):
    """Where the learner gets its batches."""

    def next_batch(self, step: int, timeout_s: float) -> TrainingBatch[Any]:
        """The batch of update `step`, with its groups and itself durable.

        Raises:
            NoProgressError: at the timeout, saying what was waited for.
            Stopped: the source was closed.
        """
        ...

    def peek(self, step: int) -> TrainingBatch[Any] | None:
        """The batch of a later update, where it is known already; `next_batch` gives the same one. Never waits."""
        ...


@runtime_checkable
class Checkpointable(Protocol):
    """A component whose state travels inside the run's checkpoint."""

    def state(self) -> dict[str, Any]:
        """JSON-serialisable state as of the current update boundary."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Takes such a state back. Raises CheckpointError where it does not fit."""
        ...


@runtime_checkable
class LessonChooser(Protocol):
    """Which lesson the next ticket is for; implemented by `penstock.curriculum.Curriculum`."""

    def sample_lesson(self, seed: int) -> str:
        """A lesson id, drawn by the current sampling probabilities and this seed alone."""
        ...


@runtime_checkable
class CurriculumRecord(Protocol):
    """Where results are recorded that decide on lessons; what changes is told elsewhere."""

    def update_evaluation(self, stats: RolloutBatchStats, step: int) -> object:
        """Takes a full evaluation of one lesson, at one version, in."""
        ...

    def metrics(self) -> dict[str, float]:
        """``curriculum/…`` numbers of this moment."""
        ...

    def describe(self) -> dict[str, str]:
        """Each lesson's status in words."""
        ...

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of it: plain values that `Checkpointable.restore` takes back."""
        ...


@runtime_checkable
class RLLossModule(Protocol):
    """How rollouts become advantages and advantages a loss (`learner.loss.module`)."""

    def compute_advantages(self, group: RolloutGroup) -> np.ndarray:
        """float32 [n], one advantage per rollout of the group."""
        ...

    def loss(self, inputs: Any) -> Any:
        """The loss of each token: float32 [n] or a `penstock.learner.TokenLoss`, from a `penstock.learner.LossInputs`.

        It is traced by JAX, to be tried and then for each shape. The learner weighs the tokens
        (`learner.loss.aggregation`) and adds them up.
        """
        ...


Clock = Callable[[], float]
"""Unix seconds; replaced by a virtual clock in tests."""


@dataclass(frozen=True, slots=True)
class EnvironmentSpec:
    """An environment class by dotted path, with the arguments it is made with.

    Attributes:
        env_class: For example ``penstock.environments.cats.CatsEnvironment``.
        env_args: Keyword arguments.
    """

    env_class: str
    env_args: Mapping[str, Any] = field(default_factory=dict[str, Any])
