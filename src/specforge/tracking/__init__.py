"""Where metrics and progress go."""
