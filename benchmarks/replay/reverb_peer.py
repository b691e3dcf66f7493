"""The same insertions and draws with dm-reverb; a script of its own, because that needs a TensorFlow of its own.

    PYTHON reverb_peer.py BUFFERED PROMPT RESPONSE ROUND REPEATS

A table of uniform draws that forgets the oldest item, the server in this process, rollouts inserted one by one through
a writer that is flushed once per round. Prints one JSON object; imports nothing of Penstock.
"""

import importlib.metadata
import json
import statistics
import sys
import time

import numpy as np
import reverb


def make_rollout(number, prompt, pool):
    """Six arrays, the number at the front of the first."""
    head = np.zeros(prompt, np.int32)
    head[0] = number
    tokens, logprobs = pool[0][number % len(pool[0])], pool[1][number % len(pool[1])]
    length = len(tokens)
    return [
        head, tokens.copy(), logprobs.copy(), np.zeros(length, np.float32), np.ones(length, np.bool_),
        np.full(length, number // 64, np.int32),
    ]  # fmt: skip


def insert(writer, rollouts):
    for rollout in rollouts:
        writer.append(rollout)
        writer.create_item("rollouts", 1, 1.0)
    writer.flush()


def main(buffered, prompt, response, size, repeats):
    rng = np.random.default_rng(0)
    pool = (
        rng.integers(0, 50_000, (257, response), np.int32),
        -rng.exponential(1.0, (257, response)).astype(np.float32),
    )
    table = reverb.Table(
        "rollouts", reverb.selectors.Uniform(), reverb.selectors.Fifo(), buffered, reverb.rate_limiters.MinSize(1)
    )
    server = reverb.Server([table])
    client = reverb.Client(f"localhost:{server.port}")
    inserting, drawing, number = [], [], 0
    with client.writer(max_sequence_length=1) as writer:
        while number < buffered:
            insert(writer, [make_rollout(number + i, prompt, pool) for i in range(size)])
            number += size
        for _ in range(repeats + 2):
            rollouts = [make_rollout(number + i, prompt, pool) for i in range(size)]
            began = time.perf_counter()
            insert(writer, rollouts)
            inserted = time.perf_counter()
            drawn = [step[0].data for step in client.sample("rollouts", size)]
            inserting.append(inserted - began)
            drawing.append(time.perf_counter() - inserted)
            number += size
            put_in = [make_rollout(int(arrays[0][0]), prompt, pool) for arrays in drawn]
            right = [
                np.array_equal(a, b) for pair in zip(drawn, put_in, strict=True) for a, b in zip(*pair, strict=True)
            ]
            assert len(drawn) == size and all(right), "reverb gave something else than what was put in"
    insert_s, draw_s = statistics.median(inserting[2:]), statistics.median(drawing[2:])
    print(json.dumps({"version": importlib.metadata.version("dm-reverb"), "insert_s": insert_s, "draw_s": draw_s}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
