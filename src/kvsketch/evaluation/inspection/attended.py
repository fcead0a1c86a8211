"""Which tokens get the attention: what a method that chooses by keys or values alone can achieve at best."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from kvsketch.kernels.kcenter import k_center

ENDS = 256  # tokens left out at either end: sinks and the latest tokens get attention because of their place
SHARE = 0.25  # of the tokens between
CHOICES = ("best", "away", "short keys", "short values", "k-center")


def attended(
    queries: Float[Tensor, "g n d"], keys: Float[Tensor, "n d"], values: Float[Tensor, "n e"], scale: float
) -> dict[str, float] | None:
    """How much of the attention to the middle of a text goes to a quarter of its tokens, chosen in several ways.

    The last queries of a KV head's group ask. "best": the tokens that get most; "away": tokens whose keys point away
    from the mean key; "k-center": centres of greedy k-center. "cosine" is that of the mean query and the mean key.
    None if the text has no middle.
    """
    ends = min(ENDS, len(keys) // 4)
    middle = slice(ends, len(keys) - ends)
    asked = queries[:, len(keys) - ends :].flatten(0, 1)
    logits = asked @ keys[middle].T * scale
    if logits.numel() == 0:
        return None
    mass = torch.softmax(logits, 1).mean(0)
    count, mean = max(1, int(SHARE * len(mass))), keys.mean(0)
    scores = {
        "best": mass,
        "away": -F.normalize(keys[middle], dim=1) @ mean,
        "short keys": -keys[middle].norm(dim=1),
        "short values": -values[middle].norm(dim=1),
    }
    picked: dict[str, Int64[Tensor, " m"]] = {name: score.topk(count).indices for name, score in scores.items()}
    picked["k-center"] = k_center(keys[None, None, middle], torch.tensor([count], device=keys.device)).centres[0, 0]
    found = {name: float(mass[picked[name]].sum()) for name in CHOICES}
    return found | {"cosine": float(F.cosine_similarity(asked.mean(0), mean, dim=0))}
