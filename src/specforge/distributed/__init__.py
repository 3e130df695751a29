"""Process groups, real and fake."""
