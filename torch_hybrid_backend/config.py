"""Settings: typed, frozen, read once.

Each field of `Config` is one setting. It can be given three ways; the first that is present wins:

1. `torch.compile(model, backend="hybrid", options={"verify": "off"})`
2. the environment: `HYBRID_VERIFY=off`
3. `torch.compile(model, backend="hybrid", mode="max-autotune")`, which presets a few fields (`MODES`)
4. the field's default

`backend.py` reads the environment once (`Config.from_env`) and passes the result down; nothing else in the package
reads it. `docs/settings.md` lists them all; `tools/settings_table.py` makes its table from the fields.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch_hybrid_backend.core.engine import EAGER
from torch_hybrid_backend.core.precision import ACTIVATION_BITS, AS_WRITTEN, GROUP_SIZES, PRECISIONS, WeightForm
from torch_hybrid_backend.errors import ConfigError, did_you_mean, failures, nearest
from torch_hybrid_backend.machine import parallelism

_log = logging.getLogger(__name__)

PREFIX = "HYBRID_"
# csrc/src/cuda_driver.cc has it too.
CUDA_DRIVER = "libcuda.so.1"
_CACHE_NAME = "torch_hybrid_backend"
_BOOLEANS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


# Gives a field's value, or raises ValueError with the legal values in words.
_Parser = Callable[[object], object]


def _choice(*legal: str) -> _Parser:
    def parse(raw: object) -> object:
        value = raw.strip().lower() if isinstance(raw, str) else raw
        if value not in legal:
            hint = did_you_mean(value, legal) if isinstance(value, str) else ""
            raise ValueError(f"one of {', '.join(map(repr, legal))}. {hint}".rstrip(" ."))
        return value

    return parse


def _boolean(raw: object) -> object:
    if isinstance(raw, bool):
        return raw
    value = _BOOLEANS.get(str(raw).strip().lower()) if isinstance(raw, str | int) else None
    if value is None:
        raise ValueError("1, true, yes, on or 0, false, no, off")
    return value


def _whole(minimum: int, maximum: int | None = None) -> _Parser:
    def parse(raw: object) -> object:
        meaning = f"a whole number, at least {minimum}" + ("" if maximum is None else f" and at most {maximum}")
        if isinstance(raw, bool) or not isinstance(raw, str | int):
            raise ValueError(meaning)
        try:
            value = int(raw)
        except ValueError:
            raise ValueError(meaning) from None
        if value < minimum or (maximum is not None and value > maximum):
            raise ValueError(meaning)
        return value

    return parse


def _one_of(*legal: int) -> _Parser:
    def parse(raw: object) -> object:
        if not isinstance(raw, bool) and isinstance(raw, str | int) and str(raw).strip() in map(str, legal):
            return int(raw)
        raise ValueError("one of " + ", ".join(map(str, legal)))

    return parse


def _number(meaning: str, is_legal: Callable[[float], bool]) -> _Parser:
    def parse(raw: object) -> object:
        if isinstance(raw, bool) or not isinstance(raw, str | int | float):
            raise ValueError(meaning)
        try:
            value = float(raw)
        except ValueError:
            raise ValueError(meaning) from None
        if not is_legal(value):
            raise ValueError(meaning)
        return value

    return parse


_seconds = _number("a number of seconds greater than 0", lambda value: 0 < value < float("inf"))
_fraction = _number("a number greater than 0 and at most 1", lambda value: 0 < value <= 1)


def _names(raw: object) -> object:
    if isinstance(raw, str):
        return tuple(part.strip().lower() for part in raw.split(",") if part.strip())
    if isinstance(raw, Sequence) and all(isinstance(part, str) for part in raw):
        return tuple(part.strip().lower() for part in raw)
    raise ValueError("engine names separated by commas, or a sequence of them")


def _directory(raw: object) -> object:
    if not isinstance(raw, str | os.PathLike) or not str(raw).strip():
        raise ValueError("the path of a directory")
    try:
        return Path(raw).expanduser()
    except failures(RuntimeError) as error:
        raise ValueError(f"a path whose home directory is known ({error})") from None


def _library(raw: object) -> object:
    if not isinstance(raw, str | os.PathLike) or not str(raw).strip():
        raise ValueError("the path or the name of a library")
    return os.fspath(raw)


def _default_cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    base = (os.environ if environ is None else environ).get("XDG_CACHE_HOME", "")
    # The XDG specification: a relative path there is invalid and to be ignored.
    if base and Path(base).is_absolute():
        return Path(base) / _CACHE_NAME
    try:
        return Path.home() / ".cache" / _CACHE_NAME
    except failures(RuntimeError):
        # A user without HOME and without an entry in the system's list of users, as in some containers.
        # Anybody may make that directory first: the store refuses one that is not this user's.
        return Path(tempfile.gettempdir()) / f"{_CACHE_NAME}-{os.getuid() if hasattr(os, 'getuid') else 'user'}"


def _setting(parse: _Parser, values: str, meaning: str, shown_default: str = "") -> dict[str, object]:
    return {"parse": parse, "values": values, "meaning": meaning, "shown_default": shown_default}


@dataclass(frozen=True, slots=True)
class Config:
    """All settings. The metadata of the fields drives parsing, errors and the table in docs/settings.md."""

    engines: tuple[str, ...] = dataclasses.field(
        default=(),
        metadata=_setting(
            _names,
            "names, comma separated",
            "engines that may be used; their order breaks ties. Empty: every engine that can run here",
        ),
    )
    disable_engines: tuple[str, ...] = dataclasses.field(
        default=(),
        metadata=_setting(_names, "names, comma separated", "engines that may not be used"),
    )
    precision: str = dataclasses.field(
        default=AS_WRITTEN,
        metadata=_setting(
            _choice(*PRECISIONS),
            ", ".join(PRECISIONS),
            "what inference graphs are computed in: what the model says, or layers that gain by it in 16 or 8 bits, or weights kept in 8 or 4 "
            "(docs/precision.md)",
        ),
    )
    precision_tolerance: float | None = dataclasses.field(
        default=None,
        metadata=_setting(
            _fraction,
            "between 0 and 1",
            "how far a graph's outputs may be off those of the graph as written on the first call, as root mean square over root mean square; "
            "beyond it the worst layers are computed as written",
            "0.02 for bf16 and fp16, 0.3 for int4-weights, 0.1 for the others",
        ),
    )
    weight_group_size: int | None = dataclasses.field(
        default=None,
        metadata=_setting(
            _one_of(*GROUP_SIZES),
            ", ".join(map(str, GROUP_SIZES)),
            "under `int8-weights` and `int4-weights`: how many neighbours along a row of a weight share a scale; rows that are no whole groups "
            "stay as written",
            "32 for int4-weights, a whole row for int8-weights",
        ),
    )
    weight_zero_points: bool = dataclasses.field(
        default=False,
        metadata=_setting(
            _boolean,
            "0, 1",
            "under `int8-weights` and `int4-weights`: keep a zero point beside each scale: smaller errors where a group's values are not about "
            "0, and as many bytes again as scales take",
        ),
    )
    activation_bits: int = dataclasses.field(
        default=8,
        metadata=_setting(
            _one_of(*ACTIVATION_BITS),
            ", ".join(map(str, ACTIVATION_BITS)),
            "under `int8-weights` and `int4-weights`: to how many bits kernels may round the activations that such weights multiply, by the "
            "largest of up to 64 (8 bits) or 256 (16 bits) neighbours; 32: not at all",
        ),
    )
    placement: str = dataclasses.field(
        default="measure",
        metadata=_setting(
            _choice("estimate", "measure", "tune"),
            "estimate, measure, tune",
            "how engines and kernels are chosen: by estimates, by timing on the first call, or by timing every variant of every large kernel "
            "(minutes; Ctrl-C stops it, and a later process goes on)",
        ),
    )
    measure_budget_s: float = dataclasses.field(
        default=0.3,
        metadata=_setting(_seconds, "seconds", "time spent on timing one region under `placement=measure`"),
    )
    progress: bool = dataclasses.field(
        default=True,
        metadata=_setting(
            _boolean,
            "0, 1",
            "show on a terminal how far first calls, tuning and builds are, and say when a model is ready and what it gained",
        ),
    )
    min_region_nodes: int = dataclasses.field(
        default=1,
        metadata=_setting(_whole(0), "at least 0", "regions with fewer computing operators than this stay in eager"),
    )
    verify: str = dataclasses.field(
        default="first",
        metadata=_setting(
            _choice("first", "always", "off"),
            "first, always, off",
            "compare each region's outputs with eager's: on its first call, on every call (slow), or never",
        ),
    )
    strict: bool = dataclasses.field(
        default=False,
        metadata=_setting(_boolean, "0, 1", "raise where a region would otherwise fall back to eager with a warning"),
    )
    cache: bool = dataclasses.field(
        default=True,
        metadata=_setting(
            _boolean, "0, 1", "keep compiled kernels, timings and traced inference graphs on disk for later processes"
        ),
    )
    cache_dir: Path = dataclasses.field(
        default_factory=_default_cache_dir,
        metadata=_setting(
            _directory,
            "a path",
            "where they are kept: the user's own directory, or one of root's, that nobody else may write. One that cannot be written is read: "
            "a cache that was filled as an image was built, for other users after `chmod -R a+rX`",
            "$XDG_CACHE_HOME/torch_hybrid_backend, else ~/.cache/torch_hybrid_backend",
        ),
    )
    cache_limit_mib: int = dataclasses.field(
        default=1024,
        metadata=_setting(
            _whole(1), "at least 1", "MiB of disk they may take; beyond that, what was not used for longest is removed"
        ),
    )
    compile_threads: int = dataclasses.field(
        default_factory=parallelism,
        metadata=_setting(
            _whole(1),
            "at least 1",
            "processes that compile kernels in parallel",
            "number of CPUs that the process may use",
        ),
    )
    compile_deadline_s: float = dataclasses.field(
        default=300.0,
        metadata=_setting(
            _seconds,
            "seconds",
            "time that one graph's kernels may take to compile, of all engines, backward graphs and first calls together (tuning excepted); "
            "late ones run in eager",
        ),
    )
    background: bool = dataclasses.field(
        default=False,
        metadata=_setting(
            _boolean,
            "0, 1",
            "eager answers calls while kernels are compiled, checked and timed off the call (docs/background.md); what cannot be run twice "
            "unnoticed is compiled in the call as ever",
        ),
    )
    tensorrt_constants_percent: int = dataclasses.field(
        default=5,
        metadata=_setting(
            _whole(0, 100),
            "0 to 100",
            "how much of the weights that they read the TensorRT engines of a graph may hold a second time, as constants, where that is "
            "faster; beyond it the regions that gain least per byte take their weights as inputs (docs/gpu.md)",
        ),
    )
    cuda_driver: str = dataclasses.field(
        default=CUDA_DRIVER,
        metadata=_setting(
            _library,
            "a path, or a name that the loader finds",
            "NVIDIA's driver library, by which kernels are launched on GPUs; a process uses one",
        ),
    )
    cuda_graphs: bool = dataclasses.field(
        default=False,
        metadata=_setting(
            _boolean,
            "0, 1",
            "launch kernels that follow one another on a GPU together, as a CUDA graph, from a plan's second call on; results are new tensors "
            "in every call all the same, and inputs may lie anywhere",
        ),
    )
    log: str = dataclasses.field(
        default="",
        metadata=_setting(
            _choice("", "debug", "info", "warning", "error"),
            "debug, info, warning, error",
            "level of the package's log; empty leaves it to Python's logging",
        ),
    )
    explicit: frozenset[str] = dataclasses.field(default=frozenset(), repr=False, compare=False)
    """Names of the fields that the environment or options set: a mode does not override those."""

    def __post_init__(self) -> None:
        """Bring every field to its type, as if an option had given it. Raises ConfigError for an illegal value."""
        for field in setting_fields():
            value = getattr(self, field.name)
            if value is not field.default:
                object.__setattr__(self, field.name, _parsed(field, value, f"Config({field.name}=...)"))

    @property
    def weight_form(self) -> WeightForm:
        """Form in which weights of 8 and 4 bits are kept."""
        return WeightForm(self.weight_group_size, self.weight_zero_points, self.activation_bits)

    @staticmethod
    def from_env(environ: Mapping[str, str]) -> Config:
        """The settings that `environ` (usually `os.environ`) gives; an empty variable counts as absent.

        An unknown `HYBRID_*` variable, which may be another program's, gives one WARNING in a process. Raises ConfigError for an illegal value.
        """
        by_variable = {PREFIX + field.name.upper(): field for field in setting_fields()}
        for name in sorted(name for name in environ if name.startswith(PREFIX) and name not in by_variable):
            _warn_of_unknown(name, tuple(by_variable))
        given = {by_variable[name].name: environ[name] for name in by_variable if environ.get(name, "").strip()}
        return Config(cache_dir=_default_cache_dir(environ))._updated(given, shown=lambda field: PREFIX + field.upper())

    def with_options(self, options: Mapping[str, object] | None, mode: str | None) -> Config:
        """These settings with what `torch.compile(..., options=, mode=)` hands to a backend applied.

        Options override everything; a mode sets only fields that nothing set explicitly. torch leaves out
        `mode` when it is "default" and `options` when empty. Raises ConfigError for unknown names and illegal values.
        """
        config = self
        if options is not None and not isinstance(options, Mapping):
            raise ConfigError(f"options is {options!r}; it must be a dict of settings, such as {{'precision': 'bf16'}}")
        if mode is not None:
            if mode not in MODES:
                hint = did_you_mean(mode, MODES)
                raise ConfigError(f"unknown mode {mode!r}. {hint}The modes are: {', '.join(map(repr, MODES))}")
            preset = {name: value for name, value in MODES[mode].items() if name not in self.explicit}
            config = dataclasses.replace(config, **preset)  # type: ignore[arg-type]
        return config._updated(dict(options or {}), shown=lambda field: f'options["{field}"]')

    def select(self, known: Sequence[str]) -> tuple[str, ...]:
        """Names of the engines to use, of those `known`, in order of preference. Eager cannot be off, and is last.

        Raises ConfigError where `engines` or `disable_engines` name an engine that does not exist.
        """
        for setting, names in (("engines", self.engines), ("disable_engines", self.disable_engines)):
            for name in names:
                if name not in known:
                    raise ConfigError(
                        f"{PREFIX}{setting.upper()} (or options[{setting!r}]) names the unknown engine {name!r}. "
                        f"{did_you_mean(name, known)}"
                        f"The engines are: {', '.join(sorted(known))}"
                    )
        chosen = [name for name in (self.engines or known) if name not in self.disable_engines and name != EAGER]
        return (*dict.fromkeys(chosen), EAGER)

    def _updated(self, given: Mapping[str, object], shown: Callable[[str], str]) -> Config:
        fields = {field.name: field for field in setting_fields()}
        parsed: dict[str, object] = {}
        for name, raw in given.items():
            if name not in fields:
                raise ConfigError(_unknown_option(name, tuple(fields)))
            parsed[name] = _parsed(fields[name], raw, shown(name))
        return dataclasses.replace(self, **parsed, explicit=self.explicit | parsed.keys())  # type: ignore[arg-type]


def _parsed(field: dataclasses.Field[object], raw: object, shown: str) -> object:
    try:
        return field.metadata["parse"](raw)
    except ValueError as error:
        raise ConfigError(f"{shown} is {raw!r}; it must be {error}") from None


def _unknown_option(name: str, known: Sequence[str]) -> str:
    from torch_hybrid_backend.torch_private import inductor_options  # here alone: only messages need it

    options = f"The options of the hybrid backend are: {', '.join(known)}"
    if name.replace("-", "_") in inductor_options():
        return f"{name!r} is an option of torch.compile's own backend, inductor, which the hybrid backend does not take. {options}"
    return f"unknown option {name!r}. {did_you_mean(name, known)}{options}"


# What `mode=` presets. Those with CUDA graphs are those in which torch.compile's own backend uses them.
MODES: Mapping[str, Mapping[str, object]] = {
    "default": {},
    "reduce-overhead": {"cuda_graphs": True},
    "max-autotune": {"placement": "measure", "measure_budget_s": 2.0, "cuda_graphs": True},
    "max-autotune-no-cudagraphs": {"placement": "measure", "measure_budget_s": 2.0},
}


@functools.cache
def _warn_of_unknown(name: str, known: tuple[str, ...]) -> None:
    """Warn of a name once in a process."""
    # Compared without the prefix, which makes all of them alike.
    near = nearest(name.removeprefix(PREFIX), [each.removeprefix(PREFIX) for each in known])
    hint = f"did you mean {PREFIX}{near}?" if near else f"those of the hybrid backend are: {', '.join(sorted(known))}"
    _log.warning("the environment variable %s is ignored: there is no such setting; %s", name, hint)


def setting_fields() -> tuple[dataclasses.Field[object], ...]:
    """The fields of Config that users set, in the order of the table in docs/settings.md."""
    return tuple(field for field in dataclasses.fields(Config) if "parse" in field.metadata)


def shows_progress(environ: Mapping[str, str] | None = None) -> bool:
    """True unless the environment, by default the process's, switches progress off (`HYBRID_PROGRESS=0`)."""
    return Config.from_env(os.environ if environ is None else environ).progress


def apply_log_level(config: Config) -> None:
    """Set the package logger to `config.log`, and give it a handler where the program has none that would show it."""
    if not config.log:
        return
    logger = logging.getLogger("torch_hybrid_backend")
    logger.setLevel(config.log.upper())
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)
