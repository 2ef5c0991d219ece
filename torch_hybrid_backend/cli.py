"""The command `hybrid`.

    hybrid explain my_models:make            # my_models.make() returns (model, args) or (model, args, kwargs)
    hybrid explain script.py:make --profile  # with the time of each kernel
    hybrid explain script.py:make --json
    hybrid explain script.py:make --html plan.html
    hybrid explain script.py:make --model-explorer plan.json
    hybrid explain script.py:make --kernels FOLDER
    hybrid bench script.py:make --batch 1,8 --html bench.html
    hybrid export script.py:make -o model.hybrid
    hybrid explain model.hybrid
    hybrid run model.hybrid --input x.npy --bench
    hybrid generate model.hybrid --tokenizer tokenizer.json --prompt "Once upon a time"
    hybrid serve model.hybrid --replicas 1..4
    hybrid tune script.py:make --budget-s 600
    hybrid inspect model.hybrid
    hybrid sign model.hybrid --key key.pem
    hybrid doctor
    hybrid --version
    hybrid cache
    hybrid cache --clear
    hybrid cache --forget-failures

`explain` compiles the model for inference, calls it once on the arguments and shows the plan. With `--kernels` it also writes the text of
every kernel into a folder; Triton kernels become files that run alone. `bench` compares a model with other runtimes (docs/bench.md).

`export` writes the compiled model to one file, of which `explain` shows the plan, `run` calls it, and `inspect` shows what is in it
(docs/guides/ship.md). `generate` continues a text with a decoder's file (docs/guides/generation.md). `serve` answers requests over HTTP
(docs/guides/serving.md). `tune` times every variant of a model's kernels ahead of calls, here or on a cluster (docs/guides/tuning.md).

`doctor` shows the engines that can run in this installation, and what to install for the others. Its exit status is 1 if something is missing
without which nothing is compiled.

`cache` shows the cache folder, its size on disk, and the builds that failed within the last day and are therefore not tried. `--clear`
removes all entries, and `--forget-failures` only the record of failed builds.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, TextIO

import torch

import torch_hybrid_backend
from torch_hybrid_backend.bench import command as bench
from torch_hybrid_backend.builds.background import wait_for_builds
from torch_hybrid_backend.builds.failures import Failures
from torch_hybrid_backend.config import Config
from torch_hybrid_backend.core.engine import EAGER, Engine
from torch_hybrid_backend.core.verdict import Refused
from torch_hybrid_backend.driver import file_commands, serve_command, tune_command
from torch_hybrid_backend.errors import CacheError, ConfigError, HybridError, did_you_mean, failures
from torch_hybrid_backend.factory import Factory
from torch_hybrid_backend.machine import unsupported
from torch_hybrid_backend.report import Explanation
from torch_hybrid_backend.report.share import counted
from torch_hybrid_backend.runtime.native.ops import CALLS_PER_ROUND, watches_writes
from torch_hybrid_backend.signatures import private_key
from torch_hybrid_backend.storage import shared
from torch_hybrid_backend.storage.store import Store

Explain = Callable[..., Explanation]
Engines = Callable[[Config], Sequence[Engine]]


def main(
    arguments: Sequence[str] | None = None,
    *,
    explain: Explain | None = None,
    engines: Engines | None = None,
    out: TextIO | None = None,
) -> int:
    """Run the command line. Returns the exit status: 0, or 1 after an error of this package, which is shown in one line.

    `explain` and `engines` default to the package's functions; `out` defaults to standard output.
    """
    out = out or sys.stdout
    try:
        parsed = parser().parse_args(arguments)
        if parsed.command == "explain":
            return _explain(parsed, explain or torch_hybrid_backend.explain, out)
        if parsed.command == "bench":
            return bench.run(parsed, out)
        if parsed.command in file_commands.RUN:
            return int(file_commands.RUN[parsed.command](parsed, out))
        if parsed.command == "serve":
            return serve_command.serve(parsed, out)
        if parsed.command == "tune":
            return tune_command.tune(parsed, out)
        if parsed.command == "cache":
            return _cache(parsed, out)
        return _doctor(engines or _all_engines, out)
    except HybridError as error:
        sys.stderr.write(f"hybrid: {error}\n")
        return 1


class _Parser(argparse.ArgumentParser):
    """Parser whose errors suggest the nearest legal name of a command, an option or a choice. Options must be written in full."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, and end the program if arguments are left over. Otherwise argparse would report them with the usage of `hybrid`, not of the
        subcommand."""
        parsed, left = super().parse_known_args(args, namespace)
        if left:
            self.error(f"unrecognized arguments: {' '.join(left)}")
        return parsed, left

    def error(self, message: str) -> NoReturn:
        """End the program with the message."""
        if message.startswith("unrecognized arguments: "):
            options = [option.partition("=")[0] for option in message.split() if option.startswith("-")]
            hints = (did_you_mean(option, self._option_string_actions) for option in options)
            message = f"{message}. {''.join(hints)}".rstrip(" .")
        if found := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message):
            known = re.findall(r"[\w-]+", found[2])
            message = f"{message}. {did_you_mean(found[1], known)}".rstrip(" .")
        super().error(message)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    command = _Parser(prog="hybrid", description="Plans and state of torch.compile(backend='hybrid').")
    command.add_argument("--version", action="version", version=f"hybrid {torch_hybrid_backend.__version__}")
    commands = command.add_subparsers(dest="command", required=True)
    explain = commands.add_parser("explain", help="compile a model, call it once and show where its operators run")
    explain.add_argument(
        "target",
        help="module:factory or script.py:factory; the factory returns (model, args[, kwargs]); or a .hybrid file",
    )
    form = explain.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the plans as JSON")
    form.add_argument("--html", type=Path, metavar="FILE", help="write a page to FILE that draws the plans")
    form.add_argument(
        "--model-explorer", type=Path, metavar="FILE", help="write graphs for Model Explorer to FILE (.json)"
    )
    explain.add_argument(
        "--profile", action="store_true", help="call the model for two seconds more and show the time of each kernel"
    )
    explain.add_argument("--kernels", type=Path, metavar="FOLDER", help="write the text of every kernel into FOLDER")
    bench.add_parser(commands)
    file_commands.add_parsers(commands)
    serve_command.add_parser(commands)
    tune_command.add_parser(commands)
    commands.add_parser(
        "doctor",
        help="show which engines can run and compile here, and what the others lack; the exit status is 1 if something needed is missing",
    )
    cache = commands.add_parser(
        "cache", help="show the size of the cache of compiled kernels and timings on disk, or share its entries"
    )
    cache.add_argument(
        "share",
        nargs="?",
        choices=("push", "pull", "sign"),
        help="push: write all entries to LOCATION; pull: take the trusted ones of it; sign: sign all that it has",
    )
    cache.add_argument(
        "location",
        nargs="?",
        metavar="LOCATION",
        help="a folder, or a URL that fsspec opens; for pull, all of HYBRID_CACHE_SHARED by default",
    )
    cache.add_argument("--key", type=Path, metavar="FILE", help="private key of Ed25519 in PEM, for push and sign")
    action = cache.add_mutually_exclusive_group()
    action.add_argument("--clear", action="store_true", help="remove all entries; they are made again when needed")
    action.add_argument("--forget-failures", action="store_true", help="try builds again that failed within a day")
    return command


def _explain(parsed: argparse.Namespace, explain: Explain, out: TextIO) -> int:
    explanation = _explained_file(parsed) if _is_file(parsed.target) else _explained(parsed, explain)
    try:
        kernels = [] if parsed.kernels is None else explanation.write_kernels(parsed.kernels)
    except failures(OSError) as error:
        raise ConfigError(f"cannot write the kernels: {error}") from error
    if parsed.html is not None:
        _write(parsed.html, explanation.to_html())
    elif parsed.model_explorer is not None:
        _write(parsed.model_explorer, explanation.to_model_explorer())
    else:
        out.write((explanation.to_json() if parsed.json else str(explanation)) + "\n")
    if parsed.kernels is not None:
        sys.stderr.write(f"hybrid: {counted(len(kernels), 'kernel')} written to {parsed.kernels}\n")
    return 0


def _is_file(target: str) -> bool:
    return target.endswith(".hybrid") or (Path(target).is_file() and not target.endswith(".py"))


def _explained_file(parsed: argparse.Namespace) -> Explanation:
    if parsed.profile or parsed.kernels is not None:
        raise ConfigError("a .hybrid file has neither times nor the text of kernels; name the factory of its model")
    return torch_hybrid_backend.load(parsed.target).explain()


def _explained(parsed: argparse.Namespace, explain: Explain) -> Explanation:
    factory = Factory(parsed.target)
    with factory.importable():
        model, args, kwargs = factory.load()()
        with torch.no_grad():
            profiled = {"profile": True} if parsed.profile else {}
            explanation = explain(model, *args, **kwargs, **profiled)
        if explanation.compiling:  # HYBRID_BACKGROUND=1: wait, as no other calls run meanwhile
            wait_for_builds()
            explanation = explanation.updated()
    return explanation


def _write(path: Path, picture: str) -> None:
    try:
        path.write_text(picture, encoding="utf-8")
    except failures(OSError) as error:
        raise ConfigError(f"cannot write the picture: {error}") from error


def _all_engines(config: Config) -> Sequence[Engine]:
    from torch_hybrid_backend.driver.session import all_engines  # heavy, so not imported for --help

    return all_engines(config)


def _doctor(engines: Engines, out: TextIO) -> int:
    config = Config.from_env(os.environ)
    lines = ["engines:"]
    lacking = [unsupported()] if unsupported() else []
    try:
        known = engines(config)
    except ConfigError as error:  # a target that this machine compiles for, and cannot run, say
        lacking.append(str(error))
        known = engines(replace(config, target=Config().target))
    selected = config.select([engine.name for engine in known])
    compilers = [engine for engine in known if engine.name in selected and engine.name != EAGER]
    if compilers and not any(engine.available() for engine in compilers):
        lacking.append("no engine but eager can run, so nothing is compiled")
    for engine in known:
        verdict = engine.available()
        state, joined = (f"cannot run: {verdict.why}", "and") if isinstance(verdict, Refused) else ("can run", "but")
        if verdict and isinstance(compiles := engine.compiles(), Refused):
            state, joined = f"runs what is in the cache, but cannot compile: {compiles.why}", "and"
            if engine.name in selected:
                lacking.append(f"{engine.name} cannot compile, so eager runs what is not in the cache")
        if engine.name not in selected:
            state += f", {joined} is switched off (HYBRID_ENGINES, HYBRID_DISABLE_ENGINES)"
        lines.append(f"  {engine.name:<10} {state}")
        lines += (f"    {name:<8} {value}" for name, value in _described(engine))
    lines.append("versions:")
    lines.append(f"  {'hybrid':<10} {torch_hybrid_backend.__version__}")
    lines.append(f"  {'python':<10} {sys.version.split()[0]}")
    lines.append(f"  {'torch':<10} {torch.__version__}")
    lines.append("machine:")
    lines.append(
        f"  {'system':<10} {unsupported() or f'{platform.system()} on {platform.machine()}, which is supported'}"
    )
    lines.append(f"  {'threads':<10} {torch.get_num_threads()} for kernels, {config.compile_threads} for compilation")
    lines.append(f"  {'processor':<10} {torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} CPUs")
    lines.append(f"  {'gpu':<10} {_gpus()}")
    lines.append(f"  {'weights':<10} {_weights_state()}")
    lines.append(f"  {'cache':<10} {_cache_state(config)}")
    lines += (f"not ready: {each}" for each in lacking)
    out.write("\n".join(lines) + "\n")
    return int(bool(lacking))


def _gpus() -> str:
    if not torch.cuda.is_available():
        return f"none that this torch can use (built for CUDA {torch.version.cuda or 'none'})"
    names = (torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    return f"{', '.join(names)}; torch is built for CUDA {torch.version.cuda}"


def _weights_state() -> str:
    try:
        if watches_writes():
            return "every change is seen by the next call: the kernel watches their memory"
    except HybridError as error:
        return f"unknown: {error}"
    return (
        f"changes that bypass PyTorch's version counters may be seen up to {CALLS_PER_ROUND} calls late (Linux 6.7 and the right to"
        " call userfaultfd are needed to watch memory); call torch_hybrid_backend.refresh(model) after them"
    )


def _described(engine: Engine) -> Sequence[tuple[str, str]]:
    try:
        return engine.describe()
    except failures(Exception) as error:  # a third party's code: the other engines are still described
        return [("unknown", f"it cannot describe itself: {type(error).__name__}: {error}")]


def _cache_state(config: Config) -> str:
    if not config.cache:
        return "off (HYBRID_CACHE=0)"
    try:
        store = Store(config.cache_dir)
    except CacheError as error:
        return f"cannot be used: {error}"
    used = store.usage()
    size = f"{_mib(sum(kind.size_bytes for kind in used))} of at most {config.cache_limit_mib} MiB"
    return f"{store.root}: {sum(kind.entries for kind in used)} entries, {size}; `hybrid cache --clear` removes them"


def _share(parsed: argparse.Namespace, config: Config, store: Store, out: TextIO) -> None:
    from torch_hybrid_backend.driver.session import trusted_keys  # heavy, so not imported for --help

    key = None if parsed.key is None else private_key(parsed.key)
    if parsed.share == "pull":
        locations = [parsed.location] if parsed.location else config.cache_shared
        if not locations or key is not None:
            raise ConfigError("hybrid cache pull takes a location, unless HYBRID_CACHE_SHARED names some, and no --key")
        for text in locations:
            count = shared.pull(store, shared.location_of(text), trusted_keys(config))
            out.write(f"new entries from {text} in {store.root}: {count}\n")
        return
    if parsed.location is None or (parsed.share == "sign" and key is None):
        takes = "a location and --key" if parsed.share == "sign" else "a location"
        raise ConfigError(
            f"hybrid cache {parsed.share} takes {takes}: hybrid cache {parsed.share} FOLDER --key key.pem"
        )
    location = shared.location_of(parsed.location)
    if parsed.share == "push":
        count = shared.push(store, location, key)
        out.write(f"new entries of {store.root} in {parsed.location}: {count}\n")
    else:
        out.write(f"entries signed in {parsed.location}: {shared.sign(location, key)}\n")


def _cache(parsed: argparse.Namespace, out: TextIO) -> int:
    config = Config.from_env(os.environ)
    if parsed.share is not None and (parsed.clear or parsed.forget_failures):
        option = "--clear" if parsed.clear else "--forget-failures"
        raise ConfigError(f"hybrid cache {parsed.share} takes no {option}: run one after the other")
    store = Store(config.cache_dir)
    if parsed.share is not None:
        _share(parsed, config, store, out)
        return 0
    if parsed.key is not None:
        raise ConfigError("--key is for hybrid cache push and hybrid cache sign")
    failures = Failures(store)
    failed = failures.all()
    if parsed.forget_failures:
        failures.forget()
        out.write(f"{counted(len(failed), 'failed build')} forgotten\n")
        return 0
    used = store.usage()
    if parsed.clear:
        store.clear()
    verb = "removed from" if parsed.clear else "in"
    lines = [f"{kind.kind}: {kind.entries} entries, {_mib(kind.size_bytes)}" for kind in used]
    lines.append(f"{_mib(sum(kind.size_bytes for kind in used))} {verb} {store.root}")
    if not parsed.clear:
        lines += (f"failed: {failure.as_exception()}" for failure in failed)
        lines.append(
            f"limit: {config.cache_limit_mib} MiB (HYBRID_CACHE_LIMIT_MIB); `hybrid cache --clear` removes all"
        )
    out.write("\n".join(lines) + "\n")
    return 0


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB"


if __name__ == "__main__":
    sys.exit(main())
