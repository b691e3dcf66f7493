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
    "config": ["CurriculumConfig", "EnvironmentConfig", "LessonConfig", "LessonDependency", "SamplingParams"],
    "curriculum": ["Curriculum", "CurriculumBase", "CurriculumLog", "CurriculumUpdate"],
    "progress": ["CurriculumEvent", "LessonProgress", "evaluation_due"],
    "remote": ["CurriculumReply", "CurriculumService", "RemoteCurriculum"],
    "simulation": ["LearningCurve", "SimulatedCurriculum", "SimulatedLesson", "simulate_curriculum"],
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
