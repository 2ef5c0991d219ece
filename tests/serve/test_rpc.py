"""gRPC, asked by tritonclient, whose messages are generated from the protocol's own file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.serve.conftest import Cluster, small_network
from torch_hybrid_backend.errors import RequestError
from torch_hybrid_backend.serve import deployment, rpc

triton = pytest.importorskip("tritonclient.grpc", reason="needs tritonclient and grpcio")


def test_tritonclient_gets_what_eager_computes(cluster: Cluster, models: Path) -> None:
    """Server, model and call; errors have a code and say what was expected."""
    cluster.run(deployment(models / "dynamic.hybrid", max_body_mib=0.01), "remote")
    client = triton.InferenceServerClient(f"127.0.0.1:{cluster.grpc_port}")
    of = {"headers": {"application": "remote"}}
    assert client.is_server_live(**of)
    assert client.is_server_ready(**of)
    assert client.is_model_ready("dynamic", **of)
    assert client.get_server_metadata(**of).name == "torch_hybrid_backend"
    told = client.get_model_metadata("dynamic", **of)
    assert [(each.name, each.datatype, list(each.shape)) for each in told.inputs] == [("input", "FP32", [-1, 8])]

    def infer(x: torch.Tensor, model: str = "dynamic", **given: Any) -> Any:
        tensor = triton.InferInput("input", list(x.shape), "FP32")
        tensor.set_data_from_numpy(x.numpy())
        return client.infer(model, [tensor], **of, **given)

    x = torch.randn(3, 8)
    answer = infer(x, model_version=told.versions[0], request_id="7", outputs=[triton.InferRequestedOutput("output0")])
    assert answer.get_response().id == "7"
    torch.testing.assert_close(torch.tensor(answer.as_numpy("output0")), small_network()(x).detach())
    for given, code, said in (
        ((x[:, :5].contiguous(),), "INVALID_ARGUMENT", r"expected FP32 \[-1, 8\]"),
        ((x, "other"), "NOT_FOUND", "there is no model 'other'"),
        ((torch.zeros(1000, 8),), "RESOURCE_EXHAUSTED", "takes at most 10485"),
    ):
        with pytest.raises(triton.InferenceServerException, match=said) as caught:
            infer(*given)
        assert code in str(caught.value.status())
    client.close()
    cluster.delete("remote")


@pytest.mark.parametrize("datatype", ["BOOL", "INT8", "UINT16", "INT64", "FP32", "FP64"])
def test_values_without_bytes(datatype: str) -> None:
    """Values may be numbers in the message itself, as other clients than tritonclient send them."""
    request = rpc.message("ModelInferRequest")
    tensor = request.inputs.add(name="x", datatype=datatype, shape=[2])
    getattr(tensor.contents, rpc._CONTENTS[datatype]).extend([0, 1])
    got = rpc.tensors_of(rpc.message("ModelInferRequest", request.SerializeToString())).tensors["x"]
    assert got.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("inputs", "raw", "said"),
    [
        ([("x", "FP16", [1], {})], [], "must come as raw_input_contents"),
        ([("x", "INT8", [1], {"int_contents": [300]})], [], "does not fit in INT8"),
        ([("x", "FP32", [2], {"fp32_contents": [1.0]})], [], "has 8 bytes; the request has 4"),
        ([("x", "FP32", [1], {})], [b"0000", b"0000"], "1 inputs and the bytes of 2"),
        ([("x", "FP32", [-1], {})], [b"0000"], "none below 0"),
        ([("x", "FP32", [1], {})] * 2, [b"0000"] * 2, "'x' is there twice"),
    ],
)
def test_wrong_messages(inputs: list[Any], raw: list[bytes], said: str) -> None:
    request = rpc.message("ModelInferRequest")
    for name, datatype, shape, contents in inputs:
        request.inputs.add(name=name, datatype=datatype, shape=shape, contents=contents)
    request.raw_input_contents.extend(raw)
    with pytest.raises(RequestError, match=said):
        rpc.tensors_of(request)


def test_bytes_that_are_no_message() -> None:
    with pytest.raises(RequestError, match="is no ModelInferRequest"):
        rpc.message("ModelInferRequest", b"\xff\xff")
