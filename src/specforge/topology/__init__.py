"""From a configuration to a reference source and a store."""
