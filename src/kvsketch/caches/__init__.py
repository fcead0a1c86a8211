"""What a layer holds: the core, the methods that forget, those that look things up, and their names."""
