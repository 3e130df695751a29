"""The hf engine against transformers' own outputs: layers, final norm, head, padding, cache and generation."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from specforge.errors import TargetError
from specforge.runtime.contracts import CaptureSpec, PromptTask

FAMILIES = ["llama", "qwen3", "gemma2", "gpt2", "granite"]


def make_tasks(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tasks = []
    for n, length in enumerate(lengths):
        ids = torch.randint(3, 97, (length,), generator=generator).tolist()
        mask = [int(i >= length // 2 and i != length - 2) for i in range(length)]
        tasks.append(PromptTask(f"s{n}", tuple(ids), tuple(mask)))
    return tasks


def spec_of(*layers, dtype="float32"):
    return CaptureSpec(tuple(layers), final_hidden=True, target_argmax=True, dtype=dtype)


@pytest.mark.parametrize("family", FAMILIES)
def test_captured_layers_equal_hidden_states(make_engine, family):
    engine = make_engine(family)
    task = make_tasks([13])[0]
    tensors = engine.capture([task], spec_of(0, 1, 3))[0].tensors
    with torch.no_grad():
        reference = engine.model(torch.tensor([task.input_ids]), output_hidden_states=True)
    aux = tensors["aux_hidden_states"]
    assert aux.shape == (13, 96) and tensors["final_hidden_states"].shape == (13, 32)
    torch.testing.assert_close(aux[:, :32], reference.hidden_states[1][0])
    torch.testing.assert_close(aux[:, 32:64], reference.hidden_states[2][0])
    torch.testing.assert_close(tensors["final_hidden_states"], reference.hidden_states[-1][0])
    # The last layer's raw output is what the final norm reads: not what hidden_states holds, but its norm is.
    assert not torch.allclose(aux[:, 64:], reference.hidden_states[-1][0])
    norm = engine.decoder.ln_f if family == "gpt2" else engine.decoder.norm
    torch.testing.assert_close(norm(aux[:, 64:]), reference.hidden_states[-1][0])


@pytest.mark.parametrize("family", FAMILIES)
def test_target_argmax_is_the_models_own_at_rows_before_supervised_tokens(make_engine, family):
    engine = make_engine(family)
    task = make_tasks([17])[0]
    argmax = engine.capture([task], spec_of(1))[0].tensors["target_argmax"]
    with torch.no_grad():
        logits = engine.model(torch.tensor([task.input_ids])).logits[0]
    hidden = engine.capture([task], spec_of(1))[0].tensors["final_hidden_states"]
    torch.testing.assert_close(engine.head_logits(hidden), logits)
    for i in range(17):
        supervised = i + 1 < 17 and task.loss_mask[i + 1]
        assert int(argmax[i]) == (int(logits[i].argmax()) if supervised else -1)


@pytest.mark.parametrize("family", FAMILIES)
def test_batches_with_right_padding_change_no_value(make_engine, family):
    tasks = make_tasks([5, 19, 8, 12, 3])
    alone = make_engine(family).capture(tasks, spec_of(0, 3))
    together = make_engine(family, batch_tokens=60).capture(tasks, spec_of(0, 3))
    assert [f.sample_id for f in together] == [t.sample_id for t in tasks]
    for a, b in zip(alone, together, strict=True):
        for name, tensor in a.tensors.items():
            torch.testing.assert_close(b.tensors[name], tensor, rtol=1e-4, atol=2e-4)
            assert b.tensors[name].untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def test_features_have_the_asked_dtype_and_serve_as_constants_under_autograd(make_engine):
    tensors = make_engine().capture(make_tasks([6]), spec_of(1, dtype="bfloat16"))[0].tensors
    assert tensors["aux_hidden_states"].dtype == tensors["final_hidden_states"].dtype == torch.bfloat16
    assert tensors["input_ids"].dtype == torch.int64 and tensors["loss_mask"].dtype == torch.bool
    weight = torch.ones(32, requires_grad=True)
    (tensors["aux_hidden_states"].float() * weight).sum().backward()
    assert weight.grad is not None


def test_layer_ids_out_of_range_are_refused(make_engine):
    with pytest.raises(TargetError, match=r"aux_hidden_state_layer_ids=\[4\].*0 … 3"):
        make_engine().capture(make_tasks([4]), spec_of(4))


@pytest.mark.parametrize("family", FAMILIES)
def test_cached_forward_with_crop_equals_one_pass(make_engine, family):
    engine = make_engine(family)
    ids = torch.tensor([make_tasks([20])[0].input_ids])
    whole_logits, whole_aux, _ = engine.forward_cached(ids, None, (1, 3))
    _, _, cache = engine.forward_cached(ids[:, :11], None, (1, 3))
    wrong = (ids[:, 11:15] + 1) % 97
    engine.forward_cached(wrong, cache, (1, 3))
    cache = engine.crop_cache(cache, 11)
    logits, aux, cache = engine.forward_cached(ids[:, 11:], cache, (1, 3))
    assert cache.get_seq_length() == 20
    torch.testing.assert_close(logits, whole_logits[11:], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(aux, whole_aux[11:], rtol=1e-4, atol=1e-4)


def greedy_by_hand(engine, prompt, limit, stops):
    ids = list(prompt)
    for _ in range(limit):
        with torch.no_grad():
            token = int(engine.model(torch.tensor([ids])).logits[0, -1].argmax())
        ids.append(token)
        if token in stops:
            break
    return ids[len(prompt) :]


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_batched_greedy_equals_one_prompt_at_a_time(make_engine, family):
    engine = make_engine(family)
    prompts = [t.input_ids for t in make_tasks([4, 9, 6, 2, 9, 13, 5, 7, 3, 8], seed=3)]
    free = [greedy_by_hand(engine, p, 20, ()) for p in prompts]
    stops = [free[1][5], free[4][2], free[7][11]]
    expected = [greedy_by_hand(engine, p, 20, stops) for p in prompts]
    assert len({len(e) for e in expected}) >= 2
    options = {"max_new_tokens": 20, "temperature": 0.0, "top_p": 1.0, "seed": 0, "stop_token_ids": stops}
    assert engine.generate(prompts, **options) == expected
    assert engine.generate(prompts[:1], **options) == expected[:1]


def test_sampling_follows_the_seed_not_the_batch_and_the_distribution(make_engine):
    engine = make_engine("gemma2")
    prompts = [t.input_ids for t in make_tasks([4, 9, 6])]
    options = {"max_new_tokens": 8, "temperature": 1.0, "top_p": 0.9, "stop_token_ids": []}
    together = engine.generate(prompts, seed=[5, 6, 7], **options)
    assert engine.generate(prompts[1:2], seed=[6], **options) == together[1:2]
    assert engine.generate(prompts, seed=[8, 9, 10], **options) != together

    count = 4000
    drawn = engine.generate([prompts[0]] * count, seed=1, max_new_tokens=1, temperature=1.3, top_p=1.0, stop_token_ids=[])
    with torch.no_grad():
        probs = (engine.model(torch.tensor([prompts[0]])).logits[0, -1] / 1.3).softmax(-1)
    seen = torch.bincount(torch.tensor(drawn).flatten(), minlength=97) / count
    assert (seen - probs).abs().max() < 5 * (0.25 / count) ** 0.5
    nucleus = engine.generate([prompts[0]] * 500, seed=1, max_new_tokens=1, temperature=1.3, top_p=0.3, stop_token_ids=[])
    ranked = probs.sort(descending=True)
    kept = int((ranked.values.cumsum(0) - ranked.values < 0.3).sum())
    assert set(torch.tensor(nucleus).flatten().tolist()) <= set(ranked.indices[:kept].tolist())


def test_stop_tokens_come_from_the_generation_config(make_engine):
    assert make_engine().stop_token_ids == (2,)


def test_two_threads_never_mix_their_features(make_engine):
    """The prefetch thread captures training samples while the main thread captures and decodes held-out ones."""
    engine = make_engine()
    spec = CaptureSpec((0, 2), final_hidden=True, target_argmax=True, dtype="float32")
    tasks = [PromptTask(str(n), tuple(range(3, 9 + n)), tuple([0, 0] + [1] * (4 + n))) for n in range(12)]
    expected = {task.sample_id: engine.capture([task], spec)[0].tensors for task in tasks}

    def check(task):
        for _ in range(6):
            found = engine.capture([task], spec)[0].tensors
            logits, aux, _ = engine.forward_cached(torch.tensor([task.input_ids]), None, (0, 2))
            assert all(torch.equal(found[name], expected[task.sample_id][name]) for name in found), task.sample_id
            torch.testing.assert_close(aux, expected[task.sample_id]["aux_hidden_states"])
            assert logits.shape == (len(task.input_ids), 97)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(check, tasks))
