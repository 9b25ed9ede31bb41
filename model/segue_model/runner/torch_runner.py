"""The plain twin of every fast path: any device, torch operations only, paged KV.

One ragged batch per forward: the linear layers see the rows of all slices at once, attention runs per group of slices
over pages gathered by their tables.
"""

from collections.abc import Sequence

import torch
from torch.nn import functional as fn

from segue_model.arrays import Floats, Logits, Weights
from segue_model.config import DecoderConfig
from segue_model.rope import RopeTable
from segue_model.runner.base import PAGE_TOKENS, Slice
from segue_model.runner.canonical import check_canonical, check_exported_tokens
from segue_model.runner.torch_plan import AttentionGroup, Plan, check_batch, make_plan
from segue_model.runner.torch_weights import LayerWeights, MergedWeights
from segue_model.sampling import Outcome, SampleRequest, sample
from segue_model.torch_arrays import to_numpy, to_torch

_DTYPES = (torch.float32, torch.bfloat16)


def pages_for_bytes(config: DecoderConfig, dtype: torch.dtype, budget_bytes: int) -> int:
    """Pages that fit into `budget_bytes` of KV in this dtype. Raises ValueError when not even one does."""
    page_bytes = PAGE_TOKENS * config.kv_bytes_per_token(dtype.itemsize)
    if budget_bytes < page_bytes:
        raise ValueError(f"a KV budget of {budget_bytes} bytes is less than one page of {page_bytes}")
    return budget_bytes // page_bytes


class TorchRunner:
    """Implements runner.base.Runner. The KV dtype is the activations'; logits come back on the CPU.

    weights: the arrays that `checkpoint.Checkpoint` names, read once and copied.
    Raises ValueError for an unsupported dtype, an empty pool or weights that do not fit the configuration.
    """

    def __init__(
        self,
        config: DecoderConfig,
        weights: Weights,
        *,
        num_pages: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if dtype not in _DTYPES:
            raise ValueError(f"dtype must be one of {_DTYPES}, got {dtype}")
        if num_pages < 1:
            raise ValueError(f"num_pages must be at least 1, got {num_pages}")
        self._config, self._num_pages = config, num_pages
        self._device, self._dtype = torch.device(device), dtype
        self._weights = MergedWeights.load(config, weights, self._device, dtype)
        self._rope = RopeTable.build(config, device=self._device)
        pool = (config.layers, num_pages, 2, config.kv_heads, PAGE_TOKENS, config.head_dim)
        self._pool = torch.zeros(pool, device=self._device, dtype=dtype)
        self._gathered = torch.empty(0, device=self._device, dtype=dtype)  # grows to the largest group seen

    @property
    def config(self) -> DecoderConfig:
        return self._config

    @property
    def name(self) -> str:
        return f"torch-{self._device.type}-{str(self._dtype).removeprefix('torch.')}"

    @property
    def page_bytes(self) -> int:
        return PAGE_TOKENS * self._config.kv_bytes_per_token(self._dtype.itemsize)

    @property
    def num_pages(self) -> int:
        return self._num_pages

    @property
    def batch_invariant(self) -> bool:
        return False

    @torch.inference_mode()
    def forward(self, batch: Sequence[Slice]) -> list[Logits | None]:
        """See Runner.forward. Raises ValueError, before anything is written, for a slice that does not fit."""
        check_batch(batch, self._config, self._num_pages)
        plan = make_plan(batch, self._config.sliding_window, self._device, self._dtype)
        rope = _widened(self._rope.at(plan.positions))  # (N, 1, head_dim)
        x = fn.embedding(plan.token_ids, self._weights.embed)  # (N, dim)
        for layer, pool in zip(self._weights.layers, self._pool, strict=True):
            x += self._attention(self._norm(x, layer.attention_norm), layer, pool, plan, rope)
            x += _swiglu(self._norm(x, layer.ffn_norm), layer)
        wanted = self._norm(x[plan.logit_rows], self._weights.norm)
        logits = fn.linear(wanted, self._weights.head).float().cpu()  # (wanted rows, vocab)
        parts = torch.split(logits, list(plan.logit_counts))
        return [part.numpy() if len(part) else None for part in parts]

    def sample(self, rows: Sequence[Logits], requests: Sequence[SampleRequest]) -> list[Outcome]:
        """See Runner.sample. On the CPU, where the logits are."""
        return sample(rows, requests)

    @torch.inference_mode()
    def copy_pages(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See Runner.copy_pages; all sources are read before a target is written."""
        if not pairs:
            return
        sources, targets = zip(*pairs, strict=True)
        self._pool[:, self._page_index(targets)] = self._pool[:, self._page_index(sources)]

    @torch.inference_mode()
    def export_pages(self, pages: Sequence[int], tokens: int) -> Floats:
        """See Runner.export_pages."""
        check_exported_tokens(pages, tokens)
        used = self._pool[:, self._page_index(pages)]  # (layers, P, 2, kv_heads, PAGE_TOKENS, head_dim)
        kv = used.permute(2, 0, 3, 1, 4, 5).flatten(3, 4)  # (2, layers, kv_heads, P * PAGE_TOKENS, head_dim)
        return to_numpy(kv[:, :, :, :tokens].contiguous())

    @torch.inference_mode()
    def import_pages(self, pages: Sequence[int], kv: Floats) -> None:
        """See Runner.import_pages. The rest of the last page is zeroed; pages beyond it are left alone.

        Raises ValueError for a foreign shape and for values that are not finite, which would outlive their session.
        """
        config = self._config
        tokens = check_canonical(config, pages, kv)
        count = -(-tokens // PAGE_TOKENS)
        whole = fn.pad(to_torch(kv).to(self._device, self._dtype), (0, 0, 0, count * PAGE_TOKENS - tokens))
        paged = whole.view(2, config.layers, config.kv_heads, count, PAGE_TOKENS, config.head_dim)
        self._pool[:, self._page_index(pages[:count])] = paged.permute(1, 3, 0, 2, 4, 5)

    def _page_index(self, pages: Sequence[int]) -> torch.Tensor:
        index = torch.tensor(list(pages), dtype=torch.int64)
        if index.numel() and (int(index.min()) < 0 or int(index.max()) >= self._num_pages):
            limits = f"0 .. {self._num_pages - 1}"
            raise ValueError(f"page ids must lie in {limits}, got {int(index.min())} .. {int(index.max())}")
        return index.to(self._device)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return fn.rms_norm(x, (weight.shape[0],), weight, self._config.rms_eps)

    def _attention(
        self, x: torch.Tensor, layer: LayerWeights, pool: torch.Tensor, plan: Plan, rope: RopeTable
    ) -> torch.Tensor:
        """x: (N, dim) to (N, dim); writes K and V of the N rows into the layer's pool before attending."""
        heads, kv_heads, head_dim = self._config.heads, self._config.kv_heads, self._config.head_dim
        qkv = fn.linear(x, layer.qkv, layer.qkv_bias).view(-1, heads + 2 * kv_heads, head_dim)
        qk, v = torch.split(qkv, [heads + kv_heads, kv_heads], dim=1)  # (N, n, head_dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            qk = torch.cat((self._norm(qk[:, :heads], layer.q_norm), self._norm(qk[:, heads:], layer.k_norm)), dim=1)
        q, k = torch.split(_rotate(qk, rope), [heads, kv_heads], dim=1)
        if plan.fresh_pages.numel():
            pool.index_fill_(0, plan.fresh_pages, 0)
        pool[plan.write_pages, :, :, plan.write_offsets] = torch.stack((k, v), dim=1)  # (N, 2, kv_heads, head_dim)
        counts = [group.sequences * group.tokens for group in plan.groups]
        mixed = [self._attend(rows, pool, g) for rows, g in zip(torch.split(q, counts), plan.groups, strict=True)]
        return fn.linear(torch.cat(mixed) if len(mixed) > 1 else mixed[0], layer.wo)

    def _attend(self, q: torch.Tensor, pool: torch.Tensor, group: AttentionGroup) -> torch.Tensor:
        """q: (B * T, heads, head_dim) to (B * T, heads * head_dim)."""
        batch, tokens, kv_heads, head_dim = group.sequences, group.tokens, self._config.kv_heads, self._config.head_dim
        k, v = self._gather(pool, group)  # (B, kv_heads, S, head_dim)
        if tokens == 1:
            # The query heads of one KV head are as good as so many queries at one position: nothing is repeated.
            folded = q.view(batch, kv_heads, self._config.group, head_dim)
            return fn.scaled_dot_product_attention(folded, k, v, attn_mask=group.blocked).reshape(batch, -1)
        per_head = q.view(batch, tokens, -1, head_dim).transpose(1, 2)  # (B, heads, T, head_dim)
        grouped = self._config.group > 1
        mixed = fn.scaled_dot_product_attention(per_head, k, v, attn_mask=group.blocked, enable_gqa=grouped)
        return mixed.transpose(1, 2).reshape(batch * tokens, -1)

    def _gather(self, pool: torch.Tensor, group: AttentionGroup) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the group's pages, head by head in order of position, as views of one reused buffer.

        A new buffer for each layer would spend more time in page faults than in copying.
        """
        kv_heads, head_dim, count = self._config.kv_heads, self._config.head_dim, group.pages.shape[0]
        size = 2 * kv_heads * count * PAGE_TOKENS * head_dim
        if self._gathered.numel() < size:
            self._gathered = torch.empty(size, device=self._device, dtype=self._dtype)
        out = self._gathered[:size].view(2, kv_heads, count, PAGE_TOKENS, head_dim)
        torch.index_select(pool.permute(1, 2, 0, 3, 4), 2, group.pages, out=out)
        k, v = out.view(2, kv_heads, group.sequences, -1, head_dim).transpose(1, 2)
        return k, v


def _swiglu(x: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
    gate, up = fn.linear(x, layer.gate_up).chunk(2, dim=-1)  # (N, ffn_dim) each
    return fn.linear(fn.silu(gate).mul_(up), layer.down)


def _widened(table: RopeTable) -> RopeTable:
    """Rows (N, head_dim / 2) as wide as a head, the sine with the sign that `_rotate` needs: (N, 1, head_dim)."""
    cos = torch.cat((table.cos, table.cos), dim=-1)
    sin = torch.cat((-table.sin, table.sin), dim=-1)
    return RopeTable(cos[:, None], sin[:, None])


def _rotate(x: torch.Tensor, rope: RopeTable) -> torch.Tensor:
    """`rope.apply_rope` in three operations: x (N, n, head_dim), rope rows (N, 1, head_dim)."""
    wide = x.float()
    swapped = wide.roll(x.shape[-1] // 2, dims=-1)
    return (wide * rope.cos).addcmul_(swapped, rope.sin).to(x.dtype)
