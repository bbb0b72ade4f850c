"""The layers of the package, checked by the import statements of every module.

A module imports only from lower layers or from its own package, and each heavy dependency has one module. The table is
that of ``docs/architecture`` and of the design.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "cachetool"

LAYERS = (
    # a module imports from lower layers and from its own room; rooms of one layer do not import each other
    {"core"},
    {"proc"},
    {"cache", "formats", "stores"},
    {"sources"},
    {"pull"},
    {"check", "conversion", "loaders"},
    {"cluster"},
    {"api"},
    {"bench", "report"},
    {"cli"},
    {"__init__", "__main__"},
)
LAYER = {room: number for number, layer in enumerate(LAYERS) for room in layer}
BLIND = {
    # room: lower rooms that it may not import
    "sources": {"cache"},  # a source is read in the same way for every caller
    "loaders": {"sources", "pull"},  # a trainer loads no module that fills a cache
    "report": set(LAYER) - {"core", "cache", "report"},
}

_TORCH = ("", "_values", "_columns", "_loader", "_device", "_iterable")
HEAVY = {
    # library: the modules that may import it
    "h5py": {"formats.hdf5", "sources.hdf5"},
    "lmdb": {"formats.lmdb", "sources.lmdb"},
    "zarr": {"formats.zarr", "sources.zarr"},
    "tfrecord": {"formats.tfrecord_package"},
    "crc32c": {"formats", "sources.tfrecord"},  # checksums of TFRecord frames and of Zarr's shard index
    "tensorflow": {"loaders.tensorflow", "loaders.tensorflow_loader"},
    "opentelemetry": {"report.otel"},
    "jax": {"loaders.jax"},
    "lightning": {"loaders.lightning"},
    "pytorch_lightning": {"loaders.lightning"},
    "transformers": {"loaders.huggingface"},
    "accelerate": {"loaders.huggingface"},
    "composer": {"loaders.composer"},
    "keras": {"loaders.keras"},
    "pyarrow": {"sources.parquet"},
    "simplejpeg": {"sources.images", "loaders.feed.jpeg"},
    "cv2": {"loaders.feed.jpeg"},
    "asyncssh": {"stores.sftp"},
    "torch": {"bench.rates", "loaders.huggingface"} | {f"loaders.torch{part}" for part in _TORCH},
    "obstore": {"stores"},
    "sqlite3": {"cache.catalog"},
    "xxhash": {"formats.digest"},
    "typer": {"cli"},
    "rich": {"cli"},
    "ray": {"cluster.engine", "cluster.connect", "cluster.agent", "loaders.ray"},
    "click": set(),  # Typer has its own copy; the library of that name may not be installed
    "pickle": set(),  # never for data
    "cloudpickle": {"loaders.feed.transform"},  # sends a user's own function to processes of the same user
}


@dataclass(frozen=True)
class Import:
    """One import statement: its module, the imported name, and flags for imports that run at import time or never."""

    module: str
    target: str
    line: int
    at_import: bool
    for_types: bool


def modules() -> dict[str, Path]:
    """Return every module of the package by its dotted name below ``cachetool``."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)] = path
    return found


MODULES = modules()


def imports(module: str, tree: ast.AST, *, at_import: bool = True, for_types: bool = False) -> Iterator[Import]:
    """Yield all imports of a module. Those in functions and under TYPE_CHECKING do not run when it is imported."""
    for node in ast.iter_child_nodes(tree):
        typing = for_types or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
        inner = at_import and not typing
        inner = inner and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(module, alias.name, node.lineno, at_import, for_types)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: relative import"
            for alias in node.names:
                yield Import(module, f"{node.module}.{alias.name}", node.lineno, at_import, for_types)
        yield from imports(module, node, at_import=inner, for_types=typing)


ALL = [found for name, path in MODULES.items() for found in imports(name, ast.parse(path.read_text(encoding="utf-8")))]


def ours(found: Import) -> str | None:
    """Return the module of the package that an import names, or None for a library."""
    if found.target.split(".")[0] != "cachetool":
        return None
    name = found.target.removeprefix("cachetool").removeprefix(".")
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name or "__init__"


def allowed(room: str, target: str) -> bool:
    """Return True if a module of ``room`` may import one of the room ``target``."""
    if target == "__init__":  # its __getattr__ imports modules only on request
        return True
    return room == target or (LAYER[target] < LAYER[room] and target not in BLIND.get(room, ()))


def test_the_check_finds_the_modules_of_the_package() -> None:
    assert {name.split(".")[0] for name in MODULES} == set(LAYER)
    assert any(found.module == "core.schema" and found.target == "numpy" and found.at_import for found in ALL)


def test_a_module_imports_only_from_lower_layers_or_from_its_own_package() -> None:
    wrong = []
    for found in ALL:
        target = ours(found)
        if target is not None and not allowed(found.module.split(".")[0], target.split(".")[0]):
            wrong.append(f"{found.module}:{found.line} imports {target}")

    assert wrong == []


def test_a_heavy_library_is_imported_by_one_module() -> None:
    wrong = []
    for found in ALL:
        homes = HEAVY.get(found.target.split(".")[0])
        if homes is not None and found.module not in homes and found.module.split(".")[0] not in homes:
            wrong.append(f"{found.module}:{found.line} imports {found.target}")

    assert wrong == []


def test_the_core_does_no_input_or_output() -> None:
    """The core uses only the standard library and NumPy, and no standard module that reads, writes or runs
    something.
    """
    busy = {
        "io",
        "os",
        "pathlib",
        "socket",
        "sqlite3",
        "subprocess",
        "tempfile",
        "threading",
        "multiprocessing",
        "mmap",
    }
    wrong = [
        f"{found.module}:{found.line} imports {found.target}"
        for found in ALL
        if found.module.startswith("core.") and found.target.split(".")[0] in busy
    ]

    assert wrong == []


def test_no_two_modules_import_each_other() -> None:
    """No cycle exists among all imports, including those inside functions, except those for type checkers."""
    graph: dict[str, set[str]] = {name: set() for name in MODULES}
    for found in ALL:
        target = ours(found)
        if not found.for_types and target is not None and target != found.module:
            graph[found.module].add(target)
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path[path.index(name) :], name))
        if name not in done:
            for target in sorted(graph[name]):
                visit(target, (*path, name))
            done.add(name)

    for name in MODULES:
        visit(name, ())


def test_every_module_has_a_docstring() -> None:
    silent = [name for name, path in MODULES.items() if len(ast.get_docstring(ast.parse(path.read_text())) or "") < 20]

    assert silent == []
