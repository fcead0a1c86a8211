"""The loss of a batch of documents: of replies, a little of the text itself, and of where two heads look."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, repeat_kv

from kvsketch.evaluation.embedded.training.documents import IGNORED, Batch
from kvsketch.evaluation.embedded.training.looks import CHOOSING, FOLLOWING, looks
from kvsketch.huggingface.naming import as_argument, cache_in

PROSE_WEIGHT = 0.1  # of the text itself, relative to replies
LOOKS_WEIGHT = 1.0  # of where heads look
RESTS_WEIGHT = 0.1  # of places to rest, relative to places to choose, which are rare
FUSED = "every head by itself"  # name of the attention function on a GPU


class Read(NamedTuple):
    """A model's outputs on a batch."""

    replies: Float[Tensor, "n v"]  # logits at every place of a reply, row by row
    prose: Float[Tensor, "m v"]  # logits of the text's next tokens
    hidden: tuple[Tensor, ...]  # the input of each layer at the questions
    keys: list[Tensor]  # of each layer; the documents' keys come first


def read(model: LlamaForCausalLM, batch: Batch) -> Read:
    """Read the documents once; each question sees its document and itself, at the positions right after it."""
    document = model.model(batch.context, use_cache=True)
    asked = model.model(
        batch.asked,
        position_ids=batch.positions,
        attention_mask=batch.visible(batch.every),
        **as_argument(model.model.forward, cache_in(document)),
        output_hidden_states=True,
    )
    rows, at = batch.prose.unbind(1)
    return Read(
        model.lm_head(asked.last_hidden_state[batch.labels != IGNORED]),
        model.lm_head(document.last_hidden_state[rows, at]),
        asked.hidden_states,
        [layer.keys for layer in cache_in(asked).layers],
    )


def loss_of(model: LlamaForCausalLM, batch: Batch, found: Read) -> Tensor:
    """All three losses together."""
    places = batch.labels != IGNORED
    weights = batch.weights[places]
    loss = _mean(F.cross_entropy(found.replies.float(), batch.labels[places], reduction="none"), weights)
    if len(found.prose):
        rows, at = batch.prose.unbind(1)
        loss = loss + PROSE_WEIGHT * F.cross_entropy(found.prose.float(), batch.context[rows, at + 1])
    wanted = looks(batch)
    rare = torch.where(wanted.rests, RESTS_WEIGHT, 1.0)
    for head, found_at, worth in ((FOLLOWING, wanted.follow, torch.ones_like(rare)), (CHOOSING, wanted.choose, rare)):
        loss = loss + LOOKS_WEIGHT * _look_loss(look_scores(model, batch, found, wanted.at, *head), found_at, worth)
    return loss


def _look_loss(
    scores: Float[Tensor, "b n g total"], places: Bool[Tensor, "b n c"], worth: Float[Tensor, "b n"]
) -> Tensor:
    """The loss for attention of a KV head's queries to wrong places; it should be equal at all right places."""
    matters = places.any(-1)
    scores, places = scores[matters], places[matters][:, None]
    right = scores[..., : places.shape[-1]].where(places, 0).sum(-1) / places.sum(-1)
    return _mean(scores.logsumexp(-1) - right, worth[matters][:, None].expand_as(right))


def look_scores(
    model: LlamaForCausalLM, batch: Batch, found: Read, at: Tensor, layer: int, kv_head: int
) -> Float[Tensor, "b n g total"]:
    """The scores of a KV head's queries at these places with its keys."""
    block = model.model.layers[layer]
    attention, keys = block.self_attn, found.keys[layer][:, kv_head]
    hidden = found.hidden[layer]
    here = hidden.gather(1, at[:, :, None].expand(-1, -1, hidden.shape[-1]))
    queries = attention.q_proj(block.input_layernorm(here)).unflatten(-1, (-1, attention.head_dim))
    group = attention.num_key_value_groups
    cos, sin = model.model.rotary_emb(here, batch.positions.gather(1, at))
    queries, _ = apply_rotary_pos_emb(queries, queries, cos, sin, unsqueeze_dim=2)
    queries = queries[:, :, kv_head * group : (kv_head + 1) * group]
    scores = torch.einsum("bngd,btd->bngt", queries, keys) * attention.scaling
    return scores.masked_fill(~batch.visible(at)[:, 0, :, None], -torch.inf)


def _mean(losses: Tensor, weights: Tensor) -> Tensor:
    return (losses * weights).sum() / weights.sum().clamp(min=torch.finfo(weights.dtype).tiny)


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    **_: object,
) -> tuple[Tensor, None]:
    """Attention with repeated KV heads: in float32, a GPU has no fused attention for shared ones."""
    key, value = (repeat_kv(x, module.num_key_value_groups) for x in (key, value))
    causal = attention_mask is None
    out = F.scaled_dot_product_attention(query, key, value, attention_mask, is_causal=causal, scale=scaling)
    return out.transpose(1, 2).contiguous(), None
