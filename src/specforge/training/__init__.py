"""The training core, the same for every strategy and topology."""
