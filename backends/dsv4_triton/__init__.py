"""DeepSeek-V4 sparse attention over packed FP8 pages, in Triton."""
