"""One module an algorithm family: what flows through the layers."""
