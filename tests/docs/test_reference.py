"""The reference: ``api.md`` and ``commands.md`` say what the code says, name everything, and their examples run."""

from __future__ import annotations

import doctest
import importlib.util
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import cachetool
from cachetool.cli.app import program
from cachetool.core.docstrings import arguments_of, described, with_arguments
from tests.docs.pages import DOCS, ROOT, served
from tests.docs.world import fill_bucket, page_folder
from tests.test_public import PUBLIC

USERS = [name for name in PUBLIC if name == "cachetool" or name.startswith("cachetool.loaders.")]
MODULES = [*USERS, "cachetool.loaders"]
NEEDS = {
    "torch": "torch",
    "jax": "jax",
    "lightning": "lightning",
    "huggingface": "transformers",
    "composer": "composer",
    "keras": "keras",
    "tensorflow": "tensorflow",
}
"""The library that each module of loaders is for."""
LAYERS = "torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4096, 4))"
SETUP = {
    "lightning": f"""
import torch
from lightning.pytorch import LightningModule
class Model(LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = {LAYERS}
    def training_step(self, batch, index):
        return torch.nn.functional.cross_entropy(self.layers(batch["volume"]), batch["label"])
    def validation_step(self, batch, index):
        self.training_step(batch, index)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)
model = Model()
""",
    "huggingface": f"""
import torch
from transformers import TrainingArguments
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = {LAYERS}
    def forward(self, volume, label):
        scores = self.layers(volume)
        return {{"loss": torch.nn.functional.cross_entropy(scores, label), "logits": scores}}
model = Model()
arguments = TrainingArguments("out", num_train_epochs=1, report_to=[], use_cpu=True, disable_tqdm=True)
""",
    "keras": """
import keras
model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(4)])
model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
""",
}
"""The user's model, which the examples of a module take for granted."""


@pytest.fixture(scope="module")
def reference() -> dict[str, Any]:
    """The page as it would be made now, the arguments of all calls, and the examples."""
    command = [sys.executable, str(DOCS / "make_api.py"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def commands() -> Any:
    spec = importlib.util.spec_from_file_location("make_commands", DOCS / "make_commands.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_of_the_library_is_made_of_the_docstrings(reference: dict[str, Any]) -> None:
    assert (DOCS / "reference" / "api.md").read_text(encoding="utf-8") == reference["page"], (
        "run: python docs/make_api.py"
    )


def test_the_reference_of_the_commands_is_made_of_the_program() -> None:
    assert (DOCS / "reference" / "commands.md").read_text(encoding="utf-8") == commands().page(), (
        "run: python docs/make_commands.py"
    )


def test_every_public_name_is_in_the_reference(reference: dict[str, Any]) -> None:
    sections = dict(re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", reference["page"], flags=re.MULTILINE | re.DOTALL))

    for module in USERS:
        for name in PUBLIC[module].split():
            assert re.search(rf"^### {name}$|^\| `{name}` \|", sections[module], flags=re.MULTILINE), f"{module}.{name}"


def test_every_command_argument_and_option_is_in_the_reference() -> None:
    page = (DOCS / "reference" / "commands.md").read_text(encoding="utf-8")
    group: Any = typer.main.get_command(program())

    for name, command in group.commands.items():
        assert f"\n## {name}\n" in page
        for one in command.params:
            flags = [*one.opts, *one.secondary_opts] if one.param_type_name == "option" else [one.metavar]
            assert all(
                re.search(rf"^\| `[^|]*{re.escape(flag)}\b", page.replace("\\|", "/"), re.MULTILINE)
                or f"`{flag}" in page
                for flag in flags
            ), f"{name}: {flags}"


def test_every_argument_of_a_public_call_is_described(reference: dict[str, Any]) -> None:
    wrong = [
        f"{call['module']}: {call['name']}: {sorted(set(call['parameters']) ^ set(call['described']))}"
        for call in reference["calls"]
        if call["module"] in MODULES and set(call["parameters"]) != set(call["described"])
    ]

    assert len(reference["calls"]) > 100
    assert wrong == []


def test_help_shows_every_argument() -> None:
    from cachetool.loaders.numpy import Loader

    for value in (cachetool.Cache.pull, cachetool.Cache.convert, cachetool.convert, cachetool.BackgroundPull, Loader):
        named = set(inspect.signature(value).parameters) - {"self"}
        assert named == set(described(value.__doc__)), value
    assert "CorruptError" in str(Loader.__doc__)


def test_the_loader_of_pytorch_describes_its_own_arguments_behind_those_of_all_loaders() -> None:
    pytest.importorskip("torch")
    from cachetool.loaders import numpy, torch

    assert list(described(torch.Loader.__doc__)) == [*described(numpy.Loader.__doc__), "device", "agree"]
    assert list(inspect.signature(torch.Loader).parameters) == list(described(torch.Loader.__doc__))


def test_arguments_are_added_to_a_docstring() -> None:
    new = {"b": "    b: Two."}

    assert with_arguments("Do it.\n\nArgs:\n    a: One,\n        really.\n\nReturns:\n    c", new) == (
        "Do it.\n\nArgs:\n    a: One,\n        really.\n    b: Two.\n\nReturns:\n    c"
    )
    assert with_arguments("Do it.\n\nReturns:\n    c", new) == "Do it.\n\nArgs:\n    b: Two.\n\nReturns:\n    c"
    assert with_arguments("Do it.", new) == "Do it.\n\nArgs:\n    b: Two.\n"
    assert with_arguments("Do it.\n\nArgs:\n    b: Mine.", new) == "Do it.\n\nArgs:\n    b: Mine."


def test_a_class_takes_over_arguments_and_errors() -> None:
    class Base:
        """Base.

        Args:
            a: One.
            b: Two.

        Raises:
            ValueError: Never.
        """

    @arguments_of(Base, "b")
    class Other:
        """Other.

        Args:
            c: Three.

        Example:
            >>> 1
        """

    assert Other.__doc__ == (
        "Other.\n\nArgs:\n    b: Two.\n    c: Three.\n\nRaises:\n    ValueError: Never.\n\nExample:\n    >>> 1"
    )


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("remote")
    fill_bucket(folder / "bucket")
    return folder


@pytest.fixture(scope="module")
def servers(remote: Path) -> Iterator[dict[str, str]]:
    with served(remote) as env:
        yield env


@pytest.fixture(scope="module")
def worlds(remote: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder with a cache of 24 samples, by the format of its shards."""
    folders = {}
    for kind in ("lmdb", "tfrecord"):
        folders[kind] = page_folder(tmp_path_factory.mktemp("world") / kind, remote / "bucket")
        with cachetool.open_cache(folders[kind] / "data" / "cache", max_size="20MB") as cache:
            cache.pull(folders[kind] / "volumes", samples=24, to=kind)
    return folders


@pytest.mark.parametrize("module", [*MODULES, "Values"])
def test_the_examples_of_a_module_do_what_they_say(
    module: str, reference: dict[str, Any], worlds: dict[str, Path], servers: dict[str, str], tmp_path: Path
) -> None:
    """Each in a folder and with names of its own, all in one process."""
    kind = module.rpartition(".")[2]
    if kind in NEEDS and importlib.util.find_spec(NEEDS[kind]) is None:
        pytest.skip(f"{NEEDS[kind]} is not installed")
    examples = [example for example in reference["examples"] if example["module"] == module]
    assert examples, f"{module} has no example"
    work = []
    for number, example in enumerate(examples):
        folder = tmp_path / str(number)
        shutil.copytree(worlds["tfrecord" if kind == "tensorflow" else "lmdb"], folder)
        block = {"page": f"{module}.{example['name']}", "line": 1, "said": "", "section": "", "folder": str(folder)}
        work.append({**block, "language": "python", "text": SETUP.get(kind, "")})
        lines = doctest.DocTestParser().get_examples(f"{example['text']}\n")
        if any(line.want for line in lines):
            work.append({**block, "language": "pycon", "text": f"{example['text']}\n"})
        else:  # a trainer prints what it likes
            work.append({**block, "language": "python", "text": "".join(line.source for line in lines)})
    environment = {
        **os.environ,
        **servers,
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        "HOME": str(tmp_path),
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "KERAS_BACKEND": "torch",
    }
    script = str(Path(__file__).parent / "scripts" / "run_blocks.py")
    done = subprocess.run(
        [sys.executable, script], input=json.dumps(work), env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
