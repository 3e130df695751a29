"""From a frozen run to processes."""
