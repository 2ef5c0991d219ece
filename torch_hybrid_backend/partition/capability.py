"""Asking every engine about every operator: verdicts as values, kept for the plan."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from torch_hybrid_backend.core.device import Device
from torch_hybrid_backend.core.engine import Engine, serves
from torch_hybrid_backend.core.lazy_bits import LazyBits
from torch_hybrid_backend.core.region import Region
from torch_hybrid_backend.core.verdict import Reason, Refused, Verdict
from torch_hybrid_backend.errors import RegionError, failures
from torch_hybrid_backend.graph.devices import device_of
from torch_hybrid_backend.graph.schema import has_effects, is_in_flight, is_item, only_draws
from torch_hybrid_backend.torch_private import DataDependentOutputException, HigherOrderOperator, unset_fake_temporarily

_log = logging.getLogger(__name__)


def capability(
    operators: Sequence[Node],
    engines: Sequence[Engine],
    *,
    strict: bool,
    known: Mapping[Node, tuple[Verdict, ...]] = MappingProxyType({}),
) -> Mapping[Node, tuple[Verdict, ...]]:
    """The verdict of each engine on each operator; every engine is asked at most once per operator, and not about those that are `known`.

    What picks one of several outputs (getitem) goes with its operator. Operators with effects are eager's: a region
    means the same each time it runs. About those that only draw random numbers the engines that draw are asked. Eager's too are
    views of what a collective still writes, which an engine might copy, operators with tensors on several devices, and those with
    tensors that are lazily conjugated or negated. An engine is not asked about devices that it does not serve. An engine that
    raises instead of answering is taken to refuse, with one WARNING for that engine, or RegionError under `strict`; where it
    stumbled over a size that depends on data, without.
    """
    verdicts: dict[Node, tuple[Verdict, ...]] = {}
    broken: set[str] = set()
    for node in operators:
        if node in known:
            verdicts[node] = known[node]
        elif is_item(node) and isinstance(node.args[0], Node) and node.args[0] in verdicts:
            verdicts[node] = verdicts[node.args[0]]
        elif node.op != "call_function":
            refusal = Refused(Reason.UNKNOWN_OPERATOR, f"a node of kind {node.op} is no ATen operator")
            verdicts[node] = (refusal,) * len(engines)
        elif isinstance(node.target, HigherOrderOperator):
            refusal = Refused(
                Reason.UNKNOWN_OPERATOR,
                f"{node.target} calls sub-graphs: eager runs it, they are compiled apart where possible",
            )
            verdicts[node] = (refusal,) * len(engines)
        elif has_effects(node):
            refusal = Refused(
                Reason.UNKNOWN_OPERATOR,
                f"{node.target} writes in place, draws random numbers, asserts or works with other processes",
            )
            device = device_of(node)
            verdicts[node] = tuple(
                _ask(engine, node, device, broken, strict) if engine.draws and only_draws(node) else refusal
                for engine in engines
            )
        elif any(is_in_flight(source) for source in node.all_input_nodes):
            refusal = Refused(Reason.ARGUMENT, "an argument is still being written by a collective")
            verdicts[node] = (refusal,) * len(engines)
        elif any(_is_lazy(value) for value in (node, *node.all_input_nodes)):
            refusal = Refused(
                Reason.LAYOUT, "a tensor is a negated or conjugated view: its memory does not hold its values"
            )
            verdicts[node] = (refusal,) * len(engines)
        else:
            device = device_of(node)
            verdicts[node] = tuple(_ask(engine, node, device, broken, strict) for engine in engines)
    return verdicts


def _is_lazy(node: Node) -> bool:
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else (value,)
    return any(isinstance(tensor, torch.Tensor) and bool(LazyBits.of(tensor)) for tensor in values)


def accepted(engine: Engine, region: Region, *, strict: bool) -> Verdict:
    """Supported if an engine takes a whole region of operators that it supports. One that raises instead of answering refuses, as above."""
    try:
        with unset_fake_temporarily():
            return engine.accepts(region)
    except failures(Exception) as error:  # a third party's code
        why = f"engine {engine.name} raised when asked about region {region.name}: {type(error).__name__}: {error}"
        if strict:
            raise RegionError(why) from error
        _log.warning("%s; it does not get that region", why)
        return Refused(Reason.RUNTIME_ERROR, why)


def _ask(engine: Engine, node: Node, device: Device | None, broken: set[str], strict: bool) -> Verdict:
    if device is None:
        return Refused(
            Reason.DEVICE, f"{node.target} has tensors on several devices; what goes between devices is eager's"
        )
    # Engines come from third parties too: whatever one raises may cost that operator, never the model.
    try:
        if not serves(engine, device):
            served = " and ".join(sorted(engine.devices))
            return Refused(Reason.DEVICE, f"{node.target} is on {device}, {engine.name} serves {served}")
        # AOTAutograd is still tracing: tensors that an engine computes with would be fake.
        with unset_fake_temporarily():
            return engine.supports(node)
    except (GuardOnDataDependentSymNode, DataDependentOutputException) as error:
        return Refused(Reason.SYMBOLIC_SHAPE, f"{node.target} depends on a number that only its data tell: {error}")
    except failures(Exception) as error:  # a third party's code
        why = f"engine {engine.name} raised when asked about {node.target}: {type(error).__name__}: {error}"
        if strict:
            raise RegionError(why) from error
        if engine.name not in broken:
            broken.add(engine.name)
            _log.warning("%s; such operators fall back to eager", why)
        return Refused(Reason.RUNTIME_ERROR, why)
