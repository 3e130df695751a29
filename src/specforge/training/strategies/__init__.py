"""One module an algorithm: capture needs, loss, proposals, export half."""
