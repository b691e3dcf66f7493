#!/usr/bin/env python3
"""Makes the golden numbers of Adafactor and Muon out of other systems' own optimisers. Needs torch and transformers.

    python -m venv /tmp/golden && /tmp/golden/bin/pip install torch transformers
    /tmp/golden/bin/python scripts/make_golden_optimizers.py

Arrays as a policy has them, two layers end to end: every matrix is a parameter of its own there, since neither knows
stacked layers. Adafactor takes four steps of gradients that change from step to step, without parameter scale, relative
steps and momentum. Of Muon the golden is its first step: torch adds no bias correction to Nesterov's momentum, which
the first orthogonalised step does not see, and it orthogonalises in bfloat16, so that only two digits agree.
"""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.optimization import Adafactor

OUT = Path(__file__).parent.parent / "tests" / "learner" / "golden" / "optimizers.json"
SHAPES = {"embedding": (7, 4), "layers.up": (2, 4, 6), "layers.down": (2, 6, 4), "final_norm": (4,)}
STEPS = 4
RATE, DECAY = 0.05, 0.1


def drawn() -> tuple[dict[str, np.ndarray], list[dict[str, np.ndarray]]]:
    """Parameters, and the gradients of each step; of very different sizes from layer to layer."""
    rng = np.random.default_rng(7)

    def one(scale: float) -> dict[str, np.ndarray]:
        return {name: np.round(rng.normal(0, scale, shape), 3).astype(np.float32) for name, shape in SHAPES.items()}

    gradients = [one(1.0) for _ in range(STEPS)]
    for step in gradients:
        for name in ("layers.up", "layers.down"):
            step[name][1] *= 8
    return one(0.5), gradients


def matrices(arrays: dict[str, np.ndarray]) -> list[tuple[str, torch.Tensor]]:
    """With the name of the stack, one by one."""
    found: list[tuple[str, torch.Tensor]] = []
    for name, array in arrays.items():
        parts = array if name.startswith("layers.") else array[None]
        found += [(name, torch.tensor(part)) for part in parts]
    return found


def stacked(parts: list[tuple[str, torch.Tensor]]) -> dict[str, Any]:
    """Back to stacks."""
    lists: dict[str, list[Any]] = {}
    for name, part in parts:
        lists.setdefault(name, []).append([round(float(value), 6) for value in part.flatten()])
    return {name: np.reshape(values, SHAPES[name]).tolist() for name, values in lists.items()}


def adafactor() -> list[dict[str, Any]]:
    """Parameters after each step."""
    parameters, gradients = drawn()
    parts = matrices(parameters)
    decayed = [part for name, part in parts if not name.endswith("norm")]
    others = [part for name, part in parts if name.endswith("norm")]
    groups = [{"params": decayed, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimiser = Adafactor(groups, lr=RATE, scale_parameter=False, relative_step=False, warmup_init=False)
    after: list[dict[str, Any]] = []
    for step in gradients:
        for (_, part), (_, gradient) in zip(parts, matrices(step), strict=True):
            part.grad = gradient
        optimiser.step()
        after.append(stacked(parts))
    return after


def muon() -> dict[str, Any]:
    """The matrices of the layers after one step."""
    parameters, gradients = drawn()
    parts = [part for part in matrices(parameters) if part[0].startswith("layers.")]
    for (_, part), (_, gradient) in zip(
        parts, [each for each in matrices(gradients[0]) if each[0].startswith("layers.")], strict=True
    ):
        part.grad = gradient
    tensors = [part for _, part in parts]
    torch.optim.Muon(tensors, lr=RATE, weight_decay=DECAY, momentum=0.95, adjust_lr_fn="match_rms_adamw").step()
    return stacked(parts)


if __name__ == "__main__":
    start, steps = drawn()
    content = {
        "made_by": {name: version(name) for name in ("torch", "transformers")},
        "rate": RATE,
        "weight_decay": DECAY,
        "parameters": {name: array.tolist() for name, array in start.items()},
        "gradients": [{name: array.tolist() for name, array in step.items()} for step in steps],
        "adafactor": adafactor(),
        "muon": muon(),
    }
    rounded = json.loads(json.dumps(content, default=float), parse_float=lambda word: round(float(word), 6))
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in rounded.items())
    OUT.write_text(f"{{{lines}}}\n", "utf-8")
    print(f"wrote {OUT}")
