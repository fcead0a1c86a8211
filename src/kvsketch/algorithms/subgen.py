"""SubGen, for one head: streaming attention in sublinear time and memory.

Paper: Zandieh, Han, Mirrokni, Karbasi, SubGen (arXiv:2402.06082), Algorithm 1; ClusterGen has the same
algorithm under its own name. Randomness comes in as numbers in [0, 1), one for each coin. Logits are
⟨q, k⟩ times `scale`, which is 1 in the paper.

The text before Lemma 1 says that tokens are sampled in proportion to ‖k‖²; the algorithm, the lemma and
the proof say ‖v‖², and so do we.

Addition: the paper's clusters grow with the data. `make_room` bounds them as the doubling algorithm of
Charikar, Chekuri, Feder and Motwani (STOC 1997), which the paper names as its inspiration: δ doubles, and
clusters whose representatives are within δ become one. Lemma 2 then holds with 2δ in place of δ in its
third property: a representative moves by at most δ + δ/2 + δ/4 + … in all. (δg/(g - 1), if it grows by g.)
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor


@dataclass(frozen=True)
class Clusters:
    """𝒟: for every cluster its representative x, `t` uniform samples S of its keys, and their number n."""

    representatives: Float[Tensor, "m d"]
    samples: Float[Tensor, "m t d"]
    sizes: Int64[Tensor, " m"]


@dataclass(frozen=True)
class ValueSamples:
    """ℳ: `s` tokens, each held with probability proportional to ‖v‖²; and μ, the sum of ‖v‖² so far."""

    keys: Float[Tensor, "s d"]
    values: Float[Tensor, "s e"]
    mass: Float[Tensor, ""]


def no_clusters(t: int, key: Float[Tensor, " d"]) -> Clusters:
    """𝒟 = ∅, for keys like this one."""
    width = len(key)
    return Clusters(key.new_empty(0, width), key.new_empty(0, t, width), torch.empty(0, dtype=torch.int64))


def no_samples(s: int, key: Float[Tensor, " d"], value: Float[Tensor, " e"]) -> ValueSamples:
    """ℳ = [null, …], μ = 0."""
    return ValueSamples(key.new_zeros(s, len(key)), value.new_zeros(s, len(value)), value.new_zeros(()))


def update_softmax_normalizer(
    clusters: Clusters, delta: float, key: Float[Tensor, " d"], uniforms: Float[Tensor, " t"]
) -> Clusters:
    """Put the key into the nearest cluster if that is within δ, or let the key found one. Lines 11-23."""
    nearest, distance = nearest_cluster(clusters, key)
    if distance > delta:
        alone = key.expand(1, len(uniforms), -1)  # S' = [k, … × t …]
        return Clusters(
            torch.cat([clusters.representatives, key[None]]),
            torch.cat([clusters.samples, alone]),
            torch.cat([clusters.sizes, clusters.sizes.new_ones(1)]),
        )
    samples, sizes = clusters.samples.clone(), clusters.sizes.clone()
    sizes[nearest] += 1
    adopts = uniforms * sizes[nearest] < 1
    samples[nearest, adopts] = key
    return Clusters(clusters.representatives, samples, sizes)


def nearest_cluster(clusters: Clusters, key: Float[Tensor, " d"]) -> tuple[int, float]:
    """i* and ‖x_i* - k‖; infinitely far where there is no cluster. Line 12."""
    if len(clusters.sizes) == 0:
        return -1, float("inf")
    distances = (clusters.representatives - key).norm(dim=1)
    nearest = int(distances.argmin())
    return nearest, float(distances[nearest])


def update_matrix_product(
    samples: ValueSamples, key: Float[Tensor, " d"], value: Float[Tensor, " e"], uniforms: Float[Tensor, " s"]
) -> ValueSamples:
    """Let each sample adopt the token with probability ‖v‖² / (μ + ‖v‖²). Lines 24-28, and line 6.

    A value of zero is never adopted; the first one that is not fills all samples.
    """
    norm = value.square().sum()
    mass = samples.mass + norm
    adopts = (uniforms * mass < norm)[:, None]
    return ValueSamples(
        keys=torch.where(adopts, key, samples.keys),
        values=torch.where(adopts, value, samples.values),
        mass=mass,
    )


def query_stream_attn(
    clusters: Clusters, samples: ValueSamples, query: Float[Tensor, " d"], scale: float = 1.0
) -> Float[Tensor, " e"]:
    """z / τ. Lines 29-31, in logarithms."""
    log_numerator, directions = log_terms_of_numerator(samples, query, scale)
    log_tau = log_normalizer(clusters, query, scale)
    return torch.exp(log_numerator - log_tau) @ directions


def log_terms_of_numerator(
    samples: ValueSamples, query: Float[Tensor, " d"], scale: float
) -> tuple[Float[Tensor, " s"], Float[Tensor, "s e"]]:
    """Log of μ / (s‖v‖²) · exp⟨q, k⟩ for each sample, and its v. Line 29."""
    norms = samples.values.square().sum(1)
    log_weights = (samples.mass / (len(norms) * norms)).log()
    empty = norms == 0  # null: no value but zeros came
    return (log_weights + samples.keys @ query * scale).masked_fill(empty, float("-inf")), samples.values


def log_normalizer(clusters: Clusters, query: Float[Tensor, " d"], scale: float) -> Float[Tensor, ""]:
    """Log τ, the log of Σ n/t · Σ exp⟨q, k⟩ over clusters and their samples. Line 30."""
    t = clusters.samples.shape[1]
    log_weights = (clusters.sizes.to(query.dtype) / t).log()[:, None]
    return (log_weights + clusters.samples @ query * scale).flatten().logsumexp(0)


def founders(keys: Float[Tensor, "n d"], delta: float) -> Int64[Tensor, " m"]:
    """Which keys of a stream found clusters in Algorithm 1: those that are within δ of no earlier founder."""
    if not delta >= 0:
        raise ValueError(f"delta must be 0 or more, got {delta}")
    near = torch.zeros(len(keys), dtype=torch.bool)
    found = list[int]()
    while not bool(near.all()):
        founder = int((~near).long().argmax())
        found.append(founder)
        near |= (keys - keys[founder]).norm(dim=1) <= delta
    return torch.tensor(found, dtype=torch.int64)


def make_room(
    clusters: Clusters, delta: float, uniforms: Float[Tensor, "m t"], growth: float = 2.0
) -> tuple[Clusters, float]:
    """Multiply δ by `growth` until clusters merge; the clusters that remain, and the new δ.

    δ = 0 means that δ is not known yet: it begins as the smallest distance between representatives.
    Clusters are visited in the order in which they were founded: one stays if none that stays is within δ;
    each of the others joins the nearest that stays. Sample j of a cluster is replaced by sample j of one that
    joins it, with the probability that a key of both together is of the joining one: samples stay uniform.
    """
    x = clusters.representatives
    distances = (x[:, None] - x).norm(dim=2).fill_diagonal_(float("inf"))
    closest = float(distances.min())
    delta, _ = grown(delta, closest, growth)
    stays = list[int]()
    for i in range(len(x)):
        if not stays or float(distances[i, stays].min()) > delta:
            stays.append(i)
    samples, sizes = clusters.samples.clone(), clusters.sizes.clone()
    for i in sorted(set(range(len(x))) - set(stays)):
        into = stays[int(distances[i, stays].argmin())]
        sizes[into] += sizes[i]
        adopts = uniforms[i] * sizes[into] < sizes[i]
        samples[into, adopts] = clusters.samples[i, adopts]
    return Clusters(x[stays], samples[stays], sizes[stays]), delta


def grown(delta: float, closest: float, growth: float) -> tuple[float, int]:
    """The least δ · growthⁱ for which clusters at the distance `closest` merge, and i; δ = 0 becomes that distance."""
    if delta == 0:
        return closest, 0
    times = max(0, math.ceil(math.log(closest / delta) / math.log(growth)))
    if delta * growth**times < closest:  # the logarithm was rounded down
        times += 1
    return delta * growth**times, times


def update_within_capacity(
    clusters: Clusters,
    delta: float,
    capacity: int,
    key: Float[Tensor, " d"],
    uniforms: Float[Tensor, " t"],
    uniforms_of_merge: Float[Tensor, "m t"],
    growth: float = 2.0,
) -> tuple[Clusters, float]:
    """Lines 11-23 with at most `capacity` clusters: where one more would be founded, room is made first."""
    if capacity < 2:
        raise ValueError(f"capacity must be at least 2, got {capacity}: a single cluster has none to merge with")
    _, distance = nearest_cluster(clusters, key)
    if distance > delta and len(clusters.sizes) == capacity:
        clusters, delta = make_room(clusters, delta, uniforms_of_merge, growth)
    return update_softmax_normalizer(clusters, delta, key, uniforms), delta
