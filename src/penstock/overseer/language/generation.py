"""`penstock generate`: rollouts of a recipe's lessons, scored and written to a file, without training.

The very code that generates during training: a `RolloutManager` with an engine of its own, or over a server. Prompts,
sampling and rewards are the lesson's; the seed is the recipe's, so the same call gives the same rollouts.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from penstock.curriculum import Curriculum
from penstock.environments import Environment
from penstock.inference import AgentEndpoint, RemoteContext, ServerPool
from penstock.inference.external import dialect_of, key_of
from penstock.inference.routing import Server
from penstock.inference.server_control import control_of
from penstock.inference.server_pool import trusting
from penstock.inference.serving import model_directory
from penstock.model.language import load_policy
from penstock.overseer.config import RunConfig
from penstock.overseer.config_loading import load_config
from penstock.overseer.evaluation_report import LessonReport, chosen_of
from penstock.overseer.run import step_of
from penstock.rollout import RolloutManager
from penstock.rundir import table_from_records, write_parquet
from penstock.rundir.logs import to_json
from penstock.rundir.storage import check_place, write_atomically
from penstock.text import Tokenizer
from penstock.tracking import conversation_of
from penstock.types import ConfigError, Mode, RolloutBatch, RolloutRecord, UnreachableError, fold
from penstock.types.addresses import is_url

FORMATS = (".parquet", ".jsonl")
_ASK_S = 10.0


@dataclass(frozen=True, slots=True)
class GenerationReport:
    """What was generated.

    Attributes:
        lessons: Lesson id → its numbers, in the recipe's order.
        path: The file that holds the rollouts.
        seconds: Wall seconds of generation and scoring, the engine's compilation included.
    """

    lessons: dict[str, LessonReport]
    path: Path
    seconds: float

    def __str__(self) -> str:
        lines = [
            f"{lesson.lesson_id}: {lesson.rollouts} rollouts of {lesson.prompts} prompts, mean reward "
            f"{lesson.reward_mean.value:.3f}, successes {lesson.success_rate.value:.0%}, "
            f"{lesson.response_tokens:.1f} tokens, {lesson.truncated_fraction:.0%} cut at the limit"
            for lesson in self.lessons.values()
        ]
        return "\n".join([*lines, f"{self.path} ({self.seconds:.1f} s)"])


MOST_PROMPTS = 1_000_000
"""Of a lesson at a time."""


def generate(
    source: Path | str | None,
    config: RunConfig | str | Path,
    path: Path | str,
    lessons: Sequence[str] | None = None,
    n: int | None = None,
    mode: Mode = "train",
    token: str | None = None,
) -> GenerationReport:
    """Generates rollouts of a recipe's lessons and writes them.

    Args:
        source: A run's ``checkpoints/step-<n>``, a Hugging Face directory, or the URL of a `penstock serve`, or of a
            server of the recipe's ``inference.engine``, with the recipe's tokenizer, whatever ``external.urls`` says;
            a ``/v1`` behind it is left out. None takes the servers of ``external.urls`` where their ``weights`` are
            `none`, else the policy that the recipe's ``model`` says.
        config: The recipe, its name or its path.
        path: A Parquet file, with the columns of a run's rollouts, or a JSONL file with a conversation per line.
        lessons: Which lessons; all by default.
        n: Prompts per lesson; by default ``sampling_params.n_prompts`` of each.
        mode: Which of the environment's disjoint example sets.
        token: What the server asks for; None: what the recipe's ``external.api_key_file`` says.

    Raises:
        ConfigError: an unknown lesson, no prompts, a recipe of a control policy, or a path of another kind or that
            cannot be written.
        CheckpointError: the source is no checkpoint.
        EnvironmentFailure: an environment broke its contract.
        UnreachableError: nothing answers at the URL.
    """
    loaded = config if isinstance(config, RunConfig) else load_config(config)
    if not isinstance(loaded, RunConfig):
        raise ConfigError(f"config {config} trains a control policy: what it does is evaluated, and not generated")
    config, path = loaded, Path(path)
    check_count(n)
    known, chosen = config.curriculum.lessons, chosen_of(lessons, config.curriculum.lessons, "lesson")
    if path.suffix not in FORMATS:
        raise ConfigError(f"--out {path} ends in {path.suffix!r}: it must be one of {', '.join(FORMATS)}")
    check_place(path, "--out")
    started = time.perf_counter()
    batches: dict[str, RolloutBatch] = {}
    with manager_of(source, config, token) as manager:
        for lesson_id in chosen:
            sampling, seed = known[lesson_id].sampling_params, fold(config.seed, "generate", lesson_id)
            prompts = sampling.n_prompts if n is None else n
            batches[lesson_id], _ = manager.sample_batch(
                lesson_id, prompts, sampling.n_generations_per_prompt, mode, seed, version_of(source), "generate"
            )
    seconds = time.perf_counter() - started
    _write(path, list(batches.values()), mode)
    reports = {name: LessonReport.of(name, batch, known[name].success_threshold) for name, batch in batches.items()}
    return GenerationReport(reports, path, seconds)


def check_count(n: int | None) -> None:
    """Whether so many prompts can be asked for; None leaves it to the recipe.

    Raises:
        ConfigError: it is less than one, or more than fit into memory, where all are until the last is answered.
    """
    if n is not None and n < 1:
        raise ConfigError(f"n is {n}: give at least 1 prompt per lesson, or leave it out for what the recipe says")
    if n is not None and n > MOST_PROMPTS:
        raise ConfigError(
            f"n is {n}: at most {MOST_PROMPTS:,} prompts per lesson are held in memory at a time; ask for fewer, in "
            "several files where it must be more"
        )


def version_of(source: Path | str | None) -> int:
    """The version that a run's checkpoint holds; 0 for any other model."""
    path = None if source is None else Path(source)
    return 0 if path is None or not (path / "state.json").is_file() else step_of(path)


@contextmanager
def manager_of(
    source: Path | str | None,
    config: RunConfig,
    token: str | None = None,
    environments: Mapping[str, Environment] | None = None,
) -> Iterator[RolloutManager]:
    """A manager over a server, or with an engine of its own: of a checkpoint, or of the policy that the recipe says.

    Args:
        source: As of `generate`.
        config: Of lessons and sampling, and of how a server is asked.
        token: What the server asks for.
        environments: By lesson; they stay open.

    Raises:
        CheckpointError: the source is no checkpoint.
        ConfigError: the server is of another make, has no such model, or lacks what is needed.
        UnreachableError: nothing answers at the URL.
    """
    with ExitStack() as held:
        if urls := _urls_of(source, config):
            context = held.enter_context(_served(urls, config, token))
            agents, curriculum = AgentEndpoint.of(config.inference, context.tokenizer), Curriculum(config.curriculum)
            manager = RolloutManager(curriculum, context, config.seed, environments=environments, agents=agents)
        else:
            manager = _with_engine(source, config, environments or {})
        held.callback(manager.shutdown, close_environments=environments is None)
        yield manager


def _urls_of(source: Path | str | None, config: RunConfig) -> list[str]:
    """The servers that answer; none where an engine of our own does."""
    if is_url(source):
        return [str(source).rstrip("/").removesuffix("/v1")]
    external = config.inference.external
    return list(external.urls) if source is None and external is not None and external.weights == "none" else []


def _with_engine(
    source: Path | str | None, config: RunConfig, environments: Mapping[str, Environment]
) -> RolloutManager:
    policy, limits = config.model, config.overseer
    if source is not None:
        policy = policy.policy(model_directory(str(source)))
    tokenizer = Tokenizer.load(policy.tokenizer_path, policy.chat_template_kwargs)
    return RolloutManager.from_configs(
        environments,
        config.curriculum,
        config.inference,
        tokenizer,
        load_policy(policy, config.seed, tokenizer),
        config.seed,
        weight_step=version_of(source),
        start_timeout_s=limits.no_progress_s,
        stop_timeout_s=limits.stop_timeout_s,
    )


@contextmanager
def _served(urls: Sequence[str], config: RunConfig, token: str | None) -> Iterator[RemoteContext]:
    """A context over servers that are no run's: `penstock serve`, or the recipe's ``inference.engine``."""
    authority = None if config.inference.tls_ca is None else str(config.inference.tls_ca)
    external = config.inference.external
    token = token or key_of(external, "") or None
    wait_s = config.inference.request_timeout_s
    pool = ServerPool(token, request_timeout_s=wait_s, certificate_authority=authority)
    try:
        for url in urls:
            pool.model_name = _model_of(url, _models_of(url, token, authority), config)
        if external is not None:
            fixed = config.inference.model_copy(update={"external": external.model_copy(update={"weights": "none"})})
            pool.dialect = dialect_of(fixed)
            for url in urls if config.inference.engine != "openai" else ():
                with closing(control_of(url, token, fixed, wait_s)) as control:
                    control.check()
        pool.set_servers([Server("served", number, url) for number, url in enumerate(urls)])
        yield RemoteContext(pool, Tokenizer.load(config.model.tokenizer_path, config.model.chat_template_kwargs))
    finally:
        pool.close()


def _model_of(url: str, models: Mapping[str, str], config: RunConfig) -> str:
    """What a server is to be asked for, of the models that it has."""
    external = config.inference.external
    if external is not None and external.model not in models:
        found = ", ".join(map(repr, models))
        raise ConfigError(f"inference.external.model is {external.model!r}, and {url} has {found}: name one of them")
    if external is not None:
        return external.model
    name, maker = next(iter(models.items()))
    if maker != "penstock":
        raise ConfigError(
            f"inference.engine is builtin, and {url} is a server of another make (owned_by is {maker!r}): set "
            "inference.engine to vllm, sglang or openai, and inference.external={weights: none}"
        )
    return name


def _models_of(url: str, token: str | None, authority: str | None) -> dict[str, str]:
    """Who made a server's models, by their names; one at least."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    try:
        with httpx.Client(verify=trusting(authority), timeout=_ASK_S, headers=headers, trust_env=False) as client:
            answer = client.get(f"{url}/v1/models")
            answer.raise_for_status()
            makers = {str(card["id"]): str(card.get("owned_by")) for card in answer.json()["data"]}
        if not makers:
            raise ValueError("there is none")
        return makers
    except httpx.HTTPStatusError as error:
        raise ConfigError(
            f"{url} answered {error.response.status_code} to /v1/models: give the URL of a server as "
            "http://HOST:PORT, and its token in PENSTOCK_TOKEN or inference.external.api_key_file"
        ) from error
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise ConfigError(f"{url} cannot be asked ({error}): give the URL of a server as http://HOST:PORT") from error
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"{url}/v1/models is no list of models: give the URL of a server as http://HOST:PORT"
        ) from error
    except (httpx.HTTPError, OSError) as error:
        raise UnreachableError(f"{url}/v1/models does not answer: {error}") from error


def _write(path: Path, batches: Sequence[RolloutBatch], mode: Mode) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        rollouts = [rollout for batch in batches for rollout in batch.rollouts()]
        write_atomically(path, "".join(f"{to_json(conversation_of(rollout, mode))}\n" for rollout in rollouts))
        return
    groups = [group for batch in batches for group in batch.groups]
    records = [RolloutRecord(each, group.group_id, group_key=group.key) for group in groups for each in group.rollouts]
    write_parquet(path, table_from_records(records))
