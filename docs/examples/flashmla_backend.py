"""A backend around one function of FlashMLA's shape; pools, metadata and graph state are dsv4_triton's.

Run it with ``dsv4-matrix run --backend flashmla_backend:FlashMLABackend`` from this folder.
"""

from dsv4_triton import DSV4TritonBackend
from flash_mla import flash_mla_with_kvcache, get_mla_metadata


class FlashMLABackend(DSV4TritonBackend):
    def attend(
        self, q, k_cache, indices, topk_length, attn_sink,
        extra_k_cache=None, extra_indices=None, extra_topk_length=None,
    ):  # fmt: skip
        return flash_mla_with_kvcache(
            q, k_cache, None, None, 512, get_mla_metadata()[0],
            softmax_scale=self.softmax_scale, is_fp8_kvcache=True, indices=indices, topk_length=topk_length,
            attn_sink=attn_sink, extra_k_cache=extra_k_cache, extra_indices_in_kvcache=extra_indices,
            extra_topk_length=extra_topk_length,
        )  # fmt: skip
