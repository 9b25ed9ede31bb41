"""Every call there is, as a value: which method, which request, for which session, how long.

`Client` and `AsyncClient` differ only in how they carry one out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from google.protobuf.message import Message as ProtoMessage
from google.protobuf.wrappers_pb2 import Int32Value, StringValue

from segue.v1 import generation_pb2, model_pb2, session_pb2
from segue_client import requests
from segue_client.channel import Timeouts
from segue_client.options import (
    AppendOptions,
    CacheTierName,
    CommitPolicy,
    ForkOptions,
    ListOptions,
    Message,
    SessionOptions,
    TurnOptions,
    UpdateOptions,
)

RequestT = TypeVar("RequestT", bound=ProtoMessage)
ResponseT = TypeVar("ResponseT", bound=ProtoMessage)


@dataclass(frozen=True, slots=True)
class Method(Generic[RequestT, ResponseT]):
    """One RPC: its path and its message types."""

    path: str
    request_type: type[RequestT]
    response_type: type[ResponseT]

    def serialize(self, request: RequestT) -> bytes:
        return request.SerializeToString()

    def parse(self, data: bytes) -> ResponseT:
        return self.response_type.FromString(data)


CREATE_SESSION = Method("/segue.v1.SessionService/CreateSession", session_pb2.CreateSessionRequest, session_pb2.Session)
GET_SESSION = Method("/segue.v1.SessionService/GetSession", session_pb2.GetSessionRequest, session_pb2.Session)
LIST_SESSIONS = Method(
    "/segue.v1.SessionService/ListSessions", session_pb2.ListSessionsRequest, session_pb2.ListSessionsResponse
)
DELETE_SESSION = Method(
    "/segue.v1.SessionService/DeleteSession", session_pb2.DeleteSessionRequest, session_pb2.DeleteSessionResponse
)
FORK_SESSION = Method(
    "/segue.v1.SessionService/ForkSession", session_pb2.ForkSessionRequest, session_pb2.ForkSessionResponse
)
REWIND_SESSION = Method("/segue.v1.SessionService/RewindSession", session_pb2.RewindSessionRequest, session_pb2.Session)
UPDATE_SESSION = Method("/segue.v1.SessionService/UpdateSession", session_pb2.UpdateSessionRequest, session_pb2.Session)
READ_SESSION_TOKENS = Method(
    "/segue.v1.SessionService/ReadSessionTokens",
    session_pb2.ReadSessionTokensRequest,
    session_pb2.ReadSessionTokensResponse,
)
MOVE_SESSION_CACHE = Method(
    "/segue.v1.SessionService/MoveSessionCache", session_pb2.MoveSessionCacheRequest, session_pb2.Session
)
EXPORT_SESSION = Method(
    "/segue.v1.SessionService/ExportSession", session_pb2.ExportSessionRequest, session_pb2.ExportSessionResponse
)
IMPORT_SESSION = Method("/segue.v1.SessionService/ImportSession", session_pb2.ImportSessionRequest, session_pb2.Session)
WATCH_SESSIONS = Method(
    "/segue.v1.SessionService/WatchSessions", session_pb2.WatchSessionsRequest, session_pb2.SessionEvent
)
SCORE_TOKENS = Method(
    "/segue.v1.GenerationService/ScoreTokens", generation_pb2.ScoreTokensRequest, generation_pb2.ScoreTokensResponse
)
ESTIMATE_GENERATION = Method(
    "/segue.v1.GenerationService/EstimateGeneration",
    generation_pb2.GenerateRequest,
    generation_pb2.EstimateGenerationResponse,
)
GENERATE = Method(
    "/segue.v1.GenerationService/Generate", generation_pb2.GenerateRequest, generation_pb2.GenerateResponse
)
GENERATE_STREAM = Method(
    "/segue.v1.GenerationService/GenerateStream", generation_pb2.GenerateRequest, generation_pb2.GenerateEvent
)
APPEND_CONTEXT = Method(
    "/segue.v1.GenerationService/AppendContext", generation_pb2.AppendContextRequest, generation_pb2.GenerateEvent
)
ATTACH_GENERATION = Method(
    "/segue.v1.GenerationService/AttachGeneration",
    generation_pb2.AttachGenerationRequest,
    generation_pb2.GenerateEvent,
)
CANCEL_GENERATION = Method(
    "/segue.v1.GenerationService/CancelGeneration",
    generation_pb2.CancelGenerationRequest,
    generation_pb2.CancelGenerationResponse,
)
GET_MODEL_INFO = Method("/segue.v1.ModelService/GetModelInfo", model_pb2.GetModelInfoRequest, model_pb2.ModelInfo)
GET_SERVER_INFO = Method("/segue.v1.ModelService/GetServerInfo", model_pb2.GetServerInfoRequest, model_pb2.ServerInfo)
GET_LOAD = Method("/segue.v1.ModelService/GetLoad", model_pb2.GetLoadRequest, model_pb2.Load)
TOKENIZE = Method("/segue.v1.ModelService/Tokenize", model_pb2.TokenizeRequest, model_pb2.TokenizeResponse)
DETOKENIZE = Method("/segue.v1.ModelService/Detokenize", model_pb2.DetokenizeRequest, model_pb2.DetokenizeResponse)
# HealthCheckRequest {string service = 1} and HealthCheckResponse {enum status = 1} have the encoding of these wrappers,
# so that asking for readiness does not need the package grpcio-health-checking.
CHECK_HEALTH = Method("/grpc.health.v1.Health/Check", StringValue, Int32Value)

READY_SERVICE = "segue.v1.GenerationService"
SERVING = 1  # HealthCheckResponse.ServingStatus


@dataclass(frozen=True, slots=True)
class Call(Generic[RequestT, ResponseT]):
    """A method with its request, ready to be sent."""

    method: Method[RequestT, ResponseT]
    request: RequestT
    session_id: str = ""  # for the metadata; empty for calls of no session
    timeout: float | None = None  # seconds; None = the client's
    runs_model: bool = False  # picks the default timeout

    def deadline(self, timeouts: Timeouts) -> float:
        """Seconds this call may take."""
        if self.timeout is not None:
            return self.timeout
        return timeouts.turn if self.runs_model else timeouts.unary


TurnCall = (
    Call[generation_pb2.GenerateRequest, generation_pb2.GenerateEvent]
    | Call[generation_pb2.AppendContextRequest, generation_pb2.GenerateEvent]
)
StreamCall = TurnCall | Call[generation_pb2.AttachGenerationRequest, generation_pb2.GenerateEvent]


def create_session(options: SessionOptions) -> Call[session_pb2.CreateSessionRequest, session_pb2.Session]:
    request = requests.create_session(options)
    return Call(
        CREATE_SESSION, request, request.session_id, options.get("timeout"), runs_model=requests.has_prefix(request)
    )


def get_session(session_id: str, timeout: float | None) -> Call[session_pb2.GetSessionRequest, session_pb2.Session]:
    return Call(GET_SESSION, session_pb2.GetSessionRequest(session_id=session_id), session_id, timeout)


def list_sessions(options: ListOptions) -> Call[session_pb2.ListSessionsRequest, session_pb2.ListSessionsResponse]:
    return Call(LIST_SESSIONS, requests.list_sessions(options, page_token=""), timeout=options.get("timeout"))


def next_page(
    call: Call[session_pb2.ListSessionsRequest, session_pb2.ListSessionsResponse],
    page: session_pb2.ListSessionsResponse,
) -> Call[session_pb2.ListSessionsRequest, session_pb2.ListSessionsResponse] | None:
    """The call for the page after `page`, which answered `call`; None after the last one."""
    if not page.next_page_token:
        return None
    request = session_pb2.ListSessionsRequest()
    request.CopyFrom(call.request)
    request.page_token = page.next_page_token
    return replace(call, request=request)


def delete_session(
    session_id: str, etag: str, force: bool, allow_missing: bool, timeout: float | None
) -> Call[session_pb2.DeleteSessionRequest, session_pb2.DeleteSessionResponse]:
    request = session_pb2.DeleteSessionRequest(
        session_id=session_id, etag=etag, force=force, allow_missing=allow_missing
    )
    return Call(DELETE_SESSION, request, session_id, timeout)


def fork_session(
    session_id: str, count: int | None, options: ForkOptions
) -> Call[session_pb2.ForkSessionRequest, session_pb2.ForkSessionResponse]:
    return Call(FORK_SESSION, requests.fork_session(session_id, count, options), session_id, options.get("timeout"))


def update_session(
    session_id: str, etag: str, options: UpdateOptions
) -> Call[session_pb2.UpdateSessionRequest, session_pb2.Session]:
    request = requests.update_session(session_id, etag, options)
    return Call(UPDATE_SESSION, request, session_id, options.get("timeout"))


def read_tokens(
    session_id: str, start: int, end: int | None, text: bool, timeout: float | None
) -> Call[session_pb2.ReadSessionTokensRequest, session_pb2.ReadSessionTokensResponse]:
    request = session_pb2.ReadSessionTokensRequest(
        session_id=session_id, start_position=start, end_position=end, return_text=text
    )
    return Call(READ_SESSION_TOKENS, request, session_id, timeout)


def move_cache(
    session_id: str, tier: CacheTierName, from_position: int | None, timeout: float | None
) -> Call[session_pb2.MoveSessionCacheRequest, session_pb2.Session]:
    request = requests.move_cache(session_id, tier, from_position)
    return Call(MOVE_SESSION_CACHE, request, session_id, timeout, runs_model=True)


def export_session(
    session_id: str, tokens_only: bool, etag: str, timeout: float | None
) -> Call[session_pb2.ExportSessionRequest, session_pb2.ExportSessionResponse]:
    request = session_pb2.ExportSessionRequest(session_id=session_id, tokens_only=tokens_only, etag=etag)
    return Call(EXPORT_SESSION, request, session_id, timeout, runs_model=True)


def watch(
    session_id: str, after_sequence: int | None, timeout: float | None
) -> Call[session_pb2.WatchSessionsRequest, session_pb2.SessionEvent]:
    request = session_pb2.WatchSessionsRequest(session_id=session_id, after_sequence=after_sequence)
    return Call(WATCH_SESSIONS, request, session_id, timeout, runs_model=True)


def score(
    session_id: str, tokens: Sequence[int], top_logprobs: int | None, timeout: float | None
) -> Call[generation_pb2.ScoreTokensRequest, generation_pb2.ScoreTokensResponse]:
    request = generation_pb2.ScoreTokensRequest(session_id=session_id, token_ids=tokens, top_logprobs=top_logprobs)
    return Call(SCORE_TOKENS, request, session_id, timeout, runs_model=True)


def estimate(
    session_id: str, options: TurnOptions
) -> Call[generation_pb2.GenerateRequest, generation_pb2.EstimateGenerationResponse]:
    return Call(ESTIMATE_GENERATION, requests.generate(session_id, options), session_id, options.get("timeout"))


def rewind_session(
    session_id: str, position: int | None, turn: int | None, etag: str, timeout: float | None
) -> Call[session_pb2.RewindSessionRequest, session_pb2.Session]:
    return Call(REWIND_SESSION, requests.rewind_session(session_id, position, turn, etag), session_id, timeout)


def generate(
    session_id: str, options: TurnOptions
) -> Call[generation_pb2.GenerateRequest, generation_pb2.GenerateResponse]:
    request = requests.generate(session_id, options)
    return Call(GENERATE, request, session_id, options.get("timeout"), runs_model=True)


def stream(session_id: str, options: TurnOptions) -> Call[generation_pb2.GenerateRequest, generation_pb2.GenerateEvent]:
    request = requests.generate(session_id, options)
    return Call(GENERATE_STREAM, request, session_id, options.get("timeout"), runs_model=True)


def append_context(
    session_id: str, options: AppendOptions
) -> Call[generation_pb2.AppendContextRequest, generation_pb2.GenerateEvent]:
    request = requests.append_context(session_id, options)
    return Call(APPEND_CONTEXT, request, session_id, options.get("timeout"), runs_model=True)


def attach(
    request_id: str, after_sequence: int, session_id: str, timeout: float
) -> Call[generation_pb2.AttachGenerationRequest, generation_pb2.GenerateEvent]:
    """Takes up the events of a turn after the last one seen; `session_id` is for the metadata."""
    request = generation_pb2.AttachGenerationRequest(request_id=request_id, after_sequence=after_sequence)
    return Call(ATTACH_GENERATION, request, session_id, timeout)


def cancel(
    request_id: str | None,
    session_id: str | None,
    commit_policy: CommitPolicy | None = None,
    timeout: float | None = None,
    header_session_id: str = "",
) -> Call[generation_pb2.CancelGenerationRequest, generation_pb2.CancelGenerationResponse]:
    """Cancels by request or by session; `header_session_id` is the session of a request, where it is known."""
    request = requests.cancel(request_id, session_id, commit_policy)
    return Call(CANCEL_GENERATION, request, session_id or header_session_id, timeout)


def model_info(timeout: float | None) -> Call[model_pb2.GetModelInfoRequest, model_pb2.ModelInfo]:
    return Call(GET_MODEL_INFO, model_pb2.GetModelInfoRequest(), timeout=timeout)


def server_info(timeout: float | None) -> Call[model_pb2.GetServerInfoRequest, model_pb2.ServerInfo]:
    return Call(GET_SERVER_INFO, model_pb2.GetServerInfoRequest(), timeout=timeout)


def load(timeout: float | None) -> Call[model_pb2.GetLoadRequest, model_pb2.Load]:
    return Call(GET_LOAD, model_pb2.GetLoadRequest(), timeout=timeout)


def tokenize(
    text: str | None, messages: Sequence[Message] | None, add_special_tokens: bool, timeout: float | None
) -> Call[model_pb2.TokenizeRequest, model_pb2.TokenizeResponse]:
    return Call(TOKENIZE, requests.tokenize(text, messages, add_special_tokens), timeout=timeout)


def detokenize(
    tokens: Sequence[int], skip_special_tokens: bool, timeout: float | None
) -> Call[model_pb2.DetokenizeRequest, model_pb2.DetokenizeResponse]:
    request = model_pb2.DetokenizeRequest(token_ids=tokens, skip_special_tokens=skip_special_tokens)
    return Call(DETOKENIZE, request, timeout=timeout)


def check_ready(timeout: float) -> Call[StringValue, Int32Value]:
    return Call(CHECK_HEALTH, StringValue(value=READY_SERVICE), timeout=timeout)
