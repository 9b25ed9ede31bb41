"""Chat templates: messages to text, and to token ids in which a message can never forge a control token."""

from collections.abc import Mapping, Sequence

from segue_model.tokenizer import Tokenizer


class ChatTemplateError(ValueError):
    """A chat template is broken, refused the messages, or asked for what is not allowed. Carries its own message."""


class ChatTemplate:
    """A Jinja chat template in a sandbox. Safe to share between threads."""

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "") -> None:
        self.source = source

    def render(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool) -> str:
        """The prompt text, control tokens written out."""
        raise NotImplementedError


def encode_chat(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, str]],
    add_generation_prompt: bool,
) -> list[int]:
    """Token ids of the rendered conversation."""
    raise NotImplementedError
