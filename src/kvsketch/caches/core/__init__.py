"""What all methods share: `layer.py` says where a token goes, `method.py` and `chooser.py` what a method is."""
