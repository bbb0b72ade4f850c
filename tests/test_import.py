"""The public names of the package, and the cost of its import."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import subprocess
import sys

import pytest

import cachetool

HEAVY = (
    "typer",
    "rich",
    "pydantic",
    "numpy",
    "h5py",
    "lmdb",
    "zarr",
    "obstore",
    "tfrecord",
    "torch",
    "tensorflow",
    "jax",
    "sqlite3",
)


def loaded_after(code: str) -> set[str]:
    """Return the heavy libraries that a new interpreter has loaded after ``code``."""
    script = f"{code}\nimport sys, json\nprint(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_the_package_loads_no_library() -> None:
    assert loaded_after("import cachetool") == set()


def test_catching_an_error_loads_no_library() -> None:
    assert loaded_after("import cachetool\ntry:\n    pass\nexcept cachetool.CapacityError:\n    pass") == set()


def test_importing_the_library_loads_no_format_store_or_framework() -> None:
    assert loaded_after("import cachetool\ncachetool.open_cache") <= {"numpy", "sqlite3"}


def test_feeders_load_no_module_that_fills_or_evicts_a_cache() -> None:
    """Each module adds to the time that a loader's feeders need to start."""
    script = "import cachetool.loaders.feed.feeder, cachetool.loaders.feed.leader, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = {name.rpartition(".")[2] for name in done.stdout.split() if name.startswith("cachetool.cache.")}
    assert {"catalog", "snapshots"} <= loaded
    assert loaded.isdisjoint({"admission", "commit", "draws", "eviction", "growth", "rebuild", "repair", "stats"})


def test_the_help_of_the_command_line_loads_only_typer_and_its_requirements() -> None:
    assert loaded_after("from cachetool.cli.app import run\nrun(['pull', '--help'])") == {"typer", "pydantic"}


def test_a_command_loads_no_other_command() -> None:
    from cachetool.cli.app import VERBS

    script = "import sys; from cachetool.cli.app import run; run(['ls', '--help']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert {f"cachetool.cli.{verb}" for verb in VERBS} & {*done.stdout.split()} == {"cachetool.cli.ls"}


def test_every_public_name_exists_and_is_listed() -> None:
    assert sorted(dir(cachetool)) == sorted(cachetool.__all__)
    for name in cachetool.__all__:
        assert getattr(cachetool, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing_of_that_name'"):
        cachetool.nothing_of_that_name  # noqa: B018


def test_every_error_class_is_public() -> None:
    from cachetool.core import errors

    assert {name for name in errors.__all__ if name[0].isupper()} <= set(cachetool.__all__)


def test_the_version_is_that_of_the_installed_package() -> None:
    from importlib.metadata import version

    assert version("cachetool") == cachetool.__version__


OPTIONAL = ("torch", "tensorflow", "lightning", "huggingface", "composer", "keras")


def public_modules() -> list[str]:
    """Return every module that can be imported without an optional library."""
    names = [found.name for found in pkgutil.walk_packages(cachetool.__path__, "cachetool.")]
    optional = tuple(f"cachetool.loaders.{name}" for name in OPTIONAL)
    return [name for name in names if not name.endswith("__main__") and not name.startswith(optional)]


@pytest.mark.parametrize("name", public_modules())
def test_public_names_exist_and_are_documented(name: str) -> None:
    module = importlib.import_module(name)

    for public in getattr(module, "__all__", ()):
        value = getattr(module, public)
        if (inspect.isfunction(value) or inspect.isclass(value)) and value.__module__.startswith("cachetool"):
            assert inspect.getdoc(value), f"{name}.{public} has no docstring"


@pytest.mark.parametrize(
    ("module", "library"),
    [(name, name) for name in ("torch", "tensorflow", "ray", "jax", "keras")] + [("huggingface", "transformers")],
)
def test_a_loader_without_its_library_names_the_extra(module: str, library: str) -> None:
    code = f"import sys; sys.modules[{library!r}] = None; import cachetool.loaders.{module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last == f"ModuleNotFoundError: this needs {library}: pip install 'cachetool[{module}]'"


def test_public_names_keep_their_meaning_after_all_modules_are_loaded() -> None:
    """A module with the same name would replace a function of the package when it is imported."""
    code = (
        "import pkgutil, cachetool, cachetool.api, cachetool.pull.run, cachetool.conversion.run\n"
        "modules = {m.name for m in pkgutil.iter_modules(cachetool.__path__)}\n"
        "print(sorted(modules & set(cachetool.__all__)), callable(cachetool.convert))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout == "[] True\n"
