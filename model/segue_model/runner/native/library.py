"""The C interface of the kernels, declared once. Names and layouts mirror api.cpp, model.h, batch.h and sample.h."""

import ctypes
import struct
from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Final

PAIR_ROWS: Final = 32  # outputs are padded to a whole number of these
MAX_HEAD_DIM: Final = 256


class KvType(IntEnum):
    FLOAT32 = 0
    BF16 = 1
    INT8 = 2


class Stored(IntEnum):
    """Element and block types of stored weights; the numbers are those of enum ggml_type."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    BF16 = 30


class Rounding(IntEnum):
    """What becomes of floats."""

    BF16 = 0
    INT8 = 1
    INT4 = 2


class Slot(IntEnum):
    """Which weight is meant."""

    EMBED = 0
    HEAD = 1
    WQ = 2
    WK = 3
    WV = 4
    WO = 5
    GATE = 6
    UP = 7
    DOWN = 8
    NORM = 9
    ATTENTION_NORM = 10
    FFN_NORM = 11
    Q_BIAS = 12
    K_BIAS = 13
    V_BIAS = 14
    Q_NORM = 15
    K_NORM = 16


class Fault(IntEnum):
    """What is wrong with a slice of a batch."""

    NONE = 0
    EMPTY = 1
    POSITION = 2
    COVER = 3
    TOKEN = 4
    PAGE = 5
    SHARED = 6


class Refusal(IntEnum):
    """Why nothing was drawn from a row."""

    NONE = 0
    LOGITS = 1
    ADJUSTED = 2
    BIAS = 3
    HISTORY = 4
    BANNED = 5


class Shape(Structure):
    _fields_ = (
        *(
            (name, c_int32)
            for name in ("vocab", "dim", "layers", "heads", "kv_heads", "head_dim", "ffn_dim", "context")
        ),
        *((name, c_int32) for name in ("window", "qk_norm", "kv_type", "threads", "max_rows")),
        ("eps", c_float),
        ("num_pages", c_int64),
    )


class Batch(Structure):
    _fields_ = (
        ("slices", c_int64),
        *((name, c_void_p) for name in ("lengths", "starts", "tables", "wants", "token_ids", "pages", "logits")),
    )


class Complaint(Structure):
    _fields_ = (("fault", c_int32), ("slice", c_int64), ("value", c_int64))


# Draw and Drawn of sample.h. A step has one of each for every row: a Structure would take ten times as long to fill.
DRAW: Final = struct.Struct("P 6d 3q 4P 4q P")
DRAWN: Final = struct.Struct("q q f i")
Drawn = tuple[int, int, float, int]  # token, mass, peak, refusal


@dataclass(frozen=True, slots=True)
class Library:
    """The loaded kernels. Pointers are addresses; the caller keeps what they point to alive and large enough."""

    functions: ctypes.CDLL

    @classmethod
    def load(cls, path: Path) -> "Library":
        functions = ctypes.CDLL(str(path))
        for name, (result, *arguments) in _SIGNATURES.items():
            function = getattr(functions, f"segue_{name}")
            function.restype, function.argtypes = result, arguments
        return cls(functions)

    def checked(self, status: int) -> None:
        """Raise what a status other than 0 stands for."""
        if status == 1:
            raise MemoryError("the kernels could not get the memory they need")
        if status:
            raise RuntimeError(f"the kernels failed with status {status}")


_SIGNATURES: Final = {  # name -> result, arguments
    "create": (c_int32, POINTER(Shape), c_void_p, c_void_p, POINTER(c_void_p)),
    "destroy": (None, c_void_p),
    "keep_workers_on": (None, c_void_p, c_void_p),
    "set_matrix": (c_int32, c_void_p, c_int32, c_int32, c_int32, c_int32, c_void_p, c_int32, c_int32),
    "tie_head": (None, c_void_p),
    "set_vector": (c_int32, c_void_p, c_int32, c_int32, c_void_p, c_int32),
    "row_bytes": (c_int64, c_int32, c_int32),
    "page_bytes": (c_int64, c_void_p),
    "weight_bytes": (c_int64, c_void_p),
    "unpack_row": (None, c_void_p, c_int32, c_int32, c_int32, c_void_p),
    "forward": (c_int32, c_void_p, POINTER(Batch), POINTER(Complaint)),
    "sample": (c_int32, c_void_p, c_void_p, c_int32, c_int32, c_void_p),
    "copy_page": (None, c_void_p, c_int64, c_int64),
    "export": (None, c_void_p, c_void_p, c_int64, c_void_p),
    "import": (None, c_void_p, c_void_p, c_int64, c_void_p),
    "fill_pages": (None, c_void_p, c_int32),
    "probe_read": (c_double, c_void_p, c_int64, c_int32),
    "probe_multiply": (c_double, c_void_p, c_int64, c_int32),
    "probe_tiles": (c_double, c_void_p, c_int64, c_int32),
    "linear": (c_double, c_void_p, c_int32, c_int32, c_void_p, c_int32, c_void_p, c_int32),
}
