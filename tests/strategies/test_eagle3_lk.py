"""LK losses against autograd on the written-out formula, tile by tile, and inside the strategy under every cut of the vocabulary."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from specforge.modeling.target import TargetHead
from specforge.ops.lk_loss import LKForm, lk_loss, lk_loss_reference
from specforge.runtime.contracts import StepContext
from specforge.training.strategies.eagle3_rows import align

FORMS = [LKForm("alpha", 1.0, 3.0), LKForm("lambda", 1.0, 3.0), LKForm("lambda", 0.5, 0.0)]
CONTEXT = StepContext(step=0, total_steps=10, epoch=0, seed=0)
MASKS = [[[0, 0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 1], [0, 1, 1, 1, 1, 1]], [[0, 0, 1, 0, 1, 1, 1], [0, 0, 0]]]


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f"{f.kind}-{f.kl_scale}-{f.kl_decay}")
@pytest.mark.parametrize("tile", [1, 4, 100])
def test_value_and_gradients_equal_autograd(form, tile) -> None:
    torch.manual_seed(0)
    hidden, head = torch.randn(9, 6), torch.randn(12, 6)
    target = torch.randn(5, 20) * 2
    normalizers, teacher = torch.logsumexp(target, -1), target[:, ::2][:, :10]
    teacher = torch.cat((teacher, target[:, 1:4:2]), -1)
    rows, weights = torch.randint(0, 5, (9,)), torch.rand(9)
    weights[3] = 0.0
    results = []
    for run in (lambda h, w: lk_loss(h, w, teacher, normalizers, rows, weights, form, tile),
                lambda h, w: lk_loss_reference(h, w, teacher[rows], normalizers[rows], weights, form)):  # fmt: skip
        h, w = hidden.clone().requires_grad_(), head.clone().requires_grad_()
        loss, losses, predicted, alpha = run(h, w)
        (2.5 * loss).backward()
        results.append((loss.detach(), losses, predicted, alpha, h.grad, w.grad))
    for fast, slow in zip(*results, strict=True):
        torch.testing.assert_close(fast, slow, rtol=2e-5, atol=1e-6)
    assert results[0][5].abs().sum() > 0 and ((results[0][3] > 0) & (results[0][3] < 1)).all()


def test_forms_by_hand() -> None:
    """Target 0.5, 0.3, 0.2 of which the first two are kept; draft 0.8, 0.2: α = 0.5 + 0.2, KL = 0.625 ln(0.625/0.8) + 0.375 ln(0.375/0.2)."""
    teacher, normalizers = torch.tensor([[0.5, 0.3]]).log(), torch.zeros(1)
    hidden, head = torch.tensor([[1.0]]), torch.tensor([[0.8], [0.2]]).log()
    one, row = torch.ones(1), torch.zeros(1, dtype=torch.int64)
    loss, _, predicted, alpha = lk_loss(hidden, head, teacher, normalizers, row, one, FORMS[0])
    assert alpha.item() == pytest.approx(0.7) and loss.item() == pytest.approx(0.3566749) and predicted.item() == 0
    w, divergence = 2.718281828 ** (-3 * 0.7), 0.625 * -0.2468601 + 0.375 * 0.6286087
    assert lk_loss(hidden, head, teacher, normalizers, row, one, FORMS[1])[0].item() == pytest.approx(w * divergence + (1 - w) * 0.3)


def test_hopeless_rows_and_no_rows_give_finite_zeros() -> None:
    hidden = torch.tensor([[200.0, 0.0]], requires_grad=True)
    head = torch.eye(2)
    teacher = torch.tensor([[-300.0, 0.0]])
    loss, _, _, alpha = lk_loss(hidden, head, teacher, torch.zeros(1), torch.zeros(1, dtype=torch.int64), torch.ones(1), FORMS[0])
    loss.backward()
    assert alpha.item() == loss.item() == 0.0 and (hidden.grad == 0).all()
    nothing = torch.zeros(0, 2, requires_grad=True)
    none = torch.zeros(0, dtype=torch.int64)
    loss, *_ = lk_loss(nothing, head, teacher, torch.zeros(1), none, torch.zeros(0), FORMS[1])
    loss.backward()
    assert loss.item() == 0.0 and nothing.grad.shape == (0, 2)


@pytest.mark.parametrize("form", FORMS[:2], ids=lambda f: f.kind)
def test_a_draft_that_learns_it_reaches_the_targets_distribution(form) -> None:
    """Both forms have their optimum where q is the target's distribution; from any start plain descent comes close."""
    torch.manual_seed(1)
    teacher = torch.randn(1, 8)
    logits = torch.zeros(1, 8, requires_grad=True)
    optimizer = torch.optim.Adam([logits], lr=0.02)
    for _ in range(400):
        arguments = (torch.eye(8), teacher, torch.logsumexp(teacher, -1), torch.zeros(1, dtype=torch.int64), torch.ones(1), form)
        loss, _, _, alpha = lk_loss(logits, *arguments)
        optimizer.zero_grad(), loss.backward(), optimizer.step()
    assert alpha.item() > 0.98


def test_the_normalizer_is_that_of_the_whole_vocabulary() -> None:
    torch.manual_seed(2)
    hidden = torch.randn(3, 4, 6)
    head = TargetHead(torch.randn(25, 6), torch.randn(25), scale=0.7, soft_cap=3.0)
    torch.testing.assert_close(head.log_normalizer(hidden, tile=7), torch.logsumexp(head.logits(hidden), -1))


@pytest.mark.parametrize("kept", [None, range(0, 40, 2)])
@pytest.mark.parametrize("loss", ["lk_alpha", "lk_lambda"])
def test_the_strategy_sums_the_loss_of_each_step(make_strategy, make_draft, make_batch, tiny_head, kept, loss) -> None:
    strategy = make_strategy(loss=loss, kl_scale=0.9, kl_decay=2.0)
    form, batch = LKForm(loss.removeprefix("lk_"), 0.9, 2.0), make_batch(MASKS, width=20)
    draft = make_draft(strategy, kept)
    out = strategy.forward_loss(draft, batch, tiny_head, CONTEXT)
    ids = torch.arange(40) if kept is None else torch.tensor(list(kept))
    rows = align(batch, 3, by_document=True)
    whole = tiny_head.logits(batch.tensors["final_hidden_states"].flatten(0, 1)[rows.teacher_places])
    inside = torch.isin(whole.argmax(-1), ids).float()
    total, accepted = torch.zeros(()), []

    def on_step(k, normed, weight):
        taught = rows.teacher_rows[k]
        sums = lk_loss_reference(normed, weight, whole[taught][:, ids], torch.logsumexp(whole[taught], -1),
                                 rows.weights[k] * inside[taught], dataclasses.replace(form))  # fmt: skip
        accepted.append((sums[3] * rows.weights[k]).sum())
        return 0.8**k * sums[0]

    total = sum(draft(rows.inputs, on_step))
    torch.testing.assert_close(out.loss_sum, total, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(out.metrics["acceptance_rate"][0].float(), torch.stack(accepted))
    assert out.weight_sum.item() == 11, "the denominator is that of soft cross-entropy"
    gradients = []
    for value in (out.loss_sum, total):
        draft.zero_grad()
        value.backward()
        gradients.append([p.grad.clone() for p in draft.parameters()])
    assert all(torch.allclose(a, b, atol=1e-5, rtol=1e-4) and a.any() for a, b in zip(*gradients, strict=True))


def test_soft_cross_entropy_reports_no_acceptance(make_strategy, make_draft, make_batch, tiny_head) -> None:
    strategy = make_strategy()
    out = strategy.forward_loss(make_draft(strategy), make_batch(MASKS, width=20), tiny_head, CONTEXT)
    assert set(out.metrics) == {"per_position_accuracy", "step_loss"}
