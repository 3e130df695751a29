"""One module an architecture: what a draft layer is made of."""
