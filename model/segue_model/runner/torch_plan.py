"""From slices to index tensors: checked and laid out once per forward, then used by every layer.

Slices are sorted by length, so that those of one attention group are neighbours in the concatenated rows, and nothing
needs to be gathered but pages.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from segue_model.config import DecoderConfig
from segue_model.runner.base import PAGE_TOKENS, Slice, Want

_PADDING_RATIO = 1.25  # a decode joins a group whose shortest row has at least 1 / 1.25 of its pages,
_PADDING_PAGES = 4  # give or take a few pages, which cost less than one more call of the attention kernel

_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """B sequences of T new tokens each, whose keys are padded to a common S."""

    sequences: int  # B
    tokens: int  # T
    pages: torch.Tensor  # (B * S / PAGE_TOKENS,) page ids; padding repeats a page of the same sequence
    blocked: torch.Tensor  # (B, 1, T, S) in the activations' dtype: 0 allowed, -inf blocked


@dataclass(frozen=True, slots=True)
class Plan:
    """A ragged batch as N rows in planned order, (N,) each unless noted."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    write_pages: torch.Tensor  # where each row's K and V go
    write_offsets: torch.Tensor
    fresh_pages: torch.Tensor  # begun in this batch and not filled: zeroed first, so that no stale KV is ever read
    groups: tuple[AttentionGroup, ...]
    logit_rows: torch.Tensor  # the rows whose logits are wanted, in the caller's order
    logit_counts: tuple[int, ...]  # how many of them belong to each slice, in the caller's order


def check_batch(batch: Sequence[Slice], config: DecoderConfig, num_pages: int) -> None:
    """Raise ValueError, naming the slice and the limit, for anything that would read or write out of place."""
    if not batch:
        raise ValueError("a batch must hold at least one slice")
    for index, item in enumerate(batch):
        problem = _problem(item, config, num_pages)
        if problem is not None:
            raise ValueError(f"slice {index}: {problem}")
    _check_sharing(batch, num_pages)


def make_plan(batch: Sequence[Slice], window: int | None, device: torch.device, dtype: torch.dtype) -> Plan:
    """Lay a checked batch out."""
    order = sorted(range(len(batch)), key=lambda i: (len(batch[i].token_ids), _end(batch[i])))
    slices = [batch[i] for i in order]
    positions = [np.arange(item.start, _end(item)) for item in slices]
    pages = [_table(item)[at // PAGE_TOKENS] for item, at in zip(slices, positions, strict=True)]
    rows, counts = _logit_rows(batch, order)

    def upload(parts: Sequence[_Ints]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(device)

    row_positions = upload(positions)
    return Plan(
        token_ids=upload([np.asarray(item.token_ids, dtype=np.int64) for item in slices]),
        positions=row_positions,
        write_pages=upload(pages),
        write_offsets=row_positions % PAGE_TOKENS,
        fresh_pages=torch.tensor(_fresh_pages(slices), dtype=torch.int64, device=device),
        groups=tuple(_attention_group(group, window, device, dtype) for group in _grouped(slices)),
        logit_rows=torch.tensor(rows, dtype=torch.int64, device=device),
        logit_counts=tuple(counts),
    )


def _end(item: Slice) -> int:
    return item.start + len(item.token_ids)


def _table(item: Slice) -> _Ints:
    """The page ids that the slice uses; its table may be longer."""
    return np.asarray(item.pages[: -(-_end(item) // PAGE_TOKENS)], dtype=np.int64)


def _problem(item: Slice, config: DecoderConfig, num_pages: int) -> str | None:
    if not len(item.token_ids):
        return "token_ids must hold at least one token"
    if item.start < 0 or _end(item) > config.max_context_tokens:
        return f"positions {item.start} .. {_end(item) - 1} must lie in 0 .. {config.max_context_tokens - 1}"
    if len(item.pages) * PAGE_TOKENS < _end(item):
        return f"{len(item.pages)} pages of {PAGE_TOKENS} do not cover {_end(item)} positions"
    low, high = min(item.token_ids), max(item.token_ids)
    if low < 0 or high >= config.vocab_size:
        return f"token_ids must lie in 0 .. {config.vocab_size - 1}, got {low} .. {high}"
    table = _table(item)
    if table.min() < 0 or table.max() >= num_pages:
        return f"page ids must lie in 0 .. {num_pages - 1}, got {table.min()} .. {table.max()}"
    return None


def _check_sharing(batch: Sequence[Slice], num_pages: int) -> None:
    """No page may be written by one slice and used by another, nor stand twice in a table that writes it."""
    users = np.zeros(num_pages, dtype=np.int64)
    for item in batch:
        np.add.at(users, _table(item), 1)
    for index, item in enumerate(batch):
        written = _table(item)[item.start // PAGE_TOKENS :]
        if users[written].max() > 1:
            page = int(written[users[written].argmax()])
            raise ValueError(f"slice {index}: page {page} is written here and used elsewhere in the batch")


def _logit_rows(batch: Sequence[Slice], order: Sequence[int]) -> tuple[list[int], list[int]]:
    """The wanted rows and their number for each slice, in the order of `batch`, counted in planned rows."""
    first, row = [0] * len(batch), 0
    for index in order:
        first[index] = row
        row += len(batch[index].token_ids)
    rows: list[int] = []
    counts: list[int] = []
    for start, item in zip(first, batch, strict=True):
        end = start + len(item.token_ids)
        begin = {Want.NOTHING: end, Want.LAST: end - 1, Want.ALL: start}[item.want]
        rows.extend(range(begin, end))
        counts.append(end - begin)
    return rows, counts


def _fresh_pages(slices: Sequence[Slice]) -> list[int]:
    fresh = []
    for item in slices:
        begun = _end(item) // PAGE_TOKENS * PAGE_TOKENS  # first position of the page left unfilled
        if item.start <= begun < _end(item):
            fresh.append(item.pages[begun // PAGE_TOKENS])
    return fresh


def _grouped(slices: Sequence[Slice]) -> Iterator[list[Slice]]:
    """Neighbours of equal T and of about equal length."""
    group: list[Slice] = []
    for item in slices:
        if group and not _fits(item, group[0]):
            yield group
            group = []
        group.append(item)
    yield group


def _fits(item: Slice, shortest: Slice) -> bool:
    pages, fewest = -(-_end(item) // PAGE_TOKENS), -(-_end(shortest) // PAGE_TOKENS)
    return len(item.token_ids) == len(shortest.token_ids) and pages <= fewest * _PADDING_RATIO + _PADDING_PAGES


def _attention_group(
    group: Sequence[Slice], window: int | None, device: torch.device, dtype: torch.dtype
) -> AttentionGroup:
    """Pages wholly before the window are not even gathered."""
    skipped = [0 if window is None else max(0, item.start - window + 1) // PAGE_TOKENS for item in group]
    tables = [_table(item)[skip:] for item, skip in zip(group, skipped, strict=True)]
    width = max(len(table) for table in tables)
    padded = np.stack([np.pad(table, (0, width - len(table)), mode="edge") for table in tables])
    starts = torch.tensor([[item.start] for item in group], device=device)
    bases = torch.tensor(skipped, device=device)[:, None] * PAGE_TOKENS
    tokens = len(group[0].token_ids)
    queries = (starts + torch.arange(tokens, device=device))[:, :, None]  # (B, T, 1) positions
    keys = (bases + torch.arange(width * PAGE_TOKENS, device=device))[:, None, :]  # (B, 1, S) positions
    blocked = keys > queries if window is None else (keys > queries) | (keys <= queries - window)
    bias = torch.zeros(blocked.shape, dtype=dtype, device=device).masked_fill_(blocked, -torch.inf)
    return AttentionGroup(len(group), tokens, torch.from_numpy(padded.reshape(-1)).to(device), bias[:, None])
