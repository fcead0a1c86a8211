"""The papers' algorithms for one head, in the papers' order and terms; randomness comes in as an argument."""
