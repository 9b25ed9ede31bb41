"""Hand a checkpoint's weights to the kernels, one tensor at a time: the model is never inflated to float32."""

from typing import Final, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from segue_model.arrays import BFLOAT16, Floats, Weights
from segue_model.config import DecoderConfig
from segue_model.runner.native.kernels import Kernels
from segue_model.runner.native.library import Rounding, Slot, Stored

Bytes = npt.NDArray[np.uint8]

FLOATS: Final = {np.dtype(np.float32): Stored.F32, np.dtype(np.float16): Stored.F16, BFLOAT16: Stored.BF16}
STORED: Final = {int(stored): stored for stored in Stored}
FORMATS: Final = {"auto": Rounding.BF16, "bf16": Rounding.BF16, "int8": Rounding.INT8, "int4": Rounding.INT4}


class Raw(Protocol):
    """A weight in the blocks it is stored in, like loaders.gguf.RawTensor."""

    @property
    def quant(self) -> int: ...
    @property
    def rows(self) -> Bytes: ...


@runtime_checkable
class HasBlocks(Protocol):
    """Weights that can be read without dequantising them, like loaders.gguf.GgufWeights."""

    def raw(self, name: str) -> Raw: ...


class Rows(NamedTuple):
    """A matrix ready to be packed."""

    stored: Stored
    rounding: Rounding
    data: Bytes  # (rows, bytes of a row)


def load_weights(config: DecoderConfig, weights: Weights, kernels: Kernels, form: str) -> None:
    """Pack all weights. form: a key of FORMATS; "auto" keeps stored blocks and rounds floats to bf16.

    Raises ValueError naming the tensor that is missing or has another shape.
    """
    loader = _Loader(weights, kernels, form)
    loader.matrix(Slot.EMBED, 0, "embed.weight", config.vocab_size, config.dim)
    for i in range(config.layers):
        _load_layer(loader, config, i)
    loader.vector(Slot.NORM, 0, "norm.weight", config.dim)
    if config.tie_embeddings:
        kernels.tie_head()
    else:
        loader.matrix(Slot.HEAD, 0, "head.weight", config.vocab_size, config.dim)


def _load_layer(loader: "_Loader", config: DecoderConfig, i: int) -> None:
    dim, ffn_dim, head_dim = config.dim, config.ffn_dim, config.head_dim
    q, kv, prefix = config.heads * head_dim, config.kv_heads * head_dim, f"layers.{i}."
    loader.vector(Slot.ATTENTION_NORM, i, f"{prefix}attention_norm.weight", dim)
    for slot, name, rows in ((Slot.WQ, "wq", q), (Slot.WK, "wk", kv), (Slot.WV, "wv", kv)):
        loader.matrix(slot, i, f"{prefix}attention.{name}.weight", rows, dim)
    if config.qkv_bias:
        for slot, name, rows in ((Slot.Q_BIAS, "wq", q), (Slot.K_BIAS, "wk", kv), (Slot.V_BIAS, "wv", kv)):
            loader.vector(slot, i, f"{prefix}attention.{name}.bias", rows)
    if config.qk_norm:
        loader.vector(Slot.Q_NORM, i, f"{prefix}attention.q_norm.weight", head_dim)
        loader.vector(Slot.K_NORM, i, f"{prefix}attention.k_norm.weight", head_dim)
    loader.matrix(Slot.WO, i, f"{prefix}attention.wo.weight", dim, q)
    loader.vector(Slot.FFN_NORM, i, f"{prefix}ffn_norm.weight", dim)
    loader.matrix(Slot.GATE, i, f"{prefix}ffn.gate.weight", ffn_dim, dim)
    loader.matrix(Slot.UP, i, f"{prefix}ffn.up.weight", ffn_dim, dim)
    loader.matrix(Slot.DOWN, i, f"{prefix}ffn.down.weight", dim, ffn_dim)


class _Loader:
    def __init__(self, weights: Weights, kernels: Kernels, form: str) -> None:
        self._weights, self._kernels, self._form = weights, kernels, form

    def vector(self, slot: Slot, layer: int, name: str, count: int) -> None:
        values = np.ascontiguousarray(self._array(name, (count,)), np.float32)
        self._kernels.set_vector(slot, layer, values)

    def matrix(self, slot: Slot, layer: int, name: str, count: int, cols: int) -> None:
        rows = self._stored_rows(name, count, cols) or self._float_rows(slot, name, count, cols)
        self._kernels.set_matrix(slot, layer, rows.stored, rows.rounding, rows.data, cols)

    def _stored_rows(self, name: str, count: int, cols: int) -> Rows | None:
        """The blocks as they lie in the file, when they may be kept and have kernels."""
        if self._form != "auto" or not isinstance(self._weights, HasBlocks) or name not in self._weights:
            return None
        raw = self._weights.raw(name)
        stored = STORED.get(int(raw.quant))
        if stored is None:
            return None
        if raw.rows.shape != (count, self._kernels.row_bytes(stored, cols)):
            raise ValueError(f"{name} must have the shape {(count, cols)}, its {stored.name} blocks differ")
        return Rows(stored, Rounding.BF16, np.ascontiguousarray(raw.rows))

    def _float_rows(self, slot: Slot, name: str, count: int, cols: int) -> Rows:
        array = np.ascontiguousarray(self._array(name, (count, cols)))
        return Rows(FLOATS[array.dtype], self._rounding(slot), array.view(np.uint8))

    def _rounding(self, slot: Slot) -> Rounding:
        if self._form == "auto" and isinstance(self._weights, HasBlocks):
            return Rounding.INT8  # blocks without kernels: dequantised, so bf16 would only be larger
        # Four bits in the head change answers: KL 0.063 instead of 0.004 on SmolLM2.
        coarse = self._form == "int4" and slot in {Slot.EMBED, Slot.HEAD}
        return Rounding.INT8 if coarse else FORMATS[self._form]

    def _array(self, name: str, shape: tuple[int, ...]) -> Floats:
        if name not in self._weights:
            raise ValueError(f"the checkpoint has no tensor {name}")
        array = self._weights[name]
        if array.shape != shape:
            raise ValueError(f"{name} must have the shape {shape}, got {array.shape}")
        return array
