"""The hardware that a run can be compiled for without having it: what a chip holds, how fast it is at best.

XLA's compilers for NVIDIA GPUs and for TPUs run on any machine; they take a description of the chip in place of the
chip. A GPU's is given here, a TPU's comes with its compiler. Rates are the makers' for dense products: no program
reaches them, so what follows from them is a bound. This machine's own are measured.

Sources: openxla/xla, `xla/backends/gpu/target_config/specs` (what the compiler is told); NVIDIA's and Google Cloud's
data sheets (rates, memory of TPUs). Float32 is multiplied as float32 (docs/gpu.md): on a TPU in six passes.

Not covered: several chips. A learner is one process on one device.
"""

import importlib.util
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from penstock.overseer.doctor import free_memory_bytes
from penstock.types import ConfigError

if TYPE_CHECKING:
    from jax.sharding import SingleDeviceSharding

Platform = Literal["cpu", "cuda", "tpu"]


@dataclass(frozen=True)
class Chip:
    """One accelerator, or this machine.

    Attributes:
        label: For people.
        platform: Whose compiler.
        memory_bytes: That arrays and programs may take, all of them together.
        bytes_per_s: Of its memory, read or written.
        flops_per_s: Of products, by dtype.
        described: To the compiler: a GPU's numbers, or the name of the smallest topology of such TPUs.
    """

    label: str
    platform: Platform
    memory_bytes: int
    bytes_per_s: float
    flops_per_s: Mapping[str, float]
    described: Mapping[str, Any] | str = field(default="", repr=False)

    def place(self) -> "SingleDeviceSharding":
        """Where an array lies on it, for `jax.ShapeDtypeStruct`; loads JAX.

        Raises:
            ConfigError: its compiler is not installed.
        """
        import jax
        from jax.experimental import topologies
        from jax.sharding import SingleDeviceSharding

        if self.platform == "cpu":
            return SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
        named: dict[str, Any] = {"topology_name": self.described}
        if self.platform == "cuda":
            named = {"target_config": _text_proto(self.described), "topology": "1x1x1"}
        return SingleDeviceSharding(topologies.get_topology_desc(platform=self.platform, **named).devices[0])


def _nvidia(name: str, memory: int, bandwidth: int, tflops: tuple[float, float], **numbers: Any) -> Chip:
    """A GPU. Of its memory CUDA and its libraries keep some; the rest can be given to JAX."""
    device = _EVERY_GPU | {"device_memory_size": memory, "memory_bandwidth": bandwidth} | numbers
    described = {
        "gpu_device_info": device,
        "dnn_version_info": {"major": 9, "minor": 10},
        "platform_name": '"CUDA"',
        "device_description_str": f'"{name}"',
    }
    rates = {"bfloat16": tflops[0] * 1e12, "float32": tflops[1] * 1e12}
    return Chip(name, "cuda", round(CUDA_FRACTION * memory), bandwidth, rates, described)


def _tpu(name: str, topology: str, gib: float, bandwidth: float, tflops: float) -> Chip:
    rates = {"bfloat16": tflops * 1e12, "float32": tflops * 1e12 / 6}
    return Chip(name, "tpu", round(gib * 2**30), bandwidth, rates, topology)


CUDA_FRACTION = 0.92
"""Of a GPU's memory, that JAX is given at most: XLA_PYTHON_CLIENT_MEM_FRACTION, which is 0.75 by default."""

_EVERY_GPU = {
    "threads_per_warp": 32, "threads_per_block_limit": 1024, "threads_per_core_limit": 2048,
    "shared_memory_per_block": 49152, "registers_per_block_limit": 65536, "registers_per_core_limit": 65536,
    "block_dim_limit_x": 2147483647, "block_dim_limit_y": 65535, "block_dim_limit_z": 65535,
}  # fmt: skip
_AMPERE = {
    "cuda_compute_capability": {"major": 8, "minor": 0}, "core_count": 108, "fpus_per_core": 64, "clock_rate_ghz": 1.41,
    "l2_cache_size": 41943040, "shared_memory_per_block_optin": 166912, "shared_memory_per_core": 167936,
}  # fmt: skip
_HOPPER = {
    "cuda_compute_capability": {"major": 9, "minor": 0}, "core_count": 132, "fpus_per_core": 128,
    "clock_rate_ghz": 1.98, "l2_cache_size": 52428800, "shared_memory_per_block_optin": 232448,
    "shared_memory_per_core": 233472,
}  # fmt: skip
CHIPS: dict[str, Chip] = {
    "h100": _nvidia("NVIDIA H100 80GB HBM3", 84978434048, 3352320000000, (989, 67), **_HOPPER),
    "h200": _nvidia("NVIDIA H200 141GB HBM3e", 151397597184, 4800000000000, (989, 67), **_HOPPER),
    "a100": _nvidia("NVIDIA A100-SXM4-80GB", 85100068864, 2039040000000, (312, 19.5), **_AMPERE),
    "v5e": _tpu("TPU v5e", "v5e:2x2", 15.75, 819e9, 197),
    "v6e": _tpu("TPU v6e", "v6e:2x2", 31.25, 1640e9, 918),
}
"""By the name in a target."""

_COMPILERS: dict[Platform, tuple[tuple[str, ...], str]] = {
    "cuda": (("jax_cuda12_plugin", "jax_cuda13_plugin"), "cuda-fit"), "tpu": (("libtpu",), "tpu-fit")
}  # fmt: skip
"""By platform: modules of which one compiles for it, and the extra that installs one."""


def parse_target(target: str) -> Chip:
    """The chip of ``h100:1`` and the like, or ``cpu``; `CHIPS` has the names. A compiler is looked for, not loaded.

    Raises:
        ConfigError: no such chip, more than one of them, or no compiler for it is installed.
    """
    if target == "cpu":
        return this_machine()
    name, _, count = target.partition(":")
    if name not in CHIPS:
        known = ", ".join(f"{known}:1" for known in CHIPS)
        raise ConfigError(f"--target is {target!r}: there are {known}, and cpu for this machine")
    if count not in ("", "1"):
        raise ConfigError(
            f"--target is {target!r}: a learner computes on one device, and others would idle; give {name}:1"
        )
    chip = CHIPS[name]
    modules, extra = _COMPILERS[chip.platform]
    if all(importlib.util.find_spec(module) is None for module in modules):
        raise ConfigError(
            f"--target is {target!r}, and its compiler is not installed: pip install 'penstock[{extra}]' (it needs no "
            "such chip)"
        )
    return chip


def prepare_compilers() -> None:
    """What compilers for absent hardware need said before JAX is loaded: they would look for the hardware."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def this_machine() -> Chip:
    """The CPUs and the free memory here, at the rates that they give at this moment."""
    product = matrix_product_flops()
    return Chip("this machine", "cpu", free_memory_bytes(), 2 * copy_bytes(), {"float32": product, "bfloat16": product})


_SIDE = 1024
_COPY_BYTES = 128 * 2**20


def matrix_product_flops() -> float:
    """FLOP/s of a float32 matrix product by JAX's default device; loads JAX."""
    import jax
    import jax.numpy as jnp

    matrix = jnp.ones((_SIDE, _SIDE), jnp.float32)
    multiply = jax.jit(jnp.matmul)
    return 2 * _SIDE**3 / best_s(lambda: multiply(matrix, matrix).block_until_ready())


def copy_bytes() -> float:
    """Bytes per second of a copy in main memory, each read and written."""
    source = np.ones(_COPY_BYTES, np.uint8)
    target = np.empty_like(source)
    return _COPY_BYTES / best_s(lambda: np.copyto(target, source))


def best_s(run: Callable[[], object], repeats: int = 5) -> float:
    """Seconds of the fastest of some runs, after one that is not counted."""
    run()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def _text_proto(fields: Any) -> str:
    """Protobuf's text form of nested fields."""
    written = (f"{k} {{ {_text_proto(v)} }}" if isinstance(v, Mapping) else f"{k}: {v}" for k, v in fields.items())
    return " ".join(written)
