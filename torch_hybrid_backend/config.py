"""Settings: typed, frozen, read once.

Each field of `Config` is one setting. Its value comes from the first of these that is present:

1. `torch.compile(model, backend="hybrid", options={"verify": "off"})`
2. the environment: `HYBRID_VERIFY=off`
3. `torch.compile(model, backend="hybrid", mode="max-autotune")`, which presets a few fields (`MODES`)
4. the field's default

`backend.py` reads the environment variables once (`Config.from_env`) and passes the result down; nothing else in the package
reads them. `docs/settings.md` lists all settings; `tools/settings_table.py` makes its table from the fields.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import re
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
# csrc/torch/cuda_driver.cc has the same name.
CUDA_DRIVER = "libcuda.so.1"
_CACHE_NAME = "torch_hybrid_backend"
_BOOLEANS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


# Returns a field's value, or raises ValueError whose text describes the legal values.
_Parser = Callable[[object], object]


def _choice(*legal: str) -> _Parser:
    def parse(raw: object) -> object:
        value = raw.strip().lower() if isinstance(raw, str) else raw
        if value not in legal:
            hint = did_you_mean(value, legal) if isinstance(value, str) else ""
            raise ValueError(f"one of {', '.join(map(repr, legal))}. {hint}".rstrip(" ."))
        return value

    return parse


def _target(raw: object) -> object:
    """Names of targets, separated by commas as their features are; the engine knows which there are."""
    texts = [raw] if isinstance(raw, str) else raw if isinstance(raw, list | tuple) else []
    parts = [part.strip().lower() for text in texts for part in (text.split(",") if isinstance(text, str) else [""])]
    if not parts or any(re.fullmatch(r"[+\w.-]+", part) is None for part in parts):
        raise ValueError(
            "the name of a processor, such as 'native', 'x86-64-v3' or 'neoverse-n1', or one with features: 'armv8-a,+dotprod'; for files also "
            "several, separated by commas or as a list"
        )
    return ",".join(parts)


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


def _texts(meaning: str) -> _Parser:
    def parse(raw: object) -> object:
        if isinstance(raw, str):
            raw = raw.split(",")
        if not isinstance(raw, Sequence) or not all(isinstance(part, str | os.PathLike) for part in raw):
            raise ValueError(meaning)
        return tuple(text for part in raw if (text := os.fspath(part).strip()))

    return parse


def _library(raw: object) -> object:
    if not isinstance(raw, str | os.PathLike) or not str(raw).strip():
        raise ValueError("the path or the name of a library")
    return os.fspath(raw)


def _default_cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    base = (os.environ if environ is None else environ).get("XDG_CACHE_HOME", "")
    # The XDG specification: a relative path in this variable is invalid and must be ignored.
    if base and Path(base).is_absolute():
        return Path(base) / _CACHE_NAME
    try:
        return Path.home() / ".cache" / _CACHE_NAME
    except failures(RuntimeError):
        # A user without HOME and without an entry in the system's list of users, as in some containers.
        # Any user may create this directory first: the store refuses a directory of another user.
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
            "precision of inference graphs: as written in the model; layers that get faster by it in 16 or 8 bits; or weights in 8 or 4 bits "
            "(docs/precision.md)",
        ),
    )
    precision_tolerance: float | None = dataclasses.field(
        default=None,
        metadata=_setting(
            _fraction,
            "between 0 and 1",
            "largest error of a graph's outputs against the graph as written, in the first call: root mean square of the difference over "
            "that of the values; if the error is larger, the worst layers are computed as written",
            "0.02 for bf16 and fp16, 0.3 for int4-weights, 0.1 for the others",
        ),
    )
    weight_group_size: int | None = dataclasses.field(
        default=None,
        metadata=_setting(
            _one_of(*GROUP_SIZES),
            ", ".join(map(str, GROUP_SIZES)),
            "under `int8-weights` and `int4-weights`: number of neighbours along a row of a weight that share a scale; a weight whose rows are "
            "not divisible into groups stays as written",
            "32 for int4-weights, a whole row for int8-weights",
        ),
    )
    weight_zero_points: bool = dataclasses.field(
        default=False,
        metadata=_setting(
            _boolean,
            "0, 1",
            "under `int8-weights` and `int4-weights`: keep a zero point beside each scale; this reduces errors of groups whose values are not "
            "centred at 0, and takes as many bytes as the scales",
        ),
    )
    activation_bits: int = dataclasses.field(
        default=8,
        metadata=_setting(
            _one_of(*ACTIVATION_BITS),
            ", ".join(map(str, ACTIVATION_BITS)),
            "under `int8-weights` and `int4-weights`: bits to which kernels may round the activations of these layers, scaled by the "
            "largest of up to 64 (8 bits) or 256 (16 bits) neighbours; 32: no rounding",
        ),
    )
    target: str = dataclasses.field(
        default="native",
        metadata=_setting(
            _target,
            "native, x86-64-v2, x86-64-v3, x86-64-v4, armv8-a, cortex-a72, neoverse-n1, neoverse-v1, rv64gc, rv64gcv, a triple; features may "
            "follow; for files also several",
            "processor that kernels of the CPU are compiled for: this machine's; or a level of x86-64 (v3 has AVX2, v4 AVX-512), whose kernels "
            "all machines of that level share; they are slower than native ones (docs/guides/cache.md); or for `export`, an Arm or RISC-V "
            "processor (docs/guides/arm.md), or several processors (docs/guides/ship.md)",
        ),
    )
    placement: str = dataclasses.field(
        default="measure",
        metadata=_setting(
            _choice("estimate", "measure", "tune"),
            "estimate, measure, tune",
            "how engines and kernels are chosen: by estimates, by timing in the first call, or by autotuning: timing every variant of every "
            "large kernel (this takes minutes; Ctrl-C stops it, and a later process continues)",
        ),
    )
    prefer_kernels: bool = dataclasses.field(
        default=False,
        metadata=_setting(
            _boolean,
            "0, 1",
            "run regions by kernels also where operators of PyTorch's are faster, in eager or in place of a kernel; `export` sets this, so "
            "that few files need PyTorch",
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
            "show the progress of first calls, tuning and builds on a terminal, and report when a model is ready and what it gained",
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
            "compare each region's outputs with eager's: in its first call, in every call (slow), or never",
        ),
    )
    strict: bool = dataclasses.field(
        default=False,
        metadata=_setting(_boolean, "0, 1", "raise an error instead of a fallback of a region to eager with a warning"),
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
            "directory of the cache: it must belong to the user or to root, and no other user may write to it. A directory that cannot be "
            "written is only read, such as a cache that was filled while an image was built (for other users after `chmod -R a+rX`)",
            "$XDG_CACHE_HOME/torch_hybrid_backend, else ~/.cache/torch_hybrid_backend",
        ),
    )
    cache_limit_mib: int = dataclasses.field(
        default=1024,
        metadata=_setting(
            _whole(1),
            "at least 1",
            "largest size of the cache in MiB; beyond it the least recently used entries are removed",
        ),
    )
    cache_shared: tuple[str, ...] = dataclasses.field(
        default=(),
        metadata=_setting(
            _texts("paths and URLs, separated by commas"),
            "paths and URLs, comma separated",
            "shared caches, read where the cache has no entry, and never written: folders, and URLs that fsspec opens. An entry counts if a "
            "key of `cache_keys` signed it, or if only this user or root can write its folder (docs/guides/cache.md)",
        ),
    )
    cache_keys: tuple[str, ...] = dataclasses.field(
        default=(),
        metadata=_setting(
            _texts("paths of public keys in PEM, or keys as 64 hexadecimal digits, separated by commas"),
            "paths or keys, comma separated",
            "public keys of Ed25519 whose entries in shared caches count: paths of PEM files, or 64 hexadecimal digits",
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
            "time for compiling one graph's kernels: all engines, backward graphs and first calls together, without tuning; regions that are "
            "late run in eager",
        ),
    )
    background: bool = dataclasses.field(
        default=False,
        metadata=_setting(
            _boolean,
            "0, 1",
            "eager runs calls while kernels are compiled, checked and timed in the background (docs/background.md); graphs that cannot be run "
            "twice unnoticed are compiled in the call",
        ),
    )
    memory_budget: float | None = dataclasses.field(
        default=None,
        metadata=_setting(
            _number("a number, at least 0; 'inf' for no limit", lambda value: value >= 0),
            "at least 0, or inf",
            "memory by which packed weights may exceed the weights that they are packed from, as a share of these; forms of weights that take "
            "more (Winograd's) are used where they gain most time per byte (docs/guides/memory.md)",
            "1, and at least 32 MiB",
        ),
    )
    offload_weights: bool = dataclasses.field(
        default=False,
        metadata=_setting(
            _boolean,
            "0, 1",
            "move weights that inference plans hold in packed form from memory to a file without a name in `cache_dir`; what reads them later "
            "gets them from there, and writes to them count as ever (docs/guides/memory.md)",
        ),
    )
    ranks_agree: bool = dataclasses.field(
        default=True,
        metadata=_setting(
            _boolean,
            "0, 1",
            "in a torch.distributed job: all ranks compute a graph with collectives alike, as one of them chooses, or in eager, so that "
            "replicated values are equal to the last bit (docs/guides/distributed.md). 0: each rank chooses for itself",
        ),
    )
    tensorrt_constants_percent: int = dataclasses.field(
        default=5,
        metadata=_setting(
            _whole(0, 100),
            "0 to 100",
            "share of a graph's weights that its TensorRT engines may hold a second time, as constants, where that is faster; beyond it the "
            "regions that gain least per byte take their weights as inputs (docs/gpu.md)",
        ),
    )
    cuda_driver: str = dataclasses.field(
        default=CUDA_DRIVER,
        metadata=_setting(
            _library,
            "a path, or a name that the loader finds",
            "NVIDIA's driver library, which launches kernels on GPUs; a process uses one library",
        ),
    )
    cuda_graphs: bool = dataclasses.field(
        default=False,
        metadata=_setting(
            _boolean,
            "0, 1",
            "launch consecutive kernels on a GPU together, as a CUDA graph, from a plan's second call on; results are still new tensors in "
            "every call, and inputs may lie at any address",
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
        """Parse every field as an option's value would be. Raises ConfigError for an illegal value."""
        for field in setting_fields():
            value = getattr(self, field.name)
            if value is not field.default:
                object.__setattr__(self, field.name, _parsed(field, value, f"Config({field.name}=...)"))

    @property
    def weight_form(self) -> WeightForm:
        """Form of 8-bit and 4-bit weights."""
        return WeightForm(self.weight_group_size, self.weight_zero_points, self.activation_bits)

    @staticmethod
    def from_env(environ: Mapping[str, str]) -> Config:
        """The settings of the environment variables in `environ` (usually `os.environ`). An empty variable counts as absent.

        An unknown `HYBRID_*` variable, which may be another program's, logs one WARNING in a process. Raises ConfigError for an illegal value.
        """
        by_variable = {PREFIX + field.name.upper(): field for field in setting_fields()}
        for name in sorted(name for name in environ if name.startswith(PREFIX) and name not in by_variable):
            _warn_of_unknown(name, tuple(by_variable))
        given = {by_variable[name].name: environ[name] for name in by_variable if environ.get(name, "").strip()}
        return Config(cache_dir=_default_cache_dir(environ))._updated(given, shown=lambda field: PREFIX + field.upper())

    def with_options(self, options: Mapping[str, object] | None, mode: str | None) -> Config:
        """These settings with the `options` and `mode` of `torch.compile` applied.

        Options override everything. A mode sets only fields that were not set explicitly. PyTorch passes None for
        the mode "default" and for empty options. Raises ConfigError for unknown names and illegal values.
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
        """Names of the engines to use, out of `known`, in order of preference. Eager cannot be disabled, and is last.

        Raises ConfigError if `engines` or `disable_engines` names an unknown engine.
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
    from torch_hybrid_backend.torch_private import inductor_options  # imported here because only this message needs it

    options = f"The options of the hybrid backend are: {', '.join(known)}"
    if name.replace("-", "_") in inductor_options():
        return f"{name!r} is an option of torch.compile's own backend, inductor, which the hybrid backend does not take. {options}"
    return f"unknown option {name!r}. {did_you_mean(name, known)}{options}"


# Fields that `mode=` presets. CUDA graphs are on in the modes in which Inductor uses them.
MODES: Mapping[str, Mapping[str, object]] = {
    "default": {},
    "reduce-overhead": {"cuda_graphs": True},
    "max-autotune": {"placement": "measure", "measure_budget_s": 2.0, "cuda_graphs": True},
    "max-autotune-no-cudagraphs": {"placement": "measure", "measure_budget_s": 2.0},
}


@functools.cache
def _warn_of_unknown(name: str, known: tuple[str, ...]) -> None:
    """Warn of a name once in a process."""
    # Compared without the prefix, which would make all names similar.
    near = nearest(name.removeprefix(PREFIX), [each.removeprefix(PREFIX) for each in known])
    hint = f"did you mean {PREFIX}{near}?" if near else f"the settings are: {', '.join(sorted(known))}"
    _log.warning("the environment variable %s is ignored: there is no such setting; %s", name, hint)


def setting_fields() -> tuple[dataclasses.Field[object], ...]:
    """The fields of Config that users set, in the order of the table in docs/settings.md."""
    return tuple(field for field in dataclasses.fields(Config) if "parse" in field.metadata)


def shows_progress(environ: Mapping[str, str] | None = None) -> bool:
    """True unless `environ`, by default the process's environment, switches progress off (`HYBRID_PROGRESS=0`)."""
    return Config.from_env(os.environ if environ is None else environ).progress


def apply_log_level(config: Config) -> None:
    """Set the level of the package's logger to `config.log`. Add a handler if the program has none that would show its records."""
    if not config.log:
        return
    logger = logging.getLogger("torch_hybrid_backend")
    logger.setLevel(config.log.upper())
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        logger.addHandler(handler)
