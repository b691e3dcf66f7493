"""Configuration of weight hand-over. Imports neither JAX nor Arrow."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from penstock.types.idle_keys import refuse_idle

Transport = Literal["shared_memory", "arrow_flight", "checkpoint"]


_OWN_KEYS: dict[Transport, tuple[str, ...]] = {
    "arrow_flight": ("host", "port", "advertise", "streams", "chunk_bytes", "fanout", "tls_cert", "tls_key", "tls_ca"),
    "checkpoint": ("url", "keep"),
}


class WeightsConfig(BaseModel):
    """How published weights reach clients in other processes; within one process they go by reference.

    Attributes:
        transport: `shared_memory` for processes of one machine, `arrow_flight` over sockets, `checkpoint` through
            files in a directory or URL that everybody reaches.
        encoding: `full` sends every array; `delta` sends the lossless difference to the version that the client has,
            where that is smaller.
        bfloat16: Cast float32 arrays to bfloat16, on the learner's device, before they are sent. Of control policies
            alone: their fleet then samples from rounded weights, and `mismatch_kl` says by how much that differs.
        host: Address that a server listens on; anything but loopback needs a token, which a run makes itself.
        port: 0 takes a free one.
        advertise: ``host:port`` that clients connect to, where it is not the one listened on (a proxy, a NAT).
        streams: Parallel streams of one fetch over sockets.
        chunk_bytes: Largest message of a stream.
        fanout: Most clients that fetch from the server itself; further ones fetch from those that have the version.
        url: Directory or fsspec URL of `checkpoint`; None means ``weights`` in the run directory.
        keep: Versions that `checkpoint` keeps.
        fetch_timeout_s: Longest time that one fetch may take.
        max_bytes: Largest publication that a client accepts; checked before anything is allocated.
        tls_cert: PEM file of the server's certificate chain; with `tls_key`, sockets speak TLS.
        tls_key: PEM file of its private key.
        tls_ca: PEM file of the certificates that clients trust; None trusts those of the system.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    transport: Transport = "arrow_flight"
    encoding: Literal["full", "delta"] = "full"
    bfloat16: bool = False
    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535)
    advertise: str | None = None
    streams: int = Field(default=4, ge=1, le=64)
    chunk_bytes: int = Field(default=2 * 1024 * 1024, ge=4096)
    fanout: int = Field(default=4, ge=1)
    url: str | None = None
    keep: int = Field(default=2, ge=1)
    fetch_timeout_s: float = Field(default=300.0, gt=0)
    max_bytes: int = Field(default=256 * 1024**3, ge=1)
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_ca: str | None = None

    @model_validator(mode="after")
    def _certificate_and_key(self) -> "WeightsConfig":
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key belong together: give both, or neither")
        for owner, keys in _OWN_KEYS.items():
            if self.transport != owner:
                refuse_idle(self, keys, f"transport is {self.transport!r}, and it is of {owner!r}")
        return self
