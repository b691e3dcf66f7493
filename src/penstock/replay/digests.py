"""Which engine served which version as the learner made it: digests of all arrays, compared by version and engine.

The learner says what the arrays of a version are before it offers that (`expect_digests`). An engine says what it
serves after every swap, one after the other and each until it was heard (`tell_digests`): so one that told of a later
version and not of this one never served this one. A rollout names the engines that answered it. It may be trained when
each version behind its tokens, the cache of its prompt included, was served as it was made by one of them, and by none
of them otherwise; one that names no engine could be of any. Of an engine that tells nothing, a canary's verdict stands
in (`mark_engine`).

What is told of a version is kept while a rollout of it can be fresh. The digests are `penstock.model.arrays`', and
plain text here. Not covered: who waits for them, and how long (`penstock.replay.PacedReplayBuffer`).
"""

from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np

from penstock.replay.freshness import Verdict
from penstock.replay.ledger import NotifyingCondition
from penstock.types import Experience, MismatchError

Digests = Mapping[str, str]
"""By an array's name."""
_MOST_NAMED = 5


class WeightDigests:
    """Of one lineage. Thread-safe; without a version that was expected, everything is verified.

    Args:
        changed: The lock of the buffer whose rollouts are judged.
        lineage: Of this life of the run.

    Attributes:
        on_news: Called with the lock held, when a rollout may be judged that could not be before.
    """

    def __init__(self, changed: NotifyingCondition, lineage: int) -> None:
        self.on_news: Callable[[], None] = lambda: None
        self._changed = changed
        self._lineage = lineage
        self._oldest = 0
        self._expected: dict[int, list[Digests]] = {}
        self._served: dict[str, dict[int, Digests]] = {}
        self._newest: dict[str, int] = {}
        self._marks: dict[tuple[str, int], str] = {}
        self._gone: dict[str, int] = {}

    # --- what is told --------------------------------------------------------------------------------------------

    def expect_digests(self, lineage: int, step: int, digests: Digests) -> None:
        """The learner is about to offer a version; again with others where it offers it anew with other weights."""
        with self._changed:
            if lineage != self._lineage:
                return
            made = self._expected.setdefault(step, [])
            if not made or made[-1] != digests:
                made.append(digests)
            self.on_news()

    def tell_digests(self, engine: str, lineage: int, step: int, digests: Digests) -> bool:
        """An engine serves a version.

        Args:
            engine: Its name and incarnation, as in its rollouts' metadata.
            lineage: Of the run when the version was made.
            step: Number of the version, as its tokens have it.
            digests: Of the arrays that it computes with.

        Returns:
            Whether they are those that the learner made; false, too, where that is not known yet: tell them again.

        Raises:
            MismatchError: they are not: the engine must end.
        """
        with self._changed:
            if lineage != self._lineage:
                return False
            self._newest[engine] = max(step, self._newest.get(engine, step))
            if step < self._oldest:
                return True  # nothing of it can be trained any more
            self._served.setdefault(engine, {})[step] = digests
            self.on_news()
            proof = self._proof(engine, step)
        if isinstance(proof, Verdict):
            raise MismatchError(proof.reason)
        return proof == "verified"

    def mark_engine(self, engine: str, lineage: int, step: int, fault: str = "") -> None:
        """The verdict of a canary, which counts where the engine tells no digests: a fault in words, or none."""
        with self._changed:
            if lineage == self._lineage and step >= self._oldest:
                self._marks[engine, step] = fault
                self.on_news()

    def forget_engine(self, name: str, incarnation: int) -> None:
        """An incarnation of an engine is dead, and those before it: nothing more will be told of them."""
        with self._changed:
            self._gone[name] = max(incarnation, self._gone.get(name, -1))
            self.on_news()

    def drop_before(self, step: int) -> None:
        """Rollouts of versions before `step` are stale: what was told of these is not needed any more."""
        with self._changed:
            self._oldest = max(self._oldest, step)
            self._expected = {at: made for at, made in self._expected.items() if at >= step}
            self._marks = {key: fault for key, fault in self._marks.items() if key[1] >= step}
            for engine, served in list(self._served.items()):
                kept = {at: digests for at, digests in served.items() if at >= step}
                self._served[engine] = kept
                if not kept and self._is_gone(engine):
                    del self._served[engine], self._newest[engine]

    # --- what follows --------------------------------------------------------------------------------------------

    def proof_of(self, rollout: Experience) -> Literal["verified", "unknown"] | Verdict:
        """Whether a rollout with metadata is of the weights that the learner made, with the lock held."""
        found: Literal["verified", "unknown"] = "verified"
        for step in self._steps_of(rollout):
            assert rollout.metadata is not None  # or nobody asks
            engines = rollout.metadata.engines or tuple(self._served)
            proofs = [self._proof(engine, step) for engine in engines]
            for proof in proofs:
                if isinstance(proof, Verdict):
                    return proof
            if "unknown" in proofs or not engines:
                found = "unknown"
            elif "verified" not in proofs:
                return Verdict("invalid", f"{', '.join(engines)} answered, and never served version {step}")
        return found

    def missing_of(self, rollout: Experience) -> str:
        """In words, what is not known yet of a rollout."""
        assert rollout.metadata is not None  # or nobody asks
        engines = rollout.metadata.engines or ("an engine",)
        steps = ", ".join(map(str, self._steps_of(rollout)))
        return f"the digests of what {' and '.join(engines)} served as version {steps}"

    def _steps_of(self, rollout: Experience) -> list[int]:
        """Versions behind its tokens that can be fresh; none while nothing is expected."""
        if not self._expected or rollout.metadata is None:
            return []
        steps, mask = getattr(rollout, "response_weight_steps", None), getattr(rollout, "response_mask", None)
        sampled = () if steps is None else _distinct(steps[mask])
        return [step for step in sorted({rollout.metadata.weight_step, *sampled}) if step >= self._oldest]

    def _proof(self, engine: str, step: int) -> Literal["verified", "unknown", "elsewhere"] | Verdict:
        """Of one engine and version; `elsewhere`: it never served that."""
        told = self._served.get(engine, {}).get(step)
        if told is not None:
            made = self._expected.get(step)
            if made is None or (told in made and told != made[-1]):
                return "unknown"  # or it is about to take what is offered anew
            return "verified" if told == made[-1] else Verdict("invalid", _difference(engine, step, told, made[-1]))
        if (fault := self._marks.get((engine, step))) is not None:
            return Verdict("invalid", fault) if fault else "verified"
        if self._newest.get(engine, -1) > step:
            return "elsewhere"
        if self._is_gone(engine):
            return Verdict("invalid", f"{engine} ended before it told what it served as version {step}")
        return "unknown"

    def _is_gone(self, engine: str) -> bool:
        name, _, incarnation = engine.rpartition("#")
        return incarnation.isdecimal() and int(incarnation) <= self._gone.get(name, -1)


def _distinct(steps: np.ndarray) -> list[int]:
    """Mostly one, which takes no sorting."""
    if len(steps) and steps.min() == steps.max():
        return [int(steps[0])]
    return np.unique(steps).tolist()


def _difference(engine: str, step: int, told: Digests, made: Digests) -> str:
    names = sorted(name for name in {*told, *made} if told.get(name) != made.get(name))
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return (
        f"{engine} serves version {step} with other weights than the learner made: the digests of {len(names)} of "
        f"{len(made)} arrays differ ({', '.join(names[:_MOST_NAMED])}{more})"
    )
