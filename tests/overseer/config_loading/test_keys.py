from typing import Annotated

from pydantic import BaseModel, Field

from penstock.overseer.config_loading import ConfigKey, all_keys, is_key, is_secret, keys_at


class Leaf(BaseModel):
    rate: float = 0.0
    token: str = Field(default="", repr=False)


class Branch(BaseModel):
    leaf: Leaf | None = None
    by_name: dict[str, Leaf] = {}
    listed: Annotated[list[Leaf], Field(max_length=3)] = []
    nested: dict[str, list[Leaf]] = {}
    anything: dict[str, int] = {}


class Tree(BaseModel):
    branch: Branch = Branch()
    other: Leaf | Branch = Leaf()
    again: "Tree | None" = None


def test_keys_at_every_kind_of_section():
    leaf = ["rate", "token"]
    assert keys_at(Tree, ()) == ["again", "branch", "other"]
    assert keys_at(Tree, ("branch", "leaf")) == leaf
    assert keys_at(Tree, ("branch", "by_name", "any")) == leaf
    assert keys_at(Tree, ("branch", "listed", 2)) == leaf
    assert keys_at(Tree, ("branch", "nested", "x", 0)) == leaf
    assert keys_at(Tree, ("other",)) == sorted([*leaf, "anything", "by_name", "leaf", "listed", "nested"])
    assert keys_at(Tree, ("branch", "by_name")) == keys_at(Tree, ("branch", "anything", "x")) == []
    assert keys_at(Tree, ("nowhere", "at", "all")) == []


def test_secrets_are_fields_that_are_not_printed():
    assert is_secret(Tree, ("branch", "leaf", "token")) and is_secret(Tree, ("branch", "nested", "x", 0, "token"))
    assert not is_secret(Tree, ("branch", "leaf", "rate")) and not is_secret(Tree, ())


def test_what_may_be_set():
    for path in (
        "branch.leaf.rate",
        "branch.by_name.x",
        "branch.listed.0.rate",
        "branch.nested.x.0.token",
        "again.again",
    ):
        assert is_key(Tree, path.split(".")), path
    for path in ("branch.leaf.rate.more", "branch.zzz", "zzz", "branch.listed.0.zzz"):
        assert not is_key(Tree, path.split(".")), path


class Documented(BaseModel):
    """Two keys.

    Attributes:
        rate: Per second; None is
            the ``usual`` one.
        both: A pair.
    """

    rate: float | None = Field(default=None, gt=0, le=2)
    both: tuple[int, str] = (1, "a")
    names: dict[str, Annotated[int, Field(ge=1)]] = {}


def test_type_default_and_meaning_come_from_the_model():
    rate, both, names = all_keys(Documented)
    assert rate == ConfigKey("rate", "number > 0, ≤ 2, or null", "null", "Per second; null is the `usual` one.", None)
    assert (both.takes, both.default, both.meaning) == ("list of 2: whole number, text", "[1, a]", "A pair.")
    assert (names.takes, names.default, names.meaning) == ("mapping of names to whole numbers ≥ 1", "{}", "")


def test_the_defaults_of_a_section_are_those_of_the_section_that_holds_it():
    class Root(BaseModel):
        leaf: Leaf = Leaf(rate=2.5)
        free: Leaf

    keys = {key.path: key.default for key in all_keys(Root)}
    assert keys == {"leaf": "", "leaf.rate": "2.5", "leaf.token": '""', "free": "required", "free.rate": "0",
                    "free.token": '""'}  # fmt: skip
