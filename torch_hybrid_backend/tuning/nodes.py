"""Nodes of a Ray cluster, as they told of themselves: which of them time, and which compile.

Ray's nodes may be parts of one physical host: the boot id tells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch_hybrid_backend.errors import HybridError


@dataclass(frozen=True, slots=True)
class Node:
    """A node. `host`: the boot id of its physical host. `versions`: of what must be equal on all nodes. `lacks`: why it cannot take part.
    `threads`: kernel threads, which the fingerprint has, too."""

    id: str
    name: str
    host: str = ""
    fingerprint: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    lacks: str = ""
    threads: int = 0


@dataclass(frozen=True, slots=True)
class Roles:
    """Nodes that time, by host, all of one `fingerprint`; all nodes that can compile; sentences about nodes that are left out."""

    fingerprint: str
    timing: Mapping[str, tuple[Node, ...]]
    able: tuple[Node, ...]
    left_out: tuple[str, ...]

    def compiling_for(self, host: str) -> tuple[Node, ...]:
        """The nodes that compile for the worker of a host: those of hosts that do not time, else its own."""
        return tuple(node for node in self.able if node.host not in self.timing) or tuple(
            node for node in self.able if node.host == host
        )


def roles_of(nodes: Sequence[Node], wanted: str, versions: Mapping[str, str]) -> Roles:
    """Roles for nodes, where `versions` are the driver's. `wanted`: a fingerprint, or a part of one.

    Raises HybridError if no node has such a fingerprint, or nodes of several have; the message lists them.
    """
    left_out, able = [], []
    for node in nodes:
        lacks = node.lacks or _difference(node.versions, versions)
        if lacks:
            left_out.append(f"the node {node.name} is left out: {lacks}")
        else:
            able.append(node)
    known = sorted({node.fingerprint for node in able})
    there = "; ".join([*known, *left_out]) or "none"
    matching = [fingerprint for fingerprint in known if wanted in fingerprint]
    if not matching:
        raise HybridError(
            f"no node has the fingerprint {wanted!r}; --fingerprint takes one of those that are there, or a part of it: {there}"
        )
    if len(matching) > 1:
        raise HybridError(
            f"nodes of several fingerprints have {wanted!r}: {'; '.join(matching)}; name one of them in full"
        )
    timing: dict[str, tuple[Node, ...]] = {}
    for node in able:
        if node.fingerprint == matching[0]:
            timing[node.host] = (*timing.get(node.host, ()), node)
    return Roles(matching[0], timing, tuple(able), tuple(left_out))


def _difference(found: Mapping[str, str], wanted: Mapping[str, str]) -> str:
    return " and ".join(
        f"it has {name} {found.get(name, 'of no version')}, and this process {version}"
        for name, version in wanted.items()
        if found.get(name) != version
    )
