"""TRL's side of `benchmarks.first_step`, `end_to_end` and `time_to_reward`; a script, since it needs its own PyTorch.

    PYTHON trl_peer.py '{"trainer": "grpo", "steps": 1, "groups": 8, …}'

`GRPOTrainer` or `RLOOTrainer` on a Qwen2 of random float32 weights: prompts of random words, answers of exactly so many
tokens, or with the vocabulary's last one as their end, the share of even tokens as reward. It has what makes it fast
here: no gradient checkpointing, no bfloat16, the whole batch at once, nothing logged or saved. Prints one JSON object:
times since the epoch, lengths of the last step's answers, the peak of resident memory in bytes. Imports nothing of
Penstock. With a `task` the model, prompts and reward are those of a recipe (`benchmarks.time_to_reward`), and every so
many steps the policy answers what is held out, which counts.
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
from transformers import (
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    TrainerCallback,
)


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


class HeldOut(TrainerCallback):
    """Rewards of what is held out, and when each was known; ends the training at the bar."""

    def __init__(self, model, tokenizer, task, reward):
        self.model, self.tokenizer, self.task, self.reward = model, tokenizer, task, reward
        self.found = []

    def on_step_end(self, _, state, control, **__):
        if state.global_step % self.task["every"]:
            return
        questions = [pair for pair in self.task["held_out"] for _ in range(self.task["answers"])]
        inputs = self.tokenizer([question for question, _ in questions], return_tensors="pt", padding=True)
        with torch.no_grad():
            answers = self.model.generate(
                inputs["input_ids"], attention_mask=inputs["attention_mask"], do_sample=True, temperature=1.0,
                top_k=0, top_p=1.0, max_new_tokens=self.task["tokens"], eos_token_id=self.tokenizer.eos_token_id,
                pad_token_id=self.tokenizer.pad_token_id,
            )  # fmt: skip
        own = answers[:, inputs["input_ids"].shape[1] :].tolist()
        ids = [row[: row.index(self.tokenizer.eos_token_id) + 1] if self.tokenizer.eos_token_id in row else row
               for row in own]  # fmt: skip
        rewards = self.reward(completion_ids=ids, answer=[answer for _, answer in questions])
        mean = sum(rewards) / len(rewards)
        self.found.append([state.global_step, mean, time.time()])
        control.should_training_stop = mean >= self.task["bar"]


def made_task(task):
    """Model, tokenizer, data set and reward of a recipe, whose scoring function comes as its source."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(task["model"], padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(task["model"], dtype=torch.float32)
    names = {}
    exec(task["source"], names)  # of benchmarks.time_to_reward, which started this process

    def reward(completion_ids, answer, **_):
        ended = [tokenizer.eos_token_id in ids for ids in completion_ids]
        texts = tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
        return [names["score"](*each) for each in zip(texts, answer, ended, strict=True)]

    for question, tokens in task["prompts"].items():
        found = tokenizer(question)["input_ids"]
        assert list(found) == tokens, f"{question} is {found} here and {tokens} there"
    columns = {"prompt": 0, "answer": 1}
    data = Dataset.from_dict({name: [pair[at] for pair in task["train"]] for name, at in columns.items()})
    return model, tokenizer, data, reward


def random_task(groups, prompt_tokens, shape, ends):
    """Random weights, prompts of random words, and the share of even tokens."""
    rng, vocab = random.Random(0), shape["vocab_size"]
    shape = {name: size for name, size in shape.items() if name != "model_type"}
    model = Qwen2ForCausalLM(Qwen2Config(**shape, bos_token_id=None, eos_token_id=None)).to(torch.float32)
    prompts = [" ".join(str(rng.randrange(1, vocab - 1)) for _ in range(prompt_tokens)) for _ in range(groups)]
    return model, make_tokenizer(vocab, ends), Dataset.from_dict({"prompt": prompts}), share_of_even_tokens


def main(
    trainer, steps, groups, samples, tokens, prompt_tokens=0, shape=None, ends=False, learning_rate=1e-6, task=None,
    seed=0, optimizer=None,
):  # fmt: skip
    clock, lengths = Clock(), []
    torch.manual_seed(seed)
    made = random_task(groups, prompt_tokens, shape, ends) if task is None else made_task(task)
    model, tokenizer, data, own_reward = made
    evaluated = HeldOut(model, tokenizer, task, own_reward) if task else None

    def reward(completion_ids, **columns):
        lengths.extend(map(len, completion_ids))
        return own_reward(completion_ids=completion_ids, **columns)

    config, chosen = {"grpo": (trl.GRPOConfig, trl.GRPOTrainer), "rloo": (trl.RLOOConfig, trl.RLOOTrainer)}[trainer]
    with tempfile.TemporaryDirectory(prefix="trl-peer-") as folder:
        settings = {"lr_scheduler_type": "constant", **(optimizer or {})}
        arguments = config(
            output_dir=folder, per_device_train_batch_size=groups * samples, num_generations=samples,
            max_completion_length=tokens, max_steps=steps, temperature=1.0, beta=0.0, use_cpu=True, bf16=False,
            gradient_checkpointing=False, report_to="none", save_strategy="no", logging_strategy="no",
            disable_tqdm=True, learning_rate=learning_rate, seed=seed, **settings,
        )  # fmt: skip
        chosen(
            model,
            reward_funcs=reward,
            args=arguments,
            train_dataset=data,
            processing_class=tokenizer,
            callbacks=[clock, *filter(None, [evaluated])],
        ).train()
    if task is None:
        assert len(lengths) == groups * samples * steps, len(lengths)
        assert ends or set(lengths) == {tokens}, f"answers of {set(lengths)} tokens"
    assert {array.dtype for array in model.parameters()} == {torch.float32}
    told = {
        "version": importlib.metadata.version("trl"), "parameters": sum(array.numel() for array in model.parameters()),
        "lengths": lengths[-groups * samples :], "held_out": evaluated.found if evaluated else [],
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, **clock.stamps,
    }  # fmt: skip
    print(json.dumps(told))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
