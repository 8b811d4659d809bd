"""Oracles for DeepSeek-V4 sparse attention, independent of every packed byte. numpy and torch only."""
