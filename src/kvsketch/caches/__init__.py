"""What a layer holds: `layer.py` moves tokens from stream to window to past; one method per file."""
