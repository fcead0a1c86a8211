"""Saap's offline training: what is learnt from the queries and keys of a corpus."""
