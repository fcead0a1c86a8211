"""Fitting Saap: the classifiers of all heads together learn what each alone would."""

import pytest
import torch

from kvsketch.algorithms.saap import divergence
from kvsketch.fitting.classifiers import Classifiers, train

LANES, WIDTH, HIDDEN, BUCKETS, POOL = 3, 8, 16, 6, 200


def generator(seed):
    return torch.Generator().manual_seed(seed)


def pool(seed=0):
    """Queries, and shares that depend on them: those of a network nobody has seen."""
    queries = torch.randn(LANES, POOL, WIDTH, generator=generator(seed), dtype=torch.float64)
    hidden = torch.tanh(queries @ torch.randn(LANES, WIDTH, 12, generator=generator(seed + 1), dtype=torch.float64))
    logits = hidden @ torch.randn(LANES, 12, BUCKETS, generator=generator(seed + 2), dtype=torch.float64)
    return queries, torch.softmax(2 * logits, 2)


def batches(count, size=50, seed=3):
    numbers = generator(seed)
    return (torch.randint(POOL, (size,), generator=numbers) for _ in range(count))


def made(hidden=HIDDEN, seed=5):
    return Classifiers(LANES, WIDTH, hidden, BUCKETS, generator(seed)).double()


def network_of(classifiers, lane):
    """The same network by torch's own layers."""
    layers = [torch.nn.Linear(classifiers.hidden or WIDTH, BUCKETS)]
    if classifiers.hidden:
        layers = [torch.nn.Linear(WIDTH, HIDDEN), torch.nn.BatchNorm1d(HIDDEN), torch.nn.ReLU(), *layers]
    network = torch.nn.Sequential(*layers).double()
    with torch.no_grad():
        if classifiers.hidden:
            network[0].weight.copy_(classifiers.first[lane].T)
            network[0].bias.copy_(classifiers.first_bias[lane, 0])
        network[-1].weight.copy_(classifiers.second[lane].T)
        network[-1].bias.copy_(classifiers.second_bias[lane, 0])
    return network


@pytest.mark.parametrize("hidden", [HIDDEN, 0])
def test_heads_together_learn_what_each_alone_would(hidden):
    """Twenty steps of Adam, lane by lane, with torch's own layers: the same losses and the same answers."""
    queries, shares = pool()
    together = made(hidden)
    alone = [network_of(together, lane) for lane in range(LANES)]
    losses = torch.stack(list(train(together, queries, shares, batches(20), rate=1e-2)))
    for lane, network in enumerate(alone):
        adam = torch.optim.Adam(network.parameters(), lr=1e-2)
        for step, batch in enumerate(batches(20)):
            adam.zero_grad()
            loss = divergence(torch.log_softmax(network(queries[lane, batch]), 1), shares[lane, batch])
            loss.backward()
            adam.step()
            torch.testing.assert_close(losses[step, lane], loss.detach())
        expected = torch.log_softmax(network.eval()(queries[lane]), 1)
        torch.testing.assert_close(together(queries)[lane], expected)


@pytest.mark.parametrize("hidden", [HIDDEN, 0])
def test_what_is_used_answers_as_what_was_trained(hidden):
    queries, shares = pool()
    classifiers = made(hidden)
    list(train(classifiers, queries, shares, batches(30), rate=1e-2))
    with torch.no_grad():
        for lane in range(LANES):
            found = classifiers.classifier_of(lane).log_probabilities(queries[lane])
            torch.testing.assert_close(found, classifiers(queries)[lane])


def test_training_comes_closer_to_the_shares():
    queries, shares = pool()
    classifiers = made()
    losses = torch.stack(list(train(classifiers, queries, shares, batches(400), rate=1e-2)))
    assert (losses[-50:].mean(0) < losses[:5].mean(0) / 5).all()
    best = shares.argmax(2)
    with torch.no_grad():
        assert (classifiers(queries).argmax(2) == best).double().mean() > 0.85


def test_a_share_of_zero_is_no_trouble():
    queries, shares = pool()
    shares = torch.where(shares < 0.1, 0.0, shares)
    losses = torch.stack(list(train(made(), queries, shares / shares.sum(2, keepdim=True), batches(5))))
    assert losses.isfinite().all()
    assert (losses > 0).all()


def test_the_same_numbers_begin_the_same_classifiers():
    for one, other in zip(made().parameters(), made().parameters(), strict=True):
        assert torch.equal(one, other)
    assert not torch.equal(made().second, made(seed=6).second)
