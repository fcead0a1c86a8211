"""What a layer holds: the core, the methods that forget, those that look tokens up, and their names."""
