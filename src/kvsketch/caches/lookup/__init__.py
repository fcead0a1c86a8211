"""Methods that keep everything and read a part of it."""
