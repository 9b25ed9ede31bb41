"""The contiguous KV cache of the reference model: it owns its position, and everything else asks it."""

import torch

from segue_model.config import DecoderConfig


class KVCache:
    """K and V of `capacity` positions for every layer, allocated once.

    `pos` counts the positions already computed: queries start there, RoPE is sliced from there, and setting it to a
    smaller value is a rewind. What lies beyond `pos` is never read.
    """

    def __init__(
        self,
        config: DecoderConfig,
        capacity: int,
        *,
        batch: int = 1,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if capacity < 1 or batch < 1:
            raise ValueError(f"capacity and batch must be at least 1, got {capacity} and {batch}")
        shape = (config.layers, batch, config.kv_heads, capacity, config.head_dim)
        self._keys = torch.zeros(shape, dtype=dtype, device=device)
        self._values = torch.zeros(shape, dtype=dtype, device=device)
        self._pos = 0

    @property
    def pos(self) -> int:
        return self._pos

    @pos.setter
    def pos(self, value: int) -> None:
        if not 0 <= value <= self._pos:
            raise ValueError(f"pos can only be rewound to 0 .. {self._pos}, got {value}")
        self._pos = value

    @property
    def batch(self) -> int:
        return self._keys.shape[1]

    @property
    def capacity(self) -> int:
        return self._keys.shape[3]

    @property
    def dtype(self) -> torch.dtype:
        return self._keys.dtype

    @property
    def nbytes(self) -> int:
        """2 * layers * batch * kv_heads * head_dim * capacity * bytes of an element."""
        return self._keys.nbytes + self._values.nbytes

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store k and v (B, kv_heads, T, head_dim) at pos and return views of positions 0 .. pos + T - 1.

        Does not advance `pos`: every layer of a forward writes at the same place.
        """
        end = self._checked_end(k.shape[2])
        self._keys[layer, :, :, self._pos : end] = k
        self._values[layer, :, :, self._pos : end] = v
        return self._keys[layer, :, :, :end], self._values[layer, :, :, :end]

    def advance(self, tokens: int) -> None:
        """Count `tokens` positions as computed: once per forward, after all layers have written them."""
        self._pos = self._checked_end(tokens)

    def _checked_end(self, tokens: int) -> int:
        end = self._pos + tokens
        if end > self.capacity:
            raise ValueError(f"the cache holds {self.capacity} positions; {tokens} more after {self._pos} do not fit")
        return end
