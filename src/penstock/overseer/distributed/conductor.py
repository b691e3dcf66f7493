"""The conductor of a distributed run that trains a language policy; see `conducting` for what all of them do.

load → evaluate untrained → warm start → evaluate before → parity probe → train → evaluate after, as in one process.
"""

from penstock.overseer.config import RunConfig
from penstock.overseer.distributed.conducting import ProcessConductor
from penstock.overseer.distributed.launcher import Launcher
from penstock.overseer.distributed.plan import Plan
from penstock.overseer.distributed.records import View
from penstock.overseer.distributed.script import Turns
from penstock.overseer.distributed.updates import Updates
from penstock.overseer.evaluator import metrics_of
from penstock.overseer.result_rows import Results
from penstock.overseer.run_log import RunLog


class DistributedConductor(ProcessConductor[RunConfig]):
    """One run in many processes.

    Args:
        plan: Its components.
        launcher: Starts them.
        log: The run's single writer.
    """

    def __init__(self, plan: Plan, launcher: Launcher, log: RunLog) -> None:
        super().__init__(plan, launcher, log, Updates(log, plan.settings.config.replay.staleness_budget))

    def _units_per_s(self) -> float:
        return self._seen.numbers().get("inference/tokens_per_s", 0.0)

    def _metrics_of(self, results: Results) -> dict[str, float]:
        return metrics_of(results, "eval")

    def _prepared(self) -> Turns:
        yield from self._until_served()

    def _before_training(self) -> Turns:
        self._phase("evaluating the untrained policy")
        self.results["untrained"] = self.results["before"] = yield from self._evaluate("untrained")
        if self._config.learner.warm_start is not None:
            self._phase("warm start")
            yield from self._ending_with_the_run(self._stage.task("learner-0", "warm_start"))
            yield from self._until_served()
            self._phase("evaluating the warm start")
            self.results["before"] = yield from self._evaluate("before")

    def _checked(self) -> Turns:
        self._phase("checking that engines and learner agree")
        yield from self._ending_with_the_run(self._stage.task("learner-0", "probe"))

    def _after_training(self) -> Turns:
        yield from self._stage.call("learner-0", "publish_last")
        yield from self._until_served()

    @property
    def _goal_reached(self) -> bool:
        return self._config.curriculum.when_complete == "stop" and bool(self._seen.facts("replay-0").get("complete"))

    def _until_served(self) -> Turns:
        """Waits until every inference server holds the learner's present version."""
        return self._ending_with_the_run(self._stage.until(self._served))

    def _served(self) -> bool | None:
        view: View = self._supervisor.view
        learner = view.peer("learner-0")
        servers = [peer for peer in view.of("inference") if not peer.address.get("draining")]
        if learner is None or "weights" not in learner.address or not servers:
            return None
        wanted = (self.lineage, self._learner_step(), learner.address["weights"]["incarnation"])
        held = {(p.address.get("lineage"), p.address.get("step"), p.address.get("weights")) for p in servers}
        return True if held == {wanted} else None
