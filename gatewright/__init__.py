"""Gatewright: what gates do to state-space language models, from pretraining to tool calls."""

__version__ = "0.1.0"
