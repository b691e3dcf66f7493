"""Configuration of the engine and of the server over it. Imports neither JAX nor transformers.

Everything that fixes an array's shape is decided here, before the first request, so that the engine compiles
its programs once. Not covered: what to sample, which each request says for itself (`penstock.types.Decoding`).
"""

import re
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from penstock.model.language.config import LoadingConfig, ModelConfig
from penstock.types import ConfigError
from penstock.types.addresses import is_loopback
from penstock.types.idle_keys import refuse_idle

SMALLEST_WINDOW = 128
"""Below this, a shorter attention window saves nothing that a compilation would not cost."""

SHORTEST_PREFILL = 16

MOST_SMALL = 2
"""Small pieces that a chunk's rest goes in: one of 32 tokens takes 0.35 to 0.45 times as long as one of 128 (CPUs)."""

SMALL_PREFILL = 128
"""Padded tokens: fewer, for a prompt that comes alone, save less than another program costs to compile."""


_SERVER_URL = re.compile(r"https?://(\[[0-9A-Fa-f:.]+\]|[^/?#@:\[\]\s]+)(:[0-9]{1,5})?")
LARGEST_PORT = 65535


class EngineConfig(BaseModel):
    """Shapes and limits of one inference engine.

    Attributes:
        section: Where a config has these keys; errors name them so.
        all_rows_at_first: Whether version 0 decodes all rows, whatever is live, as a run's does: so that what happens
            before its first update needs one program of decoding.
        always_truncates: Whether every program of decoding can leave tokens out (top-k and the like). A run's cannot,
            but for more that are compiled when a request asks first: few do, and these compile half as long again.
        max_slots: Responses that are generated at the same time.
        max_seq_len: Most tokens of a prompt and its response together.
        steps_per_dispatch: Most decode steps of one dispatch; arrivals, departures and new weights wait for at most
            this many tokens.
        prefill_rows: Most prompts in one prefill.
        prefill_tokens: Most padded tokens in one prefill, so that long prompts go in fewer rows.
        prefill_chunk: Tokens of a long prompt that are prefilled between two dispatches, so that others go on
            meanwhile (up to `prefill_tokens` where more responses wait for long prompts than go on, or none that goes
            on has a token yet); one that would be padded to at most twice as many is prefilled whole. On one CPU; other
            devices prefill every prompt whole. What is added to a prompt whose beginning is cached goes in as many at a
            time, or, at its end, in a quarter of them. Texts that are scored (`InferenceEngine.score`) go in halves of
            it everywhere: each of their tokens costs its scores, too.
        prefill_lengths: Lengths that prompts are padded to, ascending; None chooses powers of four up to half of the
            largest possible prompt, which is always added.
        decode_rows: Rows that a decode step may have, ascending: the fewest that hold all live responses. None chooses
            powers of eight, and half of `max_slots` (of 8 and more); `max_slots` is always added. Each costs a program
            per window. Other devices than one CPU always take `max_slots`.
        windows: Lengths that the cache grows through, ascending; None chooses powers of two from 128.
            `max_seq_len` is always added.
        max_stop_token_ids: Most stop tokens of one request.
        request_timeout_s: Longest wait of one blocking call of `EngineContext` for all its responses.
        model_parallel: Devices of this machine over which the model and its cache are split; None takes all of them.
            A divisor of the model's attention heads, key heads and MLP width.
        forgets: Whether nothing of what was generated before is shared with what an idle engine is asked next, so that
            one submission always comes out the same. Runs at staleness zero, of one worker and one server, and
            `RolloutManager.from_configs` have it in any case.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    section: ClassVar[str] = "inference"
    all_rows_at_first: ClassVar[bool] = False
    always_truncates: ClassVar[bool] = True

    max_slots: int = Field(default=64, gt=0, le=65536)
    max_seq_len: int = Field(default=1024, gt=1, le=2**24)
    steps_per_dispatch: int = Field(default=8, gt=0, le=65536)
    prefill_rows: int = Field(default=8, gt=0)
    prefill_tokens: int = Field(default=1024, gt=0)
    prefill_chunk: int = Field(default=128, gt=0)
    prefill_lengths: tuple[int, ...] | None = None
    decode_rows: tuple[int, ...] | None = None
    windows: tuple[int, ...] | None = None
    max_stop_token_ids: int = Field(default=8, gt=0, le=65536)
    request_timeout_s: float = Field(default=600.0, gt=0)
    model_parallel: int | None = Field(default=1, ge=1)
    forgets: bool = False

    @model_validator(mode="after")
    def _ascending(self) -> "EngineConfig":
        for name in ("prefill_lengths", "decode_rows", "windows"):
            numbers: tuple[int, ...] | None = getattr(self, name)
            if numbers is None:
                continue
            if not numbers or min(numbers) < 1 or list(numbers) != sorted(set(numbers)):
                raise ValueError(f"{name} is {list(numbers)}: give positive numbers in ascending order")
        return self

    @property
    def prefill_buckets(self) -> tuple[int, ...]:
        """Padded prompt lengths, ascending; the last takes the longest prompt that leaves room for a token.

        A prompt's last token is decoded, not prefilled, so that is two less than `max_seq_len`.
        """
        longest = max(self.max_seq_len - 2, 1)
        return _buckets(self.prefill_lengths, SHORTEST_PREFILL, 4, longest, longest // 2)

    def padded_length(self, prompt_tokens: int) -> int:
        """The length that a prompt's prefill is padded to; its last token is not prefilled."""
        return next(length for length in self.prefill_buckets if length >= prompt_tokens - 1)

    @property
    def window_buckets(self) -> tuple[int, ...]:
        """Cache lengths, ascending; the last is `max_seq_len`."""
        return _buckets(self.windows, SMALLEST_WINDOW, 2, self.max_seq_len, self.max_seq_len - 1)

    @property
    def longest_whole(self) -> int:
        """Where prompts go by chunks: those of a greater padded length do."""
        return 2 * self.prefill_chunk

    @property
    def chunk_buckets(self) -> tuple[int, ...]:
        """Padded lengths of what is added to a cached text, ascending; the last is `prefill_chunk`."""
        return tuple(sorted({max(1, self.prefill_chunk // 4), self.prefill_chunk}))

    def pieces(self, tokens: int) -> tuple[int, ...]:
        """The padded lengths in which so many tokens are added to a cached text."""
        small, chunk = self.chunk_buckets[0], self.prefill_chunk
        whole, rest = divmod(tokens, chunk)
        few = -(-rest // small)
        return (chunk,) * whole + ((chunk,) if few > MOST_SMALL else (small,) * few)

    @property
    def decode_buckets(self) -> tuple[int, ...]:
        """Rows of a decode step, ascending; the last is `max_slots`."""
        half = self.max_slots // 2 if self.max_slots >= 8 else 1
        return _buckets(self.decode_rows or _buckets(None, 1, 8, half, half - 1), 1, 8, self.max_slots, 0)

    def prefill_row_counts(self, length: int) -> tuple[int, ...]:
        """Rows that a prefill of that padded length may have: one, for a long prompt that comes alone, and the most."""
        most = max(1, min(self.prefill_rows, self.prefill_tokens // length))
        return (most,) if most == 1 or most * length <= SMALL_PREFILL else (1, most)


class ExternalConfig(BaseModel):
    """Inference servers of another make: which they are, and how they get weights.

    Attributes:
        urls: Where they listen, one for each of `inference.servers`. With `weights: none` `penstock generate` asks
            these where it is given no SOURCE; they may be left out where `generate` and `eval` are given a URL.
        launch: Instead of `urls` the command that starts one, such as ``[/opt/vllm/bin/vllm, serve, "{model}"]``, in
            its own virtual environment. In place of ``{model}`` stands the directory that it loads; what Penstock needs
            of address, name, lengths and routes is added behind.
        model: What the servers call their model; one that is launched is told so.
        api_key_file: File with the key that they ask for; None: none. One that is launched has a key of its own. For
            `penstock generate` and `eval` a key in ``PENSTOCK_TOKEN`` goes before it.
        weights: `directory`: each version is written as a Hugging Face directory, which the servers load; `lora`: each
            as an adapter with a name of its own, which requests name, so that nothing pauses; `none`: they stay as they
            are, for `penstock eval` and `generate`.
        weights_dir: Folder that this run and the servers see by the same path; None takes shared memory where two
            versions fit with some room, else the run directory.
        pause: What becomes of requests that run while weights are loaded: they are kept, waited for, or aborted and
            asked again.
        kv: Whether requests that are kept compute their cache anew under the new weights, or go on with what they have.
        colocate: Whether the servers share the learner's card: they sleep, without weights and cache on it, while an
            update is computed. Requests wait meanwhile, and those that run compute their cache anew.
        start_timeout_s: Longest time that a server that is launched takes until it answers.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)

    urls: tuple[str, ...] = ()
    launch: tuple[str, ...] = ()
    model: str = Field(default="policy", min_length=1)
    api_key_file: Path | None = None
    weights: Literal["directory", "lora", "none"] = "directory"
    weights_dir: Path | None = None
    pause: Literal["keep", "wait", "abort"] = "keep"
    kv: Literal["recompute", "keep"] = "recompute"
    colocate: bool = False
    start_timeout_s: float = Field(default=900.0, gt=0)

    @model_validator(mode="after")
    def _one_place(self) -> "ExternalConfig":
        if bool(self.urls) == bool(self.launch) and (self.urls or self.weights != "none"):
            raise ValueError(
                "give urls, where servers listen, or launch, the command that starts one: exactly one, or with weights "
                "none neither"
            )
        for url in self.urls:
            parts = _SERVER_URL.fullmatch(url)
            if parts is None or int((parts[2] or ":1")[1:]) not in range(1, LARGEST_PORT + 1):
                raise ValueError(f"urls holds {url!r}: give it as http://HOST:PORT, without a path or slash behind")
            if self.urls.count(url) > 1:
                raise ValueError(f"urls holds {url!r} twice: a server has one version at a time; name each once")
        if self.launch and "{model}" not in self.launch:
            raise ValueError(
                f"launch is {' '.join(self.launch)}: one of its words must be {{model}}, in whose place stands the "
                "directory that the server loads"
            )
        if self.launch and self.weights == "none":
            raise ValueError(
                "launch is given, and weights is none: only a run starts servers, and none of fixed weights; start the "
                "server, and give its urls"
            )
        launched = "servers that are launched listen on loopback with a key of their own"
        if self.launch:
            refuse_idle(self, ("api_key_file",), launched)
        else:
            refuse_idle(self, ("start_timeout_s",), "only servers that are launched are waited for")
        if self.weights != "directory":
            why = "requests name their adapter" if self.weights == "lora" else "the servers' weights stay as they are"
            refuse_idle(self, ("pause", "kv"), f"weights is {self.weights}: {why}, so that nothing pauses")
        if self.weights == "none":
            why = "weights is none: the servers' weights stay as they are, and no learner shares their card"
            refuse_idle(self, ("weights_dir", "colocate"), why)
        if self.colocate and self.kv == "keep":
            raise ValueError("kv is keep, and colocate is set: a server that sleeps has no cache to keep; leave kv out")
        if self.pause != "keep":
            refuse_idle(self, ("kv",), f"pause is {self.pause}: no request goes on with a cache")
        return self


_BUILTIN_KEYS = (
    *(key for key in EngineConfig.model_fields if key not in ("max_slots", "max_seq_len", "request_timeout_s")),
    "host", "tls_cert", "tls_key", "max_waiting",
)  # fmt: skip


class InferenceConfig(EngineConfig):
    """A run's engines, and the servers over them where they run in processes of their own.

    Attributes:
        engine: `builtin`: Penstock's own; `vllm`: servers of vLLM, driven by this run; `sglang`: servers of SGLang that
            were started, likewise, which load each version from a directory; `openai`: a server of whatever make with
            OpenAI's API and weights that stay, for `penstock eval` and `generate`.
        external: The servers, where they are not Penstock's.
        servers: How many, each with an engine of its own (``runtime: ray``; one process has one engine).
        host: Address that the servers listen on; ``0.0.0.0`` for runs on several machines. Whoever asks must show the
            run's own token.
        tls_cert: File with the servers' certificate chain (PEM); None speaks plain HTTP.
        tls_key: File with its key, not encrypted.
        tls_ca: File with the certificates that clients trust (PEM); None trusts those of the system.
        max_waiting: Requests that one server keeps waiting; beyond, it refuses, and the client waits or goes elsewhere.
        endpoint: Opens the policy to agents (`penstock.environments.AgentEnvironment`): whoever plays a lesson's
            rollouts listens on this machine's loopback address, with a key for each rollout.
    """

    all_rows_at_first: ClassVar[bool] = True
    always_truncates: ClassVar[bool] = False

    engine: Literal["builtin", "vllm", "sglang", "openai"] = "builtin"
    external: ExternalConfig | None = None
    servers: int = Field(default=1, ge=1, le=65536)
    host: str = "127.0.0.1"
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_ca: Path | None = None
    max_waiting: int = Field(default=1024, gt=0)
    endpoint: bool = False

    @model_validator(mode="after")
    def _certificate_and_key(self) -> "InferenceConfig":
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together: give both, or neither")
        return self

    @model_validator(mode="after")
    def _external_fits(self) -> "InferenceConfig":
        external = self.external
        if (self.engine == "builtin") != (external is None):
            what = (
                "is missing: give external.urls or external.launch, or external.weights=none for penstock generate URL"
                if external is None
                else "has no effect: set engine to what the servers are, or external to null"
            )
            raise ValueError(f"engine is {self.engine}, and external {what}")
        if external is None:
            return self
        why = f"engine is {self.engine}, and it is of Penstock's own engine"
        refuse_idle(self, _BUILTIN_KEYS, why)
        if self.engine == "openai" and external.weights != "none":
            raise ValueError(
                f"external.weights is {external.weights}: an OpenAI API has no way to change weights; set it to none"
            )
        if self.engine != "vllm" and external.launch:
            raise ValueError("external.launch is given: only vLLM is launched; start the server, and give its urls")
        if self.engine == "sglang":
            self._check_sglang(external)
        if external.launch or (external.urls and not any(url.startswith("https:") for url in external.urls)):
            refuse_idle(self, ("tls_ca",), "the servers are asked over http, which knows no certificates")
        if external.urls and len(external.urls) != self.servers:
            raise ValueError(
                f"external.urls names {len(external.urls)} servers, and servers is {self.servers}: give the same number"
            )
        return self

    def _check_sglang(self, external: ExternalConfig) -> None:
        if external.weights == "lora":
            raise ValueError(
                "external.weights is lora: adapters by name are vLLM's; set it to directory, and the merged model goes"
            )
        if external.pause == "wait":
            raise ValueError("external.pause is wait: SGLang knows keep and abort; set one of them")
        if external.colocate:
            raise ValueError("external.colocate is set: only vLLM is sent to sleep; give SGLang a card of its own")


def _buckets(given: tuple[int, ...] | None, smallest: int, factor: int, longest: int, most: int) -> tuple[int, ...]:
    """Those given, or `smallest` times powers of `factor` up to `most`; and `longest`."""
    lengths = list(given or ())
    if given is None:
        length = smallest
        while length <= most:
            lengths.append(length)
            length *= factor
    return (*(length for length in lengths if length < longest), longest)


class ServedEngineConfig(EngineConfig):
    """An `EngineConfig` whose keys stand below ``engine``, as `ServeConfig` has them."""

    section: ClassVar[str] = "engine"


class ServeConfig(BaseModel):
    """The OpenAI-compatible server.

    Attributes:
        host: Address to listen on. Anything but loopback requires a token.
        port: 0 takes a free one.
        token: What clients must send as ``Authorization: Bearer …``; None asks for nothing.
        tls_cert: File with the certificate chain (PEM); None speaks plain HTTP.
        tls_key: File with its key, not encrypted.
        model_name: Name of the policy in the API; None takes the checkpoint directory's.
        max_body_bytes: Larger request bodies are refused; None takes 256 KiB without a token, and with one what a
            run's own clients would send at most for this `engine.max_seq_len`.
        max_waiting: Requests beyond this many unanswered ones are refused with status 429.
        ready_timeout_s: Longest wait for the next of the engine's programs at start-up, however long all of them take.
        stop_timeout_s: Longest wait for requests and threads at shutdown.
        model: In what dtype the checkpoint is loaded, and what its chat template is given.
        engine: The engine behind it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    token: str | None = Field(default=None, min_length=8, repr=False)
    tls_cert: Path | None = None
    tls_key: Path | None = None
    model_name: str | None = None
    max_body_bytes: int | None = Field(default=None, gt=0)
    max_waiting: int = Field(default=256, gt=0)
    ready_timeout_s: float = Field(default=600.0, gt=0)
    stop_timeout_s: float = Field(default=30.0, gt=0)
    model: LoadingConfig = LoadingConfig()
    engine: EngineConfig = EngineConfig(max_slots=16, max_seq_len=1024)

    @field_validator("engine", mode="before")
    @classmethod
    def _few_slots(cls, given: Any) -> Any:
        """The keys that are given, beside this server's own defaults."""
        return {"max_slots": 16, **given} if isinstance(given, dict) else given

    @model_validator(mode="after")
    def _guarded(self) -> "ServeConfig":
        if self.token is None and not is_loopback(self.host):
            raise ValueError(f"host {self.host!r} can be reached from other machines: set token, or use host 127.0.0.1")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together: give both, or neither")
        return self


def check_divides(model: ModelConfig, devices: int, section: str) -> None:
    """Raises ConfigError if a model cannot be split over that many devices; `section` is where a config says so."""
    counts = {
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_key_value_heads,
        "intermediate_size": model.intermediate_size,
    }
    uneven = [f"{name} ({count})" for name, count in counts.items() if count % devices]
    if uneven:
        fits = [n for n in range(1, model.num_key_value_heads + 1) if not any(c % n for c in counts.values())]
        raise ConfigError(
            f"{section}.model_parallel: the model cannot be split over {devices} devices, of which "
            f"{', '.join(uneven)} is no multiple: use one of {', '.join(map(str, fits))}"
        )
