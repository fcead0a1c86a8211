"""Attention of many queries in C, over weighted entries or among new tokens. `native/prompt.c` says how.

Torch does it too (`weighted_attention/fused.py`): where there is no compiler, where a gradient is wanted, and where the
processor multiplies whole tiles of bfloat16 but our kernels may not. Torch has no kernel with a softcap.
"""

import ctypes

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvsketch.attention import Partial, WeightedTokens
from kvsketch.kernels import native
from kvsketch.kernels.native.attention import can_read_weights, where_weights_lie

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
        return None  # torch says what is wrong with the shapes
    weights = tokens.weights
    if (weights and causal) or not all(can_read_weights(x, keys) for x in weights):
        return None
    if valid is not None and not (
        causal and valid.shape == (rows, count) and native.library_for(valid, kinds=(torch.bool,))
    ):
        return None
    if any(x.stride(3) != 1 for x in (query, keys, values)):
        return None
    # A token's heads lie together, as the next operation wants them.
    out = query.new_empty(rows, count, query_heads, value_width).transpose(1, 2)
    lse = native.room(rows, query_heads, count)
    mass, *mass_strides = where_weights_lie(tokens.log_mass, keys)
    extra, *extra_strides = where_weights_lie(tokens.log_value, keys)
    valid = None if valid is None else valid.contiguous()
    prompt = _Prompt(
        *(rows, keys.shape[1], query_heads // keys.shape[1], count, keys.shape[2], width, value_width),
        native.DTYPES[keys.dtype],
        *(place for x in (query, keys, values, out) for place in x.stride()[:3]),
        *(*mass_strides, *extra_strides),
        0 if valid is None else valid.stride(0),
        causal,
        scale,
        softcap or 0.0,
    )
    is_valid = None if valid is None else valid.data_ptr()
    beside = map(ctypes.c_void_p, (mass, extra, is_valid))
    at = (*native.addresses(query, keys, values), *beside, *native.addresses(out, lse))
    failed = library.kvs_prompt(ctypes.byref(prompt), *at, ctypes.c_int64(native.threads()))
    return None if failed else Partial(out, lse)


def in_tiles(dtype: torch.dtype) -> bool:
    """Whether C multiplies whole tiles of this dtype: a block of a few queries then takes as long as one query."""
    library = native.library()
    return dtype in native.DTYPES and library is not None and bool(library.kvs_in_tiles(_kind(dtype)))


def _kind(dtype: torch.dtype) -> ctypes.c_int64:
    return ctypes.c_int64(native.DTYPES[dtype])


def pays(dtype: torch.dtype) -> bool:
    """Whether C is faster than torch with numbers of this kind on this processor."""
    library = native.library()
    assert library is not None, "there is something to ask"
    return bool(library.kvs_prompt_pays(_kind(dtype)))
