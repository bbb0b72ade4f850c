"""The error tree: the classes that users catch, their exit codes, and their transfer between processes."""

import re

import pytest

from cachetool.core import errors
from cachetool.core.errors import CacheToolError, MissingExtra, from_json, to_json

CLASSES = [getattr(errors, name) for name in errors.__all__ if name[0].isupper()]


def test_every_error_of_the_module_is_public_and_drawn_in_the_tree_with_its_exit_code() -> None:
    drawn = dict(re.findall(r"^ +[│├└─ ]*(\w+) +(\d+)\b", errors.__doc__ or "", flags=re.MULTILINE))

    assert {c.__name__: str(c.exit_code) for c in CLASSES} == drawn
    defined = {c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, CacheToolError)}
    assert defined == set(CLASSES)


@pytest.mark.parametrize(
    ("names", "code"),
    [
        ("CacheToolError", 1),
        ("UsageError MissingExtra", 2),
        ("SourceError NotFound AccessDenied Unreachable BadObject", 3),
        ("CapacityError CapTooSmall CapBlocked", 4),
        ("CorruptError", 5),
        ("CatalogError", 6),
        ("Interrupted", 130),
    ],
)
def test_exit_codes_are_those_of_the_documentation(names: str, code: int) -> None:
    for name in names.split():
        assert code == getattr(errors, name).exit_code


@pytest.mark.parametrize("kind", CLASSES, ids=lambda c: c.__name__)
def test_an_error_keeps_its_class_and_message_as_json(kind: type[CacheToolError]) -> None:
    again = from_json(to_json(kind("what, which, next\nsecond line")))

    assert kind is type(again)
    assert str(again) == "what, which, next\nsecond line"


def test_an_unknown_error_from_a_newer_version_keeps_its_message() -> None:
    again = from_json({"error": "NotKnownYet", "message": "hello"})

    assert CacheToolError is type(again)
    assert str(again) == "hello"


@pytest.mark.parametrize("name", ["to_json", "Any", "__name__", "Exception"])
def test_json_can_only_name_error_classes(name: str) -> None:
    assert CacheToolError is type(from_json({"error": name, "message": "x"}))


def test_a_missing_extra_says_how_to_install_it() -> None:
    assert (
        str(MissingExtra("reading images", "image"))
        == "reading images needs the extra 'image': pip install 'cachetool[image]'"
    )


def test_a_usage_error_is_a_value_error_for_library_users() -> None:
    with pytest.raises(ValueError, match="bad"):
        raise errors.UsageError("bad")
