"""Model files to Checkpoint: GGUF, Hugging Face safetensors and Meta's consolidated .pth, told apart by content."""

from segue_model.loaders.open import find_embedded_model, load_checkpoint

__all__ = ["find_embedded_model", "load_checkpoint"]
