"""What all measurements share: files of rows, where they come from, and panels to draw them on."""
