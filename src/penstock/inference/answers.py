"""Answers of the OpenAI-compatible API, whole or as a stream of events.

A response's text ends before the stop string; its tokens, log-probabilities and usage count everything that was
sampled. `system_fingerprint` names the oldest weights behind the answer. With `return_token_ids` each choice has all
that the engine recorded: a log-probability's shortest decimal form reads back as the same float32; one that is not
finite, which JSON cannot say, is null. When a response was finished is said by its age, for clocks of two machines
differ. Calls of tools are read out of the text where the request gave tools; text that calls none, or that cannot be
read as a call, stays text.

*Streams* say what whole answers say: the pieces of a response's text put together are its text, whatever halves of
characters, stop strings or calls its dispatches ended in (`TextStream`). What may still become a stop string or a call
is held back until it is known.
"""

import itertools
import json
import math
import time
import uuid
from codecs import getincrementaldecoder
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from penstock.inference.meter import LATENCY_BOUNDS_S, LatencyHistogram
from penstock.text.tool_calls import CALL_BEGIN, PYTHON_TAG, tool_calls
from penstock.types import Alternatives, Completion, PromptScores, TextCodec

REPLACEMENT = "\ufffd"
_ALONE = ("{", "[")
"""How a call begins in which nothing else is said."""


Sampled = tuple[Sequence[int], Sequence[float], Alternatives | None]
"""Tokens that follow one another, their log-probabilities, and what was asked for beside them."""

_Entry = tuple[int, float | None, dict[int, float | None] | None]
"""A token, its log-probability, and the most probable ones by theirs; None where the weights say nothing."""


@dataclass(frozen=True, slots=True)
class PromptForm:
    """What an answer tells of a prompt.

    Attributes:
        echo: Its text, where the response's begins with it.
        scores: What the weights make of it, where that is asked for.
        told: How many alternatives `prompt_logprobs` have; None where they are not asked for.
        tokens: Its token ids.
    """

    echo: str | None = None
    scores: PromptScores | None = None
    told: int | None = None
    tokens: Sequence[int] | np.ndarray = ()


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What a request wants its answer to be.

    Attributes:
        tokenizer: Decodes the texts of tokens.
        model: Name of the policy.
        chat: Whether it answers a conversation.
        stop: Strings that end a response.
        logprobs: How many of the most probable tokens are told beside each one and its log-probability; None tells no
            log-probabilities.
        token_ids: Whether each choice has all that the engine recorded.
        ids_as_tokens: Whether tokens are called ``token_id:<id>`` instead of by their text.
        tools: How many calls of tools are read out of the text; what is beyond is not told.
    """

    tokenizer: TextCodec
    model: str
    chat: bool
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    token_ids: bool = False
    ids_as_tokens: bool = False
    tools: int = 0

    @property
    def prompts_at(self) -> str:
        """The parameter that a request has its prompts in."""
        return "messages" if self.chat else "prompt"

    def answer(
        self, groups: Sequence[Sequence[Completion]], prompts: Sequence[PromptForm] | None = None
    ) -> dict[str, Any]:
        """The whole answer: choices by prompt, then by sample.

        Args:
            groups: Completions by prompt, n of each.
            prompts: What is told of each prompt; None: nothing.
        """
        told = prompts or [PromptForm()] * len(groups)
        choices: list[dict[str, Any]] = []
        for prompt, completion in ((p, c) for p, group in zip(told, groups, strict=True) for c in group):
            choices.append({"index": len(choices), **self._choice(completion, prompt)})
        answer = self.envelope(groups, told) | {"usage": usage(groups), "choices": choices}
        if self.token_ids and self.chat:
            answer["prompt_token_ids"] = groups[0][0].prompt_tokens.tolist()
        if self.chat:
            answer |= self._prompt_logprobs(told[0])
        return answer

    def _choice(self, completion: Completion, prompt: PromptForm) -> dict[str, Any]:
        said, ending = self._said(completion)
        entries = self._entries(completion.response_tokens, completion.response_logprobs, completion.alternatives)
        if prompt.echo is not None:
            said, entries = {"text": prompt.echo + said["text"]}, self._echoed(prompt) + entries
        choice: dict[str, Any] = {**said, "finish_reason": ending, "logprobs": self._logprobs(entries, TextOffsets())}
        if self.token_ids:
            choice |= _record(completion)
        if self.token_ids and not self.chat:
            choice["prompt_token_ids"] = completion.prompt_tokens.tolist()
        return choice if self.chat else choice | self._prompt_logprobs(prompt)

    def envelope(
        self,
        groups: Sequence[Sequence[Completion]] = (),
        prompts: Sequence[PromptForm] = (),
        streamed: bool = False,
    ) -> dict[str, Any]:
        """What answers and chunks have around their choices.

        Args:
            groups: Completions by prompt, as far as they are known.
            prompts: What is told of each prompt.
            streamed: Whether it is one of many.
        """
        prefix, kind = ("chatcmpl", "chat.completion") if self.chat else ("cmpl", "text_completion")
        versions = [(c.lineage, c.oldest_weight_step) for group in groups for c in group]
        scored = (prompt.scores.version for prompt in prompts if prompt.scores is not None)
        oldest = min([*versions, *((version.lineage, version.step) for version in scored)], default=None)
        return {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "object": f"{kind}.chunk" if streamed and self.chat else kind,
            "created": int(time.time()),
            "model": self.model,
            "system_fingerprint": None if oldest is None else f"weights-{oldest[0]}-{oldest[1]}",
        }

    def _said(self, completion: Completion) -> tuple[dict[str, Any], str]:
        """Text or message of a choice, and why it ended."""
        text = text_before_stop(completion, self.stop)
        if not self.chat:
            return {"text": text}, completion.finish_reason
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        calls = self.calls(text)
        if not calls:
            return {"message": message}, completion.finish_reason
        before = text.partition(CALL_BEGIN)[0] if CALL_BEGIN in text else ""
        return {"message": message | {"content": before or None, "tool_calls": calls}}, "tool_calls"

    def calls(self, text: str) -> list[dict[str, Any]]:
        """The calls in a response as OpenAI has them; none where one of them cannot be read."""
        found = tool_calls(text) if self.tools else []
        if any(call.error for call in found):
            return []
        return [
            {
                "id": f"call_{uuid.uuid4().hex[:24]}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments), ensure_ascii=False)},
            }
            for call in found[: self.tools]
        ]

    def _entries(
        self, tokens: np.ndarray | Sequence[int], logprobs: np.ndarray | Sequence[float], beside: Alternatives | None
    ) -> list[_Entry]:
        """Tokens with what is told of each; nothing where no log-probabilities are asked for."""
        if self.logprobs is None:
            return []
        best = [{}] * len(tokens) if beside is None else _by_token(beside, self.logprobs)
        return [(int(t), p, top) for t, p, top in zip(tokens, finite(logprobs), best, strict=True)]

    def _echoed(self, prompt: PromptForm) -> list[_Entry]:
        """The same of a prompt, of whose first token nothing is known."""
        scores = prompt.scores
        if scores is None or self.logprobs is None:
            return []
        return [
            (int(scores.tokens[0]), None, None),
            *self._entries(scores.tokens[1:], scores.logprobs, scores.alternatives),
        ]

    def _logprobs(self, entries: Sequence[_Entry], offsets: "TextOffsets") -> dict[str, Any] | None:
        """Of these tokens, which follow those that the offsets were told of."""
        if self.logprobs is None:
            return None
        if self.chat:
            content = [
                {**self._told(token, number), "top_logprobs": [self._told(*each) for each in (best or {}).items()]}
                for token, number, best in entries
            ]
            return {"content": content, "refusal": None}
        return {
            "tokens": [self._name(token) for token, _, _ in entries],
            "token_logprobs": [number for _, number, _ in entries],
            "top_logprobs": [self._by_name(*entry) for entry in entries] if self.logprobs else None,
            "text_offset": [offsets.add(self.tokenizer.token_bytes(token)) for token, _, _ in entries],
        }

    def _told(self, token: int, logprob: float | None) -> dict[str, Any]:
        return {"token": self._name(token), "logprob": logprob, "bytes": list(self.tokenizer.token_bytes(token))}

    def _by_name(self, token: int, logprob: float | None, best: dict[int, float | None] | None) -> dict | None:
        """The most probable tokens and the one that stands there; of those with one name the most probable."""
        if best is None:
            return None
        named: dict[str, float | None] = {}
        for each, number in {**best, token: logprob}.items():
            named.setdefault(self._name(each), number)
        return named

    def _prompt_logprobs(self, prompt: PromptForm) -> dict[str, Any]:
        """As vLLM tells them, by token id."""
        scores, told = prompt.scores, prompt.told
        if scores is None or told is None:
            return {}
        best = [{}] * len(scores.ranks) if scores.alternatives is None else _by_token(scores.alternatives, told)
        entries: list[dict[str, Any] | None] = [None]
        for token, logprob, rank, top in zip(
            scores.tokens[1:].tolist(), finite(scores.logprobs), scores.ranks.tolist(), best, strict=True
        ):
            ranked = {token: (logprob, rank)} | {each: (number, at) for at, (each, number) in enumerate(top.items(), 1)}
            entries.append(
                {
                    str(each): {"logprob": number, "rank": at, "decoded_token": self._name(each)}
                    for each, (number, at) in ranked.items()
                }
            )
        return {"prompt_logprobs": entries}

    def _name(self, token: int) -> str:
        if self.ids_as_tokens:
            return f"token_id:{token}"
        return self.tokenizer.decode([token], skip_special_tokens=False)

    def delta(self, index: int, text: str, offsets: "TextOffsets", sampled: Sampled) -> dict[str, Any]:
        """A streamed piece of choice `index`.

        Args:
            index: Number of the choice, over all prompts.
            text: What is new of its text.
            offsets: Of its tokens before.
            sampled: What is new of its tokens.
        """
        said: dict[str, Any] = {"delta": {"content": text}} if self.chat else {"text": text}
        logprobs = self._logprobs(self._entries(*sampled), offsets)
        choice = {"index": index, **said, "logprobs": logprobs, "finish_reason": None}
        return choice | ({"token_ids": list(sampled[0])} if self.token_ids else {})

    def echo(self, index: int, prompt: PromptForm, offsets: "TextOffsets") -> dict[str, Any]:
        """The first piece of choice `index`, which repeats its prompt."""
        logprobs = self._logprobs(self._echoed(prompt), offsets)
        return {"index": index, "text": prompt.echo, "logprobs": logprobs, "finish_reason": None}


def _by_token(beside: Alternatives, most: int) -> list[dict[int, float | None]]:
    """Position by position the most probable tokens, in that order."""
    rows = zip(beside.tokens[:, :most].tolist(), beside.logprobs[:, :most], strict=True)
    return [dict(zip(tokens, finite(logprobs), strict=True)) for tokens, logprobs in rows]


_WITHIN = {b"", *(bytes([byte]) for byte in range(0x80, 0xC0))}
"""Of UTF-8: what goes on with a character."""


class TextOffsets:
    """Where the tokens of a growing text begin in it, in characters; one amid a character begins where that does."""

    def __init__(self) -> None:
        self._decoder, self._characters = getincrementaldecoder("utf-8")("replace"), 0

    def add(self, token: bytes) -> int:
        """The next one's."""
        half, _ = self._decoder.getstate()
        begins = self._characters + (half != b"" and token[:1] not in _WITHIN)  # half a character stays one of its own
        self._characters += len(self._decoder.decode(token))
        return begins


class TextStream:
    """The text of a growing response in pieces that never have to be taken back.

    Args:
        tokenizer: Decodes the texts of tokens.
        stop: Strings that end the response, none of which is told.
        tools: Whether what may be a call of tools is held back.
    """

    def __init__(self, tokenizer: TextCodec, stop: Sequence[str], tools: bool) -> None:
        self._tokenizer = tokenizer
        self._ends = (*stop, *((CALL_BEGIN, PYTHON_TAG) if tools else ()))
        self._tools = tools
        self._tokens: list[int] = []
        self._start = self._read = 0
        self._text = ""
        self.told = 0

    def add(self, tokens: Sequence[int]) -> str:
        """Takes sampled tokens; returns what is certain of their text."""
        self._tokens += tokens
        known = self._tokenizer.decode(self._tokens[self._start : self._read])
        whole = self._tokenizer.decode(self._tokens[self._start :])
        if not whole.endswith(REPLACEMENT):  # else half of a character
            self._text += whole[len(known) :]
            self._start, self._read = self._read, len(self._tokens)
        return self._tell(self._text[: self._certain()])

    def finish(self, text: str) -> str:
        """What is left of the response's whole text."""
        return self._tell(text)

    def _tell(self, text: str) -> str:
        piece, self.told = text[self.told :], max(self.told, len(text))
        return piece

    def _certain(self) -> int:
        """Characters before anything that is, or may become, the beginning of what ends the text."""
        text = self._text
        if self._tools and not self.told and text.lstrip()[:1] in ("", *_ALONE):
            return 0
        ends = [at for at in (text.find(end, self.told) for end in self._ends) if at >= 0]
        if ends:
            return min(ends)
        longest = max((len(end) for end in self._ends), default=1) - 1
        beginnings = (len(text) - n for n in range(min(longest, len(text)), 0, -1) if self._may_begin(text[-n:]))
        return next(beginnings, len(text))

    def _may_begin(self, ending: str) -> bool:
        return any(end.startswith(ending) for end in self._ends)


class AnswerStream:
    """The events of one streamed answer.

    Args:
        form: What it is to be.
        prompts: What is told of each prompt.
        n: How many choices each prompt has.
        with_usage: Whether the last event counts tokens; the others have a count of null then, as OpenAI's.
        continuous: Whether those count the tokens so far instead.
    """

    def __init__(
        self,
        form: AnswerForm,
        prompts: Sequence[PromptForm],
        n: int = 1,
        with_usage: bool = False,
        continuous: bool = False,
    ) -> None:
        self._form, self._with_usage, self._continuous = form, with_usage, with_usage and continuous
        self._prompts = [prompt for prompt in prompts for _ in range(n)]
        self._prompt_tokens, self._sampled = sum(len(prompt.tokens) for prompt in prompts), 0
        self._texts = [TextStream(form.tokenizer, form.stop, form.tools > 0) for _ in self._prompts]
        self._offsets = [TextOffsets() for _ in self._prompts]
        self._envelope = form.envelope(streamed=True)
        self._untold = set(range(1 if form.chat else len(self._prompts)) if form.token_ids else ())

    def begin(self) -> Iterator[bytes]:
        """Of a conversation: who speaks; of a prompt that is repeated: the prompt."""
        for index, prompt in enumerate(self._prompts):
            if prompt.echo is not None:
                yield self._event(self._form.echo(index, prompt, self._offsets[index]))
        if self._form.chat:
            for index in range(len(self._texts)):
                yield self._event({"index": index, "delta": {"role": "assistant", "content": ""}, **_OPEN})

    def add(self, index: int, sampled: Sampled) -> bytes:
        """A dispatch's tokens of choice `index`; empty where there is nothing to tell of them yet."""
        text = self._texts[index]
        self._sampled += len(sampled[0])
        piece = text.add(sampled[0])
        if not (piece or self._form.logprobs is not None or self._form.token_ids):
            return b""
        return self._event(self._form.delta(index, piece, self._offsets[index], sampled))

    def end(self, groups: Sequence[Sequence[Completion]]) -> Iterator[bytes]:
        """What is left of every choice, why it ended, and the end of the stream."""
        completions = [completion for group in groups for completion in group]
        fingerprint = self._form.envelope(groups, self._prompts)["system_fingerprint"]
        self._envelope["system_fingerprint"] = fingerprint
        for index, completion in enumerate(completions):
            yield self._event(self._last(index, completion))
        if self._with_usage:
            yield self._event(usage=usage(groups))
        yield b"data: [DONE]\n\n"

    def _last(self, index: int, completion: Completion) -> dict[str, Any]:
        form, text = self._form, text_before_stop(completion, self._form.stop)
        calls = form.calls(text) if form.chat else []
        rest = self._texts[index].finish(text if not calls else text[: self._texts[index].told])
        reason = "tool_calls" if calls else completion.finish_reason
        said: dict[str, Any] = {"delta": {"content": rest} if rest else {}} if form.chat else {"text": rest}
        if calls:
            said["delta"] = {"tool_calls": [{"index": number, **call} for number, call in enumerate(calls)]}
        record = _record(completion) if form.token_ids else {}
        return {"index": index, **said, "logprobs": None, "finish_reason": reason} | {
            name: value for name, value in record.items() if name != "token_ids"
        }

    def _event(self, *choices: dict[str, Any], **beside: Any) -> bytes:
        if self._with_usage and "usage" not in beside:
            beside["usage"] = _counted(self._prompt_tokens, self._sampled) if self._continuous else None
        for choice in choices:
            if choice["index"] in self._untold:  # the first one of it
                self._untold.remove(choice["index"])
                told = np.asarray(self._prompts[choice["index"]].tokens, np.int32).tolist()
                (beside if self._form.chat else choice)["prompt_token_ids"] = told
        return event(self._envelope | {"choices": list(choices), **beside})


_OPEN: dict[str, Any] = {"logprobs": None, "finish_reason": None}


def event(content: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return encoded(f"data: {json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(',', ':'))}\n\n")


def encoded(json_text: str) -> bytes:
    """Half of a surrogate pair, as in a prompt that is repeated, is JSON's escape of it."""
    return json_text.encode("utf-8", "backslashreplace")


def usage(groups: Sequence[Sequence[Completion]]) -> dict[str, int]:
    """Tokens of an answer. A prompt counts once, however many samples it has."""
    prompt_tokens = sum(len(group[0].prompt_tokens) for group in groups)
    return _counted(prompt_tokens, sum(len(each.response_tokens) for group in groups for each in group))


def _counted(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Of `exposition`."""


def exposition(numbers: Mapping[str, float], latencies: Mapping[str, LatencyHistogram]) -> bytes:
    """An engine's numbers in Prometheus' text form, as ``penstock_inference_…``.

    Args:
        numbers: By the names of metrics.jsonl; those that end in ``_total`` only grow.
        latencies: Of responses, in seconds.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collected(numbers, latencies))
    return generate_latest(registry)


class _Collected(Collector):
    def __init__(self, numbers: Mapping[str, float], latencies: Mapping[str, LatencyHistogram]) -> None:
        self._numbers, self._latencies = numbers, latencies

    @override
    def collect(self) -> Iterator[Metric]:
        for name, value in self._numbers.items():
            name = f"penstock_{name.replace('/', '_')}"
            form = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            yield form(name, name.removeprefix("penstock_").replace("_", " "), value=value)
        for name, found in self._latencies.items():
            bounds = [*map(str, LATENCY_BOUNDS_S), "+Inf"]
            buckets = list(zip(bounds, itertools.accumulate(found.counts), strict=True))
            about = f"seconds: {name.removesuffix('_s').replace('_', ' ')}"
            seconds = f"penstock_inference_{name.removesuffix('_s')}_seconds"
            yield HistogramMetricFamily(seconds, about, buckets, found.total_s)


def text_before_stop(completion: Completion, stop: Sequence[str]) -> str:
    """The text without the stop string that ended it (a completion's text ends with it)."""
    ending = max((s for s in stop if completion.text.endswith(s)), key=len, default="")
    return completion.text[: len(completion.text) - len(ending)]


def _record(completion: Completion) -> dict[str, Any]:
    """What the engine recorded of one response."""
    return {
        "token_ids": completion.response_tokens.tolist(),
        "token_logprobs": finite(completion.response_logprobs),
        "weight_steps": completion.weight_steps.tolist(),
        "oldest_weight_step": completion.oldest_weight_step,
        "lineage": completion.lineage,
        "engine": completion.engine,
        "timings": {stage: round(seconds, 6) for stage, seconds in completion.timings.items()},
        "age_s": 0.0 if completion.finished_s is None else round(time.monotonic() - completion.finished_s, 6),
    }


def finite(logprobs: np.ndarray | Sequence[float]) -> list[float | None]:
    """The numbers, null for what is not finite."""
    return [float(number) if math.isfinite(number) else None for number in logprobs]
