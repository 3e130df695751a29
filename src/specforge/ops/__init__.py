"""Numerical kernels: a plain torch reference beside each fast version."""
