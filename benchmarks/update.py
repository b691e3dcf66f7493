"""Seconds per learner update, split into forward, backward and optimiser step, beside its correctness.

    .venv/bin/python benchmarks/update.py [--repeats 7] [--sweep]

The shape is a 6.3M-parameter Qwen2 (vocabulary 8192, hidden 256, 6 layers) in float32 on 64 sequences of 16 prompt
and 64 response tokens. In the same process a plain update is timed, whose loss holds log-softmax over the whole
[tokens, vocabulary]; its loss and gradient are also what ours are compared with. FLOPs are those the mathematics
needs (forward, and twice that backward; the recomputation that `remat` adds is not counted as useful), and their
share is of the matrix-product rate measured in the same run, beside each number. Medians and minima are printed, and
the processor seconds of all threads, which other users of the machine disturb less. Last, for how long a checkpoint
stops the training.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from penstock.batch import RowShape, example_from_rollout
from penstock.learner import Learner, LearnerConfig, LossConfig, OptimizerConfig, save_checkpoint
from penstock.learner import step as compiled
from penstock.learner.micro_batches import plan_update
from penstock.learner.optimizer import applier, initial_state
from penstock.model.language import Decoder, ModelConfig, Segments
from penstock.model.language.attention_choice import Remat, platform_named
from penstock.types import RLExample, Rollout, RolloutMetadata, TrainingBatch

SHAPE = ModelConfig(
    model_type="qwen2",
    vocab_size=8192,
    hidden_size=256,
    intermediate_size=656,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    tie_word_embeddings=True,
)
SEQUENCES, PROMPT, RESPONSE = 64, 16, 64
LENGTH = PROMPT + RESPONSE


def main() -> None:
    arguments = parse()
    decoder, examples = Decoder.initialise(SHAPE, jax.random.key(0)), make_examples()
    rate = matrix_product_rate()
    flops = update_flops(examples)
    print(
        f"{SHAPE.parameter_count / 1e6:.1f}M parameters, {SEQUENCES} x {LENGTH} tokens, {jax.devices()[0].device_kind}"
    )
    print(f"matrix product {rate / 1e9:.0f} GFLOP/s; an update needs {flops / 1e9:.0f} GFLOP")
    plain = plain_update(decoder, examples)
    print_correctness(decoder, examples, arguments)
    report("plain update, whole log-softmax", timings(plain, arguments.repeats), flops, rate)
    choices = product((4, 8, 16, 32), (128, 256, 512), get_args(Remat)[:3]) if arguments.sweep else [
        (arguments.rows, arguments.tile, arguments.remat)
    ]  # fmt: skip
    for rows, tile, remat in choices:
        config = learner_config(rows, tile, remat)
        print(f"micro_batch_rows={rows} head_tile_tokens={tile} remat={remat}")
        time_learner(decoder, examples, config, arguments.repeats, flops, rate)
    print_checkpoint_pause(decoder, arguments)


class NoTokenizer:
    """What a model directory needs of one."""

    eos_token_id, pad_token_id, stop_token_ids = 1, 0, (1,)

    def save(self, directory: str | Path) -> None:
        """Nothing is saved."""


def print_checkpoint_pause(decoder: Decoder, arguments: argparse.Namespace) -> None:
    """What training stands still for a checkpoint: a snapshot, and the whole write as at staleness zero."""
    learner = Learner(decoder, learner_config(arguments.rows, arguments.tile, "layer"), 1)
    pauses: dict[str, list[float]] = {"written at once": [], "snapshot": []}
    with tempfile.TemporaryDirectory() as folder:
        for step in range(arguments.repeats):
            started = time.perf_counter()
            save_checkpoint(Path(folder), step, learner, NoTokenizer(), {})
            written = time.perf_counter()
            learner.snapshot()
            pauses["snapshot"].append(time.perf_counter() - written)
            pauses["written at once"].append(written - started)
    at_once, beside = (float(np.median(each)) for each in pauses.values())
    print(
        f"pause for a checkpoint: {at_once * 1e3:.0f} ms written at once, {beside * 1e3:.1f} ms for a snapshot that is "
        f"written beside the training ({at_once / beside:.0f} x less)"
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--rows", type=int, default=16, help="micro_batch_rows")
    parser.add_argument("--tile", type=int, default=256, help="head_tile_tokens")
    parser.add_argument("--remat", choices=get_args(Remat), default="layer")
    parser.add_argument("--sweep", action="store_true", help="try rows, tiles and remat")
    return parser.parse_args()


def learner_config(rows: int, tile: int, remat: Remat) -> LearnerConfig:
    return LearnerConfig(
        row_length=LENGTH,
        micro_batch_rows=rows,
        head_tile_tokens=tile,
        remat=remat,
        optimizer=OptimizerConfig(learning_rate=1e-4),
    )


def make_examples() -> tuple[RLExample, ...]:
    rng = np.random.default_rng(0)
    return tuple(
        example_from_rollout(
            Rollout(
                env_name="benchmark",
                env_example_id=str(index),
                prompt_tokens=rng.integers(0, SHAPE.vocab_size, PROMPT).astype(np.int32),
                response_tokens=rng.integers(0, SHAPE.vocab_size, RESPONSE).astype(np.int32),
                response_logprobs=-9 + rng.normal(size=RESPONSE).astype(np.float32),
                token_rewards=np.zeros(RESPONSE, np.float32),
                episode_reward=0.0,
                metadata=RolloutMetadata("benchmark", 0.0, -1),
                rollout_id=f"benchmark-0-0/{index}",
            ),
            advantage=float(rng.normal()),
            max_tokens=LENGTH,
        )
        for index in range(SEQUENCES)
    )


def matrix_product_rate() -> float:
    """FLOP/s of a float32 product on all cores, the best of several."""
    multiply = jax.jit(lambda a: a @ a)
    size = 1024
    matrix = jnp.ones((size, size))
    return 2 * size**3 / min(timings(lambda: multiply(matrix), 50)["wall"])


def update_flops(examples: tuple[RLExample, ...]) -> float:
    """Three times the forward pass: products with matrices, attention as computed, head on loss tokens only."""
    tokens = SEQUENCES * LENGTH
    per_layer = SHAPE.hidden_size * (2 * SHAPE.query_size + 2 * SHAPE.key_value_size + 3 * SHAPE.intermediate_size)
    attention = 2 * LENGTH * SHAPE.query_size
    asked = sum(int(example.loss_mask.sum()) for example in examples)
    body = 2 * tokens * SHAPE.num_hidden_layers * (per_layer + attention)
    return 3.0 * (body + 2 * asked * SHAPE.vocab_size * SHAPE.hidden_size)


def plain_loss(decoder: Decoder, batch: dict[str, Any]) -> jax.Array:
    """The rloo loss over one batch, with [tokens, vocabulary] in float32."""
    hidden = decoder.hidden_states(batch["tokens"], batch["position_ids"], batch["segments"])
    scores = jax.nn.log_softmax(decoder.logits(hidden)[:, :-1])
    logprobs = jnp.take_along_axis(scores, batch["tokens"][:, 1:, None], axis=-1)[..., 0]
    proximal = jax.lax.stop_gradient(logprobs)
    weight = jnp.minimum(jnp.exp(proximal - batch["generator_log_probs"][:, 1:]), 2.0)
    losses = -weight * jnp.exp(logprobs - proximal) * batch["advantage"][:, 1:]
    mask = batch["loss_mask"][:, 1:]
    return jnp.where(mask, losses, 0).sum() / mask.sum()


def stacked(examples: tuple[RLExample, ...]) -> dict[str, Any]:
    names = ("tokens", "position_ids", "generator_log_probs", "advantage", "loss_mask")
    arrays: dict[str, Any] = {name: jnp.stack([getattr(e, name) for e in examples]) for name in names}
    return arrays | {"segments": Segments.of(np.stack([e.segment_ids for e in examples]))}


def plain_update(decoder: Decoder, examples: tuple[RLExample, ...]) -> Callable[[], Any]:
    config, batch = OptimizerConfig(learning_rate=1e-4), stacked(examples)
    gradient, apply = jax.jit(jax.value_and_grad(plain_loss)), applier(config)
    held = {"decoder": decoder, "state": initial_state(config, decoder)}

    def update() -> Any:
        loss, gradients = gradient(held["decoder"], batch)
        held["state"], held["decoder"], done = apply(held["decoder"], held["state"], gradients, np.float32(1e-4), loss)
        return done

    return update


def print_correctness(decoder: Decoder, examples: tuple[RLExample, ...], arguments: argparse.Namespace) -> None:
    value, expected = jax.jit(jax.value_and_grad(plain_loss))(decoder, stacked(examples))
    options = compiled.ForwardOptions(arguments.remat, arguments.tile)
    accumulate = compiled.policy_accumulator(LossConfig(), options)
    so_far, loss = compiled.zeros_maker()(decoder), 0.0
    for micro_batch in plan_update(examples, LossConfig(), [RowShape(LENGTH, arguments.rows)], 0).micro_batches:
        so_far, sums = accumulate(decoder, so_far, micro_batch)
        loss += compiled.LossSums(*sums).loss
    worst = max(
        float(jnp.abs(ours - theirs).max())
        for ours, theirs in zip(jax.tree.leaves(so_far.policy), jax.tree.leaves(expected), strict=True)
    )
    print(f"loss {float(loss):.7f}, plain {float(value):.7f}; gradients differ by at most {worst:.1e}")


def time_learner(
    decoder: Decoder, examples: tuple[RLExample, ...], config: LearnerConfig, repeats: int, flops: float, rate: float
) -> None:
    learner = Learner(decoder, config, 1000)
    started = time.perf_counter()
    learner.compile()
    print(f"  compiled in {time.perf_counter() - started:.1f} s")
    plan = plan_update(examples, config.loss, config.row_shapes, 0)
    score = compiled.scorer(
        compiled.ForwardOptions(config.remat, config.head_tile(platform_named(jax.default_backend())))
    )
    forward = timings(lambda: [score(decoder, micro_batch) for micro_batch in plan.micro_batches], repeats)
    metrics: list[dict[str, float]] = []

    def update() -> None:
        batch = TrainingBatch("benchmark", learner.step, examples, (), {})
        metrics.append(learner.update(batch, learner.step))

    whole = timings(update, repeats)
    measured = metrics[1:]
    parts = {name: [m[f"time/{name}"] for m in measured] for name in ("forward_backward", "apply")}
    backward = np.array(parts["forward_backward"]) - np.median(forward["wall"])
    report("  update", whole, flops, rate)
    for name, seconds in {"forward": forward["wall"], "backward": backward, "apply": parts["apply"]}.items():
        print(f"    {name:9s} {np.median(seconds):.3f} s (best {np.min(seconds):.3f})")


def timings(function: Callable[[], Any], repeats: int) -> dict[str, list[float]]:
    """Wall and processor seconds of each call, after one that is not counted."""
    jax.block_until_ready(function())
    wall, processor = [], []
    for _ in range(repeats):
        started, used = time.perf_counter(), time.process_time()
        jax.block_until_ready(function())
        wall.append(time.perf_counter() - started)
        processor.append(time.process_time() - used)
    return {"wall": wall, "processor": processor}


def report(name: str, measured: dict[str, list[float]], flops: float, rate: float) -> None:
    median, best, processor = np.median(measured["wall"]), min(measured["wall"]), min(measured["processor"])
    rate = max(rate, matrix_product_rate())
    print(
        f"{name}: {median:.3f} s (best {best:.3f}, processor {processor:.2f}), "
        f"{SEQUENCES * LENGTH / median:.0f} tokens/s, {flops / median / rate:.0%} of {rate / 1e9:.0f} GFLOP/s "
        f"(best {flops / best / rate:.0%})"
    )


if __name__ == "__main__":
    main()
