"""Metrics, held-out evaluation and real speculative decoding."""
