"""Nodes that time, that compile, and that do neither."""

from __future__ import annotations

import pytest

from torch_hybrid_backend.errors import HybridError
from torch_hybrid_backend.tuning.nodes import Node, roles_of

_VERSIONS = {"torch": "2.13", "torch_hybrid_backend": "0.1"}


def _node(number: int, host: str, fingerprint: str = "zen|threads 2", versions: dict[str, str] = _VERSIONS) -> Node:
    return Node(f"id{number}", f"node{number}", host, fingerprint, versions)


def test_nodes_of_one_host_are_one_machine() -> None:
    """Others compile for it, as long as there are others: of hosts that do not time."""
    nodes = [_node(1, "a"), _node(2, "a"), _node(3, "b", "intel|threads 2"), _node(4, "c")]
    roles = roles_of(nodes, "zen|threads 2", _VERSIONS)
    assert roles.fingerprint == "zen|threads 2"
    assert {host: [node.id for node in nodes] for host, nodes in roles.timing.items()} == {
        "a": ["id1", "id2"],
        "c": ["id4"],
    }
    assert [node.id for node in roles.compiling_for("a")] == ["id3"]
    alone = roles_of(nodes[:2], "zen", _VERSIONS)
    assert [node.id for node in alone.compiling_for("a")] == ["id1", "id2"]
    both = roles_of([nodes[0], nodes[3]], "zen", _VERSIONS)
    assert [node.id for node in both.compiling_for("c")] == ["id4"]


def test_no_machine_of_the_fingerprint() -> None:
    """The message lists those that are there, and why others are left out."""
    nodes = [_node(1, "a"), _node(2, "b", "intel"), Node("id3", "node3", lacks="it has no package")]
    with pytest.raises(
        HybridError, match=r"'arm'; .*: intel; zen\|threads 2; the node node3 is left out: it has no pack"
    ):
        roles_of(nodes, "arm", _VERSIONS)
    with pytest.raises(HybridError, match="nodes of several fingerprints have '': intel; zen"):
        roles_of(nodes, "", _VERSIONS)


def test_nodes_with_other_versions_are_left_out() -> None:
    """Kernels of other sources have other keys."""
    other = _node(2, "b", versions={**_VERSIONS, "torch": "2.12"})
    roles = roles_of([_node(1, "a"), other], "zen", _VERSIONS)
    assert [node.id for node in roles.able] == ["id1"]
    assert roles.left_out == ("the node node2 is left out: it has torch 2.12, and this process 2.13",)
