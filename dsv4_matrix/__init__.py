"""Conformance matrix for DeepSeek-V4 sparse attention: one declaration, generated cases, independent judgement."""

__version__ = "0.1.0"
