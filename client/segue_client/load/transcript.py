"""What has been said in a conversation, in the form in which a turn takes its input."""

from __future__ import annotations

from copy import deepcopy
from typing import Protocol, Self

from segue_client.load.prompts import PromptMaker
from segue_client.load.workload import Prompt
from segue_client.options import InputOptions, Message
from segue_client.turn import AsyncTurn


class Transcript(Protocol):
    """Grows by what is asked and answered."""

    def __len__(self) -> int: ...

    def ask(self, prompt: Prompt, role: str = "user") -> None:
        """Adds what the system or the user says."""

    def answer(self, turn: AsyncTurn) -> None:
        """Adds what the model has said."""

    def input(self, start: int = 0) -> InputOptions:
        """What was said from `start` on, to be sent."""

    def copy(self) -> Self:
        """One that goes on by itself."""


class TokenTranscript:
    """Token ids: exact lengths, and nothing to tokenize."""

    def __init__(self, maker: PromptMaker) -> None:
        self._maker = maker
        self._ids: list[int] = []

    def __len__(self) -> int:
        return len(self._ids)

    def ask(self, prompt: Prompt, role: str = "user") -> None:  # noqa: ARG002  tokens have no roles
        self._ids.extend(self._maker.tokens(prompt))

    def answer(self, turn: AsyncTurn) -> None:
        self._ids.extend(turn.token_ids)

    def input(self, start: int = 0) -> InputOptions:
        return {"tokens": self._ids[start:]}

    def copy(self) -> Self:
        return deepcopy(self)


class MessageTranscript:
    """Chat messages; their bare text where the model has no chat template."""

    def __init__(self, maker: PromptMaker, has_template: bool) -> None:
        self._maker = maker
        self._has_template = has_template
        self._messages: list[Message] = []

    def __len__(self) -> int:
        return len(self._messages)

    def ask(self, prompt: Prompt, role: str = "user") -> None:
        self._messages.append({"role": role, "content": self._maker.text(prompt)})

    def answer(self, turn: AsyncTurn) -> None:
        self._messages.append({"role": "assistant", "content": turn.text})

    def input(self, start: int = 0) -> InputOptions:
        said = self._messages[start:]
        return {"messages": said} if self._has_template else {"text": "\n".join(one["content"] for one in said)}

    def copy(self) -> Self:
        return deepcopy(self)
