"""Records survive pickling, because Ray's own transport pickles them; nothing of ours ever unpickles anything."""

import ast
import dataclasses
import pickle
from pathlib import Path

import numpy as np
import pytest
from tests.fragments_made import make_fragment

import penstock.types
from penstock.types import (
    Alternatives,
    Completion,
    Decoding,
    EnvironmentSpec,
    FragmentExample,
    GenerationCall,
    LeafSpace,
    PackedRollout,
    ProblemSet,
    PromptScores,
    RLExample,
    Rollout,
    RolloutBatch,
    RolloutBatchStats,
    RolloutGroup,
    RolloutMetadata,
    RolloutRecord,
    Spaces,
    Ticket,
    TrainingBatch,
    Turn,
    WeightVersion,
)

SOURCES = Path(penstock.types.__file__).parents[1]


def a_rollout() -> Rollout:
    return Rollout(
        env_name="cats",
        env_example_id="17",
        prompt_tokens=np.array([5, 6], np.int32),
        response_tokens=np.array([8, 9, 2], np.int32),
        response_logprobs=np.array([-0.5, 0.0, -2.25], np.float32),
        token_rewards=np.array([0, 0, 0.75], np.float32),
        episode_reward=0.75,
        metadata=RolloutMetadata("worker-0", 1700000000.25, 4, 1),
        rollout_id="cats-0-3/1",
        lesson_id="cats",
        response_mask=np.array([True, False, True]),
        response_weight_steps=np.array([4, -1, 6], np.int32),
        oldest_weight_step=4,
        turns=(Turn("user", "Say “cat”", 0, 2), Turn("assistant", "", 2, 5)),
        decoding=Decoding(0.7, 40, 0.9, 32, (2, 3), ("\n\n",)),
        finish_reason="length",
        timings={"generate_s": 0.4},
    )


def an_example() -> RLExample:
    return RLExample(
        tokens=np.arange(4, dtype=np.int32),
        loss_mask=np.array([False, False, True, True]),
        segment_ids=np.ones(4, np.int32),
        position_ids=np.arange(4, dtype=np.int32),
        advantage=np.array([0, 0, 1, 1], np.float32),
        generator_log_probs=np.zeros(4, np.float32),
        reference_log_probs=None,
        temperature=np.ones(4, np.float32),
        weight_steps=np.array([-1, -1, 0, 0], np.int32),
        rollout_ids=("cats-0-3/1",),
    )


def records():
    rollout = a_rollout()
    group = RolloutGroup("cats:17", (rollout, PackedRollout(rollout)), "cats-0-3")
    batch = RolloutBatch.of((group,))
    ids = np.array([1, 2], np.int32)
    leaf = LeafSpace("image", "box", (2, 3), "uint8", low=0.0, high=255.0)
    return [
        rollout.metadata,
        rollout.turns[0],
        rollout.decoding,
        rollout,
        PackedRollout(rollout),
        group,
        batch,
        RolloutBatchStats.of("cats", batch),
        RolloutRecord(rollout, "cats-0-3", "cats:17"),
        an_example(),
        TrainingBatch("batch_x_1", 3, (an_example(),), ("cats-0-3",), {"replay/size": 1.0}),
        Ticket("cats-0-3", "cats", 3, 77, 5, 4, epoch=1, position=2, problem=9),
        ProblemSet(12, "d1"),
        WeightVersion(1, 4),
        EnvironmentSpec("penstock.environments.cats.CatsEnvironment", {"length": 3}),
        GenerationCall((ids,), 2, Decoding(), (7,)),
        Completion(ids, ids, np.array([-1, -2], np.float32), ids, 1, 0, "ab", "stop"),
        Alternatives(ids[:, None], np.array([[-1], [-2]], np.float32)),
        PromptScores(ids, np.array([-1], np.float32), ids[1:], None, WeightVersion(1, 4)),
        make_fragment(),
        FragmentExample(make_fragment()),
        leaf,
        Spaces((leaf,), (LeafSpace("", "discrete", (), "int64", (2,)),)),
    ]


def content(value):
    """A record as plain comparable values, arrays with their dtypes."""
    if isinstance(value, np.ndarray):
        return (value.dtype.str, value.tolist())
    if isinstance(value, PackedRollout):
        return ("packed", content(value.unpacked()))
    if dataclasses.is_dataclass(value):
        return (type(value), [content(getattr(value, field.name)) for field in dataclasses.fields(value)])
    if isinstance(value, dict):
        return {key: content(member) for key, member in value.items()}
    if isinstance(value, tuple | list):
        return [content(member) for member in value]
    return value


@pytest.mark.parametrize("record", records(), ids=lambda record: type(record).__name__)
@pytest.mark.parametrize("protocol", [2, pickle.HIGHEST_PROTOCOL])
def test_records_come_back_as_they_were(record, protocol):
    back = pickle.loads(pickle.dumps(record, protocol))
    assert type(back) is type(record) and content(back) == content(record)


def test_every_record_of_the_package_is_among_them():
    exported = [getattr(penstock.types, name) for name in penstock.types.__all__]
    classes = {c for c in exported if isinstance(c, type) and (dataclasses.is_dataclass(c) or c is PackedRollout)}
    missing = classes - {type(record) for record in records()}
    assert missing == set(), "give records() one of each"


FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}


def unpickling(tree: ast.Module) -> list[str]:
    """Statements of a module that could make objects of bytes from outside."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in FORBIDDEN_MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FORBIDDEN_MODULES:
            found.append(node.module)
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            values = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if name == "torch.load" or name.endswith((".read_pickle", ".to_pickle")):
                found.append(name)
            elif values.get("allow_pickle", "False") != "False" or values.get("weights_only") == "False":
                found.append(f"{name}(…)")
            elif (
                name.endswith("import_module")
                and node.args
                and ast.unparse(node.args[0]).strip("'\"") in FORBIDDEN_MODULES
            ):
                found.append(name)
    return found


def test_no_module_unpickles():
    sources = sorted(SOURCES.rglob("*.py"))
    assert len(sources) > 50
    found = {str(path.relative_to(SOURCES)): unpickling(ast.parse(path.read_text("utf-8"))) for path in sources}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "line",
    [
        "import pickle", "from cloudpickle import loads", "import joblib.numpy_pickle", "np.load(f, allow_pickle=True)",
        "np.load(f, allow_pickle=flag)", "torch.load(f)", "pd.read_pickle(f)", "importlib.import_module('dill')",
    ],
)  # fmt: skip
def test_it_would_be_noticed(line):
    assert unpickling(ast.parse(line))
    assert unpickling(ast.parse("np.load(f, allow_pickle=False)")) == []
