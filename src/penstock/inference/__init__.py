"""Generation: a continuous-batching engine, contexts for environments, an OpenAI-compatible server and its client."""

from typing import TYPE_CHECKING

from penstock.types.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from penstock.inference.access import AccessRules
    from penstock.inference.agents import AgentEndpoint
    from penstock.inference.config import EngineConfig, ServeConfig
    from penstock.inference.context import EngineContext
    from penstock.inference.engine import InferenceEngine
    from penstock.inference.http_server import HttpServer
    from penstock.inference.remote_context import RemoteContext
    from penstock.inference.routing import Server
    from penstock.inference.scripted import ScriptedContext
    from penstock.inference.sequence import GenerationRequest
    from penstock.inference.server import create_app
    from penstock.inference.server_pool import ServerPool
    from penstock.inference.serving import serve

_EXPORTS = {
    "access": ["AccessRules"],
    "agents": ["AgentEndpoint"],
    "config": ["EngineConfig", "ServeConfig"],
    "context": ["EngineContext"],
    "engine": ["InferenceEngine"],
    "http_server": ["HttpServer"],
    "remote_context": ["RemoteContext"],
    "routing": ["Server"],
    "scripted": ["ScriptedContext"],
    "sequence": ["GenerationRequest"],
    "server": ["create_app"],
    "server_pool": ["ServerPool"],
    "serving": ["serve"],
}

__all__ = [
    "AccessRules", "AgentEndpoint", "EngineConfig", "EngineContext", "GenerationRequest", "HttpServer",
    "InferenceEngine", "RemoteContext", "ScriptedContext", "ServeConfig", "Server", "ServerPool", "create_app", "serve",
]  # fmt: skip

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
