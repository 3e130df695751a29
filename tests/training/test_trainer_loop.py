"""The loop, the step and the backend: normalisation, cuts, clipping, masters, skipping, numbers that are not finite, stopping."""

from __future__ import annotations

import math
import os
import signal

import pytest
import torch
from toy_substrate import CPU, ListTracker, ToyLoader, ToyModel, ToyStrategy, make_adamw, make_trainer, run_toy

from specforge.distributed.groups import FakeGroup, SingleGroup
from specforge.errors import NumericalError, RunError
from specforge.runtime.contracts import StepContext
from specforge.training.backend import ReplicatedBackend
from specforge.training.step import train_step


def prepared(dtype=torch.float32, bucket_mib=None, group=None, model=None, **adamw):
    backend = ReplicatedBackend(bucket_mib=bucket_mib, timeout_minutes=1.0)
    model = backend.prepare(model or ToyModel(), group or SingleGroup(), make_adamw(**adamw), dtype)
    return backend, model


def one_step(backend, model, loader, step=0, group=None, clip_norm=None, strategy=None, **changed):
    return train_step(
        model=model,
        strategy=strategy or ToyStrategy(),
        head=None,
        batches=loader.batches(step),
        context=StepContext(step, 10, 0, 0),
        backend=backend,
        group=group or SingleGroup(),
        device=CPU,
        lr_factor=1.0,
        clip_norm=clip_norm,
        stop_requested=False,
        **changed,
    )


def weights(model):
    return {name: p.detach().clone() for name, p in model.state_dict().items()}


@pytest.mark.parametrize("micro", [2, 3, 6, 8])
def test_the_cut_into_micro_batches_changes_nothing(micro):
    results = []
    for cut in (1, micro):
        backend, model = prepared()
        result = one_step(backend, model, ToyLoader(6, micro=cut))
        results.append((result, weights(model)))
    (first, a), (second, b) = results
    assert first.weight_sum == second.weight_sum
    assert first.loss == pytest.approx(second.loss, rel=1e-6)
    assert first.gradient_norm == pytest.approx(second.gradient_norm, rel=1e-5)
    assert first.tokens == second.tokens
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=1e-6)


def test_the_gradient_is_the_weighted_mean_over_all_micro_batches():
    backend, model = prepared()
    loader = ToyLoader(6, micro=3)
    result = one_step(backend, model, loader)
    reference = ToyModel()
    outputs = [ToyStrategy().forward_loss(reference, b, None, StepContext(0, 1, 0, 0)) for b in loader.batches(0)]
    (sum(o.loss_sum for o in outputs) / sum(o.weight_sum for o in outputs)).backward()
    expected = math.sqrt(sum(float(p.grad.double().square().sum()) for p in reference.parameters()))
    assert result.gradient_norm == pytest.approx(expected, rel=1e-5)
    optimizer = make_adamw().create(dict(reference.named_parameters()))
    optimizer.step()
    for name, p in reference.named_parameters():
        torch.testing.assert_close(model.state_dict()[name], p.detach(), rtol=1e-5, atol=1e-7)


def test_one_gradient_reduction_and_one_reduction_of_sums_a_step():
    group = FakeGroup(rank=0, world_size=4)
    backend, model = prepared(group=group)
    numel = sum(p.numel() for p in model.parameters())
    assert group.count("broadcast") == len(model.state_dict())
    for step in range(3):
        one_step(backend, model, ToyLoader(6, micro=3), step, group=group)
    assert group.count("all_reduce_sum", numel) == 3
    assert group.count("all_reduce_sum") == 6


def test_buckets_cover_the_gradient_once():
    group = FakeGroup(world_size=2)
    model = torch.nn.Linear(1024, 700)
    backend, _ = prepared(bucket_mib=1, group=group, model=model)
    backend.backward(model(torch.ones(1, 1024)).sum())
    backend.reduce_gradients()
    sizes = [size for name, size in group.calls if name == "all_reduce_sum"]
    assert len(sizes) == 3 and sum(sizes) == 1024 * 700 + 700 and max(sizes) == 2**18


def test_clipping_is_by_the_global_norm_after_normalisation():
    backend, model = prepared()
    free, _ = prepared()
    loader = ToyLoader(6)
    norm = one_step(free, free.model, loader).gradient_norm
    seen = {}
    backend.optimizer.step = lambda: seen.update(norm=float(backend.flat.norm()))  # type: ignore[method-assign]
    one_step(backend, model, loader, clip_norm=norm / 4)
    assert seen["norm"] == pytest.approx(norm / 4, rel=1e-5)
    one_step(backend, model, loader, clip_norm=norm * 4)
    assert seen["norm"] == pytest.approx(norm, rel=1e-5)


def test_bf16_weights_follow_fp32_masters_that_keep_small_updates():
    backend, model = prepared(torch.bfloat16, lr=1e-5)
    reference, exact = prepared(torch.float32, lr=1e-5)
    start = weights(exact)
    for step in range(20):
        one_step(backend, model, ToyLoader(6, micro=2), step)
        one_step(reference, exact, ToyLoader(6, micro=2), step)
    for name, master in backend.masters.items():
        assert master.dtype == torch.float32 and model.state_dict()[name].dtype == torch.bfloat16
        assert torch.equal(model.state_dict()[name], master.detach().bfloat16())
        moved, expected = master.detach() - start[name], exact.state_dict()[name] - start[name]
        # bf16 alone could not move a weight of 0.3 by 2e-4; the masters do, in the same direction as an fp32 run.
        assert torch.nn.functional.cosine_similarity(moved.flatten(), expected.flatten(), dim=0) > 0.9
        assert moved.abs().max() > 1e-5
    assert all(p.grad is None for p in model.parameters())


def test_bf16_accumulates_micro_batches_in_fp32():
    backend, model = prepared(torch.bfloat16)
    parameter = model.down.weight
    for value in (1.0, 2.0**-10, 2.0**-10):
        backend.backward((parameter * value).sum())
    backend.reduce_gradients()
    assert backend.views["down.weight"].flatten()[0].item() == 1.0 + 2.0**-9  # in bf16 it would still be 1


def test_norms_and_vectors_are_not_decayed():
    backend, _ = prepared(weight_decay=0.5)
    decay = {id(p): g["weight_decay"] for g in backend.optimizer.param_groups for p in g["params"]}
    assert {name: decay[id(p)] for name, p in backend.masters.items()} == {
        "up.weight": 0.5,
        "up.bias": 0.0,
        "norm.weight": 0.0,
        "norm.bias": 0.0,
        "down.weight": 0.5,
    }


def test_a_step_without_supervision_is_skipped_counted_and_said(tmp_path):
    tracker = ListTracker()
    backend, model = prepared()
    before = weights(model)
    result = one_step(backend, model, ToyLoader(6, unsupervised=0))
    assert result.skipped and all(torch.equal(before[n], w) for n, w in weights(model).items())
    assert not one_step(backend, model, ToyLoader(6), 1).skipped
    run_toy(tmp_path, tracker=tracker, loader=ToyLoader(6, unsupervised=3))
    assert [m for m in tracker.messages if "step 4 has no supervised token" in m]
    assert tracker.rows[-2][2]["skipped_steps"] == 1
    assert all(math.isfinite(row["loss"]) for step, kind, row in tracker.rows if kind == "train" and step != 4)


def test_a_loss_that_is_not_finite_names_step_and_samples_and_changes_no_weight():
    backend, model = prepared()
    loader = ToyLoader(6, micro=3)
    poisoned = loader.batches(0)[1].sample_ids[0]
    before = weights(model)
    with pytest.raises(NumericalError) as error:
        one_step(backend, model, loader, strategy=ToyStrategy(poison=poisoned))
    assert "step 1: the loss" in str(error.value) and poisoned in str(error.value)
    assert loader.batches(0)[0].sample_ids[0] not in str(error.value)  # only the micro-batch at fault
    assert error.value.exit_code == 3
    assert all(torch.equal(before[n], w) for n, w in weights(model).items())


def test_a_gradient_that_is_not_finite_is_an_error_too():
    backend, model = prepared()
    model.up.weight.register_hook(lambda g: g * float("inf"))
    with pytest.raises(NumericalError, match="the gradient is not finite"):
        one_step(backend, model, ToyLoader(6))


def test_a_replaced_gradient_is_noticed():
    backend, model = prepared()
    model.zero_grad(set_to_none=True)
    with pytest.raises(RuntimeError, match="owns every .grad"):
        one_step(backend, model, ToyLoader(6))


def test_ranks_with_other_metrics_are_refused():
    class Odd(FakeGroup):
        def all_gather_object(self, value):
            return [value, [*value, ("extra", 1)]]

    backend, model = prepared()
    with pytest.raises(RunError, match="rank 1 reports other metrics"):
        one_step(backend, model, ToyLoader(6), group=Odd(world_size=2))


def test_fit_learns_logs_every_step_and_keeps_the_best(tmp_path):
    tracker = ListTracker()
    result, _ = run_toy(tmp_path, tracker=tracker, trainer=make_trainer(epochs=6))
    train = [row for row in tracker.rows if row[1] == "train"]
    assert [step for step, _, _ in train] == list(range(1, 25))
    assert train[-1][2]["loss"] < 0.8 * train[0][2]["loss"]
    assert train[0][2]["simulated_acc_len"] == pytest.approx(
        train[0][2]["per_position_accuracy"][0] * (1 + train[0][2]["per_position_accuracy"][1])
    )
    assert [step for step, kind, _ in tracker.rows if kind == "eval"] == [4, 8, 12, 16, 20, 24]
    assert result.stopped_by == "finished" and result.exit_code == 0 and result.step == 24
    assert result.checkpoint is not None and result.checkpoint.name == "step_0000024"
    assert result.metrics["walk_accept_length"] > 0


def test_max_steps_cut_the_run_and_the_schedule(tmp_path):
    tracker = ListTracker()
    result, _ = run_toy(tmp_path, tracker=tracker, trainer=make_trainer(epochs=100, max_steps=5))
    assert result.step == result.total_steps == 5
    lrs = [row["lr"] for _, kind, row in tracker.rows if kind == "train"]
    assert lrs[0] == pytest.approx(0.005) and lrs[1] == lrs[2] == pytest.approx(0.01) and lrs[4] < 0.005


def test_rows_logged_every_few_steps_are_sums_over_them(tmp_path):
    each, third = ListTracker(), ListTracker()
    run_toy(tmp_path / "a", tracker=each, evaluator=None)
    run_toy(tmp_path / "b", tracker=third, evaluator=None, trainer=make_trainer(log_every=3))
    assert [step for step, _, _ in third.rows] == [3, 6, 8]
    parts = [row for _, _, row in each.rows[:3]]
    mean = sum(r["loss"] * r["weight_sum"] for r in parts) / sum(r["weight_sum"] for r in parts)
    assert third.rows[0][2]["loss"] == pytest.approx(mean, rel=1e-9)


def test_the_time_limit_evaluates_saves_and_stops_at_a_boundary(tmp_path):
    tracker = ListTracker()
    trainer = make_trainer(epochs=1000, time_limit_minutes=0.3 / 60, save_every=10**6, eval_every=10**6)
    result, _ = run_toy(tmp_path, tracker=tracker, trainer=trainer, loader=ToyLoader(6, delay=0.02))
    assert result.stopped_by == "time_limit" and result.exit_code == 0
    assert 1 <= result.step < 40 and result.checkpoint is not None
    assert tracker.rows[-1][1] == "eval"
    again, _ = run_toy(tmp_path, trainer=trainer)
    assert again.step == result.step  # the limit counts all attempts


def test_a_signal_saves_says_where_and_gives_the_shells_exit_code(tmp_path):
    class Interrupting(ToyStrategy):
        def forward_loss(self, model, batch, head, context):
            if context.step == 2:
                os.kill(os.getpid(), signal.SIGINT)
            return super().forward_loss(model, batch, head, context)

    tracker = ListTracker()
    before = signal.getsignal(signal.SIGINT)
    result, _ = run_toy(tmp_path, tracker=tracker, strategy=Interrupting(), trainer=make_trainer(save_every=100))
    assert result.stopped_by == "signal" and result.exit_code == 130
    assert result.checkpoint is not None and str(result.checkpoint) in tracker.messages[-1]
    assert signal.getsignal(signal.SIGINT) is before
    finished, _ = run_toy(tmp_path, trainer=make_trainer(save_every=100))
    assert finished.stopped_by == "finished"


def test_a_loader_that_ends_early_is_an_error(tmp_path):
    class Short(ToyLoader):
        def __iter__(self):
            return iter([(0, self.batches(0))])

    with pytest.raises(RunError, match="ended after step 1 of 8"):
        run_toy(tmp_path, loader=Short(6))
