"""TRL's side of `benchmarks.first_step` and `benchmarks.end_to_end`; a script, because it needs a PyTorch of its own.

    PYTHON trl_peer.py '{"trainer": "grpo", "steps": 1, "groups": 8, …}'

`GRPOTrainer` or `RLOOTrainer` on a Qwen2 of random float32 weights: prompts of random words, answers of exactly so many
tokens, or with the vocabulary's last one as their end, the share of even tokens as reward. It has what makes it fast
here: no gradient checkpointing, no bfloat16, the whole batch at once, nothing logged or saved. Prints one JSON object:
times since the epoch, lengths of the last step's answers, the peak of resident memory in bytes. Imports nothing of
Penstock.
"""

import importlib.metadata
import json
import random
import resource
import sys
import tempfile
import time

import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, TrainerCallback


class Clock(TrainerCallback):
    def __init__(self):
        self.stamps = {"imported": time.time(), "steps": []}

    def on_step_begin(self, *_, **__):
        self.stamps.setdefault("begun", time.time())

    def on_step_end(self, *_, **__):
        self.stamps["steps"].append(time.time())


def share_of_even_tokens(completion_ids, **_):
    return [sum(token % 2 == 0 for token in tokens) / len(tokens) for tokens in completion_ids]


def make_tokenizer(vocab, ends):
    """One word per token; an answer ends with the last one, or with one beyond the model's vocabulary."""
    words = {str(token): token for token in range(vocab)} | {"<end>": vocab}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    end = str(vocab - 1) if ends else "<end>"
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=end, pad_token="0", unk_token="0", padding_side="left"
    )


def main(trainer, steps, groups, samples, tokens, prompt_tokens, shape, ends=False, learning_rate=1e-6):
    clock, rng = Clock(), random.Random(0)
    vocab = shape["vocab_size"]
    shape = {name: size for name, size in shape.items() if name != "model_type"}
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**shape, bos_token_id=None, eos_token_id=None)).to(torch.float32)
    prompts = [" ".join(str(rng.randrange(1, vocab - 1)) for _ in range(prompt_tokens)) for _ in range(groups)]
    lengths = []

    def reward(completion_ids, **_):
        lengths.extend(map(len, completion_ids))
        return share_of_even_tokens(completion_ids)

    config, chosen = {"grpo": (trl.GRPOConfig, trl.GRPOTrainer), "rloo": (trl.RLOOConfig, trl.RLOOTrainer)}[trainer]
    with tempfile.TemporaryDirectory(prefix="trl-peer-") as folder:
        arguments = config(
            output_dir=folder, per_device_train_batch_size=groups * samples, num_generations=samples,
            max_completion_length=tokens, max_steps=steps, temperature=1.0, beta=0.0, use_cpu=True, bf16=False,
            gradient_checkpointing=False, report_to="none", save_strategy="no", logging_strategy="no",
            disable_tqdm=True, learning_rate=learning_rate, lr_scheduler_type="constant",
        )  # fmt: skip
        chosen(
            model,
            reward_funcs=reward,
            args=arguments,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=make_tokenizer(vocab, ends),
            callbacks=[clock],
        ).train()
    assert len(lengths) == groups * samples * steps, len(lengths)
    assert ends or set(lengths) == {tokens}, f"answers of {set(lengths)} tokens"
    assert {array.dtype for array in model.parameters()} == {torch.float32}
    told = {
        "version": importlib.metadata.version("trl"), "parameters": sum(array.numel() for array in model.parameters()),
        "lengths": lengths[-groups * samples :],
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, **clock.stamps,
    }  # fmt: skip
    print(json.dumps(told))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
