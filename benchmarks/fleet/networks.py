"""How fast the machine decides with the Nature CNN, beside its own rate of matrix products.

    python -m benchmarks.fleet.networks SECONDS

Decisions of 32 slots on 84 x 84 x 4 frames through `JaxPolicyRunner`, one after the other; matrix products of 1024 x
1024 float32 through the same library. A share of 1 would be a network that is one large product. Prints one JSON line.
"""

import json
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from penstock.fleet.jax_policy import JaxPolicyRunner
from penstock.model.control import ControlModelConfig, make_control_policy
from penstock.types import LeafSpace, Spaces

FRAME, SLOTS, SIDE, FEATURES, ACTIONS = (84, 84, 4), 32, 1024, 512, 6
_LAYERS = ((8, 4, 32), (4, 2, 64), (3, 1, 64))  # size, stride, channels (Mnih et al. 2015)


def nature_flops() -> int:
    """Additions and multiplications of one decision: convolutions, dense layer, heads."""
    total, (high, wide, channels) = 0, FRAME
    for size, stride, outputs in _LAYERS:
        high, wide = (high - size) // stride + 1, (wide - size) // stride + 1
        total += 2 * high * wide * outputs * size * size * channels
        channels = outputs
    return total + 2 * high * wide * channels * FEATURES + 2 * FEATURES * (ACTIONS + 1)


def times_per_s(call: Callable[[], object], seconds: float) -> float:
    """Calls per second, after three that are not counted."""
    for _ in range(3):
        call()
    count, begin_s = 0, time.perf_counter()
    while (now_s := time.perf_counter()) - begin_s < seconds:
        call()
        count += 1
    return count / (now_s - begin_s)


def measure(seconds: float) -> dict[str, float]:
    """Decisions and operations per second."""
    spaces = Spaces((LeafSpace("", "box", FRAME, "uint8"),), (LeafSpace("", "discrete", (), "int64", (ACTIONS,)),))
    policy = make_control_policy(ControlModelConfig(network="nature_cnn"), spaces, 1)
    runner = JaxPolicyRunner(policy, SLOTS, SLOTS, 1)
    runner.compile()
    frames = {"": np.random.default_rng(0).integers(0, 256, (SLOTS, *FRAME), np.uint8)}
    slots, first = np.arange(SLOTS), np.zeros(SLOTS, np.bool_)
    decisions = SLOTS * times_per_s(lambda: runner.decide(slots, frames, first).result(), seconds)
    matrix = jnp.ones((SIDE, SIDE), jnp.float32)
    product = jax.jit(lambda a: a @ a)
    products = times_per_s(lambda: product(matrix).block_until_ready(), seconds)
    return {
        "decisions_per_s": decisions,
        "network_flops_per_s": decisions * nature_flops(),
        "product_flops_per_s": products * 2 * SIDE**3,
    }


if __name__ == "__main__":
    print(json.dumps(measure(float(sys.argv[1]))))
