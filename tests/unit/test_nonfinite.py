"""Numbers that are not finite: data with them is rejected, the loss blocks and counts tokens with them, and a NaN that
the trainer makes reaches the loss.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_dppo.algorithms import divergence, rules
from megatron_dppo.algorithms.algorithm import build_algorithm
from megatron_dppo.algorithms.decisions import decide
from megatron_dppo.algorithms.inputs import TokenInputs, recomputed, rollout
from megatron_dppo.algorithms.likelihood import negative_log_likelihood
from megatron_dppo.algorithms.policy_loss import policy_loss
from megatron_dppo.algorithms.table import PRESETS
from megatron_dppo.data.batch_file import BatchFormatError, load_batch, save_batch
from megatron_dppo.data.columns import check_log_probs, check_topk
from megatron_dppo.data.packing import pack
from tests.messages import mentioning
from tests.trajectories import trajectory
from tests.unit.test_policy_loss import complete_inputs
from tests.unit.token_inputs import inputs

NAN, INF = math.nan, math.inf


def with_number(field, value, row):
    """Return complete inputs in which ``value`` replaces one number of ``field``. All tokens train."""
    x = replace(complete_inputs(), loss_mask=torch.ones(24, dtype=torch.bool))
    column = getattr(x, field).clone()
    column[row] = value
    return replace(x, **{field: column})


def loss_and_gradient(algorithm, x):
    log_probs = x.log_probs.detach().clone().requires_grad_()
    sums = policy_loss(algorithm, replace(x, log_probs=log_probs))
    (grad,) = torch.autograd.grad(sums.loss, log_probs)
    return sums, grad


FIELDS_READ = [
    *((name, "rollout_log_probs") for name in PRESETS),
    *((name, "recomputed_log_probs") for name in PRESETS if build_algorithm(name).needs_recomputed),
]


@pytest.mark.parametrize("value", [NAN, -INF, INF])
@pytest.mark.parametrize(("name", "field"), FIELDS_READ)
def test_a_number_that_is_not_finite_blocks_its_token_and_is_counted(name, field, value):
    algorithm = build_algorithm(name)
    _, before = loss_and_gradient(algorithm, with_number(field, 0.0, []))
    sums, grad = loss_and_gradient(algorithm, with_number(field, value, 5))
    assert grad[5] == 0
    assert sums.loss.isfinite()
    assert grad.isfinite().all()
    assert sums.blocked[5]
    if not algorithm.preset.sequences:  # with sequence ratios the number blocks its whole sequence
        assert sums.metrics.values()["mask/nonfinite"] == 1
        rest = torch.arange(24) != 5
        torch.testing.assert_close(grad[rest], before[rest])
    for metric, figure in sums.metrics.values().items():
        assert math.isfinite(figure), metric


@pytest.mark.parametrize("name", [n for n in PRESETS if build_algorithm(n).reads_topk])
@pytest.mark.parametrize("field", ["topk_log_probs", "rollout_topk_log_probs"])
@pytest.mark.parametrize("value", [NAN, -INF])
def test_a_valid_topk_entry_that_is_not_finite_blocks(name, field, value):
    algorithm = build_algorithm(name)
    sums, grad = loss_and_gradient(algorithm, with_number(field, value, (5, 1)))
    assert grad[5] == 0
    assert sums.blocked[5]
    assert sums.metrics.values()["mask/nonfinite"] == 1
    assert all(math.isfinite(figure) for figure in sums.metrics.values().values())


@pytest.mark.parametrize("name", [n for n in PRESETS if build_algorithm(n).reads_topk])
def test_an_invalid_topk_entry_may_hold_anything(name):
    algorithm = build_algorithm(name)
    x = with_number("topk_log_probs", 0.0, [])
    valid = x.topk_valid.clone()
    valid[5, 2] = False
    x = replace(x, topk_valid=valid)
    _, expected = loss_and_gradient(algorithm, x)
    for field in ("topk_log_probs", "rollout_topk_log_probs"):
        column = getattr(x, field).clone()
        column[5, 2] = NAN
        sums, grad = loss_and_gradient(algorithm, replace(x, **{field: column}))
        torch.testing.assert_close(grad, expected)
        assert sums.metrics.values()["mask/nonfinite"] == 0


@pytest.mark.parametrize("name", [n for n in PRESETS if build_algorithm(n).reads_topk])
def test_a_topk_entry_of_the_most_negative_finite_number_is_no_fault(name):
    """An engine gives this number to a token that it forbids. The sum of two such numbers overflows."""
    x = with_number("topk_log_probs", -1e308, (5, 1))
    x = replace(x, rollout_topk_log_probs=x.rollout_topk_log_probs.index_put(
        (torch.tensor(5), torch.tensor(1)), torch.tensor(-1e308, dtype=torch.float64)
    ))  # fmt: skip
    assert decide(build_algorithm(name), x).finite.all()


def test_a_penalty_that_overflows_blocks_its_token():
    """The first token's log pi and the penalty's slope are finite, but the penalty (log r)^2 overflows float32."""
    log_probs = torch.tensor([-1e30, -1.0, -1e30], requires_grad=True)
    mu = torch.tensor([-1.0, -1.0, -1e30])
    x = TokenInputs(log_probs, mu, torch.ones(3), torch.ones(3).bool())
    algorithm = build_algorithm("pg-is", {"log_ratio_coefficient": 0.1})
    assert decide(algorithm, x).finite.tolist() == [False, True, True]
    assert policy_loss(algorithm, x).loss.item() == -2.0


def test_a_preset_does_not_mind_what_it_does_not_read():
    for field in ("recomputed_log_probs", "topk_log_probs"):
        sums, _ = loss_and_gradient(build_algorithm("dppo-binary-tv"), with_number(field, NAN, 5))
        assert sums.metrics.values()["mask/nonfinite"] == 0


def test_masks_by_themselves_block_nan_for_either_sign():
    x = inputs([0.5, 0.5, 0.5], [NAN, NAN, NAN], [1.0, -1.0, 0.0], recomputed=[NAN] * 3)
    clip = {"clip_low": 0.2, "clip_high": 0.2}
    for anchor in (rollout, recomputed):
        found = [
            rules.ratio_clip(x, anchor, **clip),
            rules.relaxed_clip(x, anchor, **clip, rare_below=0.1, relax_low=True, relax_high=True),
            rules.binary_tv(x, anchor, tv_threshold=1.0),
            rules.binary_kl(x, anchor, kl_threshold=INF),
        ]
        assert [mask.tolist()[:2] for mask in found] == [[False, False]] * 4
    assert rules.large_drop(x, rollout, max_drop=0.5).tolist() == [True, False, True]
    band = rules.icepop(x, recomputed, mismatch_low=0, mismatch_high=INF, **clip)
    assert band.tolist() == [False] * 3


def test_a_distance_that_is_infinite_blocks_even_towards_the_anchor():
    # pi = 0 < mu. With A > 0 the update leads back to mu, but the KL is infinite, which no threshold allows.
    x = inputs([0.0, 0.0], [0.5, 0.5], [1.0, -1.0])
    assert rules.binary_kl(x, rollout, kl_threshold=INF).tolist() == [False, False]


def test_divergences_are_nan_where_what_counts_is_nan():
    x = torch.tensor([[-1.0, -2.0]], dtype=torch.float64)
    bad = torch.tensor([[NAN, -2.0]], dtype=torch.float64)
    all_valid, second_valid = torch.tensor([[True, True]]), torch.tensor([[False, True]])
    for f in (divergence.topk_tv, divergence.topk_kl):
        for pair in ((bad, x), (x, bad)):
            assert f(*pair, all_valid).isnan().all()
            torch.testing.assert_close(f(*pair, second_valid), f(x, x, second_valid))
    for binary in (divergence.binary_tv, divergence.binary_kl):
        assert binary(bad[0], x[0]).isnan().tolist() == [True, False]
        assert binary(x[0], bad[0]).isnan().tolist() == [True, False]


def test_an_overflowing_ratio_blocks_one_token_under_an_infinite_cap_and_is_cut_under_a_finite_one():
    # log r = 89 overflows float32, whose largest number is e^88.7.
    x = inputs([1.0, 0.5], [1.0, 0.5], [-1.0, 1.0], dtype=torch.float32)
    x = replace(x, rollout_log_probs=torch.tensor([-89.0, math.log(0.5)]))
    sums, grad = loss_and_gradient(build_algorithm("pg-is"), x)
    assert grad.tolist() == [0.0, -1.0]
    assert sums.blocked.tolist() == [True, False]
    assert sums.loss.isfinite()
    assert sums.metrics.values()["mask/nonfinite"] == 1
    sums, grad = loss_and_gradient(build_algorithm("pg-tis"), x)
    assert grad.tolist() == [3.0, -1.0]
    assert sums.metrics.values()["mask/nonfinite"] == 0
    # Just below the overflow the token trains, however large its ratio is.
    x = replace(x, rollout_log_probs=torch.tensor([-88.0, math.log(0.5)]))
    _, grad = loss_and_gradient(build_algorithm("pg-is"), x)
    assert grad[0] == pytest.approx(math.exp(88), rel=1e-5)


@pytest.mark.parametrize("log_ratio", [20.5, 88.5, 89.0, 1e6])
def test_a_kl_penalty_of_a_huge_ratio_is_bounded_and_blocks_nothing_under_a_finite_cap(log_ratio):
    """There are two such tokens. Just below e^88.7 each ratio is finite in float32, but their sum is not."""
    x = inputs([1.0, 1.0], [1.0, 1.0], [-1.0, -1.0], dtype=torch.float32)
    x = replace(x, rollout_log_probs=torch.full((2,), -log_ratio))
    sums, grad = loss_and_gradient(build_algorithm("pg-tis", {"kl_coefficient": 10.0}), x)
    bound = math.expm1(20)
    assert grad.tolist() == pytest.approx([3 + 10 * bound] * 2)
    assert sums.loss.item() == pytest.approx(2 * (3 + 10 * (bound - 20)))
    assert sums.metrics.values()["mask/nonfinite"] == 0


@pytest.mark.parametrize("field", ["log_probs", "advantages"])
@pytest.mark.parametrize("name", list(PRESETS))
def test_a_nan_that_training_itself_makes_reaches_the_loss(name, field):
    x = with_number("rollout_log_probs", 0.0, [])
    column = getattr(x, field).detach().clone()
    column[5] = NAN
    assert policy_loss(build_algorithm(name), replace(x, **{field: column})).loss.isnan()
    outside = replace(x, **{field: column}, loss_mask=torch.arange(24) != 5)
    if name != "gspo" or field != "log_probs":
        assert policy_loss(build_algorithm(name), outside).loss.isfinite()


def test_decisions_keep_the_loss_mask():
    x = complete_inputs()
    decisions = decide(build_algorithm("pg-is"), x)
    assert torch.equal(decisions.trains, x.loss_mask)
    assert decisions.finite.all()


def test_the_warm_start_ignores_what_stands_outside_its_mask():
    log_probs = torch.tensor([-INF, NAN, -1.5], requires_grad=True)
    sums = negative_log_likelihood(log_probs, torch.tensor([False, False, True]))
    sums.loss.backward()
    assert sums.loss.item() == 1.5
    assert log_probs.grad.tolist() == [0.0, 0.0, -1.0]
    assert sums.metrics.values() == {"loss/sum": 1.5}


def sample(**changes):
    values = {
        "advantage": 0.5, "rollout_log_probs": [-1.0, -2.0],
        "topk_ids": np.array([[0, 7], [7, -1]], np.int32),
        "topk_log_probs": np.array([[-1.0, -2.0], [-0.5, NAN]], np.float32),
    }  # fmt: skip
    return trajectory([1], [2, 3], **{**values, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout_log_probs": [-1.0, NAN]}, "response 0 to problem 0: rollout_log_probs: nan at token 1"),
        ({"rollout_log_probs": [-INF, -1.0]}, "rollout_log_probs: -inf at token 0"),
        ({"rollout_log_probs": [-1.0, 1e-5]}, r"1\.0*e-05|9\.99.*e-06 at token 1, expected a finite"),
        ({"advantage": NAN}, "response 0 to problem 0: advantage nan, expected a finite number"),
        ({"topk_ids": np.array([[7, 7], [0, 1]], np.int32)}, "Top-K id 7 stands twice at token 0"),
        ({"topk_ids": np.array([[0, 7], [0, 0]], np.int32)}, "id 0 stands twice at token 1"),
        ({"topk_ids": np.array([[0, 7], [0, 1]], np.int32)}, "Top-K log-probabilities: nan at token 1"),
        ({"topk_ids": None}, "topk_ids and topk_log_probs go together"),
    ],
)  # fmt: skip
def test_trajectories_and_files_refuse_what_the_engines_protocol_refuses(
    tmp_path, changes, message
):
    if "twice" in message:
        changes = {**changes, "topk_log_probs": np.full((2, 2), -1.0, np.float32)}
    with pytest.raises(ValueError, match=message):
        sample(**changes).check()
    if "advantage" not in changes:
        save_batch(tmp_path, 1, [sample(**changes)])
        with pytest.raises(BatchFormatError, match=message):
            load_batch(tmp_path, 1)
        with pytest.raises(ValueError, match=message):
            pack([sample(**changes)])
        if changes.get("topk_ids", 0) is not None:  # a response that does not train is not checked
            pack([sample(**changes)], trains=[False])


def test_what_rounding_makes_and_what_is_not_valid_is_accepted():
    sample().check()
    sample(rollout_log_probs=[1e-6, 0.0]).check()
    check_log_probs([1e-6, -1e30], "here")
    check_topk(np.array([[-1, -1]]), np.array([[NAN, INF]]), "here")


def test_token_inputs_still_take_any_shape():
    x = complete_inputs()
    fields = {name: getattr(x, name) for name in x.__dataclass_fields__}
    shaped = TokenInputs(
        **{n: v.view(3, 8, *v.shape[1:]) for n, v in fields.items() if v is not None}
    )
    for name in PRESETS:
        flat, square = (policy_loss(build_algorithm(name), v).loss for v in (x, shaped))
        torch.testing.assert_close(flat, square)


def test_the_first_bad_entry_is_named_and_id_0_counts():
    with pytest.raises(ValueError, match=mentioning("here", "1.0", "token 1")):
        check_log_probs([-1.0, 1.0, NAN], "here")
    with pytest.raises(ValueError, match=mentioning("nan", "token 0")):
        check_topk(np.array([[0, -1]]), np.array([[NAN, NAN]]), "here")
    check_topk(np.array([[0, 5, 3], [3, 5, 0]]), np.full((2, 3), -1.0), "here")
    with pytest.raises(ValueError, match=mentioning("id 3", "token 1")):
        check_topk(np.array([[1, 2, 3], [3, 1, 3], [4, 4, 0]]), np.full((3, 3), -1.0), "here")
    with pytest.raises(ValueError, match=mentioning("id 0", "token 0")):
        check_topk(np.array([[0, 7, 0]]), np.full((1, 3), -1.0), "here")
