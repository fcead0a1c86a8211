"""What a method does to a model: models to try it on, and comparisons."""
