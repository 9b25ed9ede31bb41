"""Arrays to tensors and back. torch and numpy know no common bfloat16, so its bits go across as int16."""

from collections.abc import Mapping

import numpy as np
import torch

from segue_model.arrays import BFLOAT16, Floats, Weights


def to_torch(array: Floats) -> torch.Tensor:
    """A tensor over the same memory; a copy where that may not be written to."""
    writable = np.require(array, requirements="W")
    if array.dtype == BFLOAT16:
        return torch.from_numpy(writable.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(writable)


def to_numpy(tensor: torch.Tensor) -> Floats:
    """An array over the same memory, on the CPU. A gradient is not part of it."""
    values = tensor.detach().cpu()
    if values.dtype is torch.bfloat16:
        bits: Floats = values.view(torch.int16).numpy().view(BFLOAT16)
        return bits
    array: Floats = values.numpy()
    return array


def state_of(weights: Weights) -> dict[str, torch.Tensor]:
    """All weights, as `Decoder.load_state_dict` takes them."""
    return {name: to_torch(array) for name, array in weights.items()}


def weights_of(state: Mapping[str, torch.Tensor]) -> dict[str, Floats]:
    """What `Decoder.state_dict` gives, as a runner takes it."""
    return {name: to_numpy(tensor) for name, tensor in state.items()}
