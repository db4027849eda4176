"""Trees of drafted tokens: their links, and tokens drawn along them, with the model's own probabilities."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from megatron_dppo.cpu.engine.speculation import (
    fill_accepted_locations,
    fill_front_locations,
    link_trees,
    renormalized_top_k,
    renormalized_top_p,
    verify_by_sampling,
    verify_greedily,
)
from megatron_dppo.engine.server.ngram_drafts import (
    ObservedTarget,
    accepted_first,
    detach_repetitions,
    with_distinct_drafts,
)

VOCABULARY = 5
NODES = 8
PARENTS = (-1, 0, 0, 0, 1, 1, 4, 2)
TOKENS = (3, 1, 4, 0, 2, 1, 0, 3)
"""A tree: below the root the tokens 1, 4 and 0; below 1 the tokens 2 and 1, ..."""
PADDED = ((-1, 0, 1, 0, 0, 0, 0, 0), (3, 2, 1, 0, 0, 0, 0, 0))
"""A tree of two drafted tokens as SGLang pads it: with children of the root that have the token 0."""
LEAST_P = 1e-6


def ancestors(parents):
    """Return a matrix whose element i, j is 1 if node j is an ancestor of node i, or i itself."""
    mask = np.eye(len(parents), dtype=np.int64)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask


def links(parents, tokens, requests=1):
    """Return index, first child and next sibling ``[requests, nodes]`` of each node, and the nodes' positions."""
    mask = detach_repetitions(np.array(tokens), ancestors(parents).ravel(), len(parents))
    return link(torch.from_numpy(mask).repeat(requests), len(parents), requests)


def link(mask, nodes, requests=1):
    positions = torch.zeros(requests * nodes, dtype=torch.int64)
    index, children, siblings = torch.zeros(3, requests, nodes, dtype=torch.int64)
    lengths = torch.full((requests,), 10)
    link_trees(mask, lengths, positions, index, children, siblings, requests, nodes)
    return index, children, siblings, positions


def sample(probs, parents, tokens, requests, generator, verify=verify_by_sampling):
    """Verify one tree for each request. Returns the tokens ``[requests, nodes]``, padded with -1."""
    nodes = len(parents)
    index, children, siblings, _ = links(parents, tokens, requests)
    predicts = torch.zeros(requests * nodes, dtype=torch.int32)
    accepted = torch.full((requests, nodes), -1, dtype=torch.int32)
    counts = torch.zeros(requests, dtype=torch.int32)
    verify(
        predicts=predicts,
        accept_index=accepted,
        accept_token_num=counts,
        candidates=torch.tensor(tokens).repeat(requests, 1),
        retrive_index=index,
        retrive_next_token=children,
        retrive_next_sibling=siblings,
        uniform_samples=torch.rand(requests, nodes, generator=generator),
        uniform_samples_for_final_sampling=torch.rand(requests, generator=generator),
        target_probs=probs.expand(requests, -1, -1),
    )
    assert ((accepted >= 0).sum(1) == counts + 1).all()
    return torch.where(accepted >= 0, predicts[accepted.long()], -1)


def assert_sampled_from(probs, parents, tokens, sampled):
    """Assert that the tokens after each node fit ``probs`` ``[nodes, vocabulary]``. Returns the number tested."""
    tested = 0
    for node in range(len(parents)):
        path: list[int] = []
        at = node
        while at > 0:
            path.insert(0, tokens[at])
            at = parents[at]
        reached = sampled[
            (sampled[:, : len(path)] == torch.tensor(path, dtype=sampled.dtype)).all(1)
        ]
        next_tokens = reached[:, len(path)]
        next_tokens = next_tokens[next_tokens >= 0]
        counts = next_tokens.bincount(minlength=VOCABULARY).numpy()
        if counts.sum() < 200:
            continue
        expected = probs[node].double() / probs[node].double().sum() * counts.sum()
        assert stats.chisquare(counts, expected.numpy()).pvalue > LEAST_P
        tested += 1
    return tested


def random_probs(seed, nodes=NODES):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(nodes, VOCABULARY, generator=generator).mul(1.2).softmax(-1)


@pytest.mark.parametrize("seed", range(2))
def test_tokens_have_the_models_probabilities(seed):
    probs = random_probs(seed)
    sampled = sample(probs, PARENTS, TOKENS, 3000, torch.Generator().manual_seed(seed))
    assert assert_sampled_from(probs, PARENTS, TOKENS, sampled) >= 3


def test_a_filled_tree_does_not_favour_the_token_that_fills_it():
    parents, tokens = PADDED
    probs = random_probs(2)
    sampled = sample(probs, parents, tokens, 3000, torch.Generator().manual_seed(3))
    distinct = (-1, 0, 1, 0), (3, 2, 1, 0)
    assert assert_sampled_from(probs, *distinct, sampled) >= 2


def test_a_repeated_sibling_and_what_is_below_it_is_detached():
    parents = (-1, 0, 0, 2, 3)
    mask = detach_repetitions(np.array((7, 5, 5, 6, 6)), ancestors(parents).ravel(), 5)
    np.testing.assert_array_equal(mask.reshape(5, 5), ancestors((-1, 0, -1, -1, -1)))
    # Nodes with different parents may have the same token, and so may nodes of different trees.
    parents = (-1, 0, 0, 1, 2)
    two_trees = np.concatenate([ancestors(parents).ravel()] * 2)
    kept = detach_repetitions(np.array((7, 5, 6, 8, 8) * 2), two_trees, 5)
    np.testing.assert_array_equal(kept, two_trees)


def test_links_and_positions_follow_the_tree():
    index, children, siblings, positions = links(PARENTS, TOKENS, requests=2)
    assert index.tolist() == [list(range(8)), list(range(8, 16))]
    assert children.tolist() == [[1, 4, 7, -1, 6, -1, -1, -1]] * 2
    assert siblings.tolist() == [[-1, 2, 3, -1, 5, -1, -1, -1]] * 2
    assert positions.tolist() == [10, 11, 11, 11, 12, 12, 13, 12] * 2


def test_greedy_verification_follows_the_most_probable_tokens():
    index, children, siblings, _ = links(PARENTS, TOKENS)
    predicts = torch.zeros(NODES, dtype=torch.int32)
    accepted = torch.full((1, NODES), -1, dtype=torch.int32)
    counts = torch.zeros(1, dtype=torch.int32)
    best = torch.tensor([[1, 2, 0, 0, 0, 0, 3, 0]])
    candidates = torch.tensor([TOKENS])
    verify_greedily(
        predicts, accepted, counts, candidates, index, children, siblings, target_predict=best
    )
    assert counts.tolist() == [3]
    assert accepted[0].tolist() == [0, 1, 4, 6, -1, -1, -1, -1]
    assert predicts[[0, 1, 4, 6]].tolist() == [1, 2, 0, 3]


def test_drafts_of_the_whole_probability_leave_a_token_to_draw():
    probs = torch.zeros(2, VOCABULARY)
    probs[0, 1] = 1 - 2**-20
    probs[1] = 0.2
    generator = torch.Generator().manual_seed(0)

    def verify_with_largest_draws(**tensors):
        tensors["uniform_samples"].fill_(1 - 2**-24)
        verify_by_sampling(**tensors)

    assert (
        sample(probs, (-1, 0), (3, 1), 3, generator, verify_with_largest_draws).tolist()
        == [[1, -1]] * 3
    )


@pytest.mark.parametrize("name", ["threshold_single", "threshold_acc"])
def test_thresholds_that_accept_more_are_refused(name):
    threshold: dict[str, Any] = {name: 0.5}

    def with_threshold(**tensors):
        verify_by_sampling(**tensors, **threshold)

    with pytest.raises(ValueError, match=f"{name} is 0.5"):
        sample(random_probs(0), PARENTS, TOKENS, 1, torch.Generator(), with_threshold)


def test_top_k_and_top_p_keep_the_most_probable_tokens():
    probs = torch.tensor([[0.1, 0.5, 0.15, 0.05, 0.2]] * 2)
    kept = renormalized_top_k(probs, torch.tensor([2, 5]))
    torch.testing.assert_close(kept[0], torch.tensor([0, 0.5, 0, 0, 0.2]) / 0.7)
    torch.testing.assert_close(kept[1], probs[1])
    kept = renormalized_top_p(probs, torch.tensor([0.6, 1.0]))
    torch.testing.assert_close(kept[0], torch.tensor([0, 0.5, 0, 0, 0.2]) / 0.7)
    torch.testing.assert_close(kept[1], probs[1])


def test_recordings_of_accepted_nodes_are_moved_to_the_first_places():
    nodes = torch.tensor([[0, 2, 3, -1], [4, -1, -1, -1]], dtype=torch.int32)
    assert accepted_first(nodes).tolist() == [0, 2, 3, 3, 4, 5, 6, 7]


def test_the_recording_of_the_served_models_last_pass_is_kept():
    class Target:
        model_runner = "runner"

        def forward_batch_generation(self, recording, *, is_verify=False):
            return SimpleNamespace(routed_experts_output=recording, is_verify=is_verify)

    target = ObservedTarget(Target())
    assert target.model_runner == "runner"
    assert target.recording is None
    assert target.forward_batch_generation("rows", is_verify=True).is_verify
    assert target.recording == "rows"


def test_other_speculation_keeps_its_class():
    algorithm = SimpleNamespace(is_ngram=bool)
    assert with_distinct_drafts(dict, algorithm) is dict


def test_places_of_accepted_tokens_are_packed():
    locations = torch.arange(100, 108)
    front, accepted = torch.zeros(2, 8, dtype=torch.int64)
    fill_front_locations(torch.tensor([2, 1]), locations, front)
    assert front.tolist() == [100, 101, 104, 0, 0, 0, 0, 0]
    index = torch.tensor([[0, 3, -1, -1], [4, -1, -1, -1]], dtype=torch.int32)
    fill_accepted_locations(index, locations, accepted, 8)
    assert accepted.tolist() == [100, 103, 104, 0, 0, 0, 0, 0]
