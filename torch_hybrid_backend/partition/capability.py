"""Verdicts of every engine on every operator, kept for the plan."""

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
    """The verdict of each engine on each operator. Every engine is asked at most once per operator, and not about `known` operators.

    A getitem, which picks one of several outputs, gets the verdict of its operator. Eager runs the following, and engines are not asked:

    - operators with effects, as a region must mean the same each time it runs; engines that draw are asked about operators that only draw
      random numbers
    - operators that read what a collective still writes, as an engine might copy it
    - operators with tensors on several devices
    - operators with tensors that are lazily conjugated or negated

    An engine is not asked about devices that it does not serve. An engine that raises instead of answering refuses, with one WARNING for that
    engine; under `strict` it raises RegionError. If a size that depends on data made the engine raise, there is neither.
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
    """The engine's verdict on a whole region of operators that it supports. An engine that raises instead of answering refuses.

    Under `strict` it raises RegionError."""
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
            Reason.DEVICE, f"{node.target} has tensors on several devices; eager runs what goes between devices"
        )
    # Engines come from third parties too: an error of theirs may cost that operator, never the model.
    try:
        if not serves(engine, device):
            served = " and ".join(sorted(engine.devices))
            return Refused(Reason.DEVICE, f"{node.target} is on {device}, {engine.name} serves {served}")
        # AOTAutograd is still tracing: tensors that an engine computes with would be fake.
        with unset_fake_temporarily():
            return engine.supports(node)
    except (GuardOnDataDependentSymNode, DataDependentOutputException) as error:
        return Refused(
            Reason.SYMBOLIC_SHAPE, f"{node.target} depends on a number that is known only from data: {error}"
        )
    except failures(Exception) as error:  # a third party's code
        why = f"engine {engine.name} raised when asked about {node.target}: {type(error).__name__}: {error}"
        if strict:
            raise RegionError(why) from error
        if engine.name not in broken:
            broken.add(engine.name)
            _log.warning("%s; such operators fall back to eager", why)
        return Refused(Reason.RUNTIME_ERROR, why)
