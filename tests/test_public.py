"""The public names, listed: each has words of its own, and a function says which errors it raises.

Read off the files, so that no framework is imported for it.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from cachetool.core import errors

ROOT = Path(__file__).parent.parent
PUBLIC = {
    "cachetool": "AccessDenied BackgroundPull BadObject Cache CacheToolError CapBlocked CapTooSmall CapacityError"
    " CatalogError CorruptError Interrupted MissingExtra NotFound SourceError Unreachable UsageError"
    " __version__ convert open_cache",
    "cachetool.loaders.torch": "CacheDataset DevicePrefetcher EpochSampler JPEG LMDBDataset Loader Pad Samples"
    " TensorList",
    "cachetool.loaders.numpy": "JPEG Loader Pad",
    "cachetool.loaders.jax": "prefetch_to_device",
    "cachetool.loaders.lightning": "CacheDataModule GrowthCallback",
    "cachetool.loaders.huggingface": "GrowthMixin LoaderStateCallback",
    "cachetool.loaders.composer": "GrowthCallback",
    "cachetool.loaders.keras": "LoaderDataset LoaderStateCallback",
    "cachetool.loaders.tensorflow": "feature_spec make_dataset parse_batch",
    # what Cache's methods give, and what somebody who writes a format builds on
    "cachetool.cache": "CacheDir Claim Facts Origin Removal Room Shard Snapshot SourceRow Staging Stats Victim"
    " commit_together open_cache policy_names",
    "cachetool.core.schema": "KEY Field Kind Schema storage_dtype",
    "cachetool.core.block": "BLOCK_BYTES Block Column Ragged",
    "cachetool.core.extents": "CODECS EXTENTS_FILE Extents FieldExtents Frames",
    "cachetool.formats": "Format Reader Writer Written format_for format_names get_format",
    "cachetool.core.options": "Address Declared MinEpochs On OnError Option Options Policy RoomWait Workers arguments"
    " choice declared documents takes unknown_option",
    "cachetool.sources.base": "Hurry Probe ReadResult Reading Skipped Source unhurried",
    "cachetool.sources.options": "ImageSize Pixels SourceOptions image_size",
    "cachetool.sources.registry": "check_place list_source open_source refuse_empty",
    "cachetool.stores": "Limits Object OrderedStore Store canonical local_path open_store redact scrub split_url",
    "cachetool.core.errors": "AccessDenied BadObject CacheToolError CapBlocked CapTooSmall CapacityError CatalogError"
    " CorruptError Interrupted MissingExtra NotFound SourceError Unreachable UsageError from_json to_json",
}
"""Module to its names. A name that is added, or goes, is a decision about what users may rely on."""
ERRORS = {name for name in errors.__all__ if name[0].isupper()}

Definition = ast.FunctionDef | ast.ClassDef


def parsed(module: str) -> ast.Module:
    path = ROOT.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


def listed(module: str) -> list[str]:
    """``__all__`` of a module."""
    for node in parsed(module).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            found: list[str] = ast.literal_eval(node.value)
            return found
    raise AssertionError(f"{module} has no __all__")


def defined(module: str, name: str) -> Definition | str | None:
    """Return the definition of a name: a function, a class, or the string under a constant.

    None stands for a constant that another library defines.
    """
    tree = parsed(module)
    for node in ast.walk(tree):  # also under TYPE_CHECKING
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("cachetool"):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return defined(str(node.module), alias.name)
    for at, node in enumerate(tree.body):
        if isinstance(node, Definition) and node.name == name:
            return node
        if isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if ast.unparse(target) == name:
                below = tree.body[at + 1] if at + 1 < len(tree.body) else None
                words = below.value if isinstance(below, ast.Expr) else None
                return str(words.value) if isinstance(words, ast.Constant) else ""
    return None


def definitions(module: str, name: str) -> list[tuple[str, Definition, str]]:
    """Return the public parts of a name: itself, and the methods of a class, each with the docstring of the class."""
    node = defined(module, name)
    if not isinstance(node, Definition):
        return []
    found: list[tuple[str, Definition, str]] = [(f"{module}.{name}", node, "")]
    if isinstance(node, ast.ClassDef):
        for each in node.body:
            if isinstance(each, ast.FunctionDef) and (each.name[0] != "_" or each.name == "__init__"):
                found.append((f"{module}.{name}.{each.name}", each, ast.get_docstring(node) or ""))
    return found


NAMES = [each for module, names in PUBLIC.items() for name in names.split() for each in definitions(module, name)]


@pytest.mark.parametrize("module", PUBLIC)
def test_the_public_names_of_a_module_are_these(module: str) -> None:
    assert sorted(listed(module)) == sorted(PUBLIC[module].split())


@pytest.mark.parametrize(("name", "node", "outer"), NAMES, ids=[name for name, _, _ in NAMES])
def test_a_public_name_says_what_it_is_and_what_it_raises(name: str, node: Definition, outer: str) -> None:
    """The class of an error, or one above it; of what it raises itself, not of what it calls."""
    words = (ast.get_docstring(node) or "") + (outer if node.name == "__init__" else "")
    assert len(words) >= 10, f"{name} has no docstring"

    if isinstance(node, ast.FunctionDef):
        for each in set(re.findall(r"raise (\w+)\(", ast.unparse(node))) & ERRORS:
            above = {kind.__name__ for kind in getattr(errors, each).__mro__} & ERRORS
            assert any(kind in words + outer for kind in above), f"{name} raises {each}, and does not say so"


def test_a_public_constant_is_described_where_it_stands() -> None:
    for module, names in PUBLIC.items():
        for name in names.split():
            assert defined(module, name) != "", f"{module}.{name}"
