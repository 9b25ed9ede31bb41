"""segue.v1.GenerationService."""
# ruff: noqa: N802 - methods have the names of the proto

from collections.abc import AsyncIterator
from dataclasses import dataclass

from segue.v1 import generation_pb2
from segue_server.events import Finished, Prefill, Tokens
from segue_server.grpc_api.convert_events import finished, generate_event, logprobs
from segue_server.grpc_api.convert_requests import (
    COMMIT_POLICIES,
    append_request,
    generate_request,
    score_tokens_request,
)
from segue_server.grpc_api.convert_views import estimate, scores
from segue_server.grpc_api.form import CallContext, Form, caller_of, origin_of, read
from segue_server.grpc_api.port import Service, Turn
from segue_server.requests import CommitPolicy, OutputOptions


class GenerationServicer:
    """Turns. Leaving `async with` early, for whatever reason, leaves the turn to itself, for its `detach_grace`."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def Generate(
        self, message: generation_pb2.GenerateRequest, context: CallContext
    ) -> generation_pb2.GenerateResponse:
        request = read(message, context, generate_request)
        async with self._service.generate(
            request, caller=caller_of(context), time_remaining=context.time_remaining, origin=origin_of(context)
        ) as turn:
            return await _collect(turn, request.output)

    async def GenerateStream(
        self, message: generation_pb2.GenerateRequest, context: CallContext
    ) -> AsyncIterator[generation_pb2.GenerateEvent]:
        request = read(message, context, generate_request)
        async with self._service.generate(
            request, caller=caller_of(context), time_remaining=context.time_remaining, origin=origin_of(context)
        ) as turn:
            async for sequence, event in turn:
                yield generate_event(sequence, event, request.output)

    async def AttachGeneration(
        self, message: generation_pb2.AttachGenerationRequest, context: CallContext
    ) -> AsyncIterator[generation_pb2.GenerateEvent]:
        request = read(message, context, _attach_request)
        async with self._service.attach(
            request.request_id,
            request.after_sequence,
            caller=caller_of(context),
            time_remaining=context.time_remaining,
        ) as turn:
            async for sequence, event in turn:
                yield generate_event(sequence, event, turn.output)

    async def AppendContext(
        self, message: generation_pb2.AppendContextRequest, context: CallContext
    ) -> AsyncIterator[generation_pb2.GenerateEvent]:
        request = read(message, context, append_request)
        async with self._service.append(
            request, caller=caller_of(context), time_remaining=context.time_remaining, origin=origin_of(context)
        ) as turn:
            async for sequence, event in turn:
                yield generate_event(sequence, event, request.output)

    async def ScoreTokens(
        self, message: generation_pb2.ScoreTokensRequest, context: CallContext
    ) -> generation_pb2.ScoreTokensResponse:
        request = read(message, context, score_tokens_request)
        scored = await self._service.score_tokens(
            request, caller=caller_of(context), time_remaining=context.time_remaining, origin=origin_of(context)
        )
        return scores(scored)

    async def EstimateGeneration(
        self, message: generation_pb2.GenerateRequest, context: CallContext
    ) -> generation_pb2.EstimateGenerationResponse:
        request = read(message, context, generate_request)
        return estimate(await self._service.estimate(request, caller=caller_of(context)))

    async def CancelGeneration(
        self, message: generation_pb2.CancelGenerationRequest, context: CallContext
    ) -> generation_pb2.CancelGenerationResponse:
        target = read(message, context, _cancel_target)
        was_running, last = await self._service.cancel(
            request_id=target.request_id, session_id=target.session_id, commit_policy=target.commit_policy
        )
        return generation_pb2.CancelGenerationResponse(
            was_running=was_running, finished=finished(last) if last else None
        )


async def _collect(turn: Turn, output: OutputOptions) -> generation_pb2.GenerateResponse:
    """All events of a turn in one answer."""
    answer = generation_pb2.GenerateResponse(request_id=turn.request_id, session_id=turn.session_id)
    texts: list[str] = []
    async for _, event in turn:
        match event:
            case Tokens():
                texts.append(event.text)
                answer.logprobs.extend(logprobs(event.logprobs))
                answer.token_ids.extend(event.token_ids if output.return_token_ids else ())
            case Prefill():
                answer.prompt_logprobs.extend(logprobs(event.prompt_logprobs))
            case Finished():
                answer.finished.CopyFrom(finished(event))
    answer.text = "".join(texts) if output.return_text else ""
    return answer


def _attach_request(
    form: Form, message: generation_pb2.AttachGenerationRequest
) -> generation_pb2.AttachGenerationRequest:
    if not message.request_id:
        form.refuse("request_id", "must name a turn")
    if message.after_sequence < 0:
        form.refuse("after_sequence", f"must not be negative, is {message.after_sequence}")
    return message


@dataclass(frozen=True, slots=True)
class _Target:
    request_id: str
    session_id: str
    commit_policy: CommitPolicy | None


def _cancel_target(form: Form, message: generation_pb2.CancelGenerationRequest) -> _Target:
    """An empty id is refused: elsewhere it has meant "all"."""
    if not (message.request_id or message.session_id):
        form.refuse(message.WhichOneof("target") or "target", "name a request_id or a session_id")
    return _Target(
        request_id=message.request_id,
        session_id=message.session_id,
        commit_policy=form.choice("commit_policy", message.commit_policy, COMMIT_POLICIES),
    )
