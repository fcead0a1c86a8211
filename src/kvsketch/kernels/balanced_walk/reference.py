"""The walks in plain torch: the one of the experiments, which halves exactly, and the one of the theorem."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

ONES = 0.025  # weight of the denominator beside the numerator, as in the authors' released code


def products(keys: Float[Tensor, "l n d"], values: Float[Tensor, "l n e"], scale: float) -> Float[Tensor, "l n n"]:
    """exp⟨k_i, k_j⟩ · (⟨v_i, v_j⟩ + 0.025) in every block, divided by the mean of the diagonal.

    Keys are shifted by their mean, since what they have in common would outweigh all else in the products; the shift
    changes all tokens' weights for a query by one factor. The largest exponent is subtracted, so nothing overflows; the
    signs stay the same. The small constant balances the denominator too: it is a value coordinate all tokens share.
    """
    precise = torch.float64 if keys.dtype == torch.float64 else torch.float32
    keys, values = keys.to(precise), values.to(precise)
    return products_as_they_are(keys - keys.mean(1, keepdim=True), values, scale)


def products_as_they_are(
    keys: Float[Tensor, "l n d"], values: Float[Tensor, "l n e"], scale: float
) -> Float[Tensor, "l n n"]:
    """The same for keys that are shifted already, or are not to be."""
    logits = torch.bmm(keys, keys.transpose(1, 2)).mul_(scale)
    logits -= logits.amax((1, 2), keepdim=True)
    found = logits.exp_().mul_(torch.bmm(values, values.transpose(1, 2)).add_(ONES))
    return found / found.diagonal(dim1=1, dim2=2).mean(1)[:, None, None].clamp_min(1e-30)


def halving_signs(
    products: Float[Tensor, "l n n"], uniforms: Float[Tensor, "l n"], gain: float
) -> Float[Tensor, "l n"]:
    """Signs of every block: + with probability 1/2 - gain · y, cut to [0, 1]; y sums products with the signs so far.

    As soon as half of a block has one sign, the rest gets the other: both halves have exactly n/2 tokens. Changing
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
        sign = torch.where(j - positive >= count // 2, 1.0, sign).to(y.dtype)
        positive = positive + (sign > 0)
        signs[:, j] = sign
        y.addcmul_(sign[:, None], products[:, j])
    return signs


def bounded_products(
    keys: Float[Tensor, "l n d"], values: Float[Tensor, "l n e"], real: Bool[Tensor, "l n"], scale: float
) -> Float[Tensor, "l n n"]:
    """exp(⟨k_i, k_j⟩ · scale) · ⟨v_i, v_j⟩ / R² in every block, R = exp(r_key² · scale / 2) · r_value: within ±1.

    Only the quotient is ever formed, so nothing overflows. Products of tokens that are not real are zero.
    """
    keys, values = (x.float().masked_fill(~real[..., None], 0.0) for x in (keys, values))
    lengths = keys.square().sum(2)
    logits = (torch.bmm(keys, keys.transpose(1, 2)) - lengths.amax(1)[:, None, None]).mul_(scale)
    longest = values.norm(dim=2).amax(1).clamp_min(1e-30)
    values = values / longest[:, None, None]
    return logits.exp_().mul_(torch.bmm(values, values.transpose(1, 2)))


def bounded_signs(
    products: Float[Tensor, "l n n"],
    bounds: Float[Tensor, " l"],
    uniforms: Float[Tensor, "l n"],
    real: Bool[Tensor, "l n"],
) -> tuple[Float[Tensor, "l n"], Bool[Tensor, " l"]]:
    """Signs of every block by the theorem's walk, 0 for tokens that are not real, and which walks failed.

    A sign is + with probability 1/2 - y/(2 · bound); a walk whose |y| exceeds its bound has no signs from there on.
    """
    signs = torch.zeros_like(products[:, :, 0])
    y = torch.zeros_like(signs)
    failed = torch.zeros_like(real[:, 0])
    for j in range(products.shape[1]):
        failed = failed | (real[:, j] & (y[:, j].abs() > bounds))
        sign = torch.where(uniforms[:, j] < 0.5 - y[:, j] / (2 * bounds), 1.0, -1.0).to(signs.dtype)
        signs[:, j] = sign.masked_fill(failed | ~real[:, j], 0.0)
        y.addcmul_(signs[:, j, None], products[:, j])
    return signs, failed
