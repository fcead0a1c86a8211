"""How far single layers are from exact attention when they keep few tokens."""
