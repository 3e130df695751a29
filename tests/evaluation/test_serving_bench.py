"""``specforge bench`` against a stand-in that speaks SGLang's protocol: numbers, files, and one message for each wrong server."""

from __future__ import annotations

import http.server
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from specforge.evaluation.serving_bench import percentiles
from specforge.inference.sglang_generate import Sampling, generate
from specforge.inference.sglang_http import ServerRefused
from specforge.inference.sglang_process import free_port

NEW_TOKENS = 9
CONTEXT = 200


class FakeServer(http.server.ThreadingHTTPServer):
    """Answers 9 tokens in 3 verify steps; counts what it was asked."""

    daemon_threads = True

    def __init__(self, tokenizer: Path, algorithm: str | None, kind: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.algorithm, self.kind, self.requests, self.in_flight, self.most_in_flight = algorithm, kind, [], 0, 0
        self.lock = threading.Lock()
        drafting = {"speculative_num_steps": 3, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4,
                    "speculative_draft_model_path": "some/draft"}
        self.info = {"version": "9.9", "model_path": "some/target", "tokenizer_path": str(tokenizer), "dtype": "float32",
                     "speculative_algorithm": algorithm, **(drafting if algorithm else {})}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: FakeServer

    def log_message(self, *args: Any) -> None:
        pass

    def reply(self, body: Any, status: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        if self.server.kind == "other":
            self.reply({"detail": "Not Found"}, 404)
        elif self.server.kind == "token" and self.headers["Authorization"] != "Bearer secret":
            self.reply({"error": "Unauthorized"}, 401)
        else:
            self.reply(self.server.info)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        with server.lock:
            server.requests.append((self.path, body))
            server.in_flight += 1
            server.most_in_flight = max(server.most_in_flight, server.in_flight)
        try:
            if self.path == "/flush_cache":
                self.reply({})
            elif len(body["input_ids"]) > CONTEXT:
                self.reply({"error": {"message": f"The input ({len(body['input_ids'])} tokens) is longer than the model's context"}}, 400)
            else:
                self.answer(body)
        finally:
            with server.lock:
                server.in_flight -= 1

    def answer(self, body: dict[str, Any]) -> None:
        count = min(NEW_TOKENS, body["sampling_params"]["max_new_tokens"])
        meta: dict[str, Any] = {"prompt_tokens": len(body["input_ids"]), "completion_tokens": count, "cached_tokens": 0,
                                "finish_reason": {"type": "length"}}
        if self.server.algorithm and self.server.kind != "silent":
            meta |= {"spec_verify_ct": 3, "spec_num_correct_drafts": 5, "spec_correct_drafts_histogram": [1, 0, 1, 1]}
        if not body["stream"]:
            return self.reply({"text": "", "output_ids": list(range(count)), "meta_info": meta})
        self.send_response(200)
        self.end_headers()
        for done in (1, 4, count):
            time.sleep(0.02)
            if self.server.kind == "breaks" and done == 4:
                return None
            event = {"output_ids": list(range(done)), "meta_info": meta if done == count else {"completion_tokens": done}}
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
            self.wfile.flush()
        self.wfile.write(b"data: [DONE]\n\n")
        return None


@pytest.fixture
def fake(tiny_target_folder: Path) -> Iterator[Callable[..., FakeServer]]:
    servers = []

    def start(algorithm: str | None = "EAGLE3", kind: str = "good") -> FakeServer:
        server = FakeServer(tiny_target_folder, algorithm, kind)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_bench_measures_both_servers_and_writes_everything(fake, run_cli, tmp_path: Path) -> None:
    draft, plain = fake(), fake(None)
    outcome = run_cli("bench", f"{draft.url}/v1/", "--baseline", plain.url, "--num-prompts", "6", "--concurrency", "1", "3",
                      "--output", "b.json", "--max-new-tokens", "50", cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    assert all(part in outcome.out for part in ("2.667", "6 of 6 outputs equal", "speedup", "written to b.json"))
    report = json.loads((tmp_path / "b.json").read_text())
    assert (report["harness"], report["num_draft_tokens"], report["tree"], report["mode"]) == ("sglang 9.9", 3, False, "greedy")
    assert report["max_new_tokens"] == 50 and report["num_prompts"] == 6 and report["template_digest"]
    for load, concurrency in zip(report["loads"], (1, 3), strict=True):
        measured, baseline = load["with draft"], load["without"]
        assert measured["accept_length"] == pytest.approx(1 + 5 / 3) and measured["acceptance_histogram"] == [6, 0, 6, 6]
        assert (measured["num_verify_steps"], measured["num_requests"], measured["num_output_tokens"]) == (18, 6, 54)
        assert 0 < measured["time_to_first_token"]["p50"] <= measured["end_to_end"]["p50"] and "accept_length" not in baseline
        assert load["concurrency"] == concurrency and load["equal_outputs"] == 6
    assert draft.most_in_flight == 3
    paths = [path for path, _ in draft.requests]
    assert paths.count("/generate") == 2 * (6 + 4) and paths.count("/flush_cache") == 2
    assert all(body["sampling_params"]["temperature"] == 0 for path, body in draft.requests if path == "/generate")


def test_prompt_files_of_both_forms(fake, run_cli, tmp_path: Path) -> None:
    question = {"role": "user", "content": "how many rivers"}
    rows = [{"prompt": question["content"]}, {"nothing": 1},
            {"messages": [question, {"role": "assistant", "content": "two"}, {"role": "user", "content": "more"}]}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    server = fake()
    outcome = run_cli("bench", server.url, "--prompts", "p.jsonl", "--warmup", "0", "--concurrency", "1", "--json", cwd=tmp_path)
    assert outcome.code == 0 and json.loads(outcome.out)["num_prompts"] == 2
    first, second = (body["input_ids"] for path, body in server.requests if path == "/generate")
    assert first == second, "the prompt of a conversation is what comes before its first reply"
    assert list((tmp_path / "outputs" / "bench").glob("*.json"))


def bench(run_cli, tmp_path: Path, *arguments: str) -> Any:
    return run_cli("bench", *arguments, "--num-prompts", "3", cwd=tmp_path)


def test_each_wrong_server_gets_one_message(fake, run_cli, tmp_path: Path) -> None:
    port = free_port()
    cases = [
        ((f"127.0.0.1:{port}",), 1, "/server_info: no answer", "Is the server running"),
        ((fake(kind="other").url,), 2, "not as an SGLang server does", "sglang.launch_server"),
        ((fake(None).url,), 2, "serves some/target without speculative decoding", "--baseline"),
        ((fake().url, "--baseline", fake().url), 2, "is the baseline, but runs EAGLE3 with some/draft", "without --speculative-algorithm"),
        ((fake(kind="silent").url,), 1, "says it runs EAGLE3, but no answer made a verify step", "log"),
        ((fake(kind="breaks").url,), 1, "the answer broke off", ""),
        ((fake(kind="token").url,), 1, "HTTP 401: Unauthorized", ""),
        ((fake().url, "--tokenizer", "nowhere"), 2, "--tokenizer: nowhere is no folder on this machine", "some/target"),
        ((fake().url, "--prompts", "nowhere.jsonl"), 2, "--prompts=nowhere.jsonl: no such file", ""),
        ((fake().url, "--template-arguments", "{"), 2, "--template-arguments: { is not JSON", ""),
    ]
    for arguments, code, message, advice in cases:
        outcome = bench(run_cli, tmp_path, *arguments)
        assert (outcome.code, outcome.out) == (code, "") or message in outcome.err, outcome
        assert outcome.code == code and message in outcome.err and advice in outcome.err, outcome.err
        assert "Traceback" not in outcome.err
    assert bench(run_cli, tmp_path, fake(kind="token").url, "--token", "secret").code == 0
    assert bench(run_cli, tmp_path, fake().url, "--concurrency", "0").code == 2


def test_a_prompt_that_is_too_long_is_named(fake, run_cli, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "sun"}) + "\n" + json.dumps({"prompt": "#" * 300}) + "\n")
    outcome = bench(run_cli, tmp_path, fake().url, "--prompts", "p.jsonl", "--warmup", "0")
    assert outcome.code == 1 and "prompt 2 of 2 was refused" in outcome.err and "longer than the model's context" in outcome.err
    with pytest.raises(ServerRefused, match="longer than the model's context"):
        generate(fake().url, list(range(CONTEXT + 1)), Sampling(4), timeout=5)


def test_percentiles_are_nearest_ranks() -> None:
    assert percentiles([]) is None
    assert percentiles([float(i) for i in range(1, 101)]) == {"mean": 50.5, "p50": 50.0, "p95": 95.0, "p99": 99.0}
    assert percentiles([3.0]) == {"mean": 3.0, "p50": 3.0, "p95": 3.0, "p99": 3.0}
