"""Modules for training loops of your own."""

from poros.train.chunked_loss import ChunkedCausalLMLoss

__all__ = ["ChunkedCausalLMLoss"]
