"""The one error of this package."""


class TokenizerError(ValueError):
    """A vocabulary is damaged or not supported, or an id names no token. Names the key and what was found."""
