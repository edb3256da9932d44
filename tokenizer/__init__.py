"""Stage 0: train a tokenizer on a corpus, or adopt an existing one."""
