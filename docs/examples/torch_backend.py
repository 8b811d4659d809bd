"""A backend around attention in plain PyTorch: it runs anywhere, and shows all that a kernel has to do.

Run it with ``dsv4-matrix run --backend torch_backend:TorchBackend`` from this folder; then put your kernel there.
"""

import torch
from dsv4_triton import DSV4TritonBackend


def keys(cache, index):
    """Entries ``index`` [T, W] of ``cache`` as fp32 [T, W, 512]: 448 fp8 values, a scale for each 64, then 64 bf16."""
    entries = cache.shape[1]
    page, entry = (index // entries).unsqueeze(-1), (index % entries).unsqueeze(-1)
    column = torch.arange(576, device=cache.device)
    pages = cache.as_strided((cache.shape[0], entries * 584), (cache.stride(0), 1))
    data = pages[page, entry * 576 + column]
    scale = torch.exp2(pages[page, entries * 576 + entry * 8 + column[:7]].float() - 127)
    nope = data[..., :448].view(torch.float8_e4m3fn).float() * scale.repeat_interleave(64, dim=-1)
    return torch.cat((nope, data[..., 448:].contiguous().view(torch.bfloat16).float()), dim=-1)


class TorchBackend(DSV4TritonBackend):
    def attend(
        self, q, k_cache, indices, topk_length, attn_sink,
        extra_k_cache=None, extra_indices=None, extra_topk_length=None,
    ):  # fmt: skip
        found = [(k_cache, indices, topk_length), (extra_k_cache, extra_indices, extra_topk_length)]
        k, counts = [], []
        for cache, index, length in found[: 1 if extra_k_cache is None else 2]:
            index, column = index[:, 0], torch.arange(index.shape[-1], device=index.device)
            counts.append((index >= 0) & (column < length[:, None]))
            k.append(torch.where(counts[-1][..., None], keys(cache, index.clamp(min=0)), 0.0))
        k, counts = torch.cat(k, dim=1), torch.cat(counts, dim=1)
        scores = torch.einsum("thd,twd->thw", q[:, 0].float(), k) * self.softmax_scale
        scores = scores.masked_fill(~counts[:, None], -torch.inf)
        lse = scores.logsumexp(dim=-1)
        weights = torch.exp(scores - torch.logaddexp(lse, attn_sink)[..., None])
        out = torch.einsum("thw,twd->thd", weights, k).bfloat16()
        return out[:, None], lse.masked_fill(lse == -torch.inf, torch.inf)[..., None]
