"""Where two KV heads should look, so that this is trained too.

Once most replies are right, they teach a head little, though it may still look at a wrong place once in a hundred
times. The right place is known: the place of the document whose latest tokens agree longest with the reply's latest
tokens. The heads of FOLLOWING should find it. If several values of a name are asked for, several places agree and
continue differently: FOLLOWING should look at all of them equally, and the heads of CHOOSING should find the one with
which the reply continues; elsewhere CHOOSING should rest on the first token.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int64
from torch import Tensor

from kvsketch.evaluation.embedded.training.documents import IGNORED, TASK_NAMES, Batch

FOLLOWING, CHOOSING = (1, 0), (2, 0)  # layer and KV head of each, as the initial weights make them
REACH = 12  # latest tokens that are compared
AGREES = 2  # tokens that must agree for the head that follows to have a place to find
SEVERAL_AGREE, MOST = 4, 8  # tokens that must agree for a place to be a choice, and most places to choose among
CHOICE_FROM = 3  # if no place agrees so long: as many as the best place has, but at least these
SEVERAL = TASK_NAMES.index("niah_multivalue")
NOTHING = -1  # no token
RULES = (FOLLOWING, CHOOSING, REACH, AGREES, SEVERAL_AGREE, MOST, CHOICE_FROM)


@dataclass(frozen=True)
class Looks:
    """Places of questions at which a reply continues, and the places of the document that two heads should find."""

    at: Int64[Tensor, "b n"]
    follow: Bool[Tensor, "b n c"]  # all False: it does not matter what the head finds
    choose: Bool[Tensor, "b n c"]
    rests: Bool[Tensor, "b n"]  # where the place to choose is the first token


def looks(batch: Batch) -> Looks:
    """Where the heads should look, for all places of replies."""
    replies = batch.labels != IGNORED
    at = replies.byte().sort(dim=1, descending=True, stable=True).indices[:, : int(replies.sum(1).max())]
    real = replies.gather(1, at)[:, :, None]  # the other places only fill rows up
    right = batch.context[:, None] == batch.labels.gather(1, at)[:, :, None]
    agree = _agree(batch, at)
    most = agree.amax(-1, keepdim=True)
    best = (agree == most) & (agree >= AGREES)
    alone = best.sum(-1, keepdim=True) == 1
    several = (agree >= most.clamp(max=SEVERAL_AGREE)) & (agree >= CHOICE_FROM)
    chosen = several & right
    asks = (batch.tasks.gather(1, at) == SEVERAL)[:, :, None] & ~alone & real
    choice = asks & (several.sum(-1, keepdim=True) <= MOST) & (chosen.sum(-1, keepdim=True) == 1)
    first = torch.arange(agree.shape[-1], device=agree.device) == 0
    follow = torch.where(choice, several, best & right & alone & real)
    choose = torch.where(choice, chosen, first & real)
    return Looks(at, follow, choose, (real & ~choice)[:, :, 0])


def _agree(batch: Batch, at: Int64[Tensor, "b n"]) -> Int64[Tensor, "b n c"]:
    """How many tokens before each document place agree with the latest ones, counted backwards; 0 in padding."""
    width, owner = batch.context.shape[1], batch.owner.gather(1, at)
    going = batch.in_document[:, None].expand(-1, at.shape[1], -1)
    agree = torch.zeros_like(going, dtype=torch.long)
    for back in range(REACH):
        place = (at - back).clamp(min=0)
        same = (at >= back) & (batch.owner.gather(1, place) == owner)
        hand = torch.where(same, batch.asked.gather(1, place), NOTHING)
        before = F.pad(batch.context, (back + 1, 0), value=NOTHING - 1)[:, :width]
        going = going & (hand[:, :, None] == before[:, None])
        agree += going
    return agree
