"""What an operator sees: /metrics over HTTP, health and reflection with stock stubs, and the load and limits RPCs."""

import shutil
import subprocess
import urllib.request

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from segue_client import SegueError

CLASSES = ("active", "pinned", "idle", "prefix", "slack")
READINESS = "segue.v1.GenerationService"
GREEDY = {"temperature": 0.0, "ignore_eos": True}


def device_bytes(samples):
    return {name: samples["segue_kv_bytes", name, "device"] for name in CLASSES}


def test_cache_bytes_add_up_to_what_the_allocator_has_given_out(server, client):
    """While sessions rest and while a turn runs: the classes sum up to the held pages, and `active` is 0 when idle."""
    pool = server.running.engine.holdings.pool
    sessions = [client.create_session(text=f"Session {number} has a prefix of its own.") for number in range(3)]
    idle = device_bytes(server.metrics())
    assert sum(idle.values()) == pool.held * server.page_bytes > 0
    assert (idle["active"], idle["pinned"]) == (0, 0)
    with sessions[0].stream(text="Go on", **GREEDY) as turn:
        events = turn.events()
        next(events)
        assert device_bytes(server.metrics())["active"] > 0
    server.wait_idle()
    after = device_bytes(server.metrics())
    assert after["active"] == 0
    assert sum(after.values()) == pool.held * server.page_bytes
    assert server.metrics()["segue_kv_capacity_bytes", "device"] == pool.num_pages * server.page_bytes
    for session in sessions:
        session.delete()
    assert device_bytes(server.metrics())["idle"] == 0


def test_counters_equal_what_the_clients_received(server, client):
    """Tokens, turns and calls, counted on both sides of the socket."""
    before = server.metrics()
    session = client.create_session()
    turns = [session.generate(text=" and then", **GREEDY, max_tokens=count) for count in (3, 5)]
    turns.append(client.generate(text="Once", **GREEDY, max_tokens=2))
    with pytest.raises(SegueError):
        client.generate(text="")
    after = server.metrics()

    def grown(*key):
        return after[key] - before[key]

    assert grown("segue_generated_tokens_total") == sum(len(turn.token_ids) for turn in turns) == 10
    assert grown("segue_prompt_tokens_total", "computed") == sum(turn.usage.computed_tokens for turn in turns)
    assert grown("segue_prompt_tokens_total", "session") == sum(turn.usage.session_reused_tokens for turn in turns)
    assert grown("segue_turns_total", "max_tokens") == 3
    assert grown("segue_time_to_first_token_seconds_count", "new") == 2
    assert grown("segue_time_to_first_token_seconds_count", "warm") == 1
    assert grown("segue_inter_token_seconds_count") == 10 - 3
    assert grown("segue_sessions_opened_total", "create") == 1
    assert grown("segue_sessions_opened_total", "ephemeral") == 1
    assert grown("grpc_server_call_started_total", f"{READINESS}/Generate") == 4
    assert after["segue_turns_running",] == 0
    assert after["segue_sessions", "idle"] == 1


def test_promtool_finds_nothing_wrong_with_the_metrics(server, client):
    """The exposition after real traffic, read by Prometheus' own checker."""
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian: apt-get install prometheus)")
    client.generate(text="Once", **GREEDY, max_tokens=2)
    address = f"http://127.0.0.1:{server.running.ports.metrics}/metrics"
    with urllib.request.urlopen(address, timeout=10) as answer:
        exposition = answer.read()
    checked = subprocess.run(["promtool", "check", "metrics"], input=exposition, capture_output=True, check=False)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


def test_stock_health_stubs_tell_liveness_and_readiness(channel):
    """grpc_health's own client: Check, Watch and an unknown service."""
    stub = health_pb2_grpc.HealthStub(channel)
    for service in ("", READINESS):
        answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.RpcError) as unknown:
        stub.Check(health_pb2.HealthCheckRequest(service="nobody"), timeout=5)
    assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
    watch = stub.Watch(health_pb2.HealthCheckRequest(service=READINESS), timeout=5)
    assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
    watch.cancel()


def test_stock_reflection_finds_every_service_and_its_messages(channel):
    """grpc_reflection's own client (v1alpha), and the same question under the name of v1."""
    database = ProtoReflectionDescriptorDatabase(channel)
    names = set(database.get_services())
    assert {READINESS, "segue.v1.SessionService", "segue.v1.ModelService", "grpc.health.v1.Health"} <= names
    assert database.FindFileContainingSymbol(READINESS).package == "segue.v1"
    v1 = channel.stream_stream(
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        reflection_pb2.ServerReflectionRequest.SerializeToString,
        reflection_pb2.ServerReflectionResponse.FromString,
    )
    (answer,) = v1(iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=5)
    assert {service.name for service in answer.list_services_response.service} == names


def test_load_and_limits_tell_what_the_server_does_and_allows(server, client):
    """GetLoad beside a running turn, and the numbers that requests are checked against."""
    limits = client.server_info().limits
    assert limits.max_running_requests == server.config.max_running
    assert limits.prefill_chunk_tokens == server.config.prefill_chunk_tokens
    with client.stream(text="Once", **GREEDY) as turn:
        events = turn.events()
        next(events)
        load = client.load()
        assert (load.running_requests, load.queued_requests, load.sessions) == (1, 0, 1)
        assert load.kv_used_bytes > 0
        assert not load.draining
    server.wait_idle()
    server.settle()
    load = client.load()
    assert (load.running_requests, load.kv_used_bytes, load.sessions) == (0, 0, 0)
    counted = (load.prefilled_tokens, load.generated_tokens)
    answer = client.generate(text="Once upon a time", max_tokens=16, **GREEDY)
    now = client.load()
    assert now.generated_tokens - counted[1] == answer.usage.generated_tokens
    assert now.prefilled_tokens - counted[0] == answer.usage.computed_tokens
    assert now.time_to_first_token.count == load.time_to_first_token.count + 1
    assert now.inter_token.count == load.inter_token.count + answer.usage.generated_tokens - 1
    assert now.time_to_first_token.HasField("median")
    total = load.kv_evictable_bytes + load.kv_free_bytes
    assert total == limits.kv_budget_bytes, "an idle server can give back all of its pool"
