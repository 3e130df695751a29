"""The training side of SGLang: servers as endpoints, many requests over several of them, features out of their answers."""
