"""How the embedded model is made: its tokenizer, its initial weights, its documents, its training."""
