"""Drives one server of vLLM or SGLang: what it can do, and its weights.

Every call has a connection of its own, since a server that answers 500 resets the one it had. No answer but 200 says
anything about the weights: a server may have changed them all the same, so that whoever gets another takes the server
out of routing. Imports no JAX.

What holds of vLLM 0.32 and SGLang 0.5.23 is asked for, not read off their versions: `check` asks for one token by the
route that is needed, where the most probable one alone is left, by truncation (vLLM) or by a temperature near zero
(SGLang): its log-probability is 0 after that, and before it is not.
"""

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, final

import httpx
from typing_extensions import override

from penstock.inference.config import InferenceConfig
from penstock.inference.external import (
    BUSY,
    SglangDialect,
    VllmDialect,
    adapter_name,
    label_of,
    version_of_label,
)
from penstock.inference.server_pool import trusting
from penstock.types import ConfigError, UnreachableError, WeightsError, WeightVersion

ASK_S = 30.0
"""Longest wait for what changes nothing."""

HEALTH_S = 5.0
ONE_TOKEN = 1e-6
"""Probability mass that the most probable token has alone."""

NEAR_ZERO = 1e-5
"""A temperature at which the most probable token is left alone; SGLang takes what is below 1e-6 for 0."""

UNPROVEN = "unproven"
"""What weights are called of which nobody knows what they are."""

NO_ROUTE = (404, 405)
_UNREADABLE = (ValueError, KeyError, IndexError, TypeError)


class ServerControl(ABC):
    """One server's control routes.

    Args:
        url: Where it listens.
        key: What it asks for; None: nothing.
        config: How long sequences are, and how the server gets weights.
        change_s: Longest wait for a change of weights, in seconds.

    Raises:
        ConfigError: the certificates that are to be trusted cannot be read.

    Attributes:
        path: Of the route for tokens.
        health: Of one that answers while it lives.
        page: What its Prometheus page calls tokens, and requests that run and wait.
        since: The version that has what is needed.
        longest: The flag of sequences' most tokens.
    """

    path: ClassVar[str]
    health: ClassVar[str]
    page: ClassVar[tuple[str, str, str]]
    since: ClassVar[str]
    longest: ClassVar[str]

    def __init__(self, url: str, key: str | None, config: InferenceConfig, change_s: float) -> None:
        assert config.external is not None  # or there is none to drive
        self._url, self._config, self._max_seq_len, self._change_s = url, config.external, config.max_seq_len, change_s
        headers = {"connection": "close"} | ({} if key is None else {"authorization": f"Bearer {key}"})
        self._client = httpx.Client(headers=headers, trust_env=False, verify=trusting(config.tls_ca))

    @final
    def close(self) -> None:
        """Ends its connections."""
        self._client.close()

    @final
    def unhealthy(self) -> str:
        """Why it is not healthy; empty where it answers that it is, or at least asks for a key."""
        try:
            status = self._client.get(self._url + self.health, timeout=HEALTH_S).status_code
        except httpx.HTTPError as error:
            return str(error) or type(error).__name__
        return "" if status in (200, 401) else f"it answered {status} to {self.health}"

    @abstractmethod
    def check(self) -> str:
        """Whether it can do what a run needs.

        Returns:
            Its version, as it says.

        Raises:
            ConfigError: it cannot; with the flag to start it with.
            UnreachableError: it does not answer.
        """

    # --- weights -------------------------------------------------------------------------------------------------

    @abstractmethod
    def serves(self) -> WeightVersion | None:
        """The version that it calls its weights, or whose adapter was loaded last; None for a label of its own."""

    @abstractmethod
    def pause(self) -> None:
        """Computes nothing more; what becomes of requests that run is `external.pause`'s.

        Raises:
            WeightsError: it refused.
            UnreachableError: it does not answer.
        """

    @abstractmethod
    def load(self, directory: Path) -> None:
        """Loads the weights of a directory.

        Raises:
            WeightsError: it refused: what it has now is not known.
            UnreachableError: it does not answer.
        """

    @abstractmethod
    def resume(self) -> None:
        """Goes on after `pause`; raises as it does."""

    @abstractmethod
    def disown(self) -> None:
        """What it has is of no version that a client would take; it computes, whatever stopped it before."""

    @abstractmethod
    def _rename(self, label: str) -> None:
        """Has it call what it serves so; raises as `name`."""

    @final
    def name(self, version: WeightVersion) -> None:
        """Has it call what it serves by a version.

        Raises:
            WeightsError: it refused, or goes on to call it otherwise.
            UnreachableError: it does not answer.
        """
        self._rename(label_of(version))
        found = self._label()
        if found != label_of(version):
            raise WeightsError(f"{self._url} calls its weights {found!r}, and was told {label_of(version)!r}")

    @abstractmethod
    def _label(self) -> Any:
        """What it calls its weights."""

    @abstractmethod
    def checksums(self) -> dict[str, str]:
        """Hexadecimal SHA-256 of each parameter's bytes, or how it begins, by the parameter's name there.

        Of several parts of a server there is one entry each, with something and a colon before the name.

        Raises:
            WeightsError: it refused.
            UnreachableError: it does not answer.
        """

    # --- tokens --------------------------------------------------------------------------------------------------

    @abstractmethod
    def noted(
        self, model: str, prompt: Sequence[int], seed: int, max_tokens: int, timeout_s: float
    ) -> list[tuple[int, float]] | None:
        """Tokens of an answer at temperature 1 under whatever label, from a cache of its own, with log-probabilities.

        Returns:
            The same for the same weights; None where its queue is full.

        Raises:
            WeightsError: it refused, or its answer cannot be read.
            UnreachableError: it does not answer.
        """

    @final
    def generate(self, body: bytes, timeout_s: float) -> bytes | None:
        """The answer to one request for tokens; None where its queue is full, which is no fault.

        Raises:
            WeightsError: it refused.
            UnreachableError: it does not answer.
        """
        answer = self._send("POST", self.path, timeout_s, body)
        if answer.status_code in BUSY:
            return None
        if answer.status_code != 200:
            self._refuse(answer, self.path)
        return answer.content

    @final
    def metrics(self) -> dict[str, float]:
        """Of its Prometheus page what a run logs, as ``inference/…``; nothing where it has none."""
        page = self._send("GET", "/metrics", ASK_S)
        named = dict(zip(self.page, ("inference/tokens_total", "inference/running", "inference/waiting"), strict=True))
        found: dict[str, float] = {}
        for line in page.text.splitlines() if page.status_code == 200 else ():
            name, number = line.partition("{")[0].partition(" ")[0], line.rpartition(" ")[2]
            if name in named:
                found[named[name]] = found.get(named[name], 0.0) + float(number)
        return found

    # --- what it can do, and HTTP --------------------------------------------------------------------------------

    @final
    def _check_models(self) -> None:
        asked = self._send("GET", "/v1/models", ASK_S)
        if asked.status_code == 401:
            given = self._config.api_key_file
            what = "asks for a key" if given is None else f"takes another key than that of {given}"
            raise ConfigError(f"{self._url} {what}: give the file that holds it as inference.external.api_key_file")
        cards = _json(asked).get("data") or []
        names = [card.get("id") for card in cards]
        if self._config.model not in names:
            raise ConfigError(
                f"inference.external.model is {self._config.model!r}, and {self._url} has {names or 'none'}: start it "
                f"with --served-model-name {self._config.model}, or name one of its own"
            )
        room = cards[names.index(self._config.model)].get("max_model_len")
        if isinstance(room, int) and room < self._max_seq_len:
            raise ConfigError(
                f"inference.max_seq_len is {self._max_seq_len}, and {self._url} has room for {room} tokens: start it "
                f"with {self.longest} {self._max_seq_len}, or lower inference.max_seq_len"
            )

    @final
    def _check_one_token(self, body: Mapping[str, Any], remedy: str, flags: Mapping[int, str]) -> Any:
        """The one token that a request leaves possible has the log-probability 0; returns the answer.

        Args:
            body: The request.
            remedy: What makes it so where it is not.
            flags: What to do about statuses by which it says that it does not answer such requests.
        """
        asked = self._send("POST", self.path, self._change_s, body)  # the first answer of all may take its time
        if asked.status_code in flags:
            raise ConfigError(f"{self._url}{self.path} answered {asked.status_code}: {flags[asked.status_code]}")
        self._refuse_absent(asked, self.path, f"take {self.since} or later")
        if asked.status_code in BUSY:  # which says nothing of what it can do
            raise UnreachableError(f"the queue of {self._url} is full: it answered {asked.status_code}")
        try:
            found = asked.json()
            ((_, logprob),) = self._entries(found)
        except _UNREADABLE as error:
            raise ConfigError(f"{self._url}{self.path} answered {asked.status_code}, {asked.text[:200]!r}") from error
        if not abs(logprob) < 1e-3:
            raise ConfigError(f"{self._url} gives log-probabilities before temperature and truncation: {remedy}")
        return found

    @abstractmethod
    def _entries(self, answer: Any) -> list[tuple[int, float]]:
        """Tokens and log-probabilities of an answer's JSON; raises what one of another form makes it raise."""

    @final
    def _noted(self, body: Mapping[str, Any], timeout_s: float) -> list[tuple[int, float]] | None:
        content = self.generate(json.dumps(body).encode(), timeout_s)
        if content is None:
            return None
        try:
            return self._entries(json.loads(content))
        except _UNREADABLE as error:
            raise WeightsError(f"{self._url}: its answer cannot be read ({error!r})") from error

    @final
    def _version(self, path: str) -> str:
        found = self._send("GET", path, ASK_S)
        return str(_json(found).get("version", "unknown")) if found.status_code == 200 else "unknown"

    @final
    def _check_route(self, path: str, remedy: str) -> None:
        self._refuse_absent(self._send("GET", path, ASK_S), path, remedy)

    @final
    def _refuse_absent(self, answer: httpx.Response, path: str, remedy: str) -> None:
        if answer.status_code in NO_ROUTE and b"does not exist" not in answer.content:
            raise ConfigError(f"{self._url} has no route {path}: {remedy}")

    @final
    def _ask(self, method: str, path: str, timeout_s: float, body: Mapping[str, Any] | bytes | None = None) -> Any:
        answer = self._send(method, path, timeout_s, body)
        if answer.status_code != 200:
            self._refuse(answer, path)
        return answer

    @final
    def _refuse(self, answer: httpx.Response, path: str, remedy: str = "") -> None:
        words = f"{self._url}{path} answered {answer.status_code}: {answer.text[:300]}"
        raise WeightsError(f"{words}; {remedy}" if remedy else words)

    @final
    def _send(
        self, method: str, path: str, timeout_s: float, body: Mapping[str, Any] | bytes | None = None
    ) -> httpx.Response:
        try:
            if isinstance(body, bytes):
                headers = {"content-type": "application/json"}
                return self._client.request(method, self._url + path, content=body, headers=headers, timeout=timeout_s)
            return self._client.request(method, self._url + path, json=body, timeout=timeout_s)
        except (httpx.HTTPError, RuntimeError) as error:  # RuntimeError: it was closed
            raise UnreachableError(f"{self._url}{path.partition('?')[0]} does not answer: {error!r}") from error


@final
class VllmControl(ServerControl):
    """vLLM's."""

    path, health = VllmDialect.path, "/health"
    page = ("vllm:generation_tokens_total", "vllm:num_requests_running", "vllm:num_requests_waiting")
    since, longest = "vLLM 0.32", "--max-model-len"

    @override
    def check(self) -> str:
        self._check_models()
        sampling = self._sampling(0, 1) | {"top_p": ONE_TOKEN}
        failed = "its log says why; its CPU build computes no heads that are smaller than 32 (head_dim)"
        closed = {403: "start it with --enable-scale-out", 500: failed}
        remedy = "start it with --logprobs-mode processed_logprobs"
        self._check_one_token(self._body(self._config.model, [0], sampling), remedy, closed)
        if self._config.weights == "directory":
            self._check_route("/is_paused", "start it with VLLM_SERVER_DEV_MODE=1 in its environment")
        if self._config.weights == "lora":
            asked = self._send("POST", "/v1/load_lora_adapter", ASK_S, {})  # nothing is loaded: no name is given
            self._refuse_absent(
                asked, "/v1/load_lora_adapter",
                "start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment, and --enable-lora",
            )  # fmt: skip
        if self._config.colocate:
            self._check_sleep()
        return self._version("/version")

    def _check_sleep(self) -> None:
        """Its routes exist in any case; without its flag they say 200 and free nothing."""
        path, remedy = "/server_info?config_format=json", "start it with VLLM_SERVER_DEV_MODE=1 in its environment"
        asked = self._send("GET", path, self._change_s)  # it looks around on its machine for a while
        self._refuse_absent(asked, path, remedy)
        model = (_json(asked).get("vllm_config") or {}).get("model_config") or {}
        if not model.get("enable_sleep_mode"):
            raise ConfigError(
                f"inference.external.colocate is set, and {self._url} would sleep without giving memory back: start it "
                "with --enable-sleep-mode, which vLLM has on GPUs alone"
            )

    @override
    def serves(self) -> WeightVersion | None:
        if self._config.weights == "lora":
            versions = [version_of_label(name.removeprefix("policy-")) for name in self._names()]
            return max((version for version in versions if version is not None), default=None)
        return version_of_label(self._label())

    @override
    def pause(self) -> None:
        cleared = str(self._config.kv == "recompute").lower()
        self._ask("POST", f"/pause?mode={self._config.pause}&clear_cache={cleared}", self._change_s)

    @override
    def load(self, directory: Path) -> None:
        asked = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
        answer = self._send("POST", "/collective_rpc", self._change_s, asked)
        if answer.status_code != 200:
            remedy = f"if it does not see {directory}, set inference.external.weights_dir to a folder that it sees"
            self._refuse(answer, "/collective_rpc", remedy)

    @override
    def resume(self) -> None:
        self._ask("POST", "/resume", ASK_S)

    def sleep(self) -> None:
        """Its weights leave the card, and its cache is gone; requests wait. Returns when it is so.

        Raises:
            WeightsError: it refused, or does not sleep.
            UnreachableError: it does not answer.
        """
        self._ask("POST", "/sleep?level=1&mode=keep", self._change_s)
        self._check_sleeps(True)

    def wake(self) -> None:
        """It has the weights that it had before `sleep`, and computes.

        Raises:
            WeightsError: it refused, or sleeps on.
            UnreachableError: it does not answer.
        """
        self._ask("POST", "/wake_up", self._change_s)
        self._check_sleeps(False)

    def _check_sleeps(self, asked: bool) -> None:
        found = _json(self._ask("GET", "/is_sleeping", ASK_S)).get("is_sleeping")
        if found is not asked:
            raise WeightsError(
                f"{self._url}/is_sleeping says {found}, and it was told to {'sleep' if asked else 'wake'}"
            )

    @override
    def disown(self) -> None:
        if self._config.colocate:
            self._send("POST", "/wake_up", self._change_s)
        if self._config.weights == "directory":
            self._send("POST", "/update_weight_version", ASK_S, {"new_version": UNPROVEN})
            self._send("POST", "/resume", ASK_S)  # where there are no such routes, `check` says so

    @override
    def _rename(self, label: str) -> None:
        self._ask("POST", "/update_weight_version", ASK_S, {"new_version": label})

    @override
    def _label(self) -> Any:
        return _json(self._ask("GET", "/weight_info", ASK_S)).get("weight_version")

    def load_adapter(self, version: WeightVersion, directory: Path) -> None:
        """Loads a version's adapter beside the others.

        Raises:
            WeightsError: it refused.
            UnreachableError: it does not answer.
        """
        asked = {"lora_name": adapter_name(version), "lora_path": str(directory)}
        self._ask("POST", "/v1/load_lora_adapter", self._change_s, asked)

    def unload_adapter(self, version: WeightVersion) -> None:
        """Forgets a version's adapter; one that it does not have is as good."""
        asked = self._send("POST", "/v1/unload_lora_adapter", ASK_S, {"lora_name": adapter_name(version)})
        if asked.status_code not in (200, 404):
            self._refuse(asked, "/v1/unload_lora_adapter")

    def forget_adapters(self) -> None:
        """Unloads what earlier runs have left under names of versions."""
        for name in self._names():
            version = version_of_label(name.removeprefix("policy-"))
            if version is not None and name != self._config.model:
                self.unload_adapter(version)

    def _names(self) -> list[str]:
        return [str(card.get("id")) for card in _json(self._ask("GET", "/v1/models", ASK_S)).get("data") or []]

    @override
    def checksums(self) -> dict[str, str]:
        found = _json(self._ask("POST", "/weight_checker", self._change_s, {"action": "checksum"})).get("checksums")
        if not isinstance(found, dict):
            raise WeightsError(f"{self._url}/weight_checker gave no checksums")
        return {str(name): str(digest) for name, digest in found.items()}

    @override
    def noted(
        self, model: str, prompt: Sequence[int], seed: int, max_tokens: int, timeout_s: float
    ) -> list[tuple[int, float]] | None:
        salt = {"cache_salt": f"{model}-{time.monotonic_ns()}"}
        return self._noted(self._body(model, prompt, self._sampling(seed, max_tokens)) | salt, timeout_s)

    def _sampling(self, seed: int, max_tokens: int) -> dict[str, Any]:
        sampling = {"n": 1, "max_tokens": max_tokens, "temperature": 1.0, "seed": seed, "logprobs": 0}
        return sampling | {"ignore_eos": True, "stop_token_ids": [], "stop": [], "detokenize": False}

    def _body(self, model: str, prompt: Sequence[int], sampling: Mapping[str, Any]) -> dict[str, Any]:
        return {"model": model, "token_ids": list(prompt), "sampling_params": sampling, "stream": False}

    @override
    def _entries(self, answer: Any) -> list[tuple[int, float]]:
        entries = answer["choices"][0]["logprobs"]["content"]
        return [(int(entry["token_id"]), float(entry["logprob"])) for entry in entries]


@final
class SglangControl(ServerControl):
    """SGLang's: weights by directory."""

    path = SglangDialect.path
    health = "/model_info"  # its own ones wait for a token, which one that was left paused does not give
    page = ("sglang:generation_tokens_total", "sglang:num_running_reqs", "sglang:num_queue_reqs")
    since, longest = "SGLang 0.5.23", "--context-length"

    @override
    def check(self) -> str:
        self._check_models()
        sampling = self._sampling(0, 1) | {"temperature": NEAR_ZERO}
        remedy = "start it without SGLANG_RETURN_ORIGINAL_LOGPROB in its environment"
        answer = self._check_one_token(self._body([0], sampling), remedy, {})
        if self._config.weights == "directory":
            if "weight_versions" not in answer[0]["meta_info"]:
                raise ConfigError(f"{self._url} does not say which weights sampled a token: take {self.since} or later")
            asked = self._send("POST", "/weights_checker", self._change_s, {"action": "checksum"})
            self._refuse_absent(asked, "/weights_checker", f"take {self.since} or later")
            if asked.status_code in (401, 403):
                raise ConfigError(
                    f"{self._url} wants another key to be given weights: start it without --admin-api-key, so that "
                    "that of --api-key does"
                )
        return self._version("/server_info")

    @override
    def serves(self) -> WeightVersion | None:
        return version_of_label(self._label())

    @override
    def pause(self) -> None:
        mode = "abort" if self._config.pause == "abort" else "retract" if self._config.kv == "recompute" else "in_place"
        self._ask("POST", "/pause_generation", self._change_s, {"mode": mode})

    @override
    def load(self, directory: Path) -> None:
        # Requests that were taken out of its batch do not keep it from forgetting its cache; those that stay would.
        asked = {"model_path": str(directory), "flush_cache": self._config.kv == "recompute"}
        answer = self._ask("POST", "/update_weights_from_disk", self._change_s, asked | {"abort_all_requests": False})
        if _json(answer).get("success") is not True:
            raise WeightsError(f"{self._url}/update_weights_from_disk answered {answer.text[:300]}")

    @override
    def resume(self) -> None:
        self._ask("POST", "/continue_generation", ASK_S, {})

    @override
    def disown(self) -> None:
        if self._config.weights == "directory":
            body = {"new_version": UNPROVEN, "abort_all_requests": False}
            self._send("POST", "/update_weight_version", ASK_S, body)
            self._send("POST", "/continue_generation", ASK_S, {})  # where there are no such routes, `check` says so

    @override
    def _rename(self, label: str) -> None:
        # It aborts what runs unless told not to.
        self._ask("POST", "/update_weight_version", ASK_S, {"new_version": label, "abort_all_requests": False})

    @override
    def _label(self) -> Any:
        return _json(self._ask("GET", "/model_info", ASK_S)).get("weight_version")

    @override
    def checksums(self) -> dict[str, str]:
        answer = self._ask("POST", "/weights_checker", self._change_s, {"action": "checksum"})
        ranks: list[Any] = _json(answer).get("ranks") or []
        try:
            found = {f"{part}:{name}": str(sum_) for part, rank in enumerate(ranks)
                     for name, sum_ in rank["checksums"].items()}  # fmt: skip
        except (TypeError, KeyError, AttributeError) as error:
            raise WeightsError(f"{self._url}/weights_checker cannot be read: {error!r}") from error
        if not found:
            raise WeightsError(f"{self._url}/weights_checker gave no checksums")
        return found

    @override
    def noted(
        self, model: str, prompt: Sequence[int], seed: int, max_tokens: int, timeout_s: float
    ) -> list[tuple[int, float]] | None:
        salt = {"cache_salt": str(time.monotonic_ns())}
        return self._noted(self._body(prompt, self._sampling(seed, max_tokens)) | salt, timeout_s)

    def _sampling(self, seed: int, max_tokens: int) -> dict[str, Any]:
        return {"n": 1, "max_new_tokens": max_tokens, "temperature": 1.0, "sampling_seed": seed, "ignore_eos": True}

    def _body(self, prompt: Sequence[int], sampling: Mapping[str, Any]) -> dict[str, Any]:
        return {"input_ids": [list(prompt)], "sampling_params": sampling, "return_logprob": True}

    @override
    def _entries(self, answer: Any) -> list[tuple[int, float]]:
        return [(int(entry[1]), float(entry[0])) for entry in answer[0]["meta_info"]["output_token_logprobs"]]


def control_of(url: str, key: str | None, config: InferenceConfig, change_s: float) -> ServerControl:
    """What drives a server of a run's; arguments as `ServerControl`'s."""
    return (SglangControl if config.engine == "sglang" else VllmControl)(url, key, config, change_s)


def _json(answer: httpx.Response) -> dict[str, Any]:
    try:
        found = answer.json()
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
