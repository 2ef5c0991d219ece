"""Nothing that lies on a disk is run before it was verified, and nothing of it is ever unpickled or evaluated."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.end_to_end.fault_processes import ROOT, Nursery

PACKAGE = ROOT / "torch_hybrid_backend"
MODULES = sorted(PACKAGE.rglob("*.py"))
# What turns bytes or text into objects with behaviour, by the module it comes from.
_READERS = {
    "pickle": {"load", "loads", "Unpickler", "_loads", "_load"},
    "marshal": {"load", "loads"},
    "shelve": {"open"},
    "torch": {"load"},
    "torch.jit": {"load"},
    "torch.export": {"load"},
    "torch.fx": {"symbolic_trace_from_file"},
    "joblib": {"load"},
    "dill": {"load", "loads"},
    "cloudpickle": {"load", "loads"},
    "numpy": {"load"},
    "yaml": {"load", "unsafe_load"},
}
_BUILTINS = {"eval", "exec", "compile", "__import__"}
# The one place: a compiler process reads what its parent wrote into a pipe that nobody else has.
# A pipe between parent and child; code that is written from names of modules and numbers, each as its `repr`.
ALLOWED = {
    (
        "bench/answering.py",
        "numpy.load",
    ),  # arrays alone (allow_pickle=False), of a file in the run's own temporary folder
    ("bench/saving.py", "torch.load"),  # tensors alone (weights_only), likewise
    ("bench/worker.py", "torch.load"),  # tensors alone (weights_only), of a file in the run's own temporary folder
    ("codegen/workers/main.py", "pickle.loads"),
    ("driver/export.py", "torch.export.load"),  # a .pt2 file that the user names: what PyTorch reads, it reads
    ("driver/file_commands.py", "numpy.load"),  # arrays alone (allow_pickle=False), of a file that the user names
    ("quantization/call_sites.py", "compile"),
    ("quantization/call_sites.py", "exec"),
}


def _names(tree: ast.AST) -> dict[str, str]:
    """Local name -> what it was imported as, "pickle" or "pickle.loads"."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    return found


def _dotted(node: ast.expr, names: dict[str, str]) -> str:
    if isinstance(node, ast.Name):
        return names.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value, names)}.{node.attr}"
    return "?"


def suspicious(source: str) -> set[str]:
    """The uses of readers and evaluating builtins in a module, called or handed on."""
    tree = ast.parse(source)
    names = _names(tree)
    used = {_dotted(node, names) for node in ast.walk(tree) if isinstance(node, ast.Name | ast.Attribute)}
    readers = {f"{module}.{name}" for module, members in _READERS.items() for name in members}
    called = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    return (used & readers) | (called & _BUILTINS)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle; pickle.loads(b'')",
        "import pickle as p; p.load(f)",
        "from pickle import loads as l; l(b'')",
        "import torch; torch.load(f)",
        "import marshal; f(marshal.loads)",
        "eval('1')",
        "exec('1')",
    ],
)
def test_the_check_finds_what_it_looks_for(source: str) -> None:
    """However it is imported, called or handed on."""
    assert suspicious(source)


def test_nothing_is_unpickled_or_evaluated() -> None:
    """Read from the source of every module; what is allowed says why."""
    found = {(path.relative_to(PACKAGE).as_posix(), use) for path in MODULES for use in suspicious(path.read_text())}
    assert found == ALLOWED


def test_libraries_are_opened_in_one_place() -> None:
    """Only the C++ loader opens kernel libraries, and only `runtime/native/libraries.py` says which. The GPU's driver is what settings name.
    The runner opens OpenMP's, OpenSSL's, and LibTorch where its user says. Elsewhere PyTorch's own are looked into, which the process has open
    already: RTLD_NOLOAD opens none."""
    sources = [
        path for folder in ("src", "torch", "runner", "runner_torch") for path in (ROOT / "csrc" / folder).rglob("*.cc")
    ]
    opens = {path.name: re.findall(r"dlopen\(([^;]*);", path.read_text()) for path in sources}
    assert {name for name, calls in opens.items() if any("RTLD_NOLOAD" not in call for call in calls)} == {
        "cuda_driver.cc",
        "kernel_library.cc",
        "signatures.cc",
        "torch_library.cc",
        "worker_threads.cc",
    }
    assert opens["signatures.cc"] == ['"libcrypto.so.3", RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE)']
    assert opens["worker_threads.cc"] == ['"libgomp.so.1", RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE)']
    driver = (ROOT / "csrc" / "torch" / "cuda_driver.cc").read_text()
    assert re.findall(r"dlopen\(([^,]*),", driver) == ["drivers.path.c_str()"]
    assert not [path for path in MODULES if "CDLL" in path.read_text() or "load_module(" in path.read_text()]
    callers = {path.name for path in MODULES if "ops.open_library" in path.read_text()}
    assert callers == {"ops.py"}


def test_a_cached_start_unpickles_nothing(nursery: Nursery, filled_cache: Path, tmp_path: Path) -> None:
    """Watched by an audit hook: a process that finds everything in the cache resolves no pickled name, and opens of it only whole entries."""
    script = """
import re
root = os.path.realpath(os.environ["HYBRID_CACHE_DIR"])
seen, loaded = [], []
def watch(event, arguments):
    ours = ("_runtime.so", "libnvidia-ml.so.1")  # and what a torch for CUDA counts GPUs by
    if event == "pickle.find_class" or (event == "ctypes.dlopen" and not str(arguments[0]).endswith(ours)):
        seen.append((event, *map(str, arguments)))
    if event == "open" and isinstance(arguments[0], str) and os.path.realpath(arguments[0]).startswith(root + "/"):
        loaded.append(arguments[0])
sys.addaudithook(watch)
check(6)
say(seen)
entry = r".*/(captures|graphs|kernels|variants|verdicts)/[0-9a-f]{64}/[0-9a-f]{64}\\.(so|json)"
say(bool(loaded) and all(re.fullmatch(entry, path) for path in loaded))
maps = open("/proc/self/maps").read()
say(root in maps, "memfd:" in maps)
"""
    done = nursery.run(script, tmp_path, HYBRID_CACHE_DIR=str(filled_cache))
    assert (done.answers, done.status) == (["tvm", "[]", "True", "False True"], 0), done
