"""Serves a checkpoint by the OpenAI-compatible API until somebody ends it: `serve` for the command line."""

import gc
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from penstock.inference.access import AccessRules
from penstock.inference.config import ServeConfig, ServedEngineConfig
from penstock.inference.engine import InferenceEngine
from penstock.inference.http_server import HttpServer
from penstock.inference.server import create_app
from penstock.model.language import Decoder, load_policy
from penstock.model.language.config import LoadingConfig
from penstock.model.language.lora import is_adapter
from penstock.text import Tokenizer
from penstock.types import CheckpointError, WeightVersion
from penstock.types.addresses import is_loopback

WATCH_S = 0.5
"""`serve` checks its threads this often; it reacts to Ctrl-C at once."""


def serve(
    checkpoint: str,
    config: ServeConfig,
    announce: Callable[[str], None] = print,
    stop: threading.Event | None = None,
    step: int = 0,
) -> None:
    """Serves a checkpoint until Ctrl-C.

    Args:
        checkpoint: A Hugging Face directory, or a run's ``checkpoints/step-<n>``.
        config: Address, limits and engine.
        announce: Called with one line for each thing that happens, the URL in particular.
        stop: Ends it as Ctrl-C would, for callers that are not a terminal.
        step: The version that the checkpoint holds, as which answers name it (``system_fingerprint``).

    Raises:
        CheckpointError: nothing can be loaded from there.
        ConfigError: bad limits, or an address in use.
        RunFailed: the engine or the server died.
    """
    ending = stop or threading.Event()
    path = model_directory(checkpoint)
    policy = config.model.policy(path)
    tokenizer = Tokenizer.load(policy.tokenizer_path, policy.chat_template_kwargs)
    decoder = load_policy(policy, 0, tokenizer)
    max_seq_len = min(config.engine.max_seq_len, decoder.config.longest_sequence)
    engine_config = ServedEngineConfig.model_validate(config.engine.model_dump() | {"max_seq_len": max_seq_len})
    engine = InferenceEngine(decoder, WeightVersion(0, step), tokenizer, engine_config)
    name = config.model_name or Path(checkpoint).resolve().name
    access = AccessRules(config.token, config.host, config.max_body_bytes, config.max_waiting)
    app = create_app(engine, tokenizer, name, access, partial(_same_policy, config.model, tokenizer))
    server = HttpServer(app, config.host, config.port, config.stop_timeout_s, config.tls_cert, config.tls_key)
    with ExitStack() as closing:
        announce(f"compiling for {engine_config.max_slots} responses of at most {max_seq_len} tokens …")
        closing.callback(engine.stop, config.stop_timeout_s)
        engine.start()
        closing.callback(server.stop)
        _run_until(ending, engine, server, config, lambda: announce(_announcement(name, server.url, config)))


def _same_policy(config: LoadingConfig, tokenizer: Tokenizer, path: Path) -> Decoder:
    """The policy of another directory, in the dtype that is served."""
    return load_policy(config.policy(model_directory(str(path))), 0, tokenizer)


def _run_until(
    ending: threading.Event, engine: InferenceEngine, server: HttpServer, config: ServeConfig, ready: Callable[[], None]
) -> None:
    try:
        engine.wait_until_ready(config.ready_timeout_s)
        # What is here now stays. A full garbage collection takes 100 ms, with everything at a halt, and each body of
        # many lists would cause one.
        gc.freeze()
        server.start()
        ready()
        while not ending.wait(WATCH_S):
            engine.raise_if_failed()
            server.raise_if_failed()
    except KeyboardInterrupt:
        ending.set()


def model_directory(checkpoint: str) -> Path:
    """The directory of a checkpoint's model or adapter: itself, or ``model/`` inside a training checkpoint.

    Raises:
        CheckpointError: there is none, or none that can be looked at.
    """
    root = Path(checkpoint)
    places = (root, root / "model")
    try:
        found = next((path for path in places if (path / "config.json").is_file() or is_adapter(path)), None)
    except OSError as error:  # too long a name, or a folder that this user may not enter
        raise CheckpointError(f"{checkpoint!r:.200} cannot be read: {error.strerror}") from error
    if found is None:
        raise CheckpointError(
            f"{checkpoint!r} holds no config.json, nor does its model/: give a checkpoint directory, or an adapter's"
        )
    if not is_adapter(found) and b'"penstock.control_policy"' in (found / "config.json").read_bytes():
        raise CheckpointError(
            f"{checkpoint!r} holds a control policy, which acts in simulators: play it by penstock eval, or in your "
            "own program (penstock.fleet.GymPolicy); or give a language policy's checkpoint"
        )
    return found


def _announcement(name: str, url: str, config: ServeConfig) -> str:
    exposed = config.tls_cert is None and not is_loopback(config.host)
    return f"serving {name!r} at {url}/v1" + (" (unencrypted: set tls_cert and tls_key)" if exposed else "")
