"""The plug-in without SGLang: marks, the hook on made-up batches of every kind, joining chunks, bounds, refusals at start."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch

from specforge.errors import ConfigError, TargetError
from specforge.inference.engine_factory import configured_identity
from specforge.inference.sglang_plugin import outbox, plugin
from specforge.inference.sglang_plugin.environment import plugin_environment
from specforge.inference.sglang_plugin.hook import CaptureHook
from specforge.inference.sglang_plugin.marks import Mark, identity_rid, is_identity, is_marked, read_mark
from specforge.inference.sglang_plugin.outbox import Outbox, PendingAnswer
from specforge.inference.sglang_plugin.server_identity import told_quantization
from specforge.inference.sglang_plugin.settings import CaptureSettings, read_settings
from specforge.inference.sglang_plugin.target_model import enable_capture, refusal
from specforge.runtime.contracts import CaptureSpec, TargetIdentity

H, V = 4, 11
TARGET = TargetIdentity("tiny", None, "c", "t", "x")
SPEC = CaptureSpec((1, 3), final_hidden=True, target_argmax=True, dtype="float32")


class Mode:
    def __init__(self, extend=True, verify=False):
        self.extend, self.verify = extend, verify

    def is_extend(self):
        return self.extend

    def is_target_verify(self):
        return self.verify

    def is_draft_extend_v2(self):
        return False


class Processor:
    """The two things of SGLang's logits processor that the hook uses: vocabulary size and the head."""

    vocab_size = V

    def _get_logits(self, hidden, lm_head, metadata, use_logits_buffer):
        assert use_logits_buffer is False
        return hidden @ lm_head.T


LM_HEAD = torch.randn(V, H, generator=torch.Generator().manual_seed(5))


def make_outbox(tmp_path, **changes):
    settings = CaptureSettings((1, 3), store_path=str(tmp_path / "store"), **changes)
    return Outbox(settings, SPEC, TARGET, torch.device("cpu"))


def make_hook(tmp_path, **changes):
    return CaptureHook(SPEC, make_outbox(tmp_path, **changes), {"status": "identity", "model_path": "tiny"})


def run_batch(hook, segments, packed=False, mode=None, padding=0, **metadata):
    """``segments``: (rid, first position, ids) of each request. Returns what the hook wrote into the result, and the made-up states."""
    ids = torch.tensor([i for _, _, part in segments for i in part] + [0] * padding)
    g = torch.Generator().manual_seed(int(ids.sum()))
    hidden, aux = torch.randn(len(ids), H, generator=g), torch.randn(len(ids), 2 * H, generator=g)
    batch = SimpleNamespace(
        rids=[rid for rid, _, _ in segments], extend_seq_lens_cpu=[len(part) for _, _, part in segments],
        extend_prefix_lens_cpu=[start for _, start, _ in segments], forward_mode=mode or Mode(),
    )
    batch.__dict__.update(metadata)
    result = SimpleNamespace(customized_info=None)
    given = aux if packed else [aux[:, :H], aux[:, H:]]
    hook(result, Processor(), ids, hidden, LM_HEAD, batch, given)
    return result.customized_info, hidden, aux


def wait_for(outbox, name, attempt=0):
    for _ in range(400):
        if (ref := outbox.store.find_attempt(name, attempt)) is not None:
            return ref, outbox.store.get(ref)
        threading.Event().wait(0.01)
    raise AssertionError(f"{name} never came: {outbox.store.failure(name, attempt)}")


def settled(outbox):
    """Nothing is under way any more; the bound is given back a moment after the file is there."""
    for _ in range(400):
        if outbox.pending_bytes == 0:
            return True
        threading.Event().wait(0.01)
    return False


def test_marks_survive_the_request_id_with_any_sample_name():
    for name, mask in (("a:b/ü 7", [0, 1, 1, 0, 1]), ("s", []), ("specforge:1:s", [1] * 9), ("x", [0] * 4)):
        mark = Mark.of(name, mask, 3, "inline")
        again = read_mark(mark.rid())
        assert again == mark and again.loss_mask() == [bool(m) for m in mask]
        assert again.argmax_rows() == [i for i in range(len(mask) - 1) if mask[i + 1]]
        assert is_marked(mark.rid()) and not is_identity(mark.rid()) and mark.rid() != mark.rid()
    assert is_identity(identity_rid()) and is_marked(identity_rid())
    assert not is_marked("HEALTH_CHECK_17") and not is_marked(None)
    for bad in ("specforge:2:s:0:aa:1::x", "specforge:1:q:0:aa:1::x", "specforge:1:s:0"):
        with pytest.raises(ValueError, match="mark"):
            read_mark(bad)


@pytest.mark.parametrize("packed", [False, True])
def test_marked_requests_of_a_mixed_batch_are_stored_and_the_others_left_alone(tmp_path, packed):
    hook = make_hook(tmp_path)
    first, second = Mark.of("one", [0, 1, 1, 0], 0, "store"), Mark.of("two", [1, 1], 1, "store")
    segments = [(first.rid(), 0, [5, 6, 7, 8]), ("user-request", 0, [1, 2, 3]), (second.rid(), 0, [9, 10])]
    info, hidden, aux = run_batch(hook, segments, packed=packed, padding=3)
    assert list(info) == ["specforge"]
    assert [a and a["status"] for a in info["specforge"]] == ["stored", None, "stored"]
    for mark, rows, ids, mask in ((first, slice(0, 4), [5, 6, 7, 8], [0, 1, 1, 0]), (second, slice(7, 9), [9, 10], [1, 1])):
        ref, tensors = wait_for(hook.outbox, mark.name, mark.attempt)
        assert ref.capture == SPEC and ref.target == TARGET
        assert tensors["input_ids"].tolist() == ids and tensors["loss_mask"].tolist() == [bool(m) for m in mask]
        assert torch.equal(tensors["aux_hidden_states"], aux[rows]) and torch.equal(tensors["final_hidden_states"], hidden[rows])
        logits = hidden[rows] @ LM_HEAD.T
        expected = [int(logits[i].argmax()) if i + 1 < len(mask) and mask[i + 1] else -1 for i in range(len(mask))]
        assert tensors["target_argmax"].tolist() == expected
    assert len(list((tmp_path / "store").glob("*/*.safetensors"))) == 2 and settled(hook.outbox)


def test_batches_without_marks_decode_verify_and_graph_capture_are_not_touched(tmp_path):
    hook = make_hook(tmp_path)
    mark = Mark.of("s", [1, 1], 0, "store")
    for segments, changes in (
        ([("user", 0, [1, 2])], {}),
        ([("HEALTH_CHECK_1", 0, [1])], {}),
        ([(mark.rid(), 0, [1, 2])], {"extend_seq_lens_cpu": None}),
        ([(mark.rid(), 0, [1, 2])], {"mode": Mode(extend=True, verify=True)}),
        ([(mark.rid(), 0, [1, 2])], {"mode": Mode(extend=False)}),
        ([(mark.rid(), 0, [1, 2])], {"rids": None}),
    ):
        info, _, _ = run_batch(hook, segments, **changes)
        assert info is None
    assert hook.outbox.store.bytes_used == 0


def test_chunks_are_joined_by_position_whatever_comes_between(tmp_path):
    hook = make_hook(tmp_path)
    mark = Mark.of("long", [0] * 4 + [1] * 5, 0, "store")
    rid, ids, states = mark.rid(), list(range(2, 11)), []
    for start, end in ((0, 4), (4, 6), (6, 9)):
        info, hidden, aux = run_batch(hook, [(f"user-{start}", 0, [3]), (rid, start, ids[start:end])])
        states.append((hidden[1:], aux[1:]))
        assert (info is None) == (end < 9)
    _, tensors = wait_for(hook.outbox, "long")
    assert tensors["input_ids"].tolist() == ids
    assert torch.equal(tensors["final_hidden_states"], torch.cat([h for h, _ in states]))
    assert torch.equal(tensors["aux_hidden_states"], torch.cat([a for _, a in states]))
    assert (tensors["target_argmax"] >= 0).tolist() == [False] * 3 + [True] * 5 + [False]


def test_a_prompt_that_starts_again_is_taken_from_its_new_start(tmp_path):
    hook = make_hook(tmp_path)
    mark = Mark.of("again", [1] * 4, 0, "store")
    rid = mark.rid()
    run_batch(hook, [(rid, 0, [4, 5])])
    _, hidden, _ = run_batch(hook, [(rid, 0, [4, 5, 6, 7])])
    assert torch.equal(wait_for(hook.outbox, "again")[1]["final_hidden_states"], hidden)
    assert settled(hook.outbox)


def test_rows_from_the_prefix_cache_and_gaps_are_answered_by_name_and_store_nothing(tmp_path):
    hook = make_hook(tmp_path)
    cached, gap, long = (Mark.of(n, [1] * 6, 0, "store").rid() for n in ("cached", "gap", "long"))
    info, _, _ = run_batch(hook, [(cached, 3, [1, 2, 3])])
    assert info["specforge"][0]["status"] == "prefix_cache" and "--disable-radix-cache" in info["specforge"][0]["message"]
    run_batch(hook, [(gap, 0, [1, 2])])
    info, _, _ = run_batch(hook, [(gap, 4, [5, 6])])
    assert info["specforge"][0]["status"] == "rows"
    info, _, _ = run_batch(hook, [(long, 0, [1] * 7)])
    assert info["specforge"][0]["status"] == "rows" and "7 tokens of a prompt of 6" in info["specforge"][0]["message"]
    assert hook.outbox.store.bytes_used == 0 and settled(hook.outbox)


def test_missing_layers_and_spread_rows_are_answered_by_name(tmp_path):
    hook = make_hook(tmp_path)
    rid = Mark.of("s", [1, 1], 0, "store").rid()
    batch = SimpleNamespace(rids=[rid], extend_seq_lens_cpu=[2], extend_prefix_lens_cpu=[0], forward_mode=Mode())
    for hidden, aux, status in ((torch.zeros(2, H), None, "no_aux"), (torch.zeros(2, H), [torch.zeros(2, H)], "no_aux"),
                                (torch.zeros(1, H), [torch.zeros(1, H)] * 2, "rows")):
        result = SimpleNamespace(customized_info=None)
        hook(result, Processor(), torch.tensor([1, 2]), hidden, LM_HEAD, batch, aux)
        assert result.customized_info["specforge"][0]["status"] == status


def test_an_exception_in_a_capture_becomes_its_answer_and_not_the_servers_end(tmp_path):
    hook = make_hook(tmp_path)
    good, bad = Mark.of("good", [1], 0, "store").rid(), "specforge:9:nonsense"
    info, _, _ = run_batch(hook, [(bad, 0, [1]), (good, 0, [2])])
    assert [a["status"] for a in info["specforge"]] == ["error", "stored"] and "release" in info["specforge"][0]["message"]


def test_inline_answers_hold_every_byte_when_sglang_asks_for_them(tmp_path):
    hook = make_hook(tmp_path)
    info, hidden, aux = run_batch(hook, [(Mark.of("s", [0, 1, 1], 2, "inline").rid(), 0, [7, 8, 9])])
    element = info["specforge"][0]
    assert isinstance(element, PendingAnswer)
    answer = json.loads(json.dumps(element.copy()))  # what HTTP does to it
    raw, offset = base64.b64decode(answer["data"]), 0
    found = {}
    for name, dtype, shape, _ in answer["specs"]:
        count = 1
        for size in shape:
            count *= size
        size = count * torch.empty((), dtype=getattr(torch, dtype)).element_size()
        found[name] = torch.frombuffer(bytearray(raw[offset : offset + size]), dtype=getattr(torch, dtype)).reshape(shape)
        offset += size
    assert offset == len(raw) and answer["attempt"] == 2
    assert torch.equal(found["aux_hidden_states"], aux) and torch.equal(found["final_hidden_states"], hidden)
    assert found["input_ids"].tolist() == [7, 8, 9] and found["loss_mask"].tolist() == [False, True, True]


def test_bounds_are_answered_busy_or_too_large_and_every_chunk_of_a_refused_prompt_says_so(tmp_path):
    hook = make_hook(tmp_path, pending_bytes=400, inline_bytes=100)
    inline = Mark.of("big", [1] * 4, 0, "inline").rid()
    info, _, _ = run_batch(hook, [(inline, 0, [1, 2, 3, 4])])
    assert info["specforge"][0]["status"] == "too_large" and "transport=store" in info["specforge"][0]["message"]
    first, second = Mark.of("first", [1] * 5, 0, "store").rid(), Mark.of("second", [1] * 5, 0, "store").rid()
    run_batch(hook, [(first, 0, [1, 2])])  # holds its buffers until the rest comes
    for start, part in ((0, [1, 2]), (2, [3, 4, 5])):
        info, _, _ = run_batch(hook, [(second, start, part)])
        assert info["specforge"][0]["status"] == "busy"
    run_batch(hook, [(first, 2, [3, 4, 5])])
    wait_for(hook.outbox, "first")
    retry = Mark.of("second", [1] * 5, 1, "store").rid()
    run_batch(hook, [(retry, 0, [1, 2, 3, 4, 5])])
    wait_for(hook.outbox, "second", 1)


def test_a_store_that_fails_says_so_to_the_one_who_waits(tmp_path, monkeypatch):
    hook = make_hook(tmp_path)
    monkeypatch.setattr(hook.outbox.store, "put", lambda *a, **k: (_ for _ in ()).throw(OSError(28, "no space")))
    run_batch(hook, [(Mark.of("s", [1, 1], 4, "store").rid(), 0, [1, 2])])
    for _ in range(400):
        if (reason := hook.outbox.store.failure("s", 4)) is not None:
            break
        threading.Event().wait(0.01)
    assert "no space" in reason and settled(hook.outbox)


def test_a_full_store_makes_new_samples_wait_for_the_client_and_only_old_files_go(tmp_path, monkeypatch):
    hook = make_hook(tmp_path, store_bytes=3500)
    store, names = hook.outbox.store, [f"n{n}" for n in range(8)]
    for name in names:
        run_batch(hook, [(Mark.of(name, [1, 1], 0, "store").rid(), 0, [1, 2])])
    threading.Event().wait(0.3)
    there = [name for name in names if store.find_attempt(name, 0)]
    assert 1 <= len(there) < 8 and hook.outbox.pending_bytes > 0, "of more than 1 kB each; not all of them fit"
    taken = set()
    for _ in range(2000):  # as clients do: whichever is there
        for name in set(names) - taken:
            if (ref := store.find_attempt(name, 0)) is not None:
                store.discard(ref)
                taken.add(name)
        if len(taken) == 8:
            break
        threading.Event().wait(0.01)
    assert len(taken) == 8
    monkeypatch.setattr(outbox, "_ABANDONED_SECONDS", 0.0)
    for name in names:  # their client is gone: each file makes room for a later one
        run_batch(hook, [(Mark.of(f"later {name}", [1, 1], 0, "store").rid(), 0, [1, 2])])
    wait_for(hook.outbox, "later n7")
    assert sum(store.find_attempt(f"later {name}", 0) is not None for name in names) < 8 and settled(hook.outbox)
    run_batch(hook, [(Mark.of("huge", [1] * 100, 0, "store").rid(), 0, [1] * 100)])
    for _ in range(400):
        if (reason := store.failure("huge", 0)) is not None:
            break
        threading.Event().wait(0.01)
    assert "max_bytes=3500" in reason


def test_ranks_that_do_not_write_take_part_in_the_head_and_answer_nothing():
    calls = []

    class Counting(Processor):
        def _get_logits(self, *args, **kwargs):
            calls.append(len(args[0]))
            return super()._get_logits(*args, **kwargs)

    hook = CaptureHook(SPEC, None, {})
    result = SimpleNamespace(customized_info=None)
    batch = SimpleNamespace(rids=[Mark.of("s", [0, 1, 1], 0, "store").rid(), identity_rid()], extend_seq_lens_cpu=[3, 1],
                            extend_prefix_lens_cpu=[0, 0], forward_mode=Mode())
    hook(result, Counting(), torch.arange(4), torch.zeros(4, H), LM_HEAD, batch, [torch.zeros(4, H)] * 2)
    assert result.customized_info is None and calls == [2]


def test_the_identity_is_answered_beside_what_others_wrote(tmp_path):
    hook = make_hook(tmp_path)
    result = SimpleNamespace(customized_info={"other": [1]})
    batch = SimpleNamespace(rids=[identity_rid()], extend_seq_lens_cpu=[1], extend_prefix_lens_cpu=[0], forward_mode=Mode())
    hook(result, Processor(), torch.tensor([1]), torch.zeros(1, H), LM_HEAD, batch, [torch.zeros(1, H)] * 2)
    assert result.customized_info == {"other": [1], "specforge": [{"status": "identity", "model_path": "tiny"}]}


# -- settings, versions, start ------------------------------------------------------------------------------------------------------


def test_settings_come_from_one_variable_and_mistakes_in_it_are_named():
    settings = CaptureSettings((1, 14), store_path="/x", revision="abc", ignore_interrupt=True)
    assert read_settings({"SPECFORGE_CAPTURE": settings.to_json()}) == settings
    assert read_settings({}) is None and read_settings({"SPECFORGE_CAPTURE": " "}) is None
    for text, message in (("{", "JSON"), ("{}", "aux_layer_ids"), ('{"aux_layer_ids": [2, 1]}', "ascending"),
                          ('{"aux_layer_ids": [1], "strore_path": "x"}', "no such key strore_path")):
        with pytest.raises(ConfigError, match=message):
            read_settings({"SPECFORGE_CAPTURE": text})


def test_versions_from_the_plug_in_interface_on_are_accepted_others_refused_by_name():
    for version in ("0.5.16", "0.5.23", "0.5.16.post1", "0.6.0rc1", "1.0"):
        assert plugin.check_version(version) == version
    for version in ("0.5.15", "0.4.9.post2", "0.5"):
        with pytest.raises(ConfigError, match=rf"SGLang {version} is not supported.*0\.5\.16"):
            plugin.check_version(version)


def run_register(**environment):
    code = "from specforge.inference.sglang_plugin.plugin import register; register(); import sys; print(sorted(m for m in sys.modules "
    code += "if m.startswith('sglang') or m == 'torch'))"
    variables = {key: value for key, value in os.environ.items() if key != "SPECFORGE_CAPTURE"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**variables, **environment})


def test_without_its_variable_the_entry_point_imports_and_registers_nothing():
    done = run_register()
    assert done.returncode == 0 and done.stdout.strip() == "[]", done.stderr


def test_unusable_settings_end_the_process_with_one_line():
    done = run_register(SPECFORGE_CAPTURE="{}")
    assert done.returncode == 1 and done.stderr.startswith("specforge_capture: SPECFORGE_CAPTURE={}")
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_server_of_ours_finds_the_plug_in_without_an_installation(tmp_path, monkeypatch):
    monkeypatch.setattr("specforge.inference.sglang_plugin.environment.entry_points", lambda group: [])
    changes = plugin_environment(CaptureSettings((1,)), tmp_path, {**os.environ, "SGLANG_PLUGINS": "other"})
    assert changes["SGLANG_PLUGINS"] == "other,specforge_capture"
    code = "from importlib.metadata import entry_points as e; print([p.load().__module__ for p in e(group='sglang.srt.plugins') "
    code += "if p.name == 'specforge_capture'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **changes}, cwd=tmp_path)
    assert "specforge.inference.sglang_plugin.plugin" in done.stdout, done.stderr


def make_runner(speculative=False, draft=False, generation=True, device="cpu", **arguments):
    algorithm = SimpleNamespace(is_none=lambda: not speculative)
    return SimpleNamespace(server_args=SimpleNamespace(**arguments), is_draft_worker=draft, spec_algorithm=algorithm, is_generation=generation,
                           device=device)


def graph(prefill):
    return SimpleNamespace(prefill=SimpleNamespace(backend=prefill), decode=SimpleNamespace(backend="full"))


def test_servers_whose_features_would_be_wrong_are_refused_with_the_flag_to_change():
    assert refusal(make_runner()) is None
    assert refusal(make_runner(tp_size=4, pp_size=1, chunked_prefill_size=128, disable_radix_cache=False)) is None
    assert refusal(make_runner(device="cuda", cuda_graph_config=graph("disabled"))) is None
    assert refusal(make_runner(device="cpu", cuda_graph_config=graph("breakable"))) is None
    for runner, flag in ((make_runner(speculative=True), "--speculative-algorithm"), (make_runner(draft=True), "--speculative-algorithm"),
                         (make_runner(pp_size=2), "--pp-size"), (make_runner(attn_cp_size=2), "--attn-cp-size"),
                         (make_runner(enable_return_aux_hidden_states=True), "--enable-return-aux-hidden-states"),
                         (make_runner(device="cuda:1", cuda_graph_config=graph("breakable")), "--disable-prefill-cuda-graph"),
                         (make_runner(generation=False), "--is-embedding")):
        assert flag in refusal(runner)


class _Setter(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Module()


class LlamaForCausalLM(_Setter):
    def set_eagle3_layers_to_capture(self, ids):
        self.inner.layers_to_capture = [i + 1 for i in ids]


class DeepseekV2ForCausalLM(_Setter):
    def set_eagle3_layers_to_capture(self, ids):
        self.inner.layers_to_capture = [i + 1 for i in ids] if ids[0] == 1 else list(ids)

    def set_dflash_layers_to_capture(self, ids):
        self.inner.layers_to_capture = [i + 1 for i in ids]


class SomeChildOfDeepseek(DeepseekV2ForCausalLM):
    pass


class Wrapper(_Setter):
    def __init__(self):
        super().__init__()
        self.language_model = SomeChildOfDeepseek()
        self.set_eagle3_layers_to_capture = self.language_model.set_eagle3_layers_to_capture


class UnknownRule(_Setter):
    def set_eagle3_layers_to_capture(self, ids):
        self.inner.layers_to_capture = list(ids)


@pytest.mark.parametrize("cls", [LlamaForCausalLM, DeepseekV2ForCausalLM, SomeChildOfDeepseek, Wrapper])
@pytest.mark.parametrize("ids", [(1, 3, 7), (2, 5), (4,)])
def test_the_setter_of_each_class_hits_the_output_side_layers(cls, ids):
    model = cls()
    enable_capture(model, ids, 12)
    inner = model.language_model.inner if cls is Wrapper else model.inner
    assert inner.layers_to_capture == [i + 1 for i in ids]


def test_ids_that_one_setter_cannot_express_go_through_the_other_and_unknown_rules_are_refused():
    model = DeepseekV2ForCausalLM()
    assert "dflash" in enable_capture(model, (0, 5), 12) and model.inner.layers_to_capture == [1, 6]
    with pytest.raises(TargetError, match=r"captures before layers \[1, 3\] instead of \[2, 4\]"):
        enable_capture(UnknownRule(), (1, 3), 12)
    with pytest.raises(TargetError, match="_Setter cannot give the output of layers .* no set_eagle3_layers_to_capture"):
        enable_capture(_Setter(), (1,), 12)
    with pytest.raises(TargetError, match="last of 12"):
        enable_capture(LlamaForCausalLM(), (11,), 12)
    assert enable_capture(_Setter(), (), 12) == "no auxiliary layers"


def test_a_quantization_that_only_a_flag_says_is_part_of_the_identity_on_both_sides(tiny_target_folder):
    def runner(argument, own):
        config = SimpleNamespace(hf_config=SimpleNamespace(quantization_config=own))
        return SimpleNamespace(server_args=SimpleNamespace(quantization=argument), model_config=config)

    assert told_quantization(runner("fp8", None)) == "fp8" and told_quantization(runner(None, None)) is None
    assert told_quantization(runner("awq", {"quant_method": "awq"})) is None, "the digest of config.json has it"
    target, data = {"resolved_path": str(tiny_target_folder)}, {}
    plain, quantized = (configured_identity({"target": target, "data": data, "target_backend": {"server_args": given}})
                        for given in (None, {"quantization": "fp8"}))
    assert quantized.differences(plain) == ["quantization: fp8 versus None"] and plain.quantization is None
