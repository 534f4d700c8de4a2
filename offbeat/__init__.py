"""Offbeat: asynchronous GRPO on LoRA adapters, as a durable queue of HTTP services.

This package is what every process shares and what a user imports; `services/` holds the processes.
"""
