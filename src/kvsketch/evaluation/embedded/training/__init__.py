"""How the embedded model is made: its tokenizer, its start, its documents, its training."""
