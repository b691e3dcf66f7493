"""A component whose engine leaves one array old: an inference server for runs in many processes."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from penstock.environments import load_environment
from penstock.inference import InferenceEngine
from penstock.overseer.config_loading import load_config
from penstock.overseer.language.kind import LanguageKind
from penstock.overseer.training import RunRequest
from penstock.types import WeightVersion

STALE, FROM_STEP = "inference-1#0", 3


class StaleEngine(InferenceEngine):
    """One whose ``layers.down`` is of the version before, from a step on, where it has the name `STALE`."""

    _before: Mapping[str, Any] | None = None

    def set_weights(self, version: WeightVersion, weights: Mapping[str, Any]) -> None:
        given = weights
        if self._name == STALE and version.step >= FROM_STEP and self._before is not None:
            weights = {**weights, "layers.down": self._before["layers.down"]}
        self._before = given
        super().set_weights(version, weights)


def make_inference(ctx: Any, settings: Mapping[str, Any]) -> Any:
    from penstock.overseer.language import inference, kind

    with mock.patch.object(inference, "InferenceEngine", StaleEngine):
        return kind.make_inference(ctx, settings)


def train(run_dir: Path, *words: str) -> None:
    """`penstock train cats` with such servers."""
    config = load_config("cats", [*words])
    lessons = config.curriculum.lessons.items()
    environments = {name: load_environment(lesson.environment.spec) for name, lesson in lessons}
    RunRequest(LanguageKind(environments, {"inference": make_inference}), config, run_dir, False, "cats", True).run()
