from typing import Annotated

from pydantic import BaseModel, Field

from penstock.overseer.config_loading import is_secret, keys_at, nearest_key


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


def test_the_nearest_key_is_in_the_same_section_first():
    assert nearest_key(Tree, ("branch", "leaf", "rat")) == "branch.leaf.rate"
    assert nearest_key(Branch, ("anythin",)) == "anything"
    assert nearest_key(Tree, ("zzz",)) is None


def test_a_name_that_stands_in_one_other_section_is_found_there():
    class Root(BaseModel):
        branch: Leaf = Leaf()

    assert nearest_key(Root, ("rate",)) == "branch.rate"
    assert nearest_key(Tree, ("rate",)) is None, "it stands in several"


def test_secrets_are_fields_that_are_not_printed():
    assert is_secret(Tree, ("branch", "leaf", "token")) and is_secret(Tree, ("branch", "nested", "x", 0, "token"))
    assert not is_secret(Tree, ("branch", "leaf", "rate")) and not is_secret(Tree, ())
