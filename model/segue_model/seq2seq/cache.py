"""What the decoder remembers between calls: keys and values, of the source once and of the target so far."""

from collections.abc import Sequence

import torch

from segue_model.seq2seq.attention import KeysValues


class LayerCache:
    """One decoder layer's keys and values."""

    def __init__(self, source: KeysValues) -> None:
        self.source = source  # of the encoder's output: S positions, never changes
        self._target: KeysValues | None = None  # of the target so far: T positions, grows

    def extend(self, new: KeysValues) -> KeysValues:
        """Append new target positions; returns all of them."""
        old = self._target
        if old is not None:
            new = KeysValues(torch.cat((old.k, new.k), dim=2), torch.cat((old.v, new.v), dim=2))
        self._target = new
        return new

    def select(self, rows: torch.Tensor) -> None:
        self.source = _select(self.source, rows)
        if self._target is not None:
            self._target = _select(self._target, rows)


class DecoderCache:
    """All layers, and which positions are padding. Training is the case of one call with an empty cache."""

    def __init__(self, sources: Sequence[KeysValues], source_padding: torch.Tensor) -> None:
        """sources: one per decoder layer; source_padding: (B, 1, 1, S), True = blocked."""
        self.layers = [LayerCache(source) for source in sources]
        self.source_padding = source_padding
        self.target_padding = source_padding[..., :0]  # (B, 1, 1, pos)

    @property
    def pos(self) -> int:
        """Target positions already computed: the next token stands here."""
        return self.target_padding.shape[-1]

    def advance(self, target_padding: torch.Tensor) -> None:
        """Count positions as computed, once per call, after all layers; target_padding: (B, 1, 1, new pos)."""
        self.target_padding = target_padding

    def select(self, rows: torch.Tensor) -> None:
        """Keep these rows of the batch, in this order, repeats allowed: beam search goes on from its survivors."""
        self.source_padding = self.source_padding[rows]
        self.target_padding = self.target_padding[rows]
        for layer in self.layers:
            layer.select(rows)


def _select(stored: KeysValues, rows: torch.Tensor) -> KeysValues:
    return KeysValues(stored.k[rows], stored.v[rows])
