import pytest

from penstock.model import language


@pytest.mark.parametrize("name", language.__all__)
def test_every_exported_name_is_there(name):
    assert getattr(language, name).__name__ == name
    assert name in dir(language)


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="no attribute 'Encoder'"):
        _ = language.Encoder
