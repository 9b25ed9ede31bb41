"""segue.v1.ModelService."""
# ruff: noqa: N802 - methods have the names of the proto

import asyncio

from segue.v1 import model_pb2
from segue_server.grpc_api import convert_views
from segue_server.grpc_api.convert_requests import input_of
from segue_server.grpc_api.form import CallContext, Form, read
from segue_server.grpc_api.port import Service
from segue_server.requests import Input


class ModelServicer:
    """What is served, by whom, how busy it is, and its tokenizer."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def GetModelInfo(self, _message: model_pb2.GetModelInfoRequest, _context: CallContext) -> model_pb2.ModelInfo:
        return convert_views.model_info(self._service.model_info())

    async def GetServerInfo(
        self, _message: model_pb2.GetServerInfoRequest, _context: CallContext
    ) -> model_pb2.ServerInfo:
        return convert_views.server_info(self._service.server_info())

    async def GetLoad(self, _message: model_pb2.GetLoadRequest, _context: CallContext) -> model_pb2.Load:
        return convert_views.load(self._service.load())

    # A long text takes seconds to tokenize: in a thread, so that streams and health go on meanwhile.
    async def Tokenize(self, message: model_pb2.TokenizeRequest, context: CallContext) -> model_pb2.TokenizeResponse:
        text = read(message, context, _text_or_chat)
        ids, pieces = await asyncio.to_thread(
            self._service.tokenize, text, add_special_tokens=message.add_special_tokens
        )
        return model_pb2.TokenizeResponse(token_ids=ids, pieces=pieces)

    async def Detokenize(
        self, message: model_pb2.DetokenizeRequest, _context: CallContext
    ) -> model_pb2.DetokenizeResponse:
        text = await asyncio.to_thread(
            self._service.detokenize, tuple(message.token_ids), skip_special_tokens=message.skip_special_tokens
        )
        return model_pb2.DetokenizeResponse(text=text)


def _text_or_chat(form: Form, message: model_pb2.TokenizeRequest) -> Input:
    if message.WhichOneof("input") is None:
        form.refuse("input", "give text or chat")
    return input_of(message, "input")
