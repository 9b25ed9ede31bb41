"""`segue-server health`: for container health checks, which have no gRPC client of their own."""

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from segue_server.grpc_api.health import READINESS


def check(target: str, seconds: float) -> int:
    """0 when the server at `target` takes turns, 1 when it does not or does not answer."""
    with grpc.insecure_channel(target) as channel:
        try:
            request = health_pb2.HealthCheckRequest(service=READINESS)
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=seconds, wait_for_ready=True)
        except grpc.RpcError as error:
            sys.stderr.write(f"{target}: {error.code().name}\n")
            return 1
    sys.stdout.write(f"{health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)}\n")
    return 0 if answer.status == health_pb2.HealthCheckResponse.SERVING else 1
