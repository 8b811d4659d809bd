"""What a run leaves behind: results by case id, the canonical report, and evidence. No torch, no triton."""
