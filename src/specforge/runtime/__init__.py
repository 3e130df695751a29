"""Substrate without algorithms: contracts, control plane, data plane."""
