"""An inference server of another make under a run's control: started or found, given weights, proven, and healed.

A version reaches the server as a directory that it loads, or as an adapter beside the others, and is announced only
once it is proven: while the server is paused, its checksums are compared with the bytes that were written; of an
adapter, that its answers are not the base's. The learner rescores what was sampled, at every update, as of any engine.
A server that refuses, dies, hangs, forgets its version or holds other weights leaves routing at once, and is started
anew, or asked again until it is as it must be; nothing is announced meanwhile. Too many failures in a row end it.

Before its first version a server is tried: it loads weights whose output matrix has equal rows, after which every token
must be equally probable. Where it does not compute with an output matrix that it says it loaded, each version is
started anew. Not covered: several servers, which have an `ExternalEngine` each; what crosses cards without a file.
"""

import os
import shutil
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from penstock.inference import Server
from penstock.inference.checksums import ChecksumProof, served_checksums
from penstock.inference.codec import InterruptedAnswer, MalformedAnswer
from penstock.inference.external import adapter_name, dialect_of, key_of, label_of
from penstock.inference.server_control import ServerControl, VllmControl, control_of
from penstock.model.arrays import shapes_of
from penstock.model.language import Decoder, named_arrays, save_decoder, with_named_arrays
from penstock.model.language.adapter import base_digest
from penstock.model.language.config import ADAPTER
from penstock.model.language.decoder import decoder_digests
from penstock.model.language.hugging_face import as_tensors, save_adapter, with_merged
from penstock.overseer.component import POLL_S, Settings
from penstock.overseer.launch.process import GuardedProcess
from penstock.overseer.supervisor.messages import Identity
from penstock.text import Tokenizer
from penstock.types import (
    Completion,
    ConfigError,
    Decoding,
    GenerationCall,
    MismatchError,
    PenstockError,
    RunFailed,
    Stopped,
    UnreachableError,
    WeightsError,
    WeightVersion,
)

WATCH_S = 2.0
"""So often a server that serves is asked for a token and its version."""

END_S = 10.0
ROOM = 2.2
"""Versions that shared memory must have room for: two, and what else is written."""

SHARED_MEMORY = Path("/dev/shm")
KEPT = 2
"""Directories of versions that stay: a server may still read the one before."""

EVEN = 1e-2
"""Nats by which the log-probability of a token may differ from that of all others, where rows are equal."""


@dataclass(frozen=True, slots=True)
class _Weights:
    """A version as the server is to have it.

    Attributes:
        version: What it is to be called.
        directory: That is loaded.
        checksums: Of its tensors, as the server has them; none of an adapter.
        moved: Whether an adapter changes anything.
    """

    version: WeightVersion
    directory: Path
    checksums: Mapping[str, str]
    moved: bool = True


class ExternalEngine:
    """One server. Thread-safe.

    Args:
        identity: Whose engine it is; answers carry its name.
        settings: The run, with its config, directory and token.
        decoder: The policy, of which the parameters are kept that do not travel.
        tokenizer: Goes with every version.
        event: Something for events.jsonl.

    Attributes:
        on_change: Called with what clients may ask from now on, if anything.
        doing: What it does, in words.
        progress: Grows with each step of its way to a version.

    Raises:
        ConfigError: there is no URL for this one, or its key cannot be read.
    """

    def __init__(
        self,
        identity: Identity,
        settings: Settings,
        decoder: Decoder,
        tokenizer: Tokenizer,
        event: Callable[..., None],
    ) -> None:
        config = settings.config.inference.external
        assert config is not None  # or there is an engine in this process
        if config.urls and identity.index >= len(config.urls):
            raise ConfigError(f"inference.external.urls has {len(config.urls)} servers: there is none for {identity}")
        self.identity = identity
        self.on_change: Callable[[Server | None], None] = lambda server: None
        self._settings, self._run, self._config = settings, settings.config, config
        self._tokenizer, self._event = tokenizer, event
        self._shape = shapes_of(decoder)
        self._arrays: dict[str, Any] = {name: np.asarray(array) for name, array in named_arrays(decoder).items()}
        self._key = key_of(config, settings.token)
        self._place = _place(settings, identity.name, sum(array.nbytes for array in self._arrays.values()))
        self._base_digest = ""
        self._turn = threading.RLock()
        self._stopping = threading.Event()
        self._process: GuardedProcess | None = None
        self._control: ServerControl | None = None
        self._url = config.urls[identity.index] if config.urls else ""
        self._proof = ChecksumProof()
        self._adapters: list[WeightVersion] = []
        self._base_answer: list[tuple[int, float]] = []  # of the server's base, which no version changes
        self._relaunches = self._has_started = False
        self._tried = self._doubtful = False  # doubtful: a load began, and did not end well
        self._wanted: _Weights | None = None
        self._served: WeightVersion | None = None
        self._failures: deque[float] = deque()
        self._watched_at = 0.0
        self._asleep_since: float | None = None
        self._stats: dict[str, float] = {}
        self._busy_s = 0.0
        self.doing = "waiting for the first weights"
        self.progress = 0.0

    # --- what it serves ------------------------------------------------------------------------------------------

    @property
    def server(self) -> Server | None:
        """The server as clients know it; None while nothing may be asked of it."""
        version = self._served
        if version is None:
            return None
        return Server(self.identity.name, self.identity.incarnation, self._url, version=version)

    def set_weights(self, version: WeightVersion, arrays: Mapping[str, Any]) -> dict[str, str]:
        """Returns when the server serves a version, and that is proven.

        Args:
            version: Recorded for every token that it samples.
            arrays: By name; the decoder's own stay where none came.

        Returns:
            The digests of all arrays.

        Raises:
            RunFailed: it failed too often in a row.
            ConfigError: it lacks what a run needs, or was launched and never answered.
            Stopped: the engine was stopped.
        """
        with self._turn:
            for name, array in arrays.items():
                own = self._arrays.get(name, array)
                self._arrays[name] = np.asarray(array).astype(own.dtype, copy=False)
            decoder = with_named_arrays(self._shape, self._arrays)
            self._wanted = self._written(version, decoder)
            self._serve()
            self._clear(version)
            return decoder_digests(self._arrays)

    def watch(self) -> None:
        """Asks the server for a token and its version, now and then; one that does not serve any more is healed.

        Raises:
            RunFailed: it failed too often in a row.
            Stopped: the engine was stopped.
        """
        if self._served is None or time.monotonic() - self._watched_at < WATCH_S:
            return
        if self._asleep_since is not None:
            if time.monotonic() - self._asleep_since > self._run.overseer.no_progress_s:
                self.wake()  # whoever sent it to sleep is gone
            return
        if not self._turn.acquire(blocking=False):
            return  # it is being given weights, by which it is asked enough
        try:
            before, self._watched_at = self._watched_at, time.monotonic()
            self._or_heal(lambda: self._look(self._watched_at - before))
        finally:
            self._turn.release()

    def sleep(self) -> None:
        """Returns when it has given its memory on the card away, until `wake` or the next version; raises as `watch`.

        Requests wait meanwhile. A server that does not serve has nothing to give.
        """
        with self._turn:
            if self._served is not None and self._asleep_since is None:
                self._or_heal(self._fall_asleep)

    def wake(self) -> None:
        """It answers again, if it slept; raises as `watch`."""
        with self._turn:
            self._or_heal(self._wake)

    def _or_heal(self, step: Callable[[], object]) -> None:
        try:
            step()
        except (UnreachableError, WeightsError, MismatchError) as failure:
            self._leave(failure)
            self._serve()

    def _fall_asleep(self) -> None:
        assert isinstance(self._control, VllmControl)  # `colocate` is refused of others
        self._asleep_since, self.doing = time.monotonic(), "asleep while the learner updates"
        self._control.sleep()
        self._stats["inference/sleep_s"] = time.monotonic() - self._asleep_since

    def _wake(self) -> None:
        if self._asleep_since is not None and isinstance(self._control, VllmControl):
            started = time.monotonic()
            self._control.wake()
            self._asleep_since, self.doing, self._watched_at = None, "serving", time.monotonic()
            self._stats["inference/wake_s"] = self._watched_at - started

    def canary(
        self, version: WeightVersion, prompts: Sequence[np.ndarray], max_tokens: int, timeout_s: float
    ) -> list[Completion]:
        """Answers prompts with that version at temperature 1, for the learner; none where it does not in time."""
        limit = time.monotonic() + timeout_s
        while self._served != version:
            if time.monotonic() >= limit or self._stopping.wait(0.05):
                return []
        room = self._run.inference.max_seq_len - max_tokens
        cut = [np.ascontiguousarray(prompt[-max(room, 1) :], np.int32) for prompt in prompts]
        try:
            return self._sampled(version, cut, max_tokens, max(0.1, limit - time.monotonic()))
        except (UnreachableError, WeightsError):
            return []

    @property
    def busy_s(self) -> float:
        """Seconds in which it had requests, as far as was seen."""
        return self._busy_s

    def stats(self) -> dict[str, float]:
        """Numbers for the metrics log, named ``inference/…``."""
        return dict(self._stats)

    def stop(self, timeout_s: float) -> None:
        """Ends a server that was launched, and what was written for it."""
        self._stopping.set()
        self._announce(None)
        self._end(timeout_s)
        shutil.rmtree(self._place, ignore_errors=True)
        with suppress(OSError):  # another server's versions are there
            self._place.parent.rmdir()

    # --- giving it weights ---------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Until the wanted version is served."""
        assert self._wanted is not None
        while True:
            if self._stopping.is_set():
                raise Stopped("the engine was stopped")
            try:
                self._bring(self._wanted)
                break
            except (UnreachableError, WeightsError, MismatchError) as failure:
                self._leave(failure)
                self._stopping.wait(self._run.overseer.backoff_s)
        self._failures.clear()
        self.doing, self._watched_at = "serving", time.monotonic()
        self._announce(self._wanted.version)

    def _leave(self, failure: PenstockError) -> None:
        """It leaves routing; what was launched ends.

        Raises:
            RunFailed: that came too often.
            ConfigError: it was launched, and never answered: it would not the next time.
        """
        if self._stopping.is_set():  # which closes connections
            raise Stopped("the engine was stopped") from failure
        self._announce(None)
        limits, now = self._run.overseer, time.monotonic()
        self._failures.append(now)
        while now - self._failures[0] > limits.restart_window_s:
            self._failures.popleft()
        words = str(failure)
        self.doing = f"healing its server: {words}"
        self._event("external_engine_failed", server=str(self.identity), reason=words)
        self._end(END_S)
        if self._config.launch and not self._has_started:
            raise ConfigError(f"inference.external.launch: {words}") from failure
        if len(self._failures) > limits.max_restarts:
            raise RunFailed(
                f"the server of {self.identity} failed {len(self._failures)} times within "
                f"overseer.restart_window_s = {limits.restart_window_s:g}: {words}"
            ) from failure

    def _bring(self, weights: _Weights) -> None:
        fresh = self._control is None
        if fresh or self._relaunches:
            self._open(weights)
        self._wake()
        assert self._control is not None
        if self._config.weights == "lora":
            assert isinstance(self._control, VllmControl)  # adapters are refused of others
            self._load_adapter(self._control, weights)
            return
        if self._config.launch and (fresh or self._relaunches):
            self._prove(self._control, weights)
            self._control.name(weights.version)
            if self._tried:
                return
        if self._tried or self._try(self._control, weights):
            self._load(self._control, weights)

    def _open(self, weights: _Weights) -> ServerControl:
        """A connection to a server that can do what it must; one that is launched is started anew."""
        self._announce(None)
        self._end(END_S)
        if self._config.launch:
            self._launch(weights)
        self.doing = f"asking what {self._url} can do"
        change_s = self._run.weights.fetch_timeout_s
        control = control_of(self._url, self._key, self._run.inference, change_s)
        try:
            if not self._config.launch and (why := control.unhealthy()):
                keys = "inference.external.urls" + (" or inference.tls_ca" if self._url.startswith("https:") else "")
                raise UnreachableError(f"{self._url} is not healthy ({why}): start it, or change {keys}")
            if self._doubtful:
                self._have_it_load(control, weights.directory)
            control.disown()
            self._event("external_engine", server=str(self.identity), url=self._url, version=control.check())
        except BaseException:
            control.close()
            raise
        self._control, self._base_answer = control, []
        if isinstance(control, VllmControl) and self._config.weights == "lora":
            control.forget_adapters()
            self._adapters = []
        return control

    def _load(self, control: ServerControl, weights: _Weights) -> None:
        self.doing = f"loading version {weights.version.step}"
        self.progress += 1.0
        control.pause()
        self._have_it_load(control, weights.directory)
        self._prove(control, weights)
        control.name(weights.version)
        control.resume()

    def _have_it_load(self, control: ServerControl, directory: Path) -> None:
        """After a load that failed vLLM has parameters without values and dies of a request, so that it loads first."""
        self._doubtful = True
        control.load(directory)
        self._doubtful = False

    def _prove(self, control: ServerControl, weights: _Weights) -> None:
        self._stats["inference/proven_bytewise"] = self._proof.judge(
            weights.version, weights.checksums, control.checksums()
        )

    def _load_adapter(self, control: VllmControl, weights: _Weights) -> None:
        self.doing = f"loading the adapter of version {weights.version.step}"
        if weights.version in self._adapters:  # offered anew, with other weights
            control.unload_adapter(weights.version)
            self._adapters.remove(weights.version)
        control.load_adapter(weights.version, weights.directory)
        self._adapters.append(weights.version)
        if weights.moved:
            self._base_answer = self._base_answer or self._noted(control, self._config.model, 1)
            if self._base_answer == self._noted(control, adapter_name(weights.version), 1):
                raise MismatchError(
                    f"{self._url} loaded the adapter of version {weights.version.step}, and answers as its base does: "
                    "the adapter is not applied"
                )
        for old in self._adapters[: -(self._run.adapters_kept)]:
            control.unload_adapter(old)
            self._adapters.remove(old)

    def _try(self, control: ServerControl, weights: _Weights) -> bool:
        """Whether weights that are loaded are computed with, the output matrix included.

        If so, what it has afterwards are others than the version's. Else it was started anew with those.

        Raises:
            ConfigError: they are not, and the server cannot be started anew.
        """
        self.doing = "trying whether it computes with what it loads"
        arrays, config = self._arrays, self._shape.config
        row = np.broadcast_to(arrays["embedding"][:1], arrays["embedding"].shape)
        even = with_named_arrays(self._shape, arrays | {name: row for name in ("embedding", "head") if name in arrays})
        directory = self._place / "even"
        self._save(even, directory)
        control.pause()
        self._have_it_load(control, directory)
        control.resume()
        shutil.rmtree(directory, ignore_errors=True)
        logprobs = [logprob for _, logprob in self._noted(control, self._config.model, 4)]
        off = max(abs(logprob + np.log(config.vocab_size)) for logprob in logprobs)
        self._tried = True
        if off < EVEN:
            return True
        words = (
            f"{self._url} loaded an output matrix with equal rows, and its tokens are not equally probable (by up to "
            f"{off:.3g} nats): it computes with another than it loads"
        )
        if not self._config.launch:
            raise ConfigError(
                f"{words}; give inference.external.launch in place of urls, so that it is started anew for each version"
            )
        self._event("external_engine_relaunches", server=str(self.identity), reason=words)
        self._relaunches = True
        anew = self._open(weights)
        self._prove(anew, weights)
        anew.name(weights.version)
        return False

    # --- asking it -----------------------------------------------------------------------------------------------

    def _look(self, seconds: float) -> None:
        """Whether it serves what it is to."""
        control, wanted = self._control, self._wanted
        assert control is not None and wanted is not None
        if self._process is not None and not self._process.alive:
            raise UnreachableError(f"the server ended; it said at last: {self._process.last_words()}")
        hung_s = self._run.overseer.no_progress_s / 2
        self._sampled(wanted.version, [np.zeros(1, np.int32)], 1, hung_s)
        found = control.serves()
        if found != wanted.version:
            raise WeightsError(f"{self._url} serves {found}, and was given {wanted.version}: it was started anew")
        numbers = control.metrics()
        self._stats |= numbers
        self._busy_s += seconds if numbers.get("inference/running") else 0.0

    def _sampled(
        self, version: WeightVersion, prompts: Sequence[np.ndarray], max_tokens: int, timeout_s: float
    ) -> list[Completion]:
        """One answer to each prompt, as clients read it; none more once its queue is full.

        Raises:
            WeightsError: it cannot be read, or the server refused.
            UnreachableError: it does not answer in time.
        """
        limit, server = time.monotonic() + timeout_s, Server(self.identity.name, self.identity.incarnation, self._url)
        call = GenerationCall(prompts, 1, Decoding(max_output_tokens=max_tokens), [version.step] * len(prompts))
        dialect = dialect_of(self._run.inference)
        answers: list[Completion] = []
        for request in dialect.requests(call, self._tokenizer, self._config.model):
            bound, control = request.bound_to(replace(server, version=version)), self._control
            if bound is None or control is None:
                raise UnreachableError(f"{self.identity} has no server at the moment")
            content = control.generate(bound.body, max(0.1, limit - time.monotonic()))
            if content is None:
                break
            try:
                answers += bound.read(content)[0]
            except (InterruptedAnswer, MalformedAnswer) as error:
                raise WeightsError(f"{self._url}: {error}") from error
        return answers

    def _noted(self, control: ServerControl, model: str, answers: int) -> list[tuple[int, float]]:
        """Tokens and log-probabilities of a few answers, under whatever label; the same for the same weights."""
        found: list[tuple[int, float]] = []
        limit_s = self._run.weights.fetch_timeout_s
        for seed in range(answers):
            limit, prompt = time.monotonic() + limit_s, [seed % self._shape.config.vocab_size, 0]
            while (entries := control.noted(model, prompt, seed, 8, limit_s)) is None:
                if time.monotonic() > limit or self._stopping.wait(POLL_S):
                    raise UnreachableError(f"the queue of {self._url} was full for {limit_s:g} s")
            found += entries
        return found

    def _announce(self, version: WeightVersion | None) -> None:
        self._served = version
        self.on_change(self.server)

    # --- its process, and its files ------------------------------------------------------------------------------

    def _launch(self, weights: _Weights) -> None:
        lora = self._config.weights == "lora"
        directory = Path(self._shape.config.base) if lora else weights.directory
        with closing(socket.create_server(("127.0.0.1", 0))) as listener:
            port = listener.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        words = self._run.server_command(directory, port)
        log = self._settings.directory.path / "logs" / f"{self.identity.name}.server.out"
        environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_API_KEY": self._settings.token}
        environment |= {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"} if lora else {}
        self.doing = f"starting its server: {words[0]}"
        try:
            self._process = GuardedProcess(words, environment, log)
        except OSError as error:
            raise ConfigError(f"inference.external.launch cannot be started: {error}") from error
        with closing(control_of(self._url, self._key, self._run.inference, END_S)) as probe:
            self._await(probe, log)
        self._has_started = True

    def _await(self, probe: ServerControl, log: Path) -> None:
        assert self._process is not None
        limit_s = self._config.start_timeout_s
        limit = time.monotonic() + limit_s
        while probe.unhealthy():
            if self._stopping.wait(POLL_S):
                raise Stopped("the engine was stopped")
            self.progress += 1.0  # within a limit of its own
            if (ended := not self._process.alive) or time.monotonic() > limit:
                late = f"did not answer within inference.external.start_timeout_s = {limit_s:g}"
                what = "ended at its start" if ended else late
                raise UnreachableError(f"the server {what} ({log}): {self._process.last_words()}")

    def _end(self, timeout_s: float) -> None:
        if self._control is not None:
            asleep = self._process is None and self._asleep_since is not None  # another's, which we sent to sleep
            if asleep and isinstance(self._control, VllmControl):
                with suppress(UnreachableError, WeightsError):
                    self._control.wake()
            self._control.close()
            self._control = None
        self._asleep_since = None
        if self._process is not None:
            self._process.end(timeout_s)
            self._process, self._doubtful = None, False
            self._adapters, self._proof = [], ChecksumProof()

    def _written(self, version: WeightVersion, decoder: Decoder) -> _Weights:
        """The version's directory, written aside and renamed."""
        directory = self._place / f"policy-{label_of(version)}"
        if self._config.weights == "lora":
            if not self._base_digest:
                own = {name: each for name, each in self._arrays.items() if not name.startswith(ADAPTER)}
                self._base_digest = base_digest(own)
            self._aside(directory, lambda aside: save_adapter(decoder, aside, self._tokenizer, self._base_digest))
            moved = any(array.any() for name, array in self._arrays.items() if name.endswith(".b"))
            return _Weights(version, directory, {}, moved)
        whole = self._save(decoder, directory)
        return _Weights(version, directory, served_checksums(as_tensors(named_arrays(whole), whole.config)))

    def _save(self, decoder: Decoder, directory: Path) -> Decoder:
        """Merged, and with an output matrix of its own: a server may load only what it knows of by name."""
        whole = decoder if decoder.adapter is None else with_merged(decoder)
        if whole.config.tie_word_embeddings:
            arrays = named_arrays(whole)
            untied = whole.config.model_copy(update={"tie_word_embeddings": False})
            whole = Decoder.from_arrays(untied, arrays | {"head": arrays["embedding"]})
        self._aside(directory, lambda aside: save_decoder(whole, aside, self._tokenizer))
        return whole

    def _aside(self, directory: Path, write: Callable[[Path], object]) -> None:
        aside = directory.with_name(f".tmp-{directory.name}")
        shutil.rmtree(aside, ignore_errors=True)
        try:
            write(aside)
            shutil.rmtree(directory, ignore_errors=True)
            os.rename(aside, directory)
        except OSError as error:
            raise RunFailed(f"{directory} cannot be written: {error}; give inference.external.weights_dir") from error

    def _clear(self, version: WeightVersion) -> None:
        """Of the directories of versions the newest stay: an adapter's as long as it may be asked for."""
        kept = KEPT if self._config.weights == "directory" else self._run.adapters_kept
        there = sorted(self._place.glob("policy-*"), key=lambda path: path.stat().st_mtime)
        for old in [path for path in there if path.name != f"policy-{label_of(version)}"][: -(kept - 1) or None]:
            shutil.rmtree(old, ignore_errors=True)


def _place(settings: Settings, name: str, model_bytes: int) -> Path:
    """The folder of one server's versions; empty."""
    config, servers = settings.config.inference.external, settings.config.inference.servers
    assert config is not None  # or there is an engine in this process
    place = settings.directory.path.resolve() / "external" / name
    if config.weights_dir is not None:
        place = config.weights_dir.resolve() / settings.job / name
    elif SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > ROOM * model_bytes * servers:
        place = SHARED_MEMORY / f"penstock-{settings.job}" / name
    shutil.rmtree(place, ignore_errors=True)
    try:
        place.mkdir(parents=True, mode=0o700)
    except OSError as error:
        raise ConfigError(f"inference.external.weights_dir: {place} cannot be made: {error}") from error
    return place
