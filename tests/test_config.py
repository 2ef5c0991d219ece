"""Settings: sources, precedence, legality."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from torch_hybrid_backend.config import (
    MODES,
    Config,
    apply_log_level,
    setting_fields,
)
from torch_hybrid_backend.errors import ConfigError


def test_an_empty_environment_gives_the_defaults() -> None:
    """Nothing set: measured placement, verification on the first call, no strictness, cache on."""
    config = Config.from_env({"HOME": "/somewhere"})
    assert (config.placement, config.verify, config.strict, config.cache) == ("measure", "first", False, True)
    assert config.engines == ()
    assert config.compile_threads >= 1


def test_every_field_can_be_set_by_its_variable() -> None:
    """Each field has the variable HYBRID_<FIELD>, parsed to the field's type."""
    values = {
        "engines": ("TVM, eager", ("tvm", "eager")),
        "disable_engines": ("triton", ("triton",)),
        "target": ("x86-64-v3", "x86-64-v3"),
        "placement": ("Estimate", "estimate"),
        "prefer_kernels": ("1", True),
        "measure_budget_s": ("0.5", 0.5),
        "progress": ("no", False),
        "min_region_nodes": ("4", 4),
        "verify": ("always", "always"),
        "strict": ("yes", True),
        "cache": ("off", False),
        "cache_dir": ("/var/cache/x", Path("/var/cache/x")),
        "cache_limit_mib": ("100", 100),
        "cache_shared": ("/mnt/cache, https://cache.example/v1", ("/mnt/cache", "https://cache.example/v1")),
        "cache_keys": ("public.pem", ("public.pem",)),
        "compile_threads": ("3", 3),
        "tensorrt_constants_percent": ("25", 25),
        "cuda_driver": ("/usr/lib/wsl/lib/libcuda.so.1", "/usr/lib/wsl/lib/libcuda.so.1"),
        "compile_deadline_s": ("12", 12.0),
        "cuda_graphs": ("1", True),
        "background": ("on", True),
        "ranks_agree": ("0", False),
        "memory_budget": ("0.5", 0.5),
        "offload_weights": ("1", True),
        "precision": ("BF16", "bf16"),
        "precision_tolerance": ("0.05", 0.05),
        "weight_group_size": ("128", 128),
        "weight_zero_points": ("1", True),
        "activation_bits": ("16", 16),
        "log": ("INFO", "info"),
    }
    assert values.keys() == {field.name for field in setting_fields()}
    config = Config.from_env({f"HYBRID_{name.upper()}": text for name, (text, _) in values.items()})
    assert {name: getattr(config, name) for name in values} == {name: value for name, (_, value) in values.items()}


def test_options_win_over_environment_over_mode_over_default() -> None:
    """A rule of precedence holds for all settings."""
    by_mode = MODES["max-autotune"]["measure_budget_s"]
    assert Config.from_env({}).with_options(None, "max-autotune").measure_budget_s == by_mode
    from_env = Config.from_env({"HYBRID_MEASURE_BUDGET_S": "0.7"})
    assert from_env.with_options(None, "max-autotune").measure_budget_s == 0.7
    assert from_env.with_options({"measure_budget_s": 0.9}, "max-autotune").measure_budget_s == 0.9


def test_modes_have_cuda_graphs_where_users_of_torch_expect_them() -> None:
    """Modes have CUDA graphs as in torch.compile's own backend; the setting itself wins."""
    assert {mode for mode in MODES if Config().with_options(None, mode).cuda_graphs} == {
        "reduce-overhead",
        "max-autotune",
    }
    assert not Config.from_env({"HYBRID_CUDA_GRAPHS": "0"}).with_options(None, "reduce-overhead").cuda_graphs
    assert Config().with_options({"cuda_graphs": True}, None).cuda_graphs


def test_several_targets() -> None:
    """A list says the same as a text with commas."""
    for value in ("x86-64-v3, X86-64-v4,+avx512vnni", ["x86-64-v3", "x86-64-v4,+avx512vnni"]):
        assert Config().with_options({"target": value}, None).target == "x86-64-v3,x86-64-v4,+avx512vnni"
    for value in ([], ["x86-64-v3", 4], "x86-64-v3,,x86-64-v4"):
        with pytest.raises(ConfigError, match="several, separated by commas or as a list"):
            Config().with_options({"target": value}, None)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs", None])
def test_the_modes_torch_users_know_are_accepted(mode: str | None) -> None:
    """torch.compile's four modes are legal, and so is none."""
    assert isinstance(Config().with_options(None, mode), Config)


@pytest.mark.parametrize(
    ("name", "value", "legal"),
    [
        ("target", "x86 64", "'native', 'x86-64-v3' or 'neoverse-n1'"),
        ("placement", "guess", "'estimate', 'measure', 'tune'"),
        ("verify", "never", "'first', 'always', 'off'"),
        ("strict", "maybe", "1, true, yes, on"),
        ("min_region_nodes", "-1", "at least 0"),
        ("min_region_nodes", "many", "a whole number"),
        ("compile_threads", "-1", "at least 1"),
        ("tensorrt_constants_percent", "101", "at least 0 and at most 100"),
        ("compile_deadline_s", "nan", "seconds greater than 0"),
        ("log", "loud", "'debug'"),
        ("weight_group_size", "48", "one of 32, 64, 128, 256"),
        ("activation_bits", "4", "one of 8, 16, 32"),
    ],
)
def test_an_illegal_value_is_an_error_that_names_the_legal_ones(name: str, value: str, legal: str) -> None:
    """The message says which setting, which value and what is legal, for variables and options alike."""
    variable = f"HYBRID_{name.upper()}"
    with pytest.raises(ConfigError, match=variable) as by_variable:
        Config.from_env({variable: value})
    with pytest.raises(ConfigError, match=name) as by_option:
        Config().with_options({name: value}, None)
    for raised in (by_variable, by_option):
        assert repr(value) in str(raised.value)
        assert legal in str(raised.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("strict", 2.5),
        ("engines", 7),
        ("cache_shared", 7),
        ("cache_keys", [b"key"]),
        ("cache_dir", 3),
        ("compile_threads", True),
        ("compile_deadline_s", False),
    ],
)
def test_a_value_of_the_wrong_type_is_an_error(name: str, value: object) -> None:
    """Options are typed: what cannot be meant is refused rather than converted."""
    with pytest.raises(ConfigError, match=name):
        Config().with_options({name: value}, None)


def test_fields_are_checked_where_a_config_is_made() -> None:
    """A value that no option may have is none of a Config's either; one in another form is brought to the field's."""
    with pytest.raises(ConfigError, match=r"Config\(precision=...\) is 'fp8'; it must be one of 'as-written', 'bf16'"):
        Config(precision="fp8")
    with pytest.raises(ConfigError, match="at least 1"):
        dataclasses.replace(Config(), compile_threads=0)
    assert Config(engines="TVM,eager", strict="yes", cache_dir="/x") == Config(  # type: ignore[arg-type]
        engines=("tvm", "eager"), strict=True, cache_dir=Path("/x")
    )
    assert Config(precision_tolerance=None).precision_tolerance is None


@pytest.mark.parametrize(
    ("make", "nearest"),
    [
        (lambda: Config(precision="bfloat16"), "bf16"),
        (lambda: Config(precision="int4"), "int4-weights"),
        (lambda: Config().with_options({"disable_engine": "tvm"}, None), "disable_engines"),
        (lambda: Config().with_options(None, "max_autotune"), "max-autotune"),
        (lambda: Config(engines=("tvn",)).select(("tvm", "eager")), "tvm"),
    ],
)
def test_a_wrong_name_suggests_the_nearest(make: Callable[[], object], nearest: str) -> None:
    """A wrong name of options, values, modes and engines suggests the nearest."""
    with pytest.raises(ConfigError, match=f"Did you mean '{nearest}'"):
        make()


def test_unknown_names_are_errors_that_list_the_known_ones() -> None:
    """A typing error in an option, a mode or an engine never passes silently."""
    with pytest.raises(ConfigError, match=r"unknown option 'colour'\. The options .*placement"):
        Config().with_options({"colour": True}, None)
    with pytest.raises(
        ConfigError, match=r"'max_autotune' is an option of torch.compile's own backend, inductor.*placement"
    ):
        Config().with_options({"max_autotune": True}, None)
    with pytest.raises(ConfigError, match=r"fastest.*'reduce-overhead'"):
        Config().with_options(None, "fastest")
    with pytest.raises(ConfigError, match=r"tvn.*eager, tvm"):
        Config(engines=("tvn",)).select(("tvm", "eager"))


def test_an_unknown_variable_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    """An unknown variable may be another program's; where it may be a typing error, the warning says what was meant. The other variables
    count."""
    for _ in range(3):
        assert Config.from_env({"HYBRID_VERIFFY": "off", "HYBRID_THRUST_KN": "4", "HYBRID_STRICT": "1"}).strict
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    of_another, mistyped = (record.getMessage() for record in caplog.records)
    assert "HYBRID_THRUST_KN" in of_another
    assert "HYBRID_PLACEMENT" in of_another
    assert "HYBRID_VERIFFY is ignored" in mistyped
    assert "did you mean HYBRID_VERIFY?" in mistyped


def test_an_empty_variable_counts_as_absent() -> None:
    """`HYBRID_VERIFY= python ...` is how shells unset a variable for one command."""
    assert Config.from_env({"HYBRID_VERIFY": ""}) == Config.from_env({})


def test_select_orders_and_disables_engines_but_keeps_eager() -> None:
    """The given order is kept, disabled engines are left out, eager is always there and last."""
    known = ("tvm", "triton", "eager")
    assert Config().select(known) == ("tvm", "triton", "eager")
    assert Config(engines=("triton", "tvm")).select(known) == ("triton", "tvm", "eager")
    assert Config(disable_engines=("tvm", "eager")).select(known) == ("triton", "eager")
    assert Config(engines=("eager",)).select(known) == ("eager",)


def test_the_cache_directory_honours_xdg(tmp_path: Path) -> None:
    """XDG_CACHE_HOME moves the default; a relative one is invalid by the specification and ignored."""
    assert Config.from_env({"XDG_CACHE_HOME": str(tmp_path)}).cache_dir == tmp_path / "torch_hybrid_backend"
    ignored = Config.from_env({"XDG_CACHE_HOME": "here"}).cache_dir
    assert ignored == Path.home() / ".cache" / "torch_hybrid_backend"


def test_the_log_level_is_applied_to_the_package_only() -> None:
    """HYBRID_LOG sets the package's logger, not the root's."""
    logger, root_level = logging.getLogger("torch_hybrid_backend"), logging.getLogger().level
    before, handlers = logger.level, list(logger.handlers)
    try:
        apply_log_level(Config(log="debug"))
        assert logger.level == logging.DEBUG
        assert logging.getLogger().level == root_level
    finally:
        logger.setLevel(before)
        logger.handlers[:] = handlers
