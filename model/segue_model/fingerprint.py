"""Which model is this? A digest that changes with the weights, the tokenizer or the configuration."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

WHOLE = 256 << 20  # bytes; a larger file is sampled
SAMPLE = 1 << 20
SAMPLES = 64


def fingerprint(path: Path) -> str:
    """32 hex digits over the names, sizes and content of a model file, or of the files of a model folder.

    Files above 256 MiB count by their size and 64 samples of 1 MiB, spread evenly, so that a large model starts as
    quickly as a small one.
    """
    digest = hashlib.blake2b(digest_size=16)
    files = sorted(p for p in path.iterdir() if p.is_file()) if path.is_dir() else [path]
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name if path.is_dir() else ''}\0{size}\0".encode())
        for piece in _pieces(file, size):
            digest.update(piece)
    return digest.hexdigest()


def _pieces(file: Path, size: int) -> Iterator[bytes]:
    with file.open("rb") as stream:
        if size <= WHOLE:
            while piece := stream.read(SAMPLE):
                yield piece
            return
        for number in range(SAMPLES):
            stream.seek((size - SAMPLE) * number // (SAMPLES - 1))
            yield stream.read(SAMPLE)
