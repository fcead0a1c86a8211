"""The walk in plain torch."""

import torch
from jaxtyping import Float
from torch import Tensor

ONES = 0.025  # weight of the denominator beside the numerator, as in the authors' released code


def products(keys: Float[Tensor, "l n d"], values: Float[Tensor, "l n e"], scale: float) -> Float[Tensor, "l n n"]:
    """exp⟨k_i, k_j⟩ · (⟨v_i, v_j⟩ + 0.025) in every block, on the mean of the diagonal.

    Keys are shifted by their mean, which changes all tokens' weights for a query by one factor, and the largest
    exponent is taken off, so nothing overflows; both leave the signs alone. The small constant balances the
    denominator too: it is a value coordinate that all tokens share.
    """
    keys, values = keys.float(), values.float()
    keys = keys - keys.mean(1, keepdim=True)
    logits = torch.bmm(keys, keys.transpose(1, 2)).mul_(scale)
    logits -= logits.amax((1, 2), keepdim=True)
    found = logits.exp_().mul_(torch.bmm(values, values.transpose(1, 2)).add_(ONES))
    return found / found.diagonal(dim1=1, dim2=2).mean(1)[:, None, None].clamp_min(1e-30)


def halving_signs(
    products: Float[Tensor, "l n n"], uniforms: Float[Tensor, "l n"], gain: float
) -> Float[Tensor, "l n"]:
    """Signs of every block: + with probability 1/2 - gain · y, cut to [0, 1], y being what the signs so far sum up to.

    As soon as half of a block has one sign the rest gets the other: both halves have exactly n/2 tokens. Changing
    all uniforms to 1 - u changes all signs, so every token is kept with probability 1/2.
    """
    count = products.shape[1]
    signs = torch.zeros_like(uniforms, dtype=products.dtype)
    y = torch.zeros_like(signs)  # of every token, with the signs so far
    positive = torch.zeros_like(signs[:, 0])
    for j in range(count):
        probability = 0.5 - gain * y[:, j]
        sign = torch.where(uniforms[:, j] < probability, 1.0, -1.0)
        sign = torch.where(positive >= count // 2, -1.0, sign)
        sign = torch.where(j - positive >= count // 2, 1.0, sign)
        positive = positive + (sign > 0)
        signs[:, j] = sign
        y.addcmul_(sign[:, None].to(y.dtype), products[:, j])
    return signs
