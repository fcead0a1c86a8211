"""Saap's study of selectivity: how far layers are from exact attention when they read few tokens."""
