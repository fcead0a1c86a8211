"""How a model's keys, values and queries are spread."""
