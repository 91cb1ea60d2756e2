"""A client without stubs: everything it knows of the service it has asked the service."""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf import message_factory
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from served import Served


def test_reflection_client(system: Served) -> None:
    """It lists the services, builds the request from its description and completes a Generate."""
    with grpc.insecure_channel(system.address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        services = set(database.get_services())
        assert services >= {"baton.v1.Inference", "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}

        method = DescriptorPool(database).FindServiceByName("baton.v1.Inference").methods_by_name["Generate"]
        assert method.server_streaming and not method.client_streaming
        request_class: Any = message_factory.GetMessageClass(method.input_type)
        response_class: Any = message_factory.GetMessageClass(method.output_type)
        request = request_class(request_id="stubless")
        request.messages.add(role="user", content="What is the capital of France?")
        request.sampling.temperature = 0
        request.sampling.max_tokens = 24
        generate = channel.unary_stream(
            f"/{method.containing_service.full_name}/{method.name}",
            request_serializer=request_class.SerializeToString,
            response_deserializer=response_class.FromString,
        )
        responses = list(generate(request, timeout=120))

    assert {response.request_id for response in responses} == {"stubless"}
    assert "Paris" in "".join(response.text for response in responses)
    finish = responses[-1].finish
    assert [response.HasField("finish") for response in responses].count(True) == 1
    assert finish.usage.completion_tokens == sum(len(response.tokens) for response in responses)
    assert finish.served_by.prefill_worker_id.startswith("prefill-")
    assert finish.served_by.decode_worker_id.startswith("decode-")
