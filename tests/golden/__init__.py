"""Answers noted down once, so that nothing changes them by accident."""
