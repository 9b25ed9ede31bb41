"""Label smoothing (section 5.4): the right token should get 1 - smoothing, and all tokens a share of the rest."""

import torch

from segue_model.seq2seq.config import PAD


def label_smoothed_loss(logits: torch.Tensor, targets: torch.Tensor, smoothing: float) -> torch.Tensor:
    """Mean cross-entropy per token that is not padding, in nats. logits: (B, T, V), targets: (B, T).

    Equals `nn.CrossEntropyLoss(label_smoothing=smoothing, ignore_index=PAD)`. It cannot reach 0: being certain costs.
    Raises ValueError for smoothing outside 0 .. 1 and for targets that are all padding.
    """
    if not 0 <= smoothing <= 1:
        raise ValueError(f"smoothing must lie in 0 .. 1, got {smoothing}")
    counted = targets != PAD  # (B, T)
    if not bool(counted.any()):
        raise ValueError("targets must hold at least one token that is not padding")
    log_probs = logits - logits.logsumexp(dim=-1, keepdim=True)  # (B, T, V)
    right = -log_probs.gather(-1, targets[..., None]).squeeze(-1)  # (B, T)
    spread = -log_probs.mean(dim=-1)  # (B, T): cross-entropy against the uniform distribution
    return ((1 - smoothing) * right + smoothing * spread)[counted].mean()
