"""Chat templates: messages to text, and to token ids in which a message can never forge a control token."""

import datetime as dt
from collections.abc import Mapping, Sequence

from jinja2 import TemplateError

from segue_model.chat_sandbox import BUDGET, MAX_CHARACTERS, MAX_STEPS, Budget, ChatEnvironment, Refusal
from segue_model.tokenizer import Tokenizer

_MAX_SOURCE = 1 << 20


class ChatTemplateError(ValueError):
    """A chat template is broken, refused the messages, or asked for what is not allowed. Carries its own message."""


class ChatTemplate:
    """A Jinja chat template in a sandbox, run as transformers' `apply_chat_template` does.

    Safe to share between threads. Raises ChatTemplateError for a template that does not compile.
    """

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "") -> None:
        if len(source) > _MAX_SOURCE:
            raise ChatTemplateError(f"the template has {len(source)} characters, more than {_MAX_SOURCE}")
        self.source = source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        try:
            self._template = ChatEnvironment().from_string(source)
        except (TemplateError, RecursionError, SyntaxError, ValueError, MemoryError) as error:
            raise ChatTemplateError(f"the chat template does not compile: {error}") from error

    def render(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool) -> str:
        """The prompt text, control tokens written out.

        Raises ChatTemplateError for a message without role or content, with the template's own words where it objects,
        and when it takes too many steps or writes too much.
        """
        return self._render(_checked(messages), add_generation_prompt, _now())

    def render_guarded(
        self,
        messages: Sequence[Mapping[str, str]],
        guarded: Sequence[Mapping[str, str]],
        guard: str,
        *,
        add_generation_prompt: bool,
    ) -> str:
        """The rendering of `guarded`, which is `messages` with the character `guard` put in at some places.

        Raises ChatTemplateError when the template would have written something else without it.
        """
        now = _now()
        text = self._render(_checked(guarded), add_generation_prompt, now)
        if text.replace(guard, "") != self._render(_checked(messages), add_generation_prompt, now):
            raise ChatTemplateError("a message spells a control token at a place that the chat template takes apart")
        return text

    def _render(self, messages: list[dict[str, str]], add_generation_prompt: bool, now: dt.datetime) -> str:
        values = {
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
            "tools": None,
            "documents": None,
            "strftime_now": now.strftime,
            BUDGET: Budget(MAX_STEPS),
            **self._tokens,
        }
        parts: list[str] = []
        room = MAX_CHARACTERS
        try:
            for part in self._template.generate(values):
                parts.append(part)
                if (room := room - len(part)) < 0:
                    raise ChatTemplateError(f"the chat template wrote more than {MAX_CHARACTERS} characters")
        except ChatTemplateError:
            raise
        except Refusal as error:
            raise ChatTemplateError(str(error)) from error
        except Exception as error:  # template code can raise whatever Python code can
            raise ChatTemplateError(f"the chat template failed: {error}") from error
        return "".join(parts)


def encode_chat(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, str]],
    add_generation_prompt: bool,
) -> list[int]:
    """Token ids of the rendered conversation.

    Control tokens that the template writes are real; ones that a message spells, alone or together with its
    surroundings, stay text. Raises ChatTemplateError as `ChatTemplate.render` does.
    """
    plain = _checked(messages)
    guard = _unused_character(template.source, plain)
    guarded = [{key: tokenizer.guarded(value, guard) for key, value in message.items()} for message in plain]
    if guarded == plain:
        text = template.render(plain, add_generation_prompt=add_generation_prompt)
        return tokenizer.encode(text, allow_special=True)
    text = template.render_guarded(plain, guarded, guard, add_generation_prompt=add_generation_prompt)
    return tokenizer.encode_guarded(text, guard)


def _checked(messages: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Plain copies, which is all that a template gets to see."""
    for i, message in enumerate(messages):
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise ChatTemplateError(f"messages[{i}].{key} must be a string, got {message.get(key)!r:.80}")
    return [{str(key): str(value) for key, value in message.items() if value is not None} for message in messages]


def _unused_character(source: str, messages: Sequence[Mapping[str, str]]) -> str:
    """A noncharacter (Unicode 23.7: free for internal use) that nobody wrote."""
    used = set(source).union(*(value for message in messages for value in message.values()))
    for code in (*range(0xFDD0, 0xFDF0), *range(0xF0000, 0xFFFFE)):
        if chr(code) not in used:
            return chr(code)
    raise ChatTemplateError("the messages use every character there is")


def _now() -> dt.datetime:
    return dt.datetime.now().astimezone()
