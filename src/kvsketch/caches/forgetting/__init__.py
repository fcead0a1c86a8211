"""Methods that hold a part of what they have seen, or something made of it."""
