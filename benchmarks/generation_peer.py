"""The other side of `benchmarks.generation_table`; a script, because it needs an interpreter with torch and more.

    PYTHON generation_peer.py transformers|vllm FOLDER float32|bfloat16

Reads a Hugging Face directory, says what it is ready with, and then answers prompts for each line of its input: token
ids in, tokens out, at temperature 1 (or 0) without top-k and top-p, of each answer exactly as many tokens as asked for,
which no token ends. It says in one JSON line how many seconds they took on the clock, how many tokens that were, and
the first answer. What libraries print goes to the standard error. Imports nothing of Penstock.

`transformers.generate` takes the rows batch by batch in their order, padded on the left; a batch goes on until its
longest answer is there, as it does where answers end by themselves. vLLM (`vllm.LLM`) gets all of them at once and
starts the next sequence as others end; it compiles as it does by default.
"""

import json
import os
import sys
import time


def transformers_side(folder, dtype):
    """What answers one line: rows of a batch together, until its longest is done."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria, StoppingCriteriaList

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    model.generation_config = GenerationConfig(pad_token_id=0)  # and nothing that the directory says

    class Lengths(StoppingCriteria):
        def __init__(self, width, lengths):
            self.ends = torch.tensor(lengths) + width

        def __call__(self, input_ids, scores, **_):
            return self.ends <= input_ids.shape[1]

    def generate(asked):
        found = []
        for first in range(0, len(asked["prompts"]), asked["rows"]):
            prompts = asked["prompts"][first : first + asked["rows"]]
            lengths = asked["lengths"][first : first + asked["rows"]]
            width = max(map(len, prompts))
            rows = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
            mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
            how = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0} if asked["temperature"] else {}
            out = model.generate(
                rows, attention_mask=mask, max_new_tokens=max(lengths),
                stopping_criteria=StoppingCriteriaList([Lengths(width, lengths)]), **how,
            )[:, width:].tolist()  # fmt: skip
            found += [row[:length] for row, length in zip(out, lengths, strict=True)]
        return found

    return generate, f"transformers {transformers.__version__}, torch {torch.__version__}"


def vllm_side(folder, dtype):
    """What answers one line: all rows at once."""
    import vllm
    from vllm import LLM, SamplingParams

    engine = LLM(
        folder, dtype=dtype, skip_tokenizer_init=True, generation_config="vllm", max_model_len=512, max_num_seqs=64,
        gpu_memory_utilization=0.15,
    )  # fmt: skip

    def generate(asked):
        prompts = [{"prompt_token_ids": prompt} for prompt in asked["prompts"]]
        how = [
            SamplingParams(temperature=asked["temperature"], max_tokens=length, ignore_eos=True, detokenize=False)
            for length in asked["lengths"]
        ]
        return [list(each.outputs[0].token_ids) for each in engine.generate(prompts, how, use_tqdm=False)]

    return generate, f"vLLM {vllm.__version__}"


def main(kind, folder, dtype):
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print
    generate, ready = {"transformers": transformers_side, "vllm": vllm_side}[kind](folder, dtype)
    print(json.dumps({"ready": ready}), file=told, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        began = time.perf_counter()
        answers = generate(asked)
        seconds = time.perf_counter() - began
        found = {"seconds": seconds, "tokens": sum(map(len, answers)), "first": answers[0]}
        print(json.dumps(found), file=told, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
