"""Text to token ids and back: tokenizer.json and GGUF vocabularies, and detokenisation of a stream."""

from segue_model.tokenizer.core import Tokenizer
from segue_model.tokenizer.detokenizer import Detokenizer
from segue_model.tokenizer.errors import TokenizerError

__all__ = ["Detokenizer", "Tokenizer", "TokenizerError"]
