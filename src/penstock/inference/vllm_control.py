"""Drives one vLLM server: what it can do, and its weights.

Every call has a connection of its own, since a server that answers 500 resets the one it had. No answer but 200 says
anything about the weights: a server may have changed them all the same, so that whoever gets another takes the server
out of routing. Imports no JAX.

What holds of vLLM 0.32 is asked for, not read off its version: `check` asks for one token by the route that is needed,
and the most probable one alone; after truncation its log-probability is 0, before it is not.
"""

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from penstock.inference.config import ExternalConfig
from penstock.inference.external import BUSY, GENERATE, adapter_name, label_of, version_of_label
from penstock.types import ConfigError, MismatchError, UnreachableError, WeightsError, WeightVersion

ASK_S = 30.0
"""Longest wait for what changes nothing."""

HEALTH_S = 5.0
ONE_TOKEN = 1e-6
"""Probability mass that the most probable token has alone."""

UNPROVEN = "unproven"
"""What weights are called of which nobody knows what they are."""

NO_BYTES = hashlib.sha256(b"").hexdigest()
"""What a checksum says of a parameter whose values are kept elsewhere, as the CPU build does of prepared matrices."""

ROWS = 64
"""Embeddings and output matrix are padded with zeros to a multiple of so many rows."""

_METRICS = {
    "vllm:generation_tokens_total": "inference/tokens_total",
    "vllm:num_requests_running": "inference/running",
    "vllm:num_requests_waiting": "inference/waiting",
}

_FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up_proj",
          "up_proj": "gate_up_proj"}  # fmt: skip
_ORDER = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


class VllmControl:
    """One server's control routes.

    Args:
        url: Where it listens.
        key: What it asks for; None: nothing.
        config: How it gets weights.
        max_seq_len: Tokens that it must have room for.
        change_s: Longest wait for a change of weights, in seconds.
    """

    def __init__(self, url: str, key: str | None, config: ExternalConfig, max_seq_len: int, change_s: float) -> None:
        self._url, self._config, self._max_seq_len, self._change_s = url, config, max_seq_len, change_s
        headers = {"connection": "close"} | ({} if key is None else {"authorization": f"Bearer {key}"})
        self._client = httpx.Client(headers=headers, trust_env=False)

    def close(self) -> None:
        """Ends its connections."""
        self._client.close()

    def healthy(self) -> bool:
        """Whether it answers that it is."""
        try:
            return self._client.get(f"{self._url}/health", timeout=HEALTH_S).status_code == 200
        except httpx.HTTPError:
            return False

    def check(self) -> str:
        """Whether it can do what a run needs.

        Returns:
            Its version, as it says.

        Raises:
            ConfigError: it cannot; with the flag to start it with.
            UnreachableError: it does not answer.
        """
        self._check_models()
        self._check_logprobs()
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
        found = self._send("GET", "/version", ASK_S)
        return str(_json(found).get("version", "unknown")) if found.status_code == 200 else "unknown"

    def _check_models(self) -> None:
        cards = _json(self._send("GET", "/v1/models", ASK_S)).get("data") or []
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
                f"with --max-model-len {self._max_seq_len}, or lower inference.max_seq_len"
            )

    def _check_logprobs(self) -> None:
        sampling = {"n": 1, "max_tokens": 1, "temperature": 1.0, "top_p": ONE_TOKEN, "seed": 0, "logprobs": 0}
        sampling |= {"ignore_eos": True, "stop_token_ids": [], "stop": [], "detokenize": False}
        body = {"model": self._config.model, "token_ids": [0], "sampling_params": sampling, "stream": False}
        asked = self._send("POST", GENERATE, self._change_s, body)  # the first answer of all may take its time
        if asked.status_code == 403:
            raise ConfigError(f"{self._url} does not open {GENERATE}: start it with --enable-scale-out")
        self._refuse_absent(asked, GENERATE, "take vLLM 0.32 or later")
        if asked.status_code == 401:
            raise ConfigError(f"{self._url} asks for a key: give the file that holds it as external.api_key_file")
        try:
            (entry,) = _json(asked)["choices"][0]["logprobs"]["content"]
            logprob = float(entry["logprob"])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ConfigError(f"{self._url}{GENERATE} answered {asked.status_code}, {asked.text[:200]!r}") from error
        if not abs(logprob) < 1e-3:
            raise ConfigError(
                f"{self._url} gives log-probabilities before temperature and truncation: start it with "
                "--logprobs-mode processed_logprobs"
            )

    def _check_sleep(self) -> None:
        """Its routes exist in any case; without its flag they say 200 and free nothing."""
        path, remedy = "/server_info?config_format=json", "start it with VLLM_SERVER_DEV_MODE=1 in its environment"
        asked = self._send("GET", path, self._change_s)  # it looks around on its machine for a while
        self._refuse_absent(asked, path, remedy)
        model = (_json(asked).get("vllm_config") or {}).get("model_config") or {}
        if not model.get("enable_sleep_mode"):
            raise ConfigError(
                f"external.colocate is set, and {self._url} would sleep without giving memory back: start it with "
                "--enable-sleep-mode, which vLLM has on GPUs alone"
            )

    def _check_route(self, path: str, remedy: str) -> None:
        self._refuse_absent(self._send("GET", path, ASK_S), path, remedy)

    def _refuse_absent(self, answer: httpx.Response, path: str, remedy: str) -> None:
        if answer.status_code in (404, 405) and b"does not exist" not in answer.content:
            raise ConfigError(f"{self._url} has no route {path}: {remedy}")

    # --- weights -------------------------------------------------------------------------------------------------

    def serves(self) -> WeightVersion | None:
        """The version that it calls its weights, or whose adapter was loaded last; None for a label of its own."""
        if self._config.weights == "lora":
            versions = [version_of_label(name.removeprefix("policy-")) for name in self._names()]
            return max((version for version in versions if version is not None), default=None)
        return version_of_label(_json(self._ask("GET", "/weight_info", ASK_S)).get("weight_version"))

    def pause(self) -> None:
        """Computes nothing more; what becomes of requests that run is `external.pause`'s.

        Raises:
            WeightsError: it refused.
            UnreachableError: it does not answer.
        """
        cleared = str(self._config.kv == "recompute").lower()
        self._ask("POST", f"/pause?mode={self._config.pause}&clear_cache={cleared}", self._change_s)

    def load(self, directory: Path) -> None:
        """Loads the weights of a directory.

        Raises:
            WeightsError: it refused: what it has now is not known.
            UnreachableError: it does not answer.
        """
        asked = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
        self._ask("POST", "/collective_rpc", self._change_s, asked)

    def resume(self) -> None:
        """Goes on after `pause`."""
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

    def disown(self) -> None:
        """What it has is of no version that a client would take; it computes, whatever stopped it before."""
        if self._config.colocate:
            self._send("POST", "/wake_up", self._change_s)
        if self._config.weights == "directory":
            self._send("POST", "/update_weight_version", ASK_S, {"new_version": UNPROVEN})
            self._send("POST", "/resume", ASK_S)  # where there are no such routes, `check` says so

    def name(self, version: WeightVersion) -> None:
        """Has it call what it serves by a version.

        Raises:
            WeightsError: it refused, or goes on to call it otherwise.
            UnreachableError: it does not answer.
        """
        self._ask("POST", "/update_weight_version", ASK_S, {"new_version": label_of(version)})
        found = _json(self._ask("GET", "/weight_info", ASK_S)).get("weight_version")
        if found != label_of(version):
            raise WeightsError(f"{self._url} calls its weights {found!r}, and was told {label_of(version)!r}")

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

    def forget_adapters(self) -> list[WeightVersion]:
        """Unloads what earlier runs have left under names of versions.

        Returns:
            What is left: nothing.
        """
        for name in self._names():
            version = version_of_label(name.removeprefix("policy-"))
            if version is not None and name != self._config.model:
                self.unload_adapter(version)
        return []

    def _names(self) -> list[str]:
        return [str(card.get("id")) for card in _json(self._ask("GET", "/v1/models", ASK_S)).get("data") or []]

    def checksums(self) -> dict[str, str]:
        """SHA-256 of each parameter's bytes, by its name there; of several parts of a server, one entry each.

        Raises:
            WeightsError: it refused.
            UnreachableError: it does not answer.
        """
        found = _json(self._ask("POST", "/weight_checker", self._change_s, {"action": "checksum"})).get("checksums")
        if not isinstance(found, dict):
            raise WeightsError(f"{self._url}/weight_checker gave no checksums")
        return {str(name): str(digest) for name, digest in found.items()}

    def metrics(self) -> dict[str, float]:
        """Of its Prometheus page what a run logs, as ``inference/…``; nothing where it has none."""
        page = self._send("GET", "/metrics", ASK_S)
        found: dict[str, float] = {}
        for line in page.text.splitlines() if page.status_code == 200 else ():
            name, _, number = line.partition("}")[0].partition("{")[0].strip(), None, line.rpartition(" ")[2]
            if name in _METRICS:
                found[_METRICS[name]] = found.get(_METRICS[name], 0.0) + float(number)
        return found

    # --- HTTP ----------------------------------------------------------------------------------------------------

    def generate(self, body: bytes, timeout_s: float) -> bytes | None:
        """The answer to one request for tokens; None where its queue is full, which is no fault.

        Raises:
            WeightsError: it refused.
            UnreachableError: it does not answer.
        """
        answer = self._send("POST", GENERATE, timeout_s, body)
        if answer.status_code in BUSY:
            return None
        if answer.status_code != 200:
            self._refuse(answer, GENERATE)
        return answer.content

    def _ask(self, method: str, path: str, timeout_s: float, body: Mapping[str, Any] | bytes | None = None) -> Any:
        answer = self._send(method, path, timeout_s, body)
        if answer.status_code != 200:
            self._refuse(answer, path)
        return answer

    def _refuse(self, answer: httpx.Response, path: str) -> None:
        raise WeightsError(f"{self._url}{path} answered {answer.status_code}: {answer.text[:300]}")

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


def _json(answer: httpx.Response) -> dict[str, Any]:
    try:
        found = answer.json()
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def served_checksums(tensors: Mapping[str, np.ndarray]) -> dict[str, str]:
    """What a server's checksums are where each parameter lies there as it lies in a file, by its name there.

    Queries, keys and values are one matrix, and so are gate and up; embeddings and output matrix are padded.

    Args:
        tensors: By their names in a Hugging Face directory.
    """
    parts: dict[str, dict[str, np.ndarray]] = {}
    for name, tensor in tensors.items():
        words = name.split(".")
        own = words[-2]
        words[-2] = _FUSED.get(own, own)
        parts.setdefault(".".join(words), {})[own] = tensor
    return {name: _checksum(name, found) for name, found in parts.items()}


def _checksum(name: str, parts: Mapping[str, np.ndarray]) -> str:
    arrays = [parts[own] for own in sorted(parts, key=lambda own: _ORDER.index(own) if own in _ORDER else 0)]
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data)
    if name.startswith(("model.embed_tokens", "lm_head")):
        digest.update(bytes(-len(arrays[0]) % ROWS * math.prod(arrays[0].shape[1:]) * arrays[0].itemsize))
    return digest.hexdigest()


class ChecksumProof:
    """Whether a server holds what it was given, as far as its checksums tell. One server; one thread at a time.

    A parameter whose checksum once was that of the file is compared with every later one. Of the others, which the
    server keeps in another form (split, padded, prepared), it is asked that they change where those in the file do.
    """

    def __init__(self) -> None:
        self._exact: set[str] = set()
        self._given: dict[str, str] = {}
        self._found: dict[str, str] = {}

    def judge(self, version: WeightVersion, given: Mapping[str, str], found: Mapping[str, str]) -> float:
        """Takes the checksums of a version.

        Args:
            version: The version that it was given.
            given: `served_checksums` of the tensors that were written.
            found: What the server says, by its names.

        Returns:
            Share of the tensors that were compared byte for byte.

        Raises:
            MismatchError: it holds others; naming them.
        """
        wrong: list[str] = []
        exact: set[str] = set()
        for full, digest in found.items():
            name = full.rpartition(":")[2].replace(".base_layer.", ".")
            expected = given.get(name)
            if expected is None or digest == NO_BYTES:
                continue
            if digest == expected:
                exact.add(full)
            elif full in self._exact or (
                self._given.get(name, expected) != expected and self._found.get(full) == digest
            ):
                wrong.append(name)
        if wrong:
            more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
            raise MismatchError(
                f"the server serves version {version.step} with other weights than it was given: "
                f"{len(wrong)} of {len(given)} parameters are not those ({', '.join(sorted(wrong)[:5])}{more})"
            )
        self._exact |= exact
        self._given, self._found = dict(given), dict(found)
        return len({full.rpartition(":")[2] for full in exact}) / max(1, len(given))
