"""What environments see of inference servers in other processes: the same blocking calls as over an engine.

For the same seeds and weights the completions are those of an `EngineContext`, up to the rounding that neighbours in a
batch cause. Calls of one `generate_many` are asked for at the same time, but not in one atomic submission: several
servers have none. A context that is `ordered` asks for one thing after another instead, as much as fits at a time, so
that one server that nobody else asks sees the same batches in every run. Imports no JAX.
"""

from collections.abc import Sequence
from itertools import groupby

from penstock.inference.codec import ServerRequest
from penstock.inference.routing import PinnedServer
from penstock.inference.server_pool import ServerPool
from penstock.types import (
    Completion,
    EnvironmentFailure,
    GenerationCall,
    ManyInferenceContext,
    TextCodec,
    WeightVersion,
)


class RemoteContext(ManyInferenceContext):
    """A `ManyInferenceContext` over a pool of servers; any number of threads may call it. Cheap to make.

    Args:
        pool: Sends the requests, and bounds how long they take.
        tokenizer: The policy's; the servers have the same.
        session: Its requests are one conversation, which stays with its server while that is alive and accepts.
        target: Its requests go to this server only.
        least: Servers with an older version of the same lineage do not answer its requests.
        ordered: Asks one request at a time.
    """

    def __init__(
        self,
        pool: ServerPool,
        tokenizer: TextCodec,
        session: str | None = None,
        target: PinnedServer | None = None,
        least: WeightVersion | None = None,
        *,
        ordered: bool = False,
    ) -> None:
        self._pool, self._tokenizer = pool, tokenizer
        self._session, self._target, self._least = session, target, least
        self._ordered = ordered

    @property
    def tokenizer(self) -> TextCodec:
        """The policy's tokenizer."""
        return self._tokenizer

    @property
    def ordered(self) -> bool:
        """As it was made."""
        return self._ordered

    def for_session(self, session: str, least: WeightVersion | None = None) -> "RemoteContext":
        """The context of one conversation, or of one group, with no older weights than these."""
        return RemoteContext(self._pool, self._tokenizer, session, self._target, least, ordered=self._ordered)

    def only(self, name: str, incarnation: int | None = None) -> "RemoteContext":
        """A context that asks one server only, also one that accepts nothing from others.

        Args:
            name: Of the server.
            incarnation: Where it is given and not alive (any more), calls raise `UnreachableError` at once.
                Otherwise they wait for another of that name, within the limit of a request.
        """
        target = PinnedServer(name, incarnation)
        return RemoteContext(self._pool, self._tokenizer, self._session, target, self._least, ordered=self._ordered)

    def generate_many(self, calls: Sequence[GenerationCall]) -> list[list[list[Completion]] | EnvironmentFailure]:
        """See `penstock.types.ManyInferenceContext`; all calls are asked for at the same time.

        A call with a prompt that does not fit the servers' sequence length has its failure in its place; the others are
        served.

        Raises:
            ConfigError: decoding parameters are out of range.
            NoProgressError: no server answered within the pool's ``request_timeout_s``; it names those that were asked.
            RunFailed: the servers' answers cannot be used.
            UnreachableError: the one incarnation that was to be asked is gone.
            Stopped: the pool was closed.
        """
        if self._ordered:
            alike = groupby(calls, lambda call: (call.n, call.decoding))
            return [result for _, some in alike for result in self._one_by_one(list(some))]
        asked = [self._requests(call) for call in calls]
        sent = [request for requests in asked if isinstance(requests, list) for request in requests]
        answers = iter(self._pool.ask(sent, self._session, self._target))
        return [
            requests if isinstance(requests, EnvironmentFailure) else _joined([next(answers) for _ in requests], call.n)
            for requests, call in zip(asked, calls, strict=True)
        ]

    def _one_by_one(self, calls: Sequence[GenerationCall]) -> list[list[list[Completion]] | EnvironmentFailure]:
        """Calls that differ in prompts and seeds alone, as one call in as few requests as hold it."""
        whole = GenerationCall(
            [prompt for call in calls for prompt in call.prompts],
            calls[0].n,
            calls[0].decoding,
            [seed for call in calls for seed in call.seeds],
        )
        requests = self._requests(whole)
        if isinstance(requests, EnvironmentFailure):
            answer = requests
        else:
            asked = (self._pool.ask([request], self._session, self._target) for request in requests)
            answer = _joined([part for parts in asked for part in parts], whole.n)
        if isinstance(answer, EnvironmentFailure):  # of one prompt, whose call fails alone
            return [answer] if len(calls) == 1 else [result for call in calls for result in self._one_by_one([call])]
        groups = iter(answer)
        return [[next(groups) for _ in call.prompts] for call in calls]

    def _requests(self, call: GenerationCall) -> list[ServerRequest[list[list[Completion]]]] | EnvironmentFailure:
        try:
            return self._pool.dialect.requests(call, self._tokenizer, self._pool.model_name, self._least)
        except EnvironmentFailure as failure:
            return failure


def _joined(
    answers: Sequence[list[list[Completion]] | EnvironmentFailure], n: int
) -> list[list[Completion]] | EnvironmentFailure:
    """The answers of one call's requests together, n to a prompt, or the first failure among them."""
    completions: list[Completion] = []
    for answer in answers:
        if isinstance(answer, EnvironmentFailure):
            return answer
        completions += [completion for group in answer for completion in group]
    return [completions[first : first + n] for first in range(0, len(completions), n)]
