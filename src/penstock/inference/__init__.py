"""Generation: a continuous-batching engine, the contexts that environments see, and an OpenAI-compatible server."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.inference.config import EngineConfig, ServeConfig
    from penstock.inference.context import EngineContext
    from penstock.inference.engine import InferenceEngine
    from penstock.inference.requests import GenerationRequest
    from penstock.inference.scripted import ScriptedContext
    from penstock.inference.server import create_app
    from penstock.inference.serving import HttpServer, serve

_EXPORTS = {
    "EngineConfig": "config",
    "EngineContext": "context",
    "GenerationRequest": "requests",
    "HttpServer": "serving",
    "InferenceEngine": "engine",
    "ScriptedContext": "scripted",
    "ServeConfig": "config",
    "create_app": "server",
    "serve": "serving",
}

__all__ = [
    "EngineConfig", "EngineContext", "GenerationRequest", "HttpServer", "InferenceEngine", "ScriptedContext",
    "ServeConfig", "create_app", "serve",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
