"""The Transformer of 2017 (Vaswani et al., arXiv:1706.03762) from scratch: `nn.Linear`, `nn.Embedding`, bare tensors.

Reading order, one idea a file: config, masks, attention, positions, layers, encoder, cache, decoder, transformer (the
whole), then schedule, loss, training (the recipe), decoding, storage, and the demonstration: reversal, picture, demo.

Shapes are in comments throughout: B batch, T target positions, S source positions, H heads.
"""

from segue_model.seq2seq.attention import Attention, attend
from segue_model.seq2seq.cache import DecoderCache
from segue_model.seq2seq.config import TransformerConfig
from segue_model.seq2seq.decoding import Hypotheses, beam_search, greedy
from segue_model.seq2seq.loss import label_smoothed_loss
from segue_model.seq2seq.masks import causal_mask, padding_mask
from segue_model.seq2seq.positions import sinusoids
from segue_model.seq2seq.schedule import NoamSchedule, noam_rate
from segue_model.seq2seq.storage import load, save
from segue_model.seq2seq.transformer import Decoded, Transformer

__all__ = [
    "Attention",
    "Decoded",
    "DecoderCache",
    "Hypotheses",
    "NoamSchedule",
    "Transformer",
    "TransformerConfig",
    "attend",
    "beam_search",
    "causal_mask",
    "greedy",
    "label_smoothed_loss",
    "load",
    "noam_rate",
    "padding_mask",
    "save",
    "sinusoids",
]
