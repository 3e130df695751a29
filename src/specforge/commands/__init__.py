"""One module a command word."""
