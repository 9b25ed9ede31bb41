"""What stored weights are made of: ggml's types, how large their blocks are, and what they dequantise to.

Numbers and sizes: ggml-org/ggml, ggml.h and ggml-common.h; a test holds them to the package `gguf`. That package is
imported only where blocks become floats, for it takes a tenth of a start, and the kernels take the blocks as they are.
"""

from enum import IntEnum
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from segue_model.arrays import BFLOAT16


class BlockType(IntEnum):
    """enum ggml_type, as far as files hold it."""

    values: int  # of a block
    size: int  # bytes of a block

    def __new__(cls, number: int, values: int = 0, size: int = 0) -> Self:
        # Look-ups by number never come here; the defaults are for those who check their types.
        self = int.__new__(cls, number)
        self._value_, self.values, self.size = number, values, size
        return self

    F32 = 0, 1, 4
    F16 = 1, 1, 2
    Q4_0 = 2, 32, 18
    Q4_1 = 3, 32, 20
    Q5_0 = 6, 32, 22
    Q5_1 = 7, 32, 24
    Q8_0 = 8, 32, 34
    Q8_1 = 9, 32, 40
    Q2_K = 10, 256, 84
    Q3_K = 11, 256, 110
    Q4_K = 12, 256, 144
    Q5_K = 13, 256, 176
    Q6_K = 14, 256, 210
    Q8_K = 15, 256, 292
    IQ2_XXS = 16, 256, 66
    IQ2_XS = 17, 256, 74
    IQ3_XXS = 18, 256, 98
    IQ1_S = 19, 256, 50
    IQ4_NL = 20, 32, 18
    IQ3_S = 21, 256, 110
    IQ2_S = 22, 256, 82
    IQ4_XS = 23, 256, 136
    I8 = 24, 1, 1
    I16 = 25, 1, 2
    I32 = 26, 1, 4
    I64 = 27, 1, 8
    F64 = 28, 1, 8
    IQ1_M = 29, 256, 56
    BF16 = 30, 1, 2
    TQ1_0 = 34, 256, 54
    TQ2_0 = 35, 256, 66
    MXFP4 = 39, 32, 17
    NVFP4 = 40, 64, 36
    Q1_0 = 41, 128, 18


_FLOATS: Final[dict[BlockType, np.dtype[np.floating]]] = {
    BlockType.F32: np.dtype(np.float32),
    BlockType.F16: np.dtype(np.float16),
    BlockType.BF16: BFLOAT16,
}
NOT_READ: Final = frozenset(  # what activations are rounded to, integers, and what `gguf` cannot dequantise
    BlockType[name] for name in ("Q8_1", "Q8_K", "I8", "I16", "I32", "I64", "F64", "Q1_0")
)


def dequantise(rows: npt.NDArray[np.uint8], kind: BlockType) -> npt.NDArray[np.float32]:
    """The values of stored rows (rows, bytes of a row), in memory of their own. `kind` is none of NOT_READ."""
    if kind in _FLOATS:
        return rows.view(_FLOATS[kind]).astype(np.float32)
    import gguf  # noqa: PLC0415 - see above

    return np.require(gguf.dequantize(rows, gguf.GGMLQuantizationType(kind)), np.float32, ["C", "A", "W"])
