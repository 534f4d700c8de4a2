"""Prompt sources: from a `data` section to rows, and from rows to prompts that a model can read."""
