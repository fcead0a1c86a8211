"""A layer's cache that reads a text in calls."""

import torch

from kvsketch.caches.core.tokens import NewTokens, Unrotated


def fed(cache, query, keys, values, sizes, valid=None, *, scale):
    """All answers, the tokens given in calls of these sizes."""
    out, start = [], 0
    for size in sizes:
        part = slice(start, start + size)
        real = None if valid is None or bool(valid[:, part].all()) else valid[:, part]
        new = NewTokens(keys[:, :, part], values[:, :, part], real, Unrotated(query[:, :, part], keys[:, :, part]))
        out.append(cache.read(query[:, :, part], new, scale).out)
        start += size
    return torch.cat(out, 2)
