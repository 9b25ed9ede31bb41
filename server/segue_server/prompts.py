"""From what a caller sends to the tokens that its turn appends to the ledger."""

from collections.abc import Collection, Sequence

from segue_model.chat import ChatTemplate, ChatTemplateError, encode_chat
from segue_model.tokenizer import Tokenizer
from segue_server.errors import FieldInvalid
from segue_server.requests import ChatMessage, ChatTurn, Input, TextInput, TokenInput

Messages = list[dict[str, str]]

_QUESTION = {"role": "user", "content": "question"}
_HISTORY: Messages = [_QUESTION, {"role": "assistant", "content": "one reply."}]
_OTHER_HISTORY: Messages = [_QUESTION, {"role": "assistant", "content": "another!"}]


class Prompts:
    """Tokenizer and chat template of the served model; either may be missing."""

    def __init__(self, tokenizer: Tokenizer | None, template: ChatTemplate | None) -> None:
        self.tokenizer = tokenizer
        self.template = template

    def encode(self, given: Input, *, ledger: Sequence[int], reply_open: bool) -> list[int]:
        """Tokens to append to `ledger`. `reply_open`: the ledger ends with sampled tokens, perhaps of a cut reply.

        Raises FieldInvalid when the input needs a tokenizer or template that is missing, or the template refuses it.
        """
        match given:
            case None:
                return []
            case TokenInput(ids):
                return list(ids)
            case TextInput(text):
                return self.need_tokenizer("text").encode(text, add_special_tokens=not ledger)
            case ChatTurn():
                return self._chat(given, ledger=ledger, reply_open=reply_open)

    def need_tokenizer(self, field: str) -> Tokenizer:
        if self.tokenizer is None:
            raise FieldInvalid.one(field, "the served model has no tokenizer; send token_ids")
        return self.tokenizer

    def _chat(self, turn: ChatTurn, *, ledger: Sequence[int], reply_open: bool) -> list[int]:
        tokenizer = self.need_tokenizer("chat")
        if self.template is None:
            raise FieldInvalid.one("chat", "the served model has no chat template; send text or token_ids")
        messages = [_plain(message) for message in turn.messages]
        try:
            if not ledger:
                return encode_chat(self.template, tokenizer, messages, turn.add_generation_prompt)
            return self._continue(self.template, tokenizer, messages, turn, ledger, reply_open)
        except ChatTemplateError as error:
            raise FieldInvalid.one("chat", f"the model's chat template refused it: {error}") from error

    def _continue(
        self,
        template: ChatTemplate,
        tokenizer: Tokenizer,
        messages: Messages,
        turn: ChatTurn,
        ledger: Sequence[int],
        reply_open: bool,
    ) -> list[int]:
        """What the template adds to a conversation that goes on.

        A template renders whole conversations, and some put a default system prompt before a first user message. So a
        stand-in history is rendered with and without the new messages, and the difference is the answer. A reply that
        ended by itself left its end token in the ledger and one that was cut did not: what the template puts after a
        reply is added as far as it is missing.
        """
        history = encode_chat(template, tokenizer, _HISTORY, False)
        whole = encode_chat(template, tokenizer, _HISTORY + messages, turn.add_generation_prompt)
        if whole[: len(history)] != history:
            raise ChatTemplateError("it changes earlier messages when new ones come, so a session cannot go on from it")
        closing = _common_end(history, encode_chat(template, tokenizer, _OTHER_HISTORY, False)) if reply_open else []
        return _missing_end(ledger, closing, tokenizer.special_ids) + whole[len(history) :]


def _common_end(one: list[int], other: list[int]) -> list[int]:
    """What two conversations that differ only in the last reply both end with: an end token and a newline, say."""
    pairs = zip(reversed(one), reversed(other), strict=False)
    same = next((n for n, (a, b) in enumerate(pairs) if a != b), 0)
    return one[len(one) - same :]


def _missing_end(ledger: Sequence[int], closing: list[int], special: Collection[int]) -> list[int]:
    """The part of `closing` that the ledger does not end with already.

    After the end token only what follows it is missing: a space that the template writes before it (Llama 2) is not.
    """
    last = ledger[-1]
    if last in special and last in closing:
        return closing[len(closing) - closing[::-1].index(last) :]
    for length in range(len(closing), 0, -1):
        if list(ledger[-length:]) == closing[:length]:
            return closing[length:]
    return closing


def _plain(message: ChatMessage) -> dict[str, str]:
    return {"role": message.role, "content": message.content}
