"""Token ids to text, one at a time, without cutting a character."""


class Detokenizer:
    """Text of a token stream. One per stream; not shared between threads."""

    def push(self, token_id: int) -> str:
        """The text that became complete with this token; "" while a character is still open."""
        raise NotImplementedError

    def flush(self) -> str:
        """What was held back at the end: U+FFFD for a character that never became whole, else ""."""
        raise NotImplementedError
