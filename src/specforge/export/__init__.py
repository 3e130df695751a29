"""From checkpoints to the folders that serving engines load."""
