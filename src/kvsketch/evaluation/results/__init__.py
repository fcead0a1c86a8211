"""What all measurements share: files of rows, the origin of rows, and panels to draw them on."""
