"""segue.v1.SessionService."""
# ruff: noqa: N802 - methods have the names of the proto

from collections.abc import AsyncIterator
from contextlib import aclosing

from segue.v1 import session_pb2
from segue_server.grpc_api import convert_requests, convert_snapshots, convert_views
from segue_server.grpc_api.form import CallContext, caller_of, check, origin_of, read
from segue_server.grpc_api.port import Service


class SessionServicer:
    """Create, look at, watch, read, change, fork, rewind and delete sessions."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def CreateSession(
        self, message: session_pb2.CreateSessionRequest, context: CallContext
    ) -> session_pb2.Session:
        request = read(message, context, convert_requests.create_session_request)
        made = await self._service.create_session(request, caller=caller_of(context), origin=origin_of(context))
        return convert_views.session(made)

    async def GetSession(self, message: session_pb2.GetSessionRequest, context: CallContext) -> session_pb2.Session:
        check(message, context)
        return convert_views.session(await self._service.get_session(message.session_id))

    async def ListSessions(
        self, message: session_pb2.ListSessionsRequest, context: CallContext
    ) -> session_pb2.ListSessionsResponse:
        request = read(message, context, convert_requests.list_sessions_request)
        return convert_views.session_page(await self._service.list_sessions(request))

    async def DeleteSession(
        self, message: session_pb2.DeleteSessionRequest, context: CallContext
    ) -> session_pb2.DeleteSessionResponse:
        check(message, context)
        freed = await self._service.delete_session(
            message.session_id, etag=message.etag, force=message.force, allow_missing=message.allow_missing
        )
        return session_pb2.DeleteSessionResponse(freed_bytes=freed)

    async def ForkSession(
        self, message: session_pb2.ForkSessionRequest, context: CallContext
    ) -> session_pb2.ForkSessionResponse:
        request = read(message, context, convert_requests.fork_session_request)
        children = await self._service.fork_session(request)
        return session_pb2.ForkSessionResponse(sessions=[convert_views.session(child) for child in children])

    async def UpdateSession(
        self, message: session_pb2.UpdateSessionRequest, context: CallContext
    ) -> session_pb2.Session:
        request = read(message, context, convert_requests.update_session_request)
        return convert_views.session(await self._service.update_session(request))

    async def ReadSessionTokens(
        self, message: session_pb2.ReadSessionTokensRequest, context: CallContext
    ) -> AsyncIterator[session_pb2.ReadSessionTokensResponse]:
        request = read(message, context, convert_requests.read_tokens_request)
        async with aclosing(self._service.read_tokens(request)) as chunks:
            async for chunk in chunks:
                yield convert_views.token_chunk(chunk)

    async def WatchSessions(
        self, message: session_pb2.WatchSessionsRequest, context: CallContext
    ) -> AsyncIterator[session_pb2.SessionEvent]:
        request = read(message, context, convert_requests.watch_sessions_request)
        async with aclosing(self._service.watch_sessions(request)) as events:
            await context.send_initial_metadata(())  # from here on nothing is missed
            async for event in events:
                yield convert_views.session_event(event)

    async def MoveSessionCache(
        self, message: session_pb2.MoveSessionCacheRequest, context: CallContext
    ) -> session_pb2.Session:
        request = read(message, context, convert_snapshots.move_cache_request)
        return convert_views.session(await self._service.move_cache(request))

    async def ExportSession(
        self, message: session_pb2.ExportSessionRequest, context: CallContext
    ) -> AsyncIterator[session_pb2.ExportSessionResponse]:
        check(message, context)
        exported = self._service.export_session(message.session_id, tokens_only=message.tokens_only, etag=message.etag)
        async with aclosing(exported) as parts:
            async for part in parts:
                yield convert_snapshots.export_part(part)

    async def ImportSession(
        self, messages: AsyncIterator[session_pb2.ImportSessionRequest], context: CallContext
    ) -> session_pb2.Session:
        first = await anext(aiter(messages), session_pb2.ImportSessionRequest())
        request = read(first, context, convert_snapshots.import_request)
        parts = convert_snapshots.import_parts(messages)
        return convert_views.session(await self._service.import_session(request, parts, caller=caller_of(context)))

    async def RewindSession(
        self, message: session_pb2.RewindSessionRequest, context: CallContext
    ) -> session_pb2.Session:
        request = read(message, context, convert_requests.rewind_session_request)
        return convert_views.session(await self._service.rewind_session(request))
