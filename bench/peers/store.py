"""Where the compared checkpoints lie; each is made when a system first asks for it."""

import os
import subprocess
from functools import cached_property
from pathlib import Path
from typing import Literal

from peers.models import Q4_0, Q8_0, made_once, write_hugging_face, write_random_gguf
from segue_model.checkpoint import Checkpoint
from segue_model.loaders import find_embedded_model, load_checkpoint

Model = Literal["smollm2", "random-1.1b", "random-1.1b-int8"]


def cache_folder() -> Path:
    """Outside the tree: gigabytes of other people's software and what it needs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "segue" / "bench"


class Store:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def gguf(self, model: Model) -> Path:
        """As packaged, and what Segue is measured on."""
        if model == "smollm2":
            return self._embedded
        blocks = Q8_0 if model == "random-1.1b-int8" else Q4_0
        name = f"random-1.1b-{blocks.type.name.lower()}.gguf"
        return made_once(self._folder / name, lambda path: write_random_gguf(self._embedded, path, blocks))

    def checkpoint(self, model: Model) -> Checkpoint:
        return load_checkpoint(self.gguf(model))  # the file is mapped, not read

    def hugging_face(self) -> Path:
        return made_once(self._folder / "smollm2-float32", lambda path: write_hugging_face(self._embedded, path))

    def openvino(self, optimum: Path) -> Path:
        """optimum: the peer's optimum-cli, which traces the model and compresses its weights to int8."""
        source = self.hugging_face()
        words = ["export", "openvino", "--task", "text-generation-with-past", "--weight-format", "int8"]
        return made_once(
            self._folder / "smollm2-openvino-int8", lambda path: _call(optimum, *words, "--model", source, path)
        )

    def requantised(self, model: Model, quant: str, quantize: Path) -> Path:
        """quantize: the peer's llama-quantize. Only to formats finer than the file's own."""
        source = self.gguf(model)
        return made_once(
            self._folder / f"{model}-{quant.lower()}.gguf",
            lambda path: _call(quantize, "--allow-requantize", source, path, quant),
        )

    @staticmethod
    def stored_bytes(file: Path) -> int:
        return load_checkpoint(file).weight_bytes

    @cached_property
    def _embedded(self) -> Path:
        return find_embedded_model()


def _call(*words: object) -> None:
    """Raises CalledProcessError; its output is shown only then."""
    subprocess.run([str(word) for word in words], check=True, capture_output=True, text=True)
