"""PyTorch's side of `benchmarks.learner`; a script, because it needs an interpreter with torch and transformers.

    PYTHON learner_peer.py FOLDER padded|packed MICRO_BATCH_TOKENS

Reads a model directory and `sequences.npz` in FOLDER, says what it is ready with, and then makes one update for each
line of its input: forward and backward of micro-batches, and an AdamW step, float32, `attn_implementation="sdpa"`
without a compiler. Sequences are padded to the longest of their micro-batch, or packed into rows with a mask of who
sees whom. Scores over the vocabulary are computed of loss tokens only. Answers with one JSON line: seconds on the clock
and of all processors, and the loss. Imports nothing of Penstock.
"""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM


def padded_batches(arrays, tokens):
    """Sequences in their order, as many per micro-batch as fit its tokens when padded."""
    lengths, batches, first = arrays["lengths"], [], 0
    while first < len(lengths):
        last = first + 1
        while last < len(lengths) and (last + 1 - first) * lengths[first : last + 1].max() <= tokens:
            last += 1
        width = lengths[first:last].max()
        rows = torch.from_numpy(arrays["tokens"][first:last, :width].astype(np.int64))
        batches.append((rows, None, torch.from_numpy(arrays["weights"][first:last, :width]), {"attention_mask": (
            torch.arange(int(width)) < torch.from_numpy(lengths[first:last])[:, None]).long()}))  # fmt: skip
        first = last
    return batches


def packed_batches(arrays, tokens):
    """Rows as they are packed by Penstock, each position seeing its own sequence up to it."""
    rows, batches = arrays["row_tokens"], []
    count = max(1, tokens // rows.shape[1])
    for first in range(0, len(rows), count):
        chosen = slice(first, first + count)
        ids = torch.from_numpy(arrays["row_segments"][chosen].astype(np.int64))
        seen = (ids[:, :, None] == ids[:, None]) & torch.ones(ids.shape[1], ids.shape[1]).tril().bool()
        positions = torch.from_numpy(arrays["row_positions"][chosen].astype(np.int64))
        weights = torch.from_numpy(arrays["row_weights"][chosen])
        tokens_of = torch.from_numpy(rows[chosen].astype(np.int64))
        batches.append((tokens_of, positions, weights, {"attention_mask": seen[:, None]}))
    return batches


def update(model, optimizer, batches):
    """The loss Σ weight · −log p of every token under the loss; weights are advantage and denominator."""
    total = 0.0
    for rows, positions, weights, options in batches:
        hidden = model.model(input_ids=rows, position_ids=positions, use_cache=False, **options).last_hidden_state
        at = weights[:, 1:].ne(0)
        scores = model.lm_head(hidden[:, :-1][at])
        logprobs = scores.log_softmax(-1).gather(-1, rows[:, 1:][at][:, None])[:, 0]
        loss = -(weights[:, 1:][at] * logprobs).sum()
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return total


def main(folder, layout, tokens):
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0, betas=(0.9, 0.95))
    with np.load(Path(folder) / "sequences.npz") as file:
        arrays = dict(file)
    batches = (padded_batches if layout == "padded" else packed_batches)(arrays, tokens)
    print(json.dumps({"torch": torch.__version__, "micro_batches": len(batches)}), flush=True)
    for _ in sys.stdin:
        started, used = time.perf_counter(), time.process_time()
        loss = update(model, optimizer, batches)
        seconds, processor_s = time.perf_counter() - started, time.process_time() - used
        print(json.dumps({"seconds": seconds, "processor_s": processor_s, "loss": loss}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
