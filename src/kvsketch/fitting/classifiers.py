"""The query classifiers of all heads of a layer, trained together by batched products.

A head's classifier is a network of two layers with batch normalization and ReLU between them (Saap, section 6.1). Heads
do not touch each other: training them together gives what training each alone would, batch by batch.
"""

import math
from collections.abc import Iterator
from itertools import repeat

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn

from kvsketch.algorithms.saap import QueryClassifier, fold_normalization

EPSILON, MOMENTUM = 1e-5, 0.1  # of the normalization: torch's own
SPARE_UNITS = 0.1  # factor on the weights of units that the linear start does not need


class Classifiers(nn.Module):
    """A classifier for every lane; with `hidden=0` each has a single layer."""

    mean: Tensor
    variance: Tensor

    products: torch.dtype | None = None  # while training, inputs and outputs of products are rounded to it

    def __init__(self, lanes: int, width: int, hidden: int, buckets: int, generator: torch.Generator) -> None:
        super().__init__()

        def uniform(*shape: int, of: int) -> nn.Parameter:
            """As torch's linear layers begin: within 1/√inputs."""
            bound = 1 / math.sqrt(of)
            return nn.Parameter((2 * torch.rand(*shape, generator=generator) - 1) * bound)

        self.hidden = hidden
        if hidden:
            self.first, self.first_bias = uniform(lanes, width, hidden, of=width), uniform(lanes, 1, hidden, of=width)
            self.gain = nn.Parameter(torch.ones(lanes, 1, hidden))
            self.offset = nn.Parameter(torch.zeros(lanes, 1, hidden))
            self.register_buffer("mean", torch.zeros(lanes, 1, hidden))
            self.register_buffer("variance", torch.ones(lanes, 1, hidden))
        inner = hidden or width
        self.second, self.second_bias = uniform(lanes, inner, buckets, of=inner), uniform(lanes, 1, buckets, of=inner)

    def forward(self, queries: Float[Tensor, "l q d"]) -> Float[Tensor, "l q c"]:
        """Log probabilities of the buckets; while training, normalized over each lane's queries."""
        inner = queries
        if self.hidden:
            inner = torch.relu(self._normalized(self._map(queries, self.first, self.first_bias)))
        return torch.log_softmax(self._map(inner, self.second, self.second_bias), 2)

    def _map(self, x: Float[Tensor, "l q i"], weight: Float[Tensor, "l i o"], bias: Float[Tensor, "l 1 o"]) -> Tensor:
        """A linear layer of every lane."""
        if self.products is None or not self.training:
            return torch.baddbmm(bias, x, weight)
        return (x.to(self.products) @ weight.to(self.products)).to(x.dtype) + bias

    def _normalized(self, x: Float[Tensor, "l q h"]) -> Float[Tensor, "l q h"]:
        """Batch normalization, each lane by itself, times the gain and moved by the offset."""
        lanes = zip(x, self.mean, self.variance, self.gain, self.offset, strict=True)
        return torch.stack(
            [
                F.batch_norm(own, mean[0], variance[0], gain[0], offset[0], self.training, MOMENTUM, EPSILON)
                for own, mean, variance, gain, offset in lanes
            ]
        )

    @torch.no_grad()
    def begin_at(
        self, weight: Float[Tensor, "l d c"], bias: Float[Tensor, "l 1 c"], queries: Float[Tensor, "l p d"]
    ) -> None:
        """Begin near a linear map of queries like these, if the inner layer is wide enough for one.

        The map takes two units for every number of a query, as x = relu(x) - relu(-x); other units begin small.
        """
        if not self.hidden:
            self.second.copy_(weight)
            self.second_bias.copy_(bias)
            return
        width = queries.shape[2]
        if self.hidden < 2 * width:
            return
        mean = queries.mean(1, keepdim=True)
        spread = queries.std(1, keepdim=True, correction=0)
        scaled = weight * spread.transpose(1, 2)
        same = torch.eye(width, device=queries.device).expand(len(queries), width, width)
        for units, sign in ((slice(0, width), 1.0), (slice(width, 2 * width), -1.0)):
            self.first[:, :, units] = sign * same
            self.first_bias[:, :, units] = 0.0
            self.mean[:, :, units], self.variance[:, :, units] = sign * mean, spread.square()
            self.second[:, units] = sign * scaled
        self.second[:, 2 * width :] *= SPARE_UNITS
        self.second_bias.copy_(bias + mean @ weight)

    def log_probabilities(self, lane: int, queries: Float[Tensor, "q d"]) -> Float[Tensor, "q c"]:
        """The answers of one lane's classifier, in the form that is used after training."""
        return self.classifier_of(lane).log_probabilities(queries)

    @torch.no_grad()
    def classifier_of(self, lane: int) -> QueryClassifier:
        """One head's classifier as it is used: the normalization is part of its first layer."""
        last = (self.second[lane].T, self.second_bias[lane, 0])
        if not self.hidden:
            return QueryClassifier(None, None, *last)
        folded = fold_normalization(
            self.first[lane].T, self.first_bias[lane, 0], self.mean[lane, 0], self.variance[lane, 0],
            self.gain[lane, 0], self.offset[lane, 0], EPSILON,
        )  # fmt: skip
        return QueryClassifier(*folded, *last)


def train(
    classifiers: Classifiers,
    queries: Float[Tensor, "l p d"],
    shares: Float[Tensor, "l p c"],
    batches: Iterator[Int64[Tensor, " b"]],
    rate: float | Iterator[float] = 1e-5,
    adam: torch.optim.Adam | None = None,
) -> Iterator[Float[Tensor, " l"]]:
    """Learn from a pool of queries with their shares (Equation 1), by Adam; each lane's loss after every batch.

    `batches` are numbers of queries in the pool, the same for all lanes. Appendix A: 40,000 batches of 1,000 queries at
    a rate of 1e-5. A caller that brings the optimizer can go on where another run was stopped.
    """
    classifiers.train()
    adam = adam or torch.optim.Adam(classifiers.parameters(), fused=True)
    rates = repeat(rate) if isinstance(rate, float) else rate
    for batch, now in zip(batches, rates, strict=False):
        for group in adam.param_groups:
            group["lr"] = now
        adam.zero_grad()
        wanted = shares[:, batch]
        found = classifiers(queries[:, batch])
        losses = (torch.xlogy(wanted, wanted) - wanted * found).sum(2).mean(1)
        losses.sum().backward()  # each lane's gradient is its own
        adam.step()
        yield losses.detach()
    classifiers.eval()
