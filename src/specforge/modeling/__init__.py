"""Draft architectures, wirings and the frozen parts of the target; single-device code."""
