"""A variant in words: lengths as the field writes them, ``(prefix lens)/(extend lens)``, then what is unusual."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from dsv4_matrix.declaration.model import Level, PrefillBits, Variant

#: More lengths than this are summed up: they are a sweep, and the declaration has them.
LISTED = 12

#: What a promise of each level says, the levels before it included.
LEVELS: Mapping[Level, str] = {
    Level.SAME_PLAN: "the same bits when the same plan runs again",
    Level.SAME_CASES: "the same bits in any order, on any number of workers, under any hash seed and locale",
    Level.BATCH: "a row's bits do not depend on the batch around it",
    Level.GRAPH: "a row's bits do not depend on the batch around it, nor on eager or graph",
    Level.DEVICE: "a row's bits do not depend on its batch, on eager or graph, nor on which device of the model",
}


def agreement_text(bits: PrefillBits) -> str:
    """``sparse prefill differs from decode in bits, from 65 tokens on``."""
    if bits.bitwise is None:
        return f"{bits.path} prefill: unknown whether it has the bits of decode"
    if bits.bitwise:
        return f"{bits.path} prefill has the bits of decode"
    return f"{bits.path} prefill differs from decode in bits, from {bits.first_divergent_kv_len} tokens on"


def variant_text(variant: Variant) -> str:
    """``decode (32, 96); replayed over 33, idle; per-head sinks, GPU only``."""
    parts = [_lengths(variant)]
    if variant.accept_lens:
        then = "written again by the next step" if variant.reuse == "next-step" else "given to another request"
        parts.append(f"keeping {_tuple(variant.accept_lens)}, rejected slots {then}")
    if variant.replays:
        batches = ", ".join(_tuple(batch) if batch else "idle" for batch in variant.replays)
        bucket = f" in a bucket of {variant.bucket}" if variant.bucket else ""
        parts.append(f"replayed{bucket} over {batches}")
    options = ", ".join(_options(variant))
    return "; ".join([*parts, options] if options else parts)


def _lengths(variant: Variant) -> str:
    if not variant.prefix_lens:
        return f"{variant.forward} of an empty batch"
    prefix = _tuple(variant.prefix_lens)
    if variant.forward == "decode":
        return f"{variant.num_steps} draft steps from {prefix}" if variant.num_steps else f"decode {prefix}"
    if variant.forward == "target-verify":
        counts = set(variant.extend_lens)
        drafts = str(counts.pop()) if len(counts) == 1 else _tuple(variant.extend_lens)
        return f"chain from {prefix} with {drafts} draft tokens"
    return f"{variant.forward.replace('-', ' ')} {prefix}/{_tuple(variant.extend_lens)}"


def _options(variant: Variant) -> Iterator[str]:
    """What differs from the usual: 64 heads, no sink, shuffled pages, full history, contiguous q."""
    if variant.heads != 64:
        yield f"{variant.heads} heads"
    if variant.sink != "off":
        yield "sink 0" if variant.sink == "zero" else "per-head sinks"
    if variant.swa_page_size != 256:
        yield f"SWA page {variant.swa_page_size}"
    if variant.index_topk != 512:
        yield f"top-k {variant.index_topk}"
    if variant.pages != "shuffled":
        yield f"{variant.pages} pages"
    if variant.history != "full":
        yield "history outside the window freed"
    if variant.q_layout != "contiguous":
        yield f"{variant.q_layout} q"
    if variant.gpu_only_lens:
        yield "GPU-only lengths"
    if variant.large_pool:
        yield "pool above 2 GiB"
    if variant.devices != ("cpu", "gpu"):
        yield " and ".join(device.upper() for device in variant.devices) + " only"


def _tuple(lengths: Sequence[int]) -> str:
    if len(lengths) > LISTED:
        return f"({len(lengths)} from {min(lengths)} to {max(lengths)})"
    text = ", ".join(str(length) for length in lengths)
    return text if len(lengths) == 1 else f"({text})"
