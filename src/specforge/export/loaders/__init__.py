"""What serving engines read of an exported draft: one module a family, each with ``LOADERS``: serving class -> :class:`Loader`."""
