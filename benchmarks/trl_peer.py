"""The first step of `benchmarks.first_step` with TRL; a script of its own, because that needs a PyTorch of its own.

    PYTHON trl_peer.py VOCAB PROMPT_TOKENS GROUPS SAMPLES TOKENS WIDTH MLP LAYERS HEADS KEY_HEADS

`GRPOTrainer` on a Qwen2 of random float32 weights: prompts of random words, answers of exactly so many tokens, the
share of even tokens as reward, one step. It has what makes it fast here: no gradient checkpointing, no bfloat16, the
whole batch at once, nothing logged or saved. Prints one JSON object of times since the epoch; imports nothing of
Penstock.
"""

import importlib.metadata
import json
import random
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
        self.stamps = {"imported": time.time()}

    def on_step_begin(self, *_, **__):
        self.stamps.setdefault("begun", time.time())

    def on_step_end(self, *_, **__):
        self.stamps["stepped"] = time.time()


def share_of_even_tokens(completion_ids, **_):
    return [sum(token % 2 == 0 for token in tokens) / len(tokens) for tokens in completion_ids]


def make_tokenizer(vocab):
    """One word per token; what ends an answer lies beyond the model's vocabulary, so that nothing does."""
    words = {str(token): token for token in range(vocab)} | {"<end>": vocab}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="0", unk_token="0", padding_side="left"
    )


def main(vocab, prompt_tokens, groups, samples, tokens, width, mlp, layers, heads, key_heads):
    clock, rng = Clock(), random.Random(0)
    shape = Qwen2Config(
        vocab_size=vocab, hidden_size=width, intermediate_size=mlp, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=key_heads, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = Qwen2ForCausalLM(shape).to(torch.float32)
    prompts = [" ".join(str(rng.randrange(1, vocab)) for _ in range(prompt_tokens)) for _ in range(groups)]
    lengths = []

    def reward(completion_ids, **_):
        lengths.extend(map(len, completion_ids))
        return share_of_even_tokens(completion_ids)

    with tempfile.TemporaryDirectory(prefix="trl-peer-") as folder:
        arguments = trl.GRPOConfig(
            output_dir=folder, per_device_train_batch_size=groups * samples, num_generations=samples,
            max_completion_length=tokens, max_steps=1, temperature=1.0, beta=0.0, use_cpu=True, bf16=False,
            gradient_checkpointing=False, report_to="none", save_strategy="no", logging_strategy="no",
            disable_tqdm=True,
        )  # fmt: skip
        trainer = trl.GRPOTrainer(
            model,
            reward_funcs=reward,
            args=arguments,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=make_tokenizer(vocab),
            callbacks=[clock],
        )
        trainer.train()
    assert lengths == [tokens] * (groups * samples), f"{len(lengths)} answers of {set(lengths)} tokens"
    parameters = sum(array.numel() for array in model.parameters())
    assert {array.dtype for array in model.parameters()} == {torch.float32}
    version = importlib.metadata.version("trl")
    print(json.dumps({"version": version, "parameters": parameters, **clock.stamps}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
