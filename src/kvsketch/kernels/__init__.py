"""One folder per operation; in each, the plain reference beside its faster forms."""
