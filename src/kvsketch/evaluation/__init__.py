"""What methods do to a model: models to try them on, and comparisons."""
