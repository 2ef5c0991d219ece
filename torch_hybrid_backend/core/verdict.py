"""Verdicts: whether an engine takes a node or region, as a value with a stable code and a sentence."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Reason(StrEnum):
    """Stable codes. They are printed by explain(), kept in caches and matched by tests: never rename one.
    `docs/refusals.md` has a section for each."""

    UNKNOWN_OPERATOR = "unknown_operator"  # the engine has no lowering for the operator
    LIBRARY = (
        "library"  # PyTorch's own operator is called for good: generated loops gain nothing on it, or cannot say it
    )
    DTYPE = "dtype"  # the operator is known, not for these dtypes
    SYMBOLIC_SHAPE = "symbolic_shape"  # a size is only known at run time
    DEVICE = "device"  # a tensor lives on a device the engine does not serve
    LAYOUT = "layout"  # sparse, quantized, complex or otherwise not a plain strided tensor
    ARGUMENT = "argument"  # an argument value the lowering does not cover
    NONDETERMINISTIC = (
        "nondeterministic"  # results would depend on an order that nothing fixes, and torch is told to avoid that
    )
    RANDOM = "random"  # the engine's kernels cannot draw the numbers that eager draws
    INT64 = "int64"  # whole numbers of 64 bits, which the engine would cut short
    FLOAT64 = "float64"  # the engine would round them
    EMPTY = "empty"  # a tensor has no elements, or may have none
    IN_PLACE = "in_place"  # the operator writes into an argument
    DATA_DEPENDENT = "data_dependent"  # how large a result is depends on the values of its arguments
    NOT_A_TENSOR = "not_a_tensor"  # the node yields no tensor (SymInt arithmetic, None, ...)
    DISABLED = "disabled"  # the engine is switched off by HYBRID_ENGINES / HYBRID_DISABLE_ENGINES
    MISSING_DEPENDENCY = "missing_dependency"  # the engine cannot run in this installation
    NO_DEVICE = "no_device"  # this machine has no device that the engine serves
    TOO_SMALL = "too_small"  # fewer nodes than HYBRID_MIN_REGION_NODES
    NOT_PROFITABLE = "not_profitable"  # eager was faster, by measurement or by estimate
    COMPILE_FAILED = "compile_failed"  # the engine raised or its compiler failed
    COMPILER_CRASHED = "compiler_crashed"  # the kernel compiler's process died
    BUILDING = "building"  # the engine is still at work on it, in a process of its own
    DEADLINE = "deadline"  # compilation exceeded HYBRID_COMPILE_DEADLINE_S
    ACCURACY = "accuracy"  # the region's outputs differ from eager's
    OUT_OF_MEMORY = (
        "out_of_memory"  # there was no memory to run the region, or to find out whether its outputs are right
    )
    RUNTIME_ERROR = "runtime_error"  # the compiled region raised while running
    RANKS_DISAGREE = "ranks_disagree"  # the ranks of a torch.distributed job cannot all compute the graph alike
    # Why a layer is computed as written under another precision. ACCURACY is one of them: in it the graph's outputs are off by too much.
    UNSUPPORTED = "unsupported"  # the operator does not take the precision, or not in this form
    EXCLUDED = "excluded"  # the user asked for it
    UNCALIBRATED = "uncalibrated"  # nothing is known of the range of its values
    SLOWER = "slower"  # it takes longer than as written, casts included


@dataclass(frozen=True, slots=True)
class Supported:
    """The engine takes it."""

    def __bool__(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Refused:
    """The engine does not take it: `why` is a full sentence for the user, without a trailing period."""

    code: Reason
    why: str

    def __bool__(self) -> bool:
        return False


Verdict = Supported | Refused
