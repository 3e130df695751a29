"""One module a way of running the frozen target."""
