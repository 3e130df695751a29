"""Engine ``sglang_server`` against servers that speak SGLang's HTTP but are made here: routes, retries, deaths, handshakes, bad answers."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from specforge.errors import ConfigError, DataError, FeatureError, RunError, TargetError
from specforge.inference.sglang_client.handshake import Expected, check
from specforge.inference.sglang_plugin.marks import is_identity, is_marked, read_mark
from specforge.inference.sglang_plugin.outbox import CaptureFailed, Outbox, failed
from specforge.inference.sglang_plugin.settings import CaptureSettings
from specforge.inference.target_engine.sglang_server import SGLangServerTargetEngine
from specforge.runtime.contracts import CaptureSpec, PromptTask, TargetIdentity

SPEC = CaptureSpec((0, 2), final_hidden=True, target_argmax=True, dtype="float32")
IDENTITY = TargetIdentity("tiny", "r7", "config-a", "tokenizer-a", "template-a")
LENGTHS = (5, 19, 8, 1, 12, 3, 30, 7)


def make_tasks(lengths=LENGTHS, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [PromptTask(f"s{n}:{length}", tuple(torch.randint(3, 97, (length,), generator=g).tolist()), tuple(int(i > length // 3) for i in
                       range(length))) for n, length in enumerate(lengths)]


class FakeSGLang(ThreadingHTTPServer):
    """``behave(server, body)`` may return a status and text, raise to break the connection, or return None to answer as SGLang would."""

    daemon_threads = True

    def __init__(self, hf, store_path, behave=None, plugin=True, token=None, **said):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hf, self.behave, self.token, self.plugin = hf, behave, token, plugin
        settings = CaptureSettings(SPEC.aux_layer_ids, store_path=str(store_path) if store_path else None)
        self.outbox = Outbox(settings, SPEC, IDENTITY, torch.device("cpu"))
        self.requests: list[dict] = []
        self.now = self.most = 0
        self.lock = threading.Lock()
        self.said = {
            "specforge": "0", "sglang": "0.5.23", "model_path": "/models/tiny", "target": {k: v for k, v in dataclasses.asdict(IDENTITY).items() if
            k != "template_digest"}, "aux_layer_ids": [0, 2], "final_hidden": True, "target_argmax": True, "dtype": "float32", "num_layers": 4,
            "hidden_size": 32, "context_length": 64, "deterministic": False, "store_path": str(store_path) if store_path else None, **said,
        }  # fmt: skip
        if store_path:
            (store_path / ".probe").write_text("probe")
            self.said |= {"probe_file": ".probe", "probe_content": "probe"}
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def stop(self):
        self.shutdown()
        self.server_close()

    def answer(self, body):
        rid = body.get("rid", "")
        meta = {"finish_reason": {"type": "length"}}
        if self.plugin and is_identity(rid):
            meta["specforge"] = [{"status": "identity", **self.said}]
        elif self.plugin and is_marked(rid):
            meta["specforge"] = [self.capture(rid, body)]
        elif body.get("return_hidden_states"):
            aux = self.hf.capture([task_of(body)], dataclasses.replace(SPEC, final_hidden=False, target_argmax=False))[0].tensors
            meta["hidden_states"] = [aux["aux_hidden_states"].tolist()]
        ids = self.hf.generate([body["input_ids"]], max_new_tokens=body["sampling_params"]["max_new_tokens"], temperature=0, top_p=1, seed=0,
                               stop_token_ids=[]) if not is_marked(rid) else [[0]]
        return {"output_ids": ids[0], "meta_info": meta}

    def capture(self, rid, body):
        mark = read_mark(rid)
        tensors = self.hf.capture([dataclasses.replace(task_of(body), loss_mask=tuple(mark.loss_mask()))], SPEC)[0].tensors
        del tensors["loss_mask"]
        if not self.said["target_argmax"]:
            self.outbox.capture = dataclasses.replace(SPEC, target_argmax=False)
            del tensors["target_argmax"]
        try:
            answer = self.outbox.add(rid, mark, 0, tensors)
        except CaptureFailed as refusal:
            return failed(refusal.code, str(refusal))
        return answer.copy()


def task_of(body):
    return PromptTask("x", tuple(body["input_ids"]), tuple(0 for _ in body["input_ids"]))


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def _say(self, status, value):
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _refuse_stranger(self):
        if self.server.token and self.headers.get("Authorization") != f"Bearer {self.server.token}":
            self._say(401, {"error": "Unauthorized"})
            return True
        return False

    def do_GET(self):
        if self._refuse_stranger():
            return
        flags = {"enable_return_aux_hidden_states": True, "aux_hidden_state_capture": "eagle3", "return_aux_hidden_state_layer_ids": [0, 2]}
        self._say(200, {"/model_info": {"model_path": self.server.said["model_path"]}, "/server_info": flags}.get(self.path, {}))

    def do_POST(self):
        if self._refuse_stranger():
            return
        server, body = self.server, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.requests.append(body)
            server.now += 1
            server.most = max(server.most, server.now)
        try:
            special = server.behave(server, body) if server.behave and not is_identity(body.get("rid", "")) else None
            self._say(*special) if special is not None else self._say(200, server.answer(body))
        except ConnectionResetError:
            self.connection.close()
        finally:
            with server.lock:
                server.now -= 1


@pytest.fixture
def make_server(make_engine, tmp_path):
    servers, hf = [], make_engine()

    def make(behave=None, store=True, **said):
        folder = tmp_path / f"store{len(servers)}" if store else None
        if folder:
            folder.mkdir()
        servers.append(FakeSGLang(hf, folder, behave, **said))
        return servers[-1]

    make.hf = hf
    yield make
    for server in servers:
        server.stop()


@pytest.fixture
def make_client(target_folder):
    engines = []

    def make(*servers, identity=IDENTITY, **changes):
        arguments = {
            "dtype": "float32", "servers": [getattr(s, "url", s) for s in servers], "token_variable": None, "num_servers": 1, "first_gpu": 0,
            "server_args": {}, "environment": {}, "transport": "store", "store_bytes": "1GiB", "requests_in_flight": 4, "retries": 2,
            "request_timeout_seconds": 20, "start_timeout_seconds": 20,
        }  # fmt: skip
        engines.append(SGLangServerTargetEngine(**{**arguments, **changes}, target_folder=target_folder("llama"), device="cpu", identity=identity,
                                                trust_remote_code=False))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def assert_same(found, expected, exact=True):
    assert [f.sample_id for f in found] == [e.sample_id for e in expected]
    for f, e in zip(found, expected, strict=True):
        assert f.tensors.keys() == e.tensors.keys()
        for name, tensor in e.tensors.items():
            assert torch.equal(f.tensors[name], tensor) if exact else torch.allclose(f.tensors[name], tensor, atol=1e-5), (f.sample_id, name)


@pytest.mark.parametrize("transport", ["store", "inline"])
def test_features_are_those_of_the_target_in_order_over_both_transports(make_server, make_client, transport, capfd):
    server = make_server()
    tasks = make_tasks()
    found = make_client(server, transport=transport).capture(tasks, SPEC)
    assert_same(found, make_server.hf.capture(tasks, SPEC))
    assert not list(server.outbox.store.folder.glob("*/*")), "every file is taken away"
    assert f"{server.url}: SGLang 0.5.23; features by the plug-in 0, transport {transport} (SGLang itself gives no final" in capfd.readouterr().err
    assert len({body["rid"] for body in server.requests}) == len(server.requests) == len(tasks) + 1


def test_several_servers_share_the_work_within_their_bound(make_server, make_client):
    servers = [make_server(lambda server, body: time.sleep(0.03)) for _ in range(3)]
    tasks = make_tasks([4] * 60)
    found = make_client(*servers, requests_in_flight=5).capture(tasks, SPEC)
    assert_same(found, make_server.hf.capture(tasks, SPEC))
    assert all(3 <= server.most <= 5 and len(server.requests) > 8 for server in servers)


def test_argmax_is_computed_here_when_the_server_gives_none(make_server, make_client, capfd):
    tasks = make_tasks([9, 1, 14])
    found = make_client(make_server(target_argmax=False)).capture(tasks, SPEC)
    assert_same(found, make_server.hf.capture(tasks, SPEC))
    assert "target_argmax: computed here" in capfd.readouterr().err


def test_a_spec_without_final_hidden_leaves_it_out(make_server, make_client):
    spec = CaptureSpec((0, 2), final_hidden=False, target_argmax=False, dtype="float32")
    found = make_client(make_server()).capture(make_tasks([6]), spec)[0].tensors
    assert set(found) == {"input_ids", "loss_mask", "aux_hidden_states"}


def test_broken_connections_are_tried_again_and_cost_nothing(make_server, make_client):
    broken = set()

    def behave(server, body):
        key = tuple(body["input_ids"])
        if key not in broken:
            broken.add(key)
            raise ConnectionResetError

    tasks = make_tasks()
    found = make_client(make_server(behave)).capture(tasks, SPEC)
    assert_same(found, make_server.hf.capture(tasks, SPEC))


def test_the_limit_of_tries_ends_the_call_with_one_message(make_server, make_client):
    def behave(server, body):
        if len(body["input_ids"]) == 19:
            raise ConnectionResetError

    server = make_server(behave)
    with pytest.raises(RunError, match=r"sample s1:19: no answer after 3 tries \(target_backend.retries=2\)"):
        make_client(server).capture(make_tasks(), SPEC)
    assert sum(len(body["input_ids"]) == 19 for body in server.requests) == 3


def test_the_work_of_a_server_that_dies_in_the_middle_goes_to_the_others(make_server, make_client):
    dying = make_server()

    def die(server, body):
        if len(server.requests) > 6:
            threading.Thread(target=server.stop, daemon=True).start()
            time.sleep(0.2)
            raise ConnectionResetError
        time.sleep(0.02)

    dying.behave = die
    tasks = make_tasks([5 + n % 9 for n in range(50)])
    client = make_client(dying, make_server(lambda server, body: time.sleep(0.02)))
    assert_same(client.capture(tasks, SPEC), make_server.hf.capture(tasks, SPEC))
    # And it is not asked again while it is away.
    assert_same(client.capture(tasks[:5], SPEC), make_server.hf.capture(tasks[:5], SPEC))


def test_when_the_last_server_dies_the_call_ends_soon_with_one_message(make_server, make_client):
    def die(server, body):
        threading.Thread(target=server.stop, daemon=True).start()
        time.sleep(0.2)
        raise ConnectionResetError

    server = make_server(die)
    began = time.monotonic()
    with pytest.raises(RunError, match=f"no SGLang server is left .*{server.url}|no answer after"):
        make_client(server).capture(make_tasks(), SPEC)
    assert time.monotonic() - began < 10


def test_a_server_that_hangs_is_given_up_after_the_time_out(make_server, make_client):
    server = make_server(lambda server, body: time.sleep(30))
    began = time.monotonic()
    with pytest.raises(RunError, match="timed out.*|no answer after 2 tries"):
        make_client(server, request_timeout_seconds=0.5, retries=1).capture(make_tasks([4, 5]), SPEC)
    assert time.monotonic() - began < 8


def test_a_busy_server_is_waited_for_and_that_is_no_failed_try(make_server, make_client):
    refusals = []

    def behave(server, body):
        if len(refusals) < 12:
            refusals.append(1)
            return 200, {"meta_info": {"specforge": [failed("busy", "no room")]}}

    found = make_client(make_server(behave), retries=0).capture(make_tasks(), SPEC)
    assert_same(found, make_server.hf.capture(make_tasks(), SPEC))
    always = make_server(lambda server, body: (200, {"meta_info": {"specforge": [failed("busy", "no room")]}}))
    with pytest.raises(RunError, match="had no room for sample s0:4 for 1 s: no room. Lower target_backend.requests_in_flight"):
        make_client(always, request_timeout_seconds=0.6).capture(make_tasks([4]), SPEC)


def test_features_that_were_promised_and_never_came_are_an_error_not_a_hang(make_server, make_client):
    server = make_server(lambda server, body: (200, {"meta_info": {"specforge": [{"status": "stored"}]}}))
    with pytest.raises(RunError, match="did not appear in .*store0 within 0 s"):
        make_client(server, request_timeout_seconds=0.4, retries=0).capture(make_tasks([4]), SPEC)

    def fails(server, body):
        mark = read_mark(body["rid"])
        server.outbox.store.fail(mark.name, mark.attempt, "OSError: no space left")
        return 200, {"meta_info": {"specforge": [{"status": "stored"}]}}

    with pytest.raises(RunError, match="no space left"):
        make_client(make_server(fails)).capture(make_tasks([4]), SPEC)


def test_answers_of_other_prompts_damaged_or_partial_ones_never_become_features(make_server, make_client):
    def other_tokens(server, body):
        return 200, server.answer({**body, "input_ids": [i % 90 + 4 for i in body["input_ids"]]})

    with pytest.raises(FeatureError, match="other tokens"):
        make_client(make_server(other_tokens)).capture(make_tasks([6]), SPEC)

    def damaged(server, body):
        answer = server.answer(body)
        data = answer["meta_info"]["specforge"][0]["data"]
        answer["meta_info"]["specforge"][0]["data"] = data[:100] + ("A" if data[100] != "A" else "B") + data[101:]
        return 200, answer

    with pytest.raises(FeatureError, match="checksum"):
        make_client(make_server(damaged), transport="inline").capture(make_tasks([6]), SPEC)

    def cut(server, body):
        answer = server.answer(body)
        answer["meta_info"]["specforge"][0]["data"] = answer["meta_info"]["specforge"][0]["data"][:400]
        return 200, answer

    with pytest.raises(FeatureError, match="the answer holds 300 bytes"):
        make_client(make_server(cut), transport="inline").capture(make_tasks([6]), SPEC)

    for status, kind in (("prefix_cache", TargetError), ("no_aux", TargetError), ("error", RunError)):
        server = make_server(lambda server, body, s=status: (200, {"meta_info": {"specforge": [failed(s, f"because {s}")]}}))
        with pytest.raises(kind, match=f"sample s0:6: because {status}"):
            make_client(server).capture(make_tasks([6]), SPEC)
    aborted = {"meta_info": {"finish_reason": {"type": "abort", "message": "out of KV cache"}}}
    with pytest.raises(RunError, match="aborted sample s0:6: out of KV cache"):
        make_client(make_server(lambda server, body: (200, aborted))).capture(make_tasks([6]), SPEC)
    with pytest.raises(TargetError, match="does not see the prompts of this target class"):
        make_client(make_server(lambda server, body: (200, {"meta_info": {}}))).capture(make_tasks([6]), SPEC)


def test_prompts_beyond_the_context_are_refused_before_and_by_the_server(make_server, make_client):
    with pytest.raises(DataError, match="sample s0:60 has 60 tokens.*fewer than 58.*data.max_length=50"):
        make_client(make_server()).capture(make_tasks([60]), SPEC)
    refused = 400, {"error": {"message": "The input (40 tokens) is longer than the model's context length (32 tokens)."}}
    with pytest.raises(RunError, match=r"sample s0:40 \(40 tokens\).*HTTP 400.*longer than the model's context length"):
        make_client(make_server(lambda server, body: refused)).capture(make_tasks([40]), SPEC)


# -- handshake ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"aux_layer_ids": [1, 2]}, r"captured layers \[1, 2\] versus \[0, 2\].*SPECFORGE_CAPTURE"),
        ({"dtype": "bfloat16"}, r"dtype bfloat16 versus float32.*target_backend.dtype"),
        ({"final_hidden": False}, "final hidden state not captured"),
        ({"num_layers": 5}, "num_layers 5 versus 4"),
        ({"quantization": "fp8"}, "quantization fp8 versus None.*--quantization of the server"),
        ({"target": {"config_digest": "other", "tokenizer_digest": "tokenizer-a", "revision": None}}, "model files of .*digest other "
                                                                                                      "versus config-a"),
        ({"target": {"config_digest": "config-a", "tokenizer_digest": "other", "revision": "r7"}}, "tokenizer files"),
        ({"target": {"config_digest": "config-a", "tokenizer_digest": "tokenizer-a", "revision": "r8"}}, "revision r8 versus "
                                                                                                         "target.revision=r7"),
        ({"target": None, "model_path": "/models/other"}, "model path /models/other versus tiny"),
        ({"probe_content": "elsewhere"}, "not the same folder on this machine.*transport=inline"),
        ({"store_path": None}, "no store_path.*transport=inline"),
    ],
)
def test_a_server_that_differs_is_refused_with_both_values_and_gets_no_work(make_server, make_client, said, message):
    server = make_server()
    server.said |= said
    with pytest.raises(TargetError, match=message):
        make_client(server).capture(make_tasks(), SPEC)
    assert len(server.requests) == 1


def test_what_makes_no_difference_is_admitted(make_server, make_client):
    server = make_server()
    server.said |= {"target": {**server.said["target"], "revision": None}}
    make_client(server).capture(make_tasks([4]), SPEC)
    server.said |= {"target": None, "model_path": "elsewhere/tiny"}
    make_client(server).capture(make_tasks([4]), SPEC)
    elsewhere = make_server(store=False)
    make_client(elsewhere, transport="inline").capture(make_tasks([4]), SPEC)


def test_an_old_sglang_is_refused_by_name():
    expected = Expected(IDENTITY, "LlamaForCausalLM", 4, 32, SPEC, "inline")
    with pytest.raises(ConfigError, match=r"SGLang 0\.5\.15 is not supported"):
        check({"sglang": "0.5.15"}, expected, "server")


def test_another_spec_is_checked_against_the_same_servers_again(make_server, make_client):
    client = make_client(make_server())
    client.capture(make_tasks([4]), SPEC)
    with pytest.raises(TargetError, match=r"captured layers \[0, 2\] versus \[1\]"):
        client.capture(make_tasks([4]), dataclasses.replace(SPEC, aux_layer_ids=(1,)))


def test_nobody_at_the_address_is_one_message(make_client):
    with pytest.raises(RunError, match="no SGLang server is left .*127.0.0.1:9.*no answer"):
        make_client("http://127.0.0.1:9").capture(make_tasks([4]), SPEC)


def test_one_absent_server_of_two_stops_nothing(make_server, make_client):
    found = make_client("http://127.0.0.1:9", make_server()).capture(make_tasks(), SPEC)
    assert_same(found, make_server.hf.capture(make_tasks(), SPEC))


def test_the_token_is_read_from_the_environment_and_sent(make_server, make_client, monkeypatch):
    server = make_server(token="secret")
    monkeypatch.setenv("MY_TOKEN", "secret")
    assert len(make_client(server, token_variable="MY_TOKEN").capture(make_tasks([4]), SPEC)) == 1
    with pytest.raises(RunError, match="HTTP 401"):
        make_client(server).capture(make_tasks([4]), SPEC)
    with pytest.raises(ConfigError, match="token_variable=NO_TOKEN"):
        make_client(server, token_variable="NO_TOKEN")


# -- a server without the plug-in ---------------------------------------------------------------------------------------------------


def test_without_the_plug_in_aux_states_come_from_sglang_itself_after_a_comparison(make_server, make_client, target_folder, capfd):
    spec = CaptureSpec((0, 2), final_hidden=False, target_argmax=False, dtype="float32")
    server = make_server(plugin=False, model_path=str(target_folder("llama")))
    tasks = make_tasks([5, 9])
    assert_same(make_client(server, transport="inline").capture(tasks, spec), make_server.hf.capture(tasks, spec))
    assert "features by SGLang's own answers" in capfd.readouterr().err
    with pytest.raises(TargetError, match="plug-in specforge_capture did not answer.*SPECFORGE_CAPTURE='{.*aux_layer_ids.*0, 2"):
        make_client(server, transport="inline").capture(tasks, SPEC)
    with pytest.raises(TargetError, match=r"returns auxiliary layers \[0, 2\].*--return-aux-hidden-state-layer-ids 0 1"):
        make_client(server, transport="inline").capture(tasks, dataclasses.replace(spec, aux_layer_ids=(0, 1)))


def test_without_the_plug_in_another_model_is_noticed(make_server, make_client, target_folder):
    spec = CaptureSpec((0, 2), final_hidden=False, target_argmax=False, dtype="float32")
    with pytest.raises(TargetError, match="serves /models/tiny, this run's target is"):
        make_client(make_server(plugin=False), identity=dataclasses.replace(IDENTITY, path="else"), transport="inline").capture(make_tasks([4]), spec)
    server = make_server(plugin=False, model_path=str(target_folder("llama")))
    for parameter in server.hf.model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    with pytest.raises(TargetError, match="output of layer 0 is not that of .*another model"):
        make_client(server, transport="inline").capture(make_tasks([4]), spec)


# -- answers ------------------------------------------------------------------------------------------------------------------------


def test_answers_end_with_the_stop_that_was_asked_for(make_server, make_client):
    server = make_server()
    client, prompts = make_client(server), [list(t.input_ids) for t in make_tasks([4, 9, 6])]
    options = {"max_new_tokens": 12, "temperature": 0.0, "top_p": 1.0, "seed": 0}
    free = server.hf.generate(prompts, stop_token_ids=[], **options)
    stops = [free[0][4], free[2][7]]
    assert client.generate(prompts, stop_token_ids=stops, **options) == server.hf.generate(prompts, stop_token_ids=stops, **options)
    # The model's own stop is 2: SGLang would always end there, so it is switched off unless it is asked for.
    assert [b["sampling_params"].get("ignore_eos") for b in server.requests[1:]] == [True] * 3
    client.generate(prompts, stop_token_ids=[2, *stops], **options)
    assert [b["sampling_params"].get("ignore_eos") for b in server.requests[4:]] == [None] * 3
    assert client.stop_token_ids == (2,)


def test_sampling_seeds_are_each_prompts_own(make_server, make_client, capfd):
    server = make_server()
    make_client(server).generate([[5], [5], [6]], max_new_tokens=2, temperature=1.0, top_p=0.9, seed=[7, 8, 7], stop_token_ids=[2])
    sent = {(b["input_ids"][0], b["sampling_params"]["sampling_seed"], b["sampling_params"]["top_p"]) for b in server.requests[1:]}
    assert sent == {(5, 7, 0.9), (5, 8, 0.9), (6, 7, 0.9)}
    assert "enable_deterministic_inference" in capfd.readouterr().err


def test_two_threads_share_the_servers_and_never_mix_their_features(make_server, make_client):
    client = make_client(make_server(), make_server())
    tasks = [make_tasks([6 + n for n in range(12)], seed) for seed in (1, 2)]
    found, threads = {}, []
    for n in (0, 1):
        threads.append(threading.Thread(target=lambda n=n: found.update({n: client.capture(tasks[n], SPEC)})))
        threads[-1].start()
    for thread in threads:
        thread.join()
    for n in (0, 1):
        assert_same(found[n], make_server.hf.capture(tasks[n], SPEC))


def test_addresses_and_arguments_that_cannot_work_are_named_at_composition():
    def rules(**node):
        return SGLangServerTargetEngine.rules({}, {"target_backend": {"servers": None, "server_args": {}, **node}})

    assert rules() == [] and rules(servers=["http://a:1", "https://b"]) == []
    assert "must be addresses" in rules(servers=["localhost:1"])[0] and "named twice" in rules(servers=["http://a", "http://a"])[0]
    problems = rules(servers=[], server_args={"dtype": "half", "speculative-algorithm": "EAGLE3", "tp_size": 2})
    assert len(problems) == 3 and "target_backend.dtype" in problems[1] and "without a draft" in problems[2]
