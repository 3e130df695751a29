"""From chat files to tokenized samples: sources, chat templates, loss masks, tokenization, vocabulary map, packing."""
