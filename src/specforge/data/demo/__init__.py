"""The demo corpus: prompts written for this project and the answers of the demo target."""
