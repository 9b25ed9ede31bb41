"""The arrays that pass between modules. They are numpy's: importing torch takes longer than all else of a start.

numpy has no bfloat16 of its own; ml_dtypes adds one, and it computes with it as with any other. `torch_arrays` goes
from these to tensors and back where torch computes.
"""

from collections.abc import Mapping
from typing import Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

BFLOAT16: Final[np.dtype[np.floating]] = np.dtype(ml_dtypes.bfloat16)

Logits = npt.NDArray[np.float32]  # (rows, vocab)
Floats = npt.NDArray[np.floating]  # float32, float16, or BFLOAT16, which only type checkers take for an np.floating
Weights = Mapping[str, Floats]  # the names that `checkpoint.Checkpoint` lists
