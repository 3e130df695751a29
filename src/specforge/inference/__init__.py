"""From prompts to features and answers with the frozen target."""
