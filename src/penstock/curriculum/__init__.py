"""Which lesson next: lessons with dependencies that unlock, graduate and come back, sampled by what they can teach."""

from typing import TYPE_CHECKING

from penstock.types.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from penstock.curriculum.config import (
        CurriculumConfig,
        EnvironmentConfig,
        LessonConfig,
        LessonDependency,
        SamplingParams,
    )
    from penstock.curriculum.curriculum import Curriculum, CurriculumBase, CurriculumLog, CurriculumUpdate
    from penstock.curriculum.progress import CurriculumEvent, LessonProgress, evaluation_due
    from penstock.curriculum.remote import CurriculumReply, CurriculumService, RemoteCurriculum
    from penstock.curriculum.simulation import LearningCurve, SimulatedCurriculum, SimulatedLesson, simulate_curriculum

_EXPORTS = {
    "Curriculum": "curriculum",
    "CurriculumBase": "curriculum",
    "CurriculumConfig": "config",
    "CurriculumEvent": "progress",
    "CurriculumLog": "curriculum",
    "CurriculumReply": "remote",
    "CurriculumService": "remote",
    "CurriculumUpdate": "curriculum",
    "EnvironmentConfig": "config",
    "LearningCurve": "simulation",
    "LessonConfig": "config",
    "LessonDependency": "config",
    "LessonProgress": "progress",
    "RemoteCurriculum": "remote",
    "SamplingParams": "config",
    "SimulatedCurriculum": "simulation",
    "SimulatedLesson": "simulation",
    "evaluation_due": "progress",
    "simulate_curriculum": "simulation",
}

__all__ = [
    "Curriculum",
    "CurriculumBase",
    "CurriculumConfig",
    "CurriculumEvent",
    "CurriculumLog",
    "CurriculumReply",
    "CurriculumService",
    "CurriculumUpdate",
    "EnvironmentConfig",
    "LearningCurve",
    "LessonConfig",
    "LessonDependency",
    "LessonProgress",
    "RemoteCurriculum",
    "SamplingParams",
    "SimulatedCurriculum",
    "SimulatedLesson",
    "evaluation_due",
    "simulate_curriculum",
]

__getattr__, __dir__ = lazy_exports(__name__, _EXPORTS)
