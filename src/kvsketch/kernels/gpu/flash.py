"""Torch's fused attention on a GPU, with the log of the denominator, which its public function does not return.

For entries without weights: new tokens among themselves, and a past that is held as it was. Torch has two operators:
cuDNN's is the faster one on Hopper and newer, but takes long for lengths that it sees for the first time.
"""

import logging
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from kvsketch.attention import Partial, WeightedTokens, weighted_attention
from kvsketch.kernels import gpu
from kvsketch.kernels.gpu.attention import doubled

FLASH, CUDNN = "torch's flash attention", "torch's cuDNN attention"
DTYPES = (torch.float16, torch.bfloat16)
STEP = 8  # widths are a multiple of it, and memory is aligned so that as many numbers are read at once
MOST_CUDNN_WIDTH = 128  # for wider heads torch asks for newer versions
CUDNN_GPUS = (9, 10)  # major compute capabilities where torch itself prefers cuDNN
LEAST_CUDNN = 91_501  # torch prefers no older version: those are wrong for some lengths (pytorch/pytorch#169849)
# Logits of all heads together. For each new shape torch makes a plan, in 36 ms on an H200, and keeps it; all layers
# share it. With so many logits cuDNN takes 3 ms less than flash attention in each layer.
LEAST_LOGITS = 1 << 32

Attended = Callable[[Tensor, Tensor, Tensor, float, bool], Partial]
_log = logging.getLogger("kvsketch")
_refused = set[str]()


def attend(
    query: Float[Tensor, "b hg q d"],
    keys: Float[Tensor, "b h n d"],
    values: Float[Tensor, "b h n e"],
    scale: float,
    *,
    causal: bool = False,
) -> Partial | None:
    """Attention over all tokens, or causally among new ones; None where torch has no such kernel."""
    if query.device.type != "cuda" or not fits(query, values) or keys.dtype != query.dtype:
        return None
    if query.shape[3] % STEP or query.numel() * keys.shape[2] == 0:
        return None
    if not all(_aligned(x) for x in (query, keys, values)) or not gpu.can_read(query.device, query, keys, values):
        return None
    found = _tried_in_cudnn(query, keys, values, scale, causal) if cudnn_pays(query, keys, values) else None
    if found is None and _works(FLASH, in_flash, query):
        found = in_flash(query, keys, values, scale, causal)
    return found


def fits(query: Tensor, values: Tensor) -> bool:
    """Whether a kernel is made for such numbers and widths; torch's own call pads widths to a multiple of STEP."""
    return query.dtype in DTYPES and query.shape[3] == values.shape[3] <= gpu.MOST_WIDTH


def cudnn_pays(query: Tensor, keys: Tensor, values: Tensor) -> bool:
    """Whether torch's own call would take cuDNN's kernel here too, and there is enough to do.

    Not while a graph is recorded: a missing plan would be made inside it.
    """
    if query.shape[:3].numel() * keys.shape[2] < LEAST_LOGITS or query.shape[3] > MOST_CUDNN_WIDTH:
        return False
    if torch.version.hip is not None or not torch.backends.cuda.cudnn_sdp_enabled():
        return False
    if (torch.backends.cudnn.version() or 0) < LEAST_CUDNN or gpu.recording(query.device):
        return False
    if torch.cuda.get_device_capability(query.device)[0] not in CUDNN_GPUS or keys.shape[2] == 1:
        return False
    return all(0 not in x.stride() and max(x.shape[:2]) <= gpu.MOST_ALONG_Y for x in (query, keys, values))


def in_flash(query: Tensor, keys: Tensor, values: Tensor, scale: float, causal: bool) -> Partial:
    """The operator's answer; keys and values are those of a group's one KV head, and are not repeated."""
    by_step = (x.transpose(1, 2) for x in (query, keys, values))
    counts = query.shape[2], keys.shape[2]
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *by_step, None, None, *counts, 0.0, causal, False, scale=scale
    )
    return Partial(out.transpose(1, 2), lse)


def in_cudnn(query: Tensor, keys: Tensor, values: Tensor, scale: float, causal: bool) -> Partial:
    """The same by cuDNN's operator, whose logs have one more axis in some versions of torch."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, keys, values, None, True, 0.0, causal, False, scale=scale
    )
    return Partial(out, lse.reshape(query.shape[:3]))


def _tried_in_cudnn(query: Tensor, keys: Tensor, values: Tensor, scale: float, causal: bool) -> Partial | None:
    """cuDNN's answer; None where it is wrong, has no room, or has no plan: logged once for each kind of call."""
    what = f"{query.dtype} × {query.shape[3]}, causal: {causal}, on {query.device}"
    if what in _refused or not _works(CUDNN, in_cudnn, query):
        return None
    try:
        return in_cudnn(query, keys, values, scale, causal)
    except torch.OutOfMemoryError:
        return None
    except RuntimeError as error:
        _refused.add(what)
        shapes = [tuple(x.shape) for x in (query, keys, values)]
        _log.warning("%s is not used for %s: %s (%s)", CUDNN, what, f"{' '.join(str(error).split()):.300}", shapes)
        return None


def _aligned(x: Tensor) -> bool:
    """Whether STEP numbers can be read at once: kernels do so without checking, and crash the process if not."""
    strides = [stride for stride, size in zip(x.stride()[:3], x.shape[:3], strict=True) if size > 1]
    return x.stride(3) == 1 and x.data_ptr() % (STEP * x.element_size()) == 0 and not any(s % STEP for s in strides)


def _works(what: str, attended: Attended, query: Tensor) -> bool:
    """Whether an operator agrees with the definition, for heads of this width."""
    width = query.shape[3]

    def check(device: torch.device, dtype: torch.dtype) -> None:
        """With queries laid out step by step, and keys and values in larger buffers."""
        draw, at = torch.Generator().manual_seed(0), torch.arange(150, device=device)
        query, keys, values = (
            torch.randn(2, heads, 350, width, generator=draw, device="cpu").to(device, dtype) for heads in (4, 2, 2)
        )
        query = query[:, :, :150].transpose(1, 2).contiguous().transpose(1, 2)
        for count, causal in ((333, False), (150, True)):
            tokens = WeightedTokens(keys[:, :, :count], values[:, :, :count])
            visible = (at[:, None] >= at)[None, None] if causal else None
            right = weighted_attention(query.double(), doubled(tokens), 0.1, visible=visible)
            found = attended(query, tokens.keys, tokens.values, 0.1, causal)
            gpu.assert_like(found.out, right.out, found.lse, right.lse)

    return gpu.works(f"{what} × {width}", query.device, query.dtype, check, triton=False)
