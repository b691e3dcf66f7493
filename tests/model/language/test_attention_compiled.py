"""Attention compiled for chips that are not there: it compiles, and nothing of length × length is in it.

Skipped without the compilers: `libtpu` for TPUs, `jax-cuda12-plugin` for NVIDIA GPUs (both with JAX_PLATFORMS=cpu).
"""

from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from penstock.model.language import Segments
from penstock.model.language.attention import attention

pytestmark = pytest.mark.slow

LENGTH = 2048


def compiled(topology, kernel, dtype=jnp.bfloat16):
    """Forward and backward of two rows, for one chip of a topology; and the name of that chip."""
    mesh = topologies.make_mesh(topology, (len(topology.devices),), ("chips",))
    whole = NamedSharding(mesh, PartitionSpec())
    segments = Segments.of(np.repeat(np.arange(16) + 1, LENGTH // 16)[None].repeat(2, axis=0))
    shapes = [(2, LENGTH, 6, 64), (2, LENGTH, 2, 64), (2, LENGTH, 2, 64)]
    inputs = [jax.ShapeDtypeStruct(shape, dtype, sharding=whole) for shape in shapes]

    def run(query, key, value, segments):
        found, backward = jax.vjp(lambda *x: attention(*x, segments, kernel), query, key, value)
        return backward(found)

    described = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), segments)
    program = jax.jit(
        jax.shard_map(run, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
    )
    return program.lower(*inputs, described).compile(), mesh.devices.flat[0].device_kind


@pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed")
def test_splash_attention_compiles_for_a_tpu(monkeypatch):
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    topology = topologies.get_topology_desc(topology_name="v5e:2x2", platform="tpu")
    program, kind = compiled(topology, "splash")
    assert kind == "TPU v5 lite"
    assert f"{LENGTH},{LENGTH}]" not in program.as_text()
    dense, _ = compiled(topology, "dense")
    assert f"{LENGTH},{LENGTH}]" in dense.as_text()
    assert program.memory_analysis().temp_size_in_bytes < dense.memory_analysis().temp_size_in_bytes / 4


H100 = """
gpu_device_info { cuda_compute_capability { major: 9 minor: 0 } core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
device_memory_size: 84978434048 memory_bandwidth: 3352320000000 l2_cache_size: 52428800 threads_per_warp: 32
threads_per_block_limit: 1024 threads_per_core_limit: 2048 shared_memory_per_block: 49152
shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472 registers_per_block_limit: 65536
registers_per_core_limit: 65536 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 }
dnn_version_info { major: 9 minor: 10 } platform_name: "CUDA" device_description_str: "NVIDIA H100 80GB HBM3"
"""


@pytest.mark.skipif(find_spec("jax_cuda12_plugin") is None, reason="jax-cuda12-plugin is not installed")
@pytest.mark.parametrize("kernel", ["triton", "cudnn"])
def test_packed_kernels_compile_for_an_h100(monkeypatch, kernel):
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    # They ask which GPU runs this, and none does.
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda _: True)
    monkeypatch.setattr(cudnn, "is_cuda_compute_capability_equal", lambda _: False)
    topology = topologies.get_topology_desc(platform="cuda", target_config=H100, topology="1x1x1")
    program, kind = compiled(topology, kernel)
    assert kind == "NVIDIA H100 80GB HBM3"
    assert f"{LENGTH},{LENGTH}]" not in program.as_text()
