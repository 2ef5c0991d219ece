"""The rooms of the package keep their walls: who may import whom, who may read the environment, what the map names.

The rules are those of ARCHITECTURE.md. They are read from the source, so a module that nothing imports is checked as well.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "torch_hybrid_backend"

_UTILITIES = {
    "arguments",
    "builds",
    "cancellation",
    "config",
    "errors",
    "generators",
    "machine",
    "measuring",
    "processes",
    "progress",
    "services",
    "storage",
}
# Room -> the other rooms it may import. The wiring (driver, backend, cli and the package itself) may import all.
ALLOWED: dict[str, set[str]] = {
    "_version": set(),
    "torch_private": set(),
    "errors": set(),
    "arguments": {"errors"},
    "sizes": {"errors"},
    "core": {"errors", "sizes"},
    "cancellation": set(),
    "config": {"core", "errors", "machine"},
    "generators": {"core", "errors"},
    "machine": {"_version", "core", "errors"},
    "measuring": {"cancellation", "core", "errors", "storage"},
    "processes": {"errors"},
    "builds": {"arguments", "cancellation", "core", "errors", "generators", "measuring", "processes", "storage"},
    "progress": {"core", "errors"},
    "signatures": {"arguments", "errors"},
    "storage": {"_version", "core", "errors", "signatures"},
    "services": {"config", "core", "measuring", "progress", "storage"},
    "report": {"_version", "core", "errors", "machine"},
    "factory": {"errors"},
    "bench": {
        "backend",
        "config",
        "core",
        "errors",
        "factory",
        "machine",
        "measuring",
        "partition",
        "processes",
        "progress",
        "report",
        "storage",
    },
    "artifact": {
        "arguments",
        "compression",
        "core",
        "errors",
        "generators",
        "graph",
        "report",
        "runtime",
        "signatures",
        "sizes",
    },
    "serve": {"_version", "artifact", "errors", "machine"},
    "tuning": {
        "_version",
        "backend",
        "cancellation",
        "codegen",
        "config",
        "core",
        "driver",
        "errors",
        "factory",
        "machine",
        "measuring",
        "progress",
        "services",
        "storage",
    },
    "compression": {"arguments", "errors", "runtime"},
    "capture": {"core", "sizes", "graph", *_UTILITIES},
    "graph": {"core", "sizes", "errors"},
    "passes": {"core", "sizes", "errors", "graph"},
    "partition": {"core", "sizes", "graph", *_UTILITIES},
    "loops": {"core", "sizes", "errors"},
    "codegen": {"core", "sizes", "loops", *_UTILITIES},
    "engines": {"core", "sizes", "graph", "loops", "codegen", *_UTILITIES},
    "ranks": {"errors"},
    "runtime": {"core", "sizes", "graph", *_UTILITIES},
    "quantization": {"arguments", "config", "core", "errors", "graph", "machine", "progress"},
}
WIRING = {"__init__", "__main__", "backend", "cli", "driver"}
MODULES = sorted(PACKAGE.rglob("*.py"))

# Modules that have no test file of their own. The list only gets shorter: a new module brings its test, and a name whose test is there, or
# whose module is gone, leaves it. `_version.py`, `codegen/operator_kernel.py`, `core/captured.py`, `core/limits.py`, `engines/cpu/policy.py`
# and `services.py` declare and do nothing.
WITHOUT_TESTS = (
    "_version.py",
    "codegen/operator_kernel.py",
    "core/captured.py",
    "core/limits.py",
    "core/precision.py",
    "engines/triton/policy.py",
    "engines/cpu/operations.py",
    "engines/cpu/policy.py",
    "services.py",
)


def room_of(path: Path) -> str:
    """The room a source file lies in: the folder below the package, or the module's own name."""
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def _nodes(path: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of a file: every rule looks at them."""
    return tuple(ast.walk(_tree(path)))


def imports_of(path: Path) -> Iterator[tuple[str, ...]]:
    """Every import of the package in a file, inside functions and TYPE_CHECKING too, as parts below the package."""
    here = path.relative_to(ROOT).with_suffix("").parts
    package = here[:-1]
    for node in _nodes(path):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join((*package[: len(package) - node.level + 1], *filter(None, [base])))
            names = [f"{base}.{alias.name}" for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == PACKAGE.name and len(parts) > 1:
                yield tuple(parts[1:])


def _named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_every_room_has_a_rule() -> None:
    """A new folder or module at the top of the package states what it may import, here."""
    assert {room_of(path) for path in MODULES} <= ALLOWED.keys() | WIRING


def test_nothing_imports_the_root() -> None:
    """No arrow points up: only the command line and what measures it use the package as its users do."""
    rooms = [path for path in MODULES if room_of(path) not in {"__init__", "backend", "bench", "cli"}]
    broken = {
        _named(path)
        for path in rooms
        for node in _nodes(path)
        if (isinstance(node, ast.Import) and any(a.name == PACKAGE.name for a in node.names))
        or (isinstance(node, ast.ImportFrom) and node.module == PACKAGE.name)
    }
    assert not broken


@pytest.mark.parametrize("path", MODULES, ids=_named)
def test_rooms_import_only_what_they_may(path: Path) -> None:
    """Stages speak through core/ and ask graph/; utilities import core and errors at most; loops serve engines alone."""
    room = room_of(path)
    if room in WIRING:
        return
    legal = ALLOWED[room] | {room, "torch_private"}
    broken = {".".join(parts) for parts in imports_of(path) if parts[0] not in legal}
    assert not broken, f"{_named(path)} imports {sorted(broken)}; {room} may import {sorted(legal)}"


@pytest.mark.parametrize("path", sorted((PACKAGE / "engines").rglob("*.py")), ids=_named)
def test_engines_do_not_import_each_other(path: Path) -> None:
    """An engine knows nothing of the others; only session.py names them all."""
    parts = path.relative_to(PACKAGE / "engines").parts
    own = parts[0].removesuffix(".py")
    others = {".".join(p) for p in imports_of(path) if p[0] == "engines" and len(p) > 1 and p[1] != own}
    assert not others, f"engine {own} imports {sorted(others)}"


def _reads_environment(path: Path) -> bool:
    """True if a module looks at os.environ; handing all of it on to a child process (`{**os.environ, ...}`) is no look."""
    handed_on = {
        id(value)
        for node in _nodes(path)
        if isinstance(node, ast.Dict)
        for key, value in zip(node.keys, node.values, strict=True)
        if key is None
    }
    return any(
        (isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv") and id(node) not in handed_on)
        or (
            isinstance(node, ast.ImportFrom)
            and node.module == "os"
            and {a.name for a in node.names} & {"environ", "getenv"}
        )
        for node in _nodes(path)
    )


def test_only_config_and_wiring_read_the_environment() -> None:
    """Settings are read once and passed down: no room looks at os.environ itself. What measures for the command line is no part of a
    compilation, and records it."""
    rooms = [path for path in MODULES if room_of(path) not in WIRING | {"bench", "config", "tuning"}]
    assert not [_named(path) for path in rooms if _reads_environment(path)]


# What a program's time limit may be, or derive from.
_BROAD = {"BaseException", "Exception", "RuntimeError", "OSError", "TimeoutError"}
# Clauses that may take what is delivered, by their function: what they are for.
_TAKE_ALL = {
    "backend._errors_unwrapped",  # brings what was delivered through Dynamo
    "builds.background.run",  # the builder's thread goes on with the next work
    "engines.tensorrt.adapter.step_complete",  # nothing may be raised through TensorRT's C++: the build is cancelled
    "engines.triton.host_driver.answer",  # nothing may be raised through C++: the launch fails
    "runtime.native.ops._run_segment",  # keeps it on its way around C++
}


def _clauses(path: Path) -> Iterator[tuple[str, ast.ExceptHandler]]:
    """Every `except` of a module, with the function that it is in."""
    module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)

    def inside(node: ast.AST, name: str) -> Iterator[tuple[str, ast.ExceptHandler]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ExceptHandler):
                yield f"{module}.{name}", child
            yield from inside(child, child.name if isinstance(child, ast.FunctionDef) else name)

    yield from inside(_tree(path), "")


def _names(node: ast.AST | None) -> set[str]:
    return {"BaseException"} if node is None else {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def test_nothing_takes_what_was_delivered_from_outside() -> None:
    """A clause for errors that may be a program's own is `except failures(...)`, or ends in `raise`; those that cannot be are listed here.
    Where it takes any Exception, its line says why."""
    broken, taking = [], set()
    for path in MODULES:
        lines = path.read_text().splitlines()
        for name, clause in _clauses(path):
            kinds = _names(clause.type)
            last = clause.body[-1]
            passes_on = isinstance(last, ast.Raise) and last.exc is None
            if not kinds & _BROAD or passes_on:
                continue
            if "failures" not in kinds:
                taking.add(name)
            if kinds & {"BaseException", "Exception"} and "#" not in lines[clause.lineno - 1] and name not in _TAKE_ALL:
                broken.append(f"{name}, line {clause.lineno}")
    assert taking == _TAKE_ALL
    assert not broken, "say in a comment why"


def test_what_is_suppressed_is_narrow() -> None:
    """`contextlib.suppress` does not tell what was delivered apart: for broad errors there is `errors.ignored`."""
    found = [
        f"{_named(path)}, line {node.lineno}"
        for path in MODULES
        for node in _nodes(path)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "suppress"
        and any(_names(argument) & _BROAD for argument in node.args)
    ]
    assert not found


def _names_of_torch(path: Path) -> Iterator[str]:
    """Names below `torch` in a module: imported, read as attributes, or written as texts on their own."""
    for node in _nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield ast.unparse(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _is_private_of_torch(name: str) -> bool:
    parts = name.rstrip(".").split(".")
    is_name = parts[0] == "torch" and all(part.isidentifier() for part in parts)
    return is_name and parts[1:2] != ["ops"] and any(re.match(r"_(?!_)", part) for part in parts)


@pytest.mark.parametrize("path", [p for p in MODULES if p.name != "torch_private.py"], ids=_named)
def test_one_module_names_what_is_private_of_torch(path: Path) -> None:
    """Names with an underscore, operators apart: `torch_private` has them all, and a canary for each."""
    assert not sorted(set(filter(_is_private_of_torch, _names_of_torch(path))))


def test_the_rule_tells_private_names() -> None:
    """Operators and special names of Python are not private."""
    private = ["torch._C._get_schema", "torch.utils._pytree", "torch._dynamo.", "torch._conj"]
    public = ["torch.ops.aten._to_copy", "torch.__version__", "torch.fx.Graph", "torch._x says", "torchao._x", "_conj"]
    assert [*filter(_is_private_of_torch, private + public)] == private


def test_tvm_is_imported_by_tir_and_target_only() -> None:
    """`import tvm` takes two seconds, and its interface changes with each release: schedules write `engines/cpu/tir/expressions.py`."""
    importers = {
        _named(path)
        for path in MODULES
        for node in _nodes(path)
        if (isinstance(node, ast.Import) and any(a.name.split(".")[0] == "tvm" for a in node.names))
        or (isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tvm")
    }
    folder = "torch_hybrid_backend/engines/cpu"
    assert not {name for name in importers if not name.startswith((f"{folder}/tir/", f"{folder}/target.py"))}


_FEATURE = re.compile(r"(avx|amx[-_]|sse|asimd|neon|sve|.*vnni)", re.IGNORECASE)


def _literals(path: Path) -> Iterator[ast.Constant]:
    """String literals of a module but its docstrings."""
    docstrings = {id(node.value) for node in _nodes(path) if isinstance(node, ast.Expr)}
    for node in _nodes(path):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node


def test_instruction_sets_are_named_in_one_table() -> None:
    """Properties of `engines/cpu/isa.py` tell what kernels may use, `machine.py` what a process may use; `engines/cpu/tir/x86.py` and
    `engines/cpu/tir/arm.py` emit LLVM's intrinsics of them."""
    tables = {"torch_hybrid_backend/engines/cpu/isa.py", "torch_hybrid_backend/machine.py"}
    named, emitting = set(), set()
    for path in MODULES:
        texts = [str(literal.value) for literal in _literals(path)]
        if any(_FEATURE.match(text) for text in texts):
            named.add(_named(path))
        if any("llvm.x86." in text or "llvm.aarch64." in text for text in texts):
            emitting.add(_named(path))
    assert named == tables
    assert emitting == {f"torch_hybrid_backend/engines/cpu/tir/{name}.py" for name in ("arm", "x86")}


def test_no_way_of_computing_is_dropped_by_a_number_of_lanes() -> None:
    """An instruction set refuses it by a property that has a name: `lanes < 8` tells nobody what is missing."""
    found = [
        f"{_named(path)}, line {node.lineno}"
        for path in (PACKAGE / "engines/cpu").rglob("*.py")
        if path.name != "isa.py"
        for node in _nodes(path)
        if isinstance(node, ast.Compare)
        and any(isinstance(side, ast.Attribute) and side.attr == "lanes" for side in (node.left, *node.comparators))
        and any(isinstance(side, ast.Constant) and side.value in (4, 8, 16) for side in (node.left, *node.comparators))
    ]
    assert not found


def test_torch_tensorrt_is_imported_by_its_adapter_only() -> None:
    """Its releases differ, and importing it takes seconds and a GPU: one module knows it, with its converters. `loaded` imports TensorRT alone,
    by the name of what is installed."""
    importers = {
        _named(path)
        for path in MODULES
        for node in _nodes(path)
        if (isinstance(node, ast.Import) and any("tensorrt" in a.name.split(".")[0] for a in node.names))
        or (isinstance(node, ast.ImportFrom) and "tensorrt" in (node.module or "").split(".")[0])
    }
    folder = "torch_hybrid_backend/engines/tensorrt"
    assert importers == {f"{folder}/adapter.py", f"{folder}/converters.py"}  # the second is imported by the first alone


@pytest.mark.parametrize("room", ["codegen", "loops"])
def test_what_engines_share_knows_none_of_them(room: str) -> None:
    """Neither a compiler's name, nor the vector of one processor, nor a device: those are a backend's (`codegen/backend.py`)."""
    texts = {path: path.read_text() for path in (PACKAGE / room).rglob("*.py")}
    found = {
        (_named(p), word) for p, text in texts.items() for word in ("tvm", "lanes", '"cpu"') if word in text.lower()
    }
    assert not found


def test_codegen_serves_engines_alone() -> None:
    """Nor does the wiring know it: an engine that generates kernels is an engine like any other. Tuning shares out variants of kernels."""
    users = {room_of(path) for path in MODULES if any(parts[0] == "codegen" for parts in imports_of(path))}
    assert users == {"codegen", "engines", "tuning"}


def test_library_code_does_not_print() -> None:
    """Output belongs to the command line; the library logs."""
    printers = {
        _named(path)
        for path in MODULES
        if path.name != "cli.py"
        for node in _nodes(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    }
    assert not printers


def test_modules_have_tests() -> None:
    """The test of `a/b.py` is `tests/a/test_b.py`; only the modules named above have none."""
    modules = {path.relative_to(PACKAGE) for path in MODULES if path.name != "__init__.py"}
    tested = {
        path.relative_to(ROOT / "tests").with_name(path.name.removeprefix("test_"))
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"^def test_", path.read_text(), re.MULTILINE)
    }
    bare = set(map(str, modules - tested))
    listed = set(WITHOUT_TESTS)
    assert not bare - listed, f"no test file beside {sorted(bare - listed)}: put it at the same place under tests/"
    assert not listed - bare, f"{sorted(listed - bare)} have a test file, or are gone: drop them from WITHOUT_TESTS"
    assert len(listed) == len(WITHOUT_TESTS)


@pytest.mark.parametrize(
    "document", ["ARCHITECTURE.md", "CONTRIBUTING.md", "README.md", "AGENTS.md", "docs/glossary.md"]
)
def test_documents_name_paths_that_exist(document: str) -> None:
    """Every path in backquotes exists: relative to the repository, to the package, or to the room the line is about."""
    missing = []
    for line in (ROOT / document).read_text().splitlines():
        named = [name for name in re.findall(r"`([\w./-]+)`", line) if re.search(r"/|\.(py|md|cc|h|toml|txt)$", name)]
        bases = [ROOT, PACKAGE]
        for name in named:
            if name.startswith(("/", "~")):
                continue
            if not any((base / name).exists() for base in bases):
                missing.append(name)
            bases += [base / name for base in (ROOT, PACKAGE) if (base / name).is_dir()]
    assert not missing
