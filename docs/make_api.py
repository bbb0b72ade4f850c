"""Writes ``docs/reference/api.md`` out of the docstrings of the library: ``python docs/make_api.py``.

No framework is needed: stand-ins take the places of PyTorch, TensorFlow and the others, so the page is the same
wherever it is made. ``python docs/make_api.py --json`` prints the page, the arguments and the examples for the tests.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import importlib.abc
import importlib.machinery
import inspect
import json
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cachetool.core.docstrings import described

FRAMEWORKS = ("torch", "tensorflow", "jax", "keras", "lightning", "transformers", "composer")
MODULES = {
    "cachetool": "Caches, pulls and conversions. `import cachetool` is fast, because it imports no other library.",
    "cachetool.loaders": "The arguments and methods that the loaders for NumPy and PyTorch share.",
    "cachetool.loaders.torch": "For PyTorch. Install in a clone: `pip install -c constraints.txt '.[torch]'`.",
    "cachetool.loaders.numpy": "For NumPy. With `prefetch_to_device` of `cachetool.loaders.jax` also for JAX.",
    "cachetool.loaders.jax": "For JAX. Install in a clone: `pip install -c constraints.txt '.[jax]'`.",
    "cachetool.loaders.lightning": (
        "For Lightning. Install in a clone: `pip install -c constraints.txt '.[lightning]'`."
    ),
    "cachetool.loaders.huggingface": (
        "For the Hugging Face Trainer. Install in a clone: `pip install -c constraints.txt '.[huggingface]'`."
    ),
    "cachetool.loaders.composer": "For MosaicML Composer. Install it with `pip install mosaicml`.",
    "cachetool.loaders.keras": "For Keras 3. Install in a clone: `pip install -c constraints.txt '.[keras]'`.",
    "cachetool.loaders.tensorflow": (
        "For TensorFlow. Install in a clone: `pip install -c constraints.txt '.[tensorflow]'`."
    ),
}
FIRST = ("open_cache", "Cache", "convert", "BackgroundPull", "CacheToolError")
COMMON = {
    "BaseLoader": "cachetool.loaders.loader",
    "FixedEpochs": "cachetool.loaders.fixed_epochs",
}
RESULTS = {
    "PullResult": "cachetool.pull.job",
    "ConvertResult": "cachetool.conversion.run",
    "Removal": "cachetool.cache.removal",
    "Victim": "cachetool.cache.policies",
    "Stats": "cachetool.cache.stats",
    "PullState": "cachetool.cache.stats",
    "Usage": "cachetool.cache.usage",
    "Shard": "cachetool.cache.snapshots",
    "Snapshot": "cachetool.cache.snapshots",
    "Schema": "cachetool.core.schema",
    "Field": "cachetool.core.schema",
    "Ragged": "cachetool.core.block",
    "Progress": "cachetool.core.progress",
}
"""Classes of values that the functions above return or hand out."""
INTERNAL = (
    *("add_source", "catalog", "check_schema", "declare", "holder", "listing", "make_again", "recover", "renew"),
    *("settle_cap", "source", "stage", "stage_together"),
)
"""Methods of a cache for the package itself."""
FEW = 4
"""Fewer arguments than that are described again, where another function has them too."""
SPECIAL = {"__iter__": "iter(...)", "__len__": "len(...)"}
HEAD = """# API reference

This page is made from the docstrings by `python docs/make_api.py`. `help()` in Python shows the same text. See
[Commands](commands.md) for the command line, [Errors](errors.md) for the messages of errors, and
[Words](../README.md#words) for the terms. Where a text names an option such as `--part`, Python has the argument
`part`.

A size is a number of bytes, or text such as `"50GB"` and `"512MiB"`. A time is a number of seconds, or text such as
`"10min"`. A share is a number such as `0.1`, or text such as `"10%"`. Every function checks its arguments before it
reads or writes anything, and raises `UsageError` for a value that cannot be used.
"""
SECTIONS = ("Args", "Attributes", "Returns", "Yields", "Raises", "Example")


# -- stand-ins for frameworks ------------------------------------------------------------------------------------------


class _Meta(type):
    """Lets a stand-in be subscripted, have any attribute, and take items."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Meta(name, (StandIn,), {})

    def __getitem__(cls, item: object) -> Any:
        return cls

    def __setitem__(cls, item: object, value: object) -> None:
        pass


class StandIn(metaclass=_Meta):
    """The base of all stand-ins."""


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in FRAMEWORKS:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda name: getattr(StandIn, name)  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


# -- docstrings --------------------------------------------------------------------------------------------------------


def sections(docstring: str) -> dict[str, str]:
    """The parts of a docstring: ``""`` for its beginning, then by the names of its sections."""
    pattern = rf"^({'|'.join(SECTIONS)}):\n"
    head, *rest = re.split(pattern, inspect.cleandoc(docstring) + "\n", flags=re.MULTILINE)
    return {"": head.strip()} | {
        name: inspect.cleandoc(f"\n{text}") for name, text in zip(rest[::2], rest[1::2], strict=True)
    }


def entries(section: str) -> Iterator[tuple[str, str]]:
    """Name and text of each entry of a section."""
    for entry in re.split(r"\n(?=\S)", section):
        name, _, text = entry.partition(":")
        yield name.strip(), " ".join(text.split())


def markdown(text: str) -> str:
    """The text of a docstring as Markdown."""
    text = re.sub(r":\w+:`~[\w.]*?(\w+)`", r"``\1``", text)
    text = re.sub(r":\w+:`([\w.]+)`", r"``\1``", text)
    parts = re.split(r"(``.+?``)", text, flags=re.DOTALL)
    return "".join(f"`{part[2:-2]}`" if part.startswith("``") else _plain(part) for part in parts)


def _plain(text: str) -> str:
    text = re.sub(r"'(__\w+__)'", r"`\1`", text)
    text = re.sub(r"(?<![\w`-])--[a-z][a-z-]*", r"`\g<0>`", text)
    return re.sub(r"[*<]", r"\\\g<0>", text)


def _link(name: str) -> str:
    """A link to the heading of a name."""
    return f"[{name}](#{re.sub('[^a-z0-9_-]', '', name.lower())})"


def signature(value: Any, name: str, *, drop: bool) -> tuple[str, list[inspect.Parameter]]:
    """The call in Python's words, and its parameters; ``drop``: without ``self``."""
    try:
        found = inspect.signature(value)
    except (ValueError, TypeError):
        return f"{name}()", []
    parameters = list(found.parameters.values())[1 if drop else 0 :]
    texts, star = [], False
    for one in parameters:
        if one.kind is one.VAR_POSITIONAL:
            star = True
        elif one.kind is one.KEYWORD_ONLY and not star:
            texts.append("*")
            star = True
        mark = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
        text = f"{mark}{one.name}"
        if one.annotation is not one.empty:
            text += f": {_type(one.annotation)}"
        if one.default is not one.empty:
            text += f" = {_default(one.default)}"
        texts.append(text)
    end = "" if found.return_annotation in (found.empty, "None", None) else f" -> {_type(found.return_annotation)}"
    call = f"{name}({', '.join(texts)}){end}"
    if len(call) > 100:
        call = f"{name}(\n" + "".join(f"    {text},\n" for text in texts) + f"){end}"
    return call, parameters


def _type(annotation: Any) -> str:
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"\b(?:\w+\.)+(?=\w)", "", text)


def _default(value: Any) -> str:
    return value.__name__ if callable(value) else repr(value)


# -- the page ----------------------------------------------------------------------------------------------------------


class Page:
    """Collects the text, and for the tests the arguments and the examples."""

    def __init__(self) -> None:
        self.lines: list[str] = [HEAD]
        self.calls: list[dict[str, Any]] = []
        self.examples: list[dict[str, str]] = []
        self.names: dict[str, list[str]] = {}
        self._places: dict[tuple[str, str], str] = {}
        """The section in which an argument was described in these words."""
        self._members: dict[Any, str] = {}
        """The module and class under which each method was described."""
        self._errors: dict[str, str] = {}

    def module(self, module: str, text: str, values: dict[str, Any]) -> None:
        """A section."""
        self.lines += [f"## {module}\n", f"{text}\n"]
        self.names[module] = list(values)
        for name, value in values.items():
            self.lines.append(f"### {name}\n")
            if inspect.isclass(value):
                self._class(module, name, value)
            elif callable(value):
                self._call(module, name, value, docstring=inspect.getdoc(value) or "")
            else:
                self.lines.append("The version of the installed package, as text.\n")

    def errors(self, values: dict[str, Any]) -> None:
        """The error classes, as a table."""
        self.lines += ["### Errors\n", "| class | exit code | made from | condition |", "|---|---|---|---|"]
        for name, value in values.items():
            text = sections(inspect.getdoc(value) or "")[""].replace("\n", " ")
            base = value.__mro__[1].__name__
            self.lines.append(f"| `{name}` | {value.exit_code} | `{base}` | {markdown(text)} |")
            self.names["cachetool"].append(name)
        self.lines.append("")

    def _class(self, module: str, name: str, value: Any) -> None:
        docstring = inspect.getdoc(value) or ""
        # The options of a dataclass that users make are arguments; the values of a result are attributes.
        is_value = dataclasses.is_dataclass(value) and "Args" not in sections(docstring)
        is_made = "ade by" in docstring.partition("\n\n")[0] or is_value
        self._call(module, name, None if is_made else value, docstring=docstring)
        if attributes := [] if dataclasses.is_dataclass(value) and not is_value else _attributes(value):
            self.lines += ["| attribute | type | meaning |", "|---|---|---|"]
            self.lines += [
                f"| `{one}` | `{kind}` | {markdown(text)} |".replace(" | None`", " \\| None`")
                for one, kind, text in attributes
            ]
            self.lines.append("")
        hooks, inherited, hidden = [], [], []
        for one, member in _members(value):
            docstring = inspect.getdoc(member) or ""
            function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            if one in INTERNAL and any(base.__name__ == "CacheDir" for base in value.__mro__):
                hidden.append(one)
                self._note_call(module, f"{name}.{one}", member, docstring)
            elif function in self._members:
                inherited.append((one, self._members[function]))
            elif re.search(r"calls this method", docstring.partition("\n\n")[0]):
                hooks.append(one)
                self._note_call(module, f"{name}.{one}", member, docstring)
            else:
                self._members[function] = name
                self.lines.append(f"#### {name}.{SPECIAL.get(one, one)}\n")
                call = None if isinstance(member, property | functools.cached_property) else member
                self._call(module, f"{name}.{one}", call, docstring=docstring, drop=not inspect.ismethod(member))
        for place in dict.fromkeys(place for _, place in inherited):
            names = ", ".join(f"`{SPECIAL.get(one, one)}`" for one, at in inherited if at == place)
            self.lines.append(f"Also, as described at {_link(place)}: {names}.\n")
        if hooks:
            self.lines.append(f"The trainer calls these methods: {', '.join(f'`{one}`' for one in hooks)}.\n")
        if hidden:
            self.lines.append(f"For the package itself: {', '.join(f'`{one}`' for one in hidden)}.\n")

    def _note_call(self, module: str, name: str, value: Any, docstring: str) -> list[inspect.Parameter]:
        parts = sections(docstring)
        if "Example" in parts:
            self.examples.append({"module": module, "name": name, "text": parts["Example"]})
        if value is None or isinstance(value, property | functools.cached_property):
            return []
        drop = "." in name and not inspect.ismethod(value)
        _, parameters = signature(value, name, drop=drop)
        self.calls.append(
            {
                "module": module,
                "name": name,
                "parameters": [one.name for one in parameters],
                "described": list(described(docstring)),
                "special": name.rpartition(".")[2] in SPECIAL,
            }
        )
        return parameters

    def _call(self, module: str, name: str, value: Any, *, docstring: str, drop: bool = False) -> None:
        parts = sections(docstring)
        self._note_call(module, name, value, docstring)
        if value is not None:
            shown = name.rpartition(".")[2]
            call, _ = signature(value, shown, drop=drop)
            if shown not in SPECIAL:
                self.lines += ["```python", call, "```", ""]
        self.lines += [markdown(parts[""]), ""]
        arguments = list(entries(parts["Args"])) if "Args" in parts and (value is not None or "." in name) else []
        places = [self._places.get(argument) for argument in arguments]
        is_old = [at is not None and places.count(at) >= FEW for at in places]
        new = [argument for argument, old in zip(arguments, is_old, strict=True) if not old]
        old = [(one, at) for (one, _), at, is_it in zip(arguments, places, is_old, strict=True) if at and is_it]
        for one, text in new:
            self._places.setdefault((one, text), name)
        if new:
            self.lines += ["Arguments:\n", *(f"- `{one}`: {markdown(text)}" for one, text in new), ""]
        for at in dict.fromkeys(at for _, at in old):
            names = ", ".join(f"`{one}`" for one, where in old if where == at)
            kind = "Further arguments" if new else "Arguments"
            self.lines.append(f"{kind}, as described at {_link(at)}: {names}.\n")
        if "Attributes" in parts:
            listed = [f"- `{one}`: {markdown(text)}" for one, text in entries(parts["Attributes"])]
            self.lines += ["Attributes:\n", *listed, ""]
        for section in ("Returns", "Yields"):
            if section in parts:
                self.lines += [f"{section}: {markdown(' '.join(parts[section].split()))}\n"]
        if "Raises" in parts:
            self._raises(name, parts["Raises"])
        if "Example" in parts:
            self.lines += ["```pycon", parts["Example"], "```", ""]

    def _raises(self, name: str, text: str) -> None:
        at = self._errors.setdefault(text, name)
        if at != name and len(text) > 120:
            self.lines.append(f"Raises: as {_link(at)}.\n")
            return
        self.lines += ["Raises:\n", *(f"- `{one}`: {markdown(text)}" for one, text in entries(text)), ""]


def _members(cls: Any) -> Iterator[tuple[str, Any]]:
    """The public methods and properties of a class that cachetool defines, in the order of their definition."""
    found: dict[str, Any] = {}
    for base in cls.__mro__:
        if base.__module__.startswith("cachetool"):
            for name, member in vars(base).items():
                public = name[0] != "_" or name in SPECIAL
                if name in found:
                    continue
                if public and (callable(getattr(cls, name)) or isinstance(member, property)) and _has_docstring(member):
                    found[name] = member if isinstance(member, property) else getattr(cls, name)
                elif public and isinstance(member, functools.cached_property):
                    found[name] = member
    yield from found.items()


def _has_docstring(member: Any) -> bool:
    return bool(getattr(getattr(member, "__func__", member), "__doc__", None)) and not inspect.isclass(member)


def _attributes(cls: Any) -> list[tuple[str, str, str]]:
    """Name, type and meaning of the fields of a dataclass, and of attributes with words below them."""
    if not dataclasses.is_dataclass(cls):
        return []
    (definition,) = ast.parse(inspect.cleandoc(inspect.getsource(cls))).body
    assert isinstance(definition, ast.ClassDef)
    found = []
    for at, node in enumerate(definition.body):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id[0] != "_":
            below = definition.body[at + 1] if at + 1 < len(definition.body) else None
            words = below.value if isinstance(below, ast.Expr) else None
            text = str(words.value) if isinstance(words, ast.Constant) else ""
            kind = re.sub(r"\b(?:\w+\.)+(?=\w)", "", ast.unparse(node.annotation))
            found.append((node.target.id, kind, " ".join(text.split())))
    return found


def make() -> Page:
    """The page, with stand-ins in the places of all frameworks."""
    sys.meta_path.insert(0, _Finder())
    page = Page()
    for module, text in MODULES.items():
        if module == "cachetool.loaders":
            values = {name: getattr(importlib.import_module(home), name) for name, home in COMMON.items()}
            page.module(module, text, values)
            continue
        here = importlib.import_module(module)
        names = sorted(here.__all__, key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))
        values = {name: getattr(here, name) for name in names}
        if module != "cachetool":
            page.module(module, text, values)
            continue
        is_error = {name: inspect.isclass(value) and issubclass(value, Exception) for name, value in values.items()}
        page.module(module, text, {n: v for n, v in values.items() if not is_error[n] or n == "CacheToolError"})
        page.errors({n: v for n, v in values.items() if is_error[n] and n != "CacheToolError"})
    values = {name: getattr(importlib.import_module(home), name) for name, home in RESULTS.items()}
    page.module("Values", "Objects that the functions and methods above return or hand out.", values)
    return page


def text_of(page: Page) -> str:
    """The page as text."""
    return re.sub(r"\n{3,}", "\n\n", "\n".join(page.lines)).rstrip() + "\n"


def main() -> None:
    """Write the page, or print it with what the tests check."""
    page = make()
    if "--json" in sys.argv:
        found = {"calls": page.calls, "examples": page.examples, "names": page.names}
        sys.stdout.write(json.dumps({"page": text_of(page), **found}))
    else:
        (Path(__file__).parent / "reference" / "api.md").write_text(text_of(page), encoding="utf-8")


if __name__ == "__main__":
    main()
