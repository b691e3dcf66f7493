"""The configuration of a run: every stage's own config composed, and checked against one another."""

from collections.abc import Callable, Collection
from math import ceil
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from penstock.batch.config import BatchMakerConfig
from penstock.curriculum.config import CurriculumConfig, SamplingParams
from penstock.inference.config import InferenceConfig
from penstock.learner.config import PRESET_FILTERS, LearnerConfig
from penstock.model.language.config import PolicyConfig
from penstock.model.language.lora import is_adapter
from penstock.replay.config import ReplayBufferConfig
from penstock.rollout.config import RolloutConfig
from penstock.tracking.config import TrackingConfig
from penstock.types.errors import ConfigError
from penstock.types.idle_keys import refuse_idle
from penstock.weights.config import WeightsConfig

VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM 0.32 takes for ``--max-lora-rank``, and nothing between."""

FLAG_KEYS = {
    "--served-model-name": "inference.external.model", "--dtype": "model.dtype",
    "--max-model-len": "inference.max_seq_len", "--max-num-seqs": "inference.max_slots",
    "--max-lora-rank": "model.lora.rank", "--max-loras": "replay.staleness_budget",
}  # fmt: skip
"""Keys that say what a run adds to a server's command."""


class OverseerConfig(BaseModel):
    """How a run is watched and saved.

    Attributes:
        no_progress_s: A run in which nothing moves for so long ends with an error naming who owes progress.
        status_s: Seconds between two writes of status.json.
        checkpoint_every: Updates between checkpoints; the last update is always followed by one.
        keep_checkpoints: How many of the newest checkpoints stay.
        keep_every: Checkpoints whose step is a multiple of this stay for good, too; None: none of them.
        keep_best: The metric of an evaluation, such as ``eval/cats/reward_mean``: of all versions that were evaluated,
            the checkpoint of the one with the greatest value stays, too, or the first checkpoint after that version;
            ``checkpoints/best`` is a link to it. None: there is none.
        stop_timeout_s: Longest wait for a component to stop.
        heartbeat_s: Seconds between two looks at a component in a process of its own.
        heartbeat_timeout_s: A component that does not answer for so long counts as dead; it is ended and replaced.
        start_timeout_s: Longest time from the start of a component's process to its first answer.
        max_restarts: So many restarts of one component within `restart_window_s` are made; one more ends the run.
        restart_window_s: Time over which the restarts of one component are counted.
        backoff_s: Wait before the first restart of a component; it doubles with every further one in the window.
        max_backoff_s: Longest such wait.
        straggler_factor: A component that is slower than the median of its peers by this factor is reported.
        replace_stragglers: Whether it is replaced, too.
        private: Nobody but the user can open the run directory; else who can is what the umask leaves.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    no_progress_s: float = Field(default=300.0, gt=0)
    status_s: float = Field(default=2.0, gt=0)
    checkpoint_every: int = Field(default=50, ge=1)
    keep_checkpoints: int = Field(default=2, ge=1, le=1_000_000)
    keep_every: int | None = Field(default=None, ge=1)
    keep_best: str | None = None
    stop_timeout_s: float = Field(default=60.0, gt=0)
    heartbeat_s: float = Field(default=1.0, gt=0)
    heartbeat_timeout_s: float = Field(default=30.0, gt=0)
    start_timeout_s: float = Field(default=180.0, gt=0)
    max_restarts: int = Field(default=10, ge=0)
    restart_window_s: float = Field(default=600.0, gt=0)
    backoff_s: float = Field(default=0.5, gt=0)
    max_backoff_s: float = Field(default=30.0, gt=0)
    straggler_factor: float = Field(default=3.0, gt=1)
    replace_stragglers: bool = False
    private: bool = False

    @model_validator(mode="after")
    def _something_is_kept(self) -> "OverseerConfig":
        if self.keep_every is not None and self.keep_every % self.checkpoint_every:
            next_one = ceil(self.keep_every / self.checkpoint_every) * self.checkpoint_every
            raise ValueError(
                f"keep_every ({self.keep_every}) must be a multiple of checkpoint_every ({self.checkpoint_every}), "
                f"such as {next_one}: other steps have no checkpoint"
            )
        return self

    @property
    def checkpoints_in_words(self) -> str:
        """How often there is one, and which stay."""
        every = "" if self.keep_every is None else f", and every {self.keep_every}th for good"
        best = "" if self.keep_best is None else f", and the best by {self.keep_best}"
        return f"every {self.checkpoint_every} updates, the last {self.keep_checkpoints} kept{every}{best}"

    def check_keep_best(self, names: Collection[str], numbers: Collection[str]) -> None:
        """Refuses a metric that no evaluation of the run gives.

        Args:
            names: Of the lessons or tasks that are evaluated.
            numbers: What an evaluation says of each, the greater the better.

        Raises:
            ValueError: `keep_best` is another, naming those that there are.
        """
        if self.keep_best is None:
            return
        known = {f"eval/{name}/{number}" for name in names for number in numbers}
        if self.keep_best not in known:
            raise ValueError(
                f"overseer.keep_best is {self.keep_best}: no such metric of an evaluation whose greatest value is the "
                f"best; there are {', '.join(sorted(known))}"
            )

    @property
    def start_limit_s(self) -> float:
        """Longest start of a component that answers meanwhile, counted anew from each program that it compiled."""
        return max(self.start_timeout_s, self.no_progress_s)


class RoleConfig(BaseModel):
    """Where the components of one role run under ``runtime: ray``.

    Attributes:
        num_cpus: CPUs that each reserves; what is free bounds how many can run. Where a role takes no accelerator, XLA
            computes with so many threads, at least one.
        num_gpus: GPUs that each reserves; a fraction shares one, and its memory, with others.
        resources: Custom resources by name, such as ``{"big_disk": 1}``.
        env: Environment variables of its process.
        spread: Place them on as many machines as possible, not on as few.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    num_cpus: float = Field(default=0.0, ge=0)
    num_gpus: float = Field(default=0.0, ge=0)
    resources: dict[str, float] = {}
    env: dict[str, str] = {}
    spread: bool = False


COLDEST = 0.01
"""The lowest temperature but 0 that vLLM takes as it is."""


class RayConfig(BaseModel):
    """The cluster under ``runtime: ray``.

    Attributes:
        address: None starts one on this machine; ``auto`` or ``host:port`` takes a running one; ``ray://host:port``
            reaches one as a client.
        namespace: Of the run's actors; None makes one from the run's directory.
        num_cpus: CPUs that a cluster started here says it has; None means this machine's.
        runtime_env: Ray's own, for user code: ``{"working_dir": ".", "pip": […], "env_vars": {…}}``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    address: str | None = None
    namespace: str | None = None
    num_cpus: int | None = Field(default=None, ge=1)
    runtime_env: dict[str, Any] = {}


_LEARNS_FROM_EQUAL = {
    "turn": ("episodes earned the same", "learns from where in them that was"),
    "gae": ("rewards are equal", "compares with a value head and learns from them"),
    "reinforce_pp": ("rewards are equal", "compares with the whole batch and learns from them"),
}
"""By advantage: which groups without variance it learns from, and how."""

ROLES = ("learner", "replay", "curriculum", "inference", "rollout", "evaluator")
"""What the components of a distributed run do, each in processes of its own."""


class RunConfig(BaseModel):
    """One run of asynchronous reinforcement learning for a language policy.

    Attributes:
        seed: Every random choice derives from it.
        steps: Number of updates.
        asynchronous: Written ``async`` in YAML. False is a name for ``replay.staleness_budget: 0``, and wins.
        runtime: Which launcher: `local` is threads in one process, `ray` many processes on one machine or several.
        model: Policy and tokenizer.
        curriculum: Lessons and their environments.
        inference: The engines and their servers.
        rollout: Generation.
        replay: Admission, freshness and storage.
        learner: Loss, optimiser, packing, warm start.
        tracking: Where samples and metrics go besides the run directory.
        overseer: Supervision and checkpoints.
        weights: How new weights reach the inference servers.
        ray: The cluster.
        roles: Resources by role: learner, replay, curriculum, inference, rollout, evaluator.
        versions: Of the packages that made the run, as its config.yaml records them; nothing goes by it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, allow_inf_nan=False)

    seed: int = Field(default=0, ge=0)
    steps: int = Field(ge=0)
    asynchronous: bool = Field(default=True, alias="async")
    runtime: Literal["local", "ray"] = "local"
    model: PolicyConfig
    curriculum: CurriculumConfig
    inference: InferenceConfig = InferenceConfig()
    rollout: RolloutConfig = RolloutConfig()
    replay: ReplayBufferConfig = ReplayBufferConfig()
    learner: LearnerConfig = LearnerConfig()
    tracking: TrackingConfig = TrackingConfig()
    overseer: OverseerConfig = OverseerConfig()
    weights: WeightsConfig = WeightsConfig()
    ray: RayConfig = RayConfig()
    roles: dict[str, RoleConfig] = {}
    versions: dict[str, str] = {}

    @model_validator(mode="wrap")
    @classmethod
    def _async_is_a_budget(cls, values: Any, handler: Callable[[Any], Any]) -> Any:
        """``async: false`` puts a budget of zero in place of whatever the recipe says; it does not count as given."""
        if not isinstance(values, dict):
            return handler(values)
        if "asynchronous" in values and "async" not in values:
            values = {("async" if name == "asynchronous" else name): value for name, value in values.items()}
        try:
            synchronous = TypeAdapter(bool).validate_python(values.get("async", True)) is False
        except ValidationError:
            return handler(values)  # the field's own validation says it better
        if not synchronous:
            return handler(values)
        made = handler({**values, "replay": {**_given(values.get("replay")), "staleness_budget": 0}})
        made.replay.model_fields_set.discard("staleness_budget")
        return made

    @model_validator(mode="wrap")
    @classmethod
    def _preset_filters(cls, values: Any, handler: Callable[[Any], Any]) -> Any:
        """A loss preset brings its filters where nothing else is said; what a run recorded of before stays.

        They do not count as given.
        """
        if not isinstance(values, dict) or values.get("versions"):
            return handler(values)
        preset = _found(values, "learner", "loss", "preset")
        filters = PRESET_FILTERS.get(preset) if isinstance(preset, str) else None  # whatever else it is, is refused
        if filters is None:
            return handler(values)
        replay, maker = _given(values.get("replay")), _given(_found(values, "replay", "batch_maker"))
        made = handler({**values, "replay": {**replay, "batch_maker": {**filters, **maker}}})
        made.replay.batch_maker.model_fields_set.intersection_update(maker)
        return made

    @model_validator(mode="after")
    def _stages_fit(self) -> Self:
        room = self.inference.max_seq_len
        for lesson_id, lesson in self.curriculum.lessons.items():
            asked = lesson.sampling_params.max_output_tokens
            if asked >= room:
                raise ValueError(
                    f"curriculum.lessons.{lesson_id}.sampling_params.max_output_tokens is {asked}, but a prompt "
                    f"and its response share inference.max_seq_len = {room}; lower the one or raise the other"
                )
            _check_trainable(lesson_id, lesson.sampling_params, self.learner)
            generations = lesson.sampling_params.n_generations_per_prompt
            loss = self.learner.loss
            if generations < 2 and loss.advantage not in ("reinforce_pp", "gae") and loss.module is None:
                raise ValueError(
                    f"curriculum.lessons.{lesson_id}.sampling_params.n_generations_per_prompt is {generations}: the "
                    f"baseline of {self.learner.loss.advantage} needs the other answers of a group; set 2 or more"
                )
        if self.learner.row_length < room:
            raise ValueError(
                f"learner.row_length is {self.learner.row_length}, shorter than inference.max_seq_len = {room}: "
                "the longest rollout would not fit a row; raise learner.row_length"
            )
        concurrency = self.rollout.max_concurrent_groups
        if self.replay.staleness_budget == 0 and concurrency not in (None, self.replay.groups_per_batch):
            raise ValueError(
                f"rollout.max_concurrent_groups is {concurrency}: at staleness zero a whole batch "
                f"({self.replay.groups_per_batch} groups) generates in lockstep; leave it out"
            )
        self._check_offline()
        self._check_external()
        self._check_replay()
        self._check_runtime()
        self.overseer.check_keep_best(self.curriculum.lessons, ("reward_mean", "success_rate", "pass_at_k"))
        if self.overseer.keep_best and not (self.curriculum.eval_frequency or self.curriculum.eval_before):
            raise ValueError(
                f"overseer.keep_best is {self.overseer.keep_best}, but the last version is the only one evaluated "
                "(curriculum.eval_frequency is 0, curriculum.eval_before is false): set a frequency"
            )
        storage = self.rollout.storage
        if (
            storage.kind == "file"
            and self.replay.synchronous
            and storage.capacity_groups < self.replay.groups_per_batch
        ):
            raise ValueError(
                f"rollout.storage.capacity_groups is {storage.capacity_groups}, below replay.groups_per_batch = "
                f"{self.replay.groups_per_batch}: at staleness zero a whole batch waits for its first group; raise it"
            )
        return self

    def _check_runtime(self) -> None:
        workers, lessons = self.rollout.workers, self.curriculum.lessons
        unknown = sorted(self.roles.keys() - set(ROLES))
        if unknown:
            raise ValueError(f"roles names {', '.join(unknown)}: no such role; there are {', '.join(ROLES)}")
        if isinstance(workers, dict) and workers.keys() != lessons.keys():
            wrong = sorted(workers.keys() ^ lessons.keys())
            raise ValueError(
                f"rollout.workers names {', '.join(workers) or 'no lesson'}, and the lessons are "
                f"{', '.join(lessons)}: give each lesson its workers, or one number for all (differing: {wrong})"
            )
        if self.weights.bfloat16:
            raise ValueError(
                "weights.bfloat16 is true: engines of a language policy are held to the learner's own arrays, and "
                "would serve rounded ones; leave it out, and set model.dtype to bfloat16"
            )
        if self.runtime == "ray":
            if self.rollout.storage.kind != "memory":
                raise ValueError(
                    f"rollout.storage.kind is {self.rollout.storage.kind}: with runtime: ray rollouts go to the replay "
                    "buffer's process directly; leave it out"
                )
            return
        several = {"inference.servers": self.inference.servers, "rollout.workers": workers}
        for name, count in several.items():
            if count != 1:
                raise ValueError(f"{name} is {count}, and one process has one: set runtime: ray, or {name}=1")

    def _check_external(self) -> None:
        """What servers of another make can and cannot do for a run."""
        external = self.inference.external
        if external is None:
            return
        if external.weights == "lora" and self.model.lora is None:
            raise ValueError(
                "inference.external.weights is lora, and model.lora says nothing: name the adapter there, or set "
                "inference.external.weights to directory"
            )
        added = {word for word in self.server_command("", 0)[len(external.launch) :] if word.startswith("--")}
        for word in external.launch:
            flag = word.partition("=")[0].replace("_", "-")
            if flag in added:
                key = FLAG_KEYS.get(flag)
                raise ValueError(
                    f"inference.external.launch has {word}, and a run adds {flag} itself: leave it out"
                    + (f", and set {key}" if key else "")
                )
        for lesson_id, lesson in self.curriculum.lessons.items():
            if self.inference.engine == "vllm" and lesson.sampling_params.temperature < COLDEST:
                raise ValueError(
                    f"curriculum.lessons.{lesson_id}.sampling_params.temperature is "
                    f"{lesson.sampling_params.temperature}: vLLM samples at {COLDEST} where it is lower; raise it"
                )

    def server_command(self, model: Path | str, port: int | str) -> list[str]:
        """What starts a server of another make: the words that were given, and what a run needs behind them.

        Args:
            model: Path of the directory that it loads.
            port: To listen on, of loopback.
        """
        external, inference, adapter = self.inference.external, self.inference, self.model.lora
        assert external is not None  # or there is none to start
        words = [str(model) if word == "{model}" else word for word in external.launch]
        words += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", external.model]
        words += ["--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"]
        words += ["--dtype", self.model.dtype, "--max-model-len", str(inference.max_seq_len)]
        words += ["--max-num-seqs", str(inference.max_slots)]
        if external.colocate:
            words.append("--enable-sleep-mode")
        if external.weights == "lora" and adapter is not None:
            rank = next((rank for rank in VLLM_RANKS if rank >= adapter.rank), adapter.rank)
            words += ["--enable-lora", "--max-loras", str(self.adapters_kept), "--max-lora-rank", str(rank)]
        return words

    @property
    def adapters_kept(self) -> int:
        """Versions that a server has beside one another: those that may be asked for, the next, and one to spare."""
        return self.replay.staleness_budget + 2

    def going_on(self, checkpoint: Path | None) -> Self:
        """The same with the policy that a checkpoint of the run holds; what the run began with may be gone.

        Args:
            checkpoint: ``checkpoints/step-<n>``; None: the run has none yet.
        """
        if checkpoint is None:
            return self
        model = self.model.policy(checkpoint / "model")
        base = self.model.base_now if is_adapter(checkpoint / "model") else None
        return self.model_copy(update={"model": model.model_copy(update={"base": base})})

    def check_trains(self) -> None:
        """Refuses servers of which nothing can be trained.

        Raises:
            ConfigError: their weights stay as they are.
        """
        external = self.inference.external
        if external is not None and external.weights == "none":
            raise ConfigError(
                f"inference.engine is {self.inference.engine} and inference.external.weights none: these servers' "
                "weights stay as they are, so that nothing trained would ever answer; set weights to directory or "
                "lora with engine: vllm, or use penstock generate with a server's URL, which trains nothing"
            )

    def _check_offline(self) -> None:
        """What stored rollouts leave without effect."""
        replay, learner = self.replay, self.learner
        if replay.from_rollouts is None:
            return
        why = "replay.from_rollouts has the rollouts: nothing is generated, and batches follow epochs over them"
        if self.runtime != "local":
            raise ValueError(f"runtime is {self.runtime}, but {why}, which one process does; leave it out")
        if learner.warm_start is not None:
            raise ValueError(f"learner.warm_start is set, but {why}, so that no environment is asked; set it to null")
        refuse_idle(replay, ("max_samples", "batch_makers"), why, at="replay.")
        of_age = ["tolerances", "max_rollout_timestamp_delay", "straggler_timeout_s", "max_failed_groups_per_batch"]
        if self.asynchronous:  # else the budget is 0 by that name
            of_age += ["staleness_budget", "max_rollout_step_delay"]
        why_none = "what replay.from_rollouts has is of no age, and nothing is waited for"
        refuse_idle(replay, of_age, why_none, at="replay.")
        refuse_idle(replay.batch_maker, ("name",), why, at="replay.batch_maker.")
        refuse_idle(self.overseer, ("keep_best",), "a run on stored rollouts evaluates nothing", at="overseer.")

    def _check_replay(self) -> None:
        replay, lessons = self.replay, self.curriculum.lessons
        unknown = sorted(replay.tolerances.keys() - lessons.keys())
        if unknown:
            raise ValueError(
                f"replay.tolerances names {', '.join(unknown)}: no such lesson; known are {', '.join(lessons)}"
            )
        if (replay.store.url or "").startswith("memory:"):
            raise ValueError(
                f"replay.store.url is {replay.store.url}: this process's memory ends with the run, and its rollouts "
                "with it; give a path or another URL"
            )
        refuse_idle(replay, ("max_waiting", "max_waiting_s"), "tickets limit what waits", at="replay.")
        refuse_idle(replay.store, ("observations",), "only simulators show any", at="replay.store.")
        if replay.synchronous:
            why = "at staleness zero nothing is used again, or batches would depend on timing"
            refuse_idle(replay, ("max_samples",), why, at="replay.")
        largest = max(lesson.sampling_params.n_generations_per_prompt for lesson in lessons.values())
        if replay.from_rollouts is None and replay.capacity < replay.groups_per_batch * largest:
            raise ValueError(
                f"replay.capacity is {replay.capacity}, below one batch of replay.groups_per_batch = "
                f"{replay.groups_per_batch} groups of {largest} rollouts: raise it"
            )
        advantage = self.learner.loss.advantage
        if advantage in _LEARNS_FROM_EQUAL and replay.batch_maker.filter_zero_variance:
            groups, why = _LEARNS_FROM_EQUAL[advantage]
            raise ValueError(
                f"replay.batch_maker.filter_zero_variance is true: it leaves out groups whose {groups}, but "
                f"learner.loss.advantage: {advantage} {why}; set it to false"
            )
        if self.learner.kl.in_reward:
            self._check_kl_in_reward()
        loss = self.learner.loss
        for key, maker in self._batch_makers.items():
            if maker.name == "grpo" and (loss.module is not None or loss.advantage != "rloo"):
                asked = f"{loss.advantage!r} is" if loss.module is None else "those of learner.loss.module are"
                raise ValueError(
                    f"{key}.name is grpo: the grpo batch maker measures advantages by rloo, but {asked} asked for: set "
                    "learner.loss.advantage: rloo, or choose another batch maker"
                )
            if maker.name == "recency" and maker.unit == "rollout" and loss.advantage == "reinforce_pp_baseline":
                raise ValueError(
                    f"{key}.unit is rollout, but learner.loss.advantage reinforce_pp_baseline has its baseline of the "
                    "group's rollouts in the batch: set unit: group, or another advantage"
                )
        if self.learner.minibatches > replay.groups_per_batch:
            raise ValueError(
                f"learner.minibatches is {self.learner.minibatches}, more than replay.groups_per_batch = "
                f"{replay.groups_per_batch}: a minibatch has at least one whole group; lower it"
            )

    def _check_kl_in_reward(self) -> None:
        """It changes rewards once a batch is drawn: advantages must be of what is in the batch."""
        for key, maker in self._batch_makers.items():
            whole = maker.name == "deadline" or (maker.name == "recency" and maker.unit == "group")
            if not whole:
                unit = f"name is {maker.name}" + (f", {key}.unit {maker.unit}" if maker.name == "recency" else "")
                raise ValueError(
                    f"{key}.{unit}: its advantages are computed before a batch is drawn, and learner.kl.place: reward "
                    "lowers rewards after that; take deadline, or recency with unit: group, or learner.kl.place: loss"
                )
            if maker.filter_zero_variance:
                raise ValueError(
                    f"{key}.filter_zero_variance is true: it leaves out groups whose rewards are equal, but with "
                    "learner.kl.place: reward they differ all the same; set it to false"
                )

    @property
    def _batch_makers(self) -> dict[str, BatchMakerConfig]:
        """All that there are, by their keys."""
        own = {f"replay.batch_makers.{name}": maker for name, maker in self.replay.batch_makers.items()}
        return {"replay.batch_maker": self.replay.batch_maker, **own}

    def dump(self) -> dict[str, Any]:
        """Plain values under the names that YAML uses."""
        return self.model_dump(mode="json", by_alias=True)

    @property
    def concurrency(self) -> int:
        """Groups in generation at once: as many as may be outstanding."""
        return self.replay.groups_per_batch * (self.replay.staleness_budget + 1)


def _found(values: Any, *keys: str) -> Any:
    """What stands there of what may be plain values or validated ones; None where nothing does."""
    for key in keys:
        values = values.get(key) if isinstance(values, dict) else getattr(values, key, None)
    return values


def _given(section: Any) -> Any:
    """What was said of a section, as plain values."""
    return section.model_dump(exclude_unset=True) if isinstance(section, BaseModel) else section or {}


def rollout_workers(config: RunConfig) -> int:
    """How many a run begins with."""
    workers = config.rollout.workers
    return workers if isinstance(workers, int) else sum(workers.values())


def lesson_of_worker(config: RunConfig, index: int) -> str | None:
    """The one lesson of a worker, where each lesson has workers of its own; None for all lessons."""
    workers = config.rollout.workers
    if isinstance(workers, int):
        return None
    owners = [lesson_id for lesson_id, count in workers.items() for _ in range(count)]
    return owners[index] if index < len(owners) else None


def _check_trainable(lesson_id: str, sampling: SamplingParams, learner: LearnerConfig) -> None:
    """The sampled distribution must be the one that the learner differentiates, unless the config says otherwise."""
    where = f"curriculum.lessons.{lesson_id}.sampling_params"
    if sampling.temperature == 0:
        raise ValueError(
            f"{where}.temperature is 0: greedy answers have no probability to learn from; set a positive one "
            "(curriculum.temperature is that of evaluations)"
        )
    for name, value in sampling.truncation.items() if not learner.allow_truncated_sampling else ():
        raise ValueError(
            f"{where}.{name} is {value}: its samples come from another distribution than the one that is "
            "differentiated; leave it out, or set learner.allow_truncated_sampling: true"
        )
