"""Attention of many queries in C, over weighted entries or among new tokens. `native/prompt.c` says how.

Torch does it too (`weighted_attention/fused.py`): where there is no compiler, where a gradient is wanted, and on
processors that multiply whole tiles of bfloat16, or float16 as fast. It has no kernel that bends logits.
"""

import ctypes

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvsketch.attention import Partial, WeightedTokens
from kvsketch.kernels import native

_NUMBERS = (
    *("rows", "heads", "group", "queries", "count", "key_width", "value_width", "kind", "query_row", "query_head"),
    *("query_step", "key_row", "key_head", "key_step", "value_row", "value_head", "value_step", "out_row", "out_head"),
    *("out_step", "mass_row", "mass_head", "extra_row", "extra_head", "valid_row", "causal"),
)


class _Prompt(ctypes.Structure):
    """`struct prompt` in `prompt.c`."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in _NUMBERS),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    ]


def attend(
    query: Float[Tensor, "b hg q d"],
    tokens: WeightedTokens,
    scale: float,
    softcap: float | None = None,
    *,
    causal: bool = False,
    valid: Bool[Tensor, "b n"] | None = None,
) -> Partial | None:
    """Attention over weighted tokens, or causally among new ones of which some are valid.

    None where C does not do it, or torch does it faster: another device, numbers that do not lie side by side, a wanted
    gradient.
    """
    keys, values = tokens.keys, tokens.values
    library = native.library_for(query, keys, values)
    if library is None or not query.numel() or not keys.numel() or not (softcap or pays(keys.dtype)):
        return None
    (rows, query_heads, count, width), value_width = query.shape, values.shape[3]
    wanted = (rows, keys.shape[1], count if causal else keys.shape[2])
    if keys.shape != (*wanted, width) or values.shape[:3] != wanted or query_heads % wanted[1]:
        return None  # torch says what is wrong with them
    weights = [x for x in (tokens.log_mass, tokens.log_value) if x is not None]
    if (weights and causal) or not all(_can_read(x, keys.shape[2]) for x in weights):
        return None
    if valid is not None and not (
        causal and valid.shape == (rows, count) and native.library_for(valid, kinds=(torch.bool,))
    ):
        return None
    if any(x.stride(3) != 1 for x in (query, keys, values)):
        return None
    # A token's heads lie together, as whoever goes on with them wants it.
    out = query.new_empty(rows, count, query_heads, value_width).transpose(1, 2)
    lse = native.room(rows, query_heads, count)
    mass, extra = (x if x is None else x.expand(keys.shape[:3]) for x in (tokens.log_mass, tokens.log_value))
    valid = None if valid is None else valid.contiguous()
    prompt = _Prompt(
        *(rows, keys.shape[1], query_heads // keys.shape[1], count, keys.shape[2], width, value_width),
        native.DTYPES[keys.dtype],
        *(place for x in (query, keys, values, out) for place in x.stride()[:3]),
        *(0 if x is None else x.stride(place) for x in (mass, extra) for place in (0, 1)),
        0 if valid is None else valid.stride(0),
        causal,
        scale,
        softcap or 0.0,
    )
    there = (query, keys, values, mass, extra, valid, out, lse)
    at = [ctypes.c_void_p(None if x is None else x.data_ptr()) for x in there]
    failed = library.kvs_prompt(ctypes.byref(prompt), *at, ctypes.c_int64(native.threads()))
    return None if failed else Partial(out, lse)


def _can_read(weights: Tensor, count: int) -> bool:
    there = native.library_for(weights, kinds=(torch.float32,)) is not None
    return there and weights.stride(2) == 1 and weights.shape[2] == count


def pays(dtype: torch.dtype) -> bool:
    """Whether C is faster than torch at numbers of this kind on this processor."""
    library = native.library()
    assert library is not None, "there is something to ask"
    return bool(library.kvs_prompt_pays(ctypes.c_int64(native.DTYPES[dtype])))
