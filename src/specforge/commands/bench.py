"""``specforge bench URL``: a live SGLang server under load, with its draft and, with ``--baseline``, beside a server without one.

Exit code 0; 1 for a server that does not answer or breaks off, 2 for one that is no SGLang server or has no draft.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specforge.data.chat_template import ChatTemplate, load_tokenizer, read_template
from specforge.data.conversation import RowProblem
from specforge.data.report import DataReport
from specforge.data.sources import read_conversations, resolve_path
from specforge.errors import ConfigError, DataError
from specforge.evaluation.serving_bench import measure, require_drafting, require_plain
from specforge.inference.sglang_generate import Answer, Sampling, ServerFacts, generate_all, server_facts
from specforge.tracking.bar import counting_bar

DEFAULT_PROMPTS = "package://specforge/data/demo/heldout.jsonl"


def main(arguments: Sequence[str]) -> int:
    """Parse ``arguments`` (without the command word), measure, print the table, write the JSON file."""
    options = _parser().parse_args(list(arguments))
    servers = _servers(options)
    drafting = servers["with draft"]
    template = _template(options, drafting)
    prompts, names = _prompts(options, template)
    sampling = Sampling(options.max_new_tokens, options.temperature, options.top_p, ignore_eos=options.ignore_eos)
    loads = [_load(options, servers, prompts, sampling, concurrency) for concurrency in options.concurrency]
    report = {**_setting(options, servers, template, names), "loads": loads}
    path = Path(options.output).expanduser() if options.output else Path("outputs") / "bench" / f"{time.strftime('%Y%m%d-%H%M%S')}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    if options.json:
        print(json.dumps(report, indent=1))
    else:
        show(report, path)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="specforge bench", description="Measure a live SGLang server: speed, latency and accept_length.")
    parser.add_argument("url", metavar="URL", help="server with the draft, for example http://127.0.0.1:30000")
    parser.add_argument("--baseline", metavar="URL", help="server of the same model without a draft, for the comparison")
    parser.add_argument("--prompts", metavar="FILE", default=DEFAULT_PROMPTS, help="JSONL with messages or prompt (default: the demo's)")
    parser.add_argument("--num-prompts", type=_positive, default=64, metavar="N", help="the first N of them (default 64)")
    parser.add_argument("--concurrency", type=_positive, nargs="+", default=[1, 8], metavar="N", help="requests in flight (default 1 8)")
    parser.add_argument("--max-new-tokens", type=_positive, default=256, metavar="N", help="length of an answer at most (default 256)")
    parser.add_argument("--ignore-eos", action="store_true", help="make every answer that long, so that two servers do the same work")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--warmup", type=int, default=4, metavar="N", help="requests before measuring (default 4)")
    parser.add_argument("--tokenizer", metavar="DIR", help="folder of the tokenizer, if the server's path is not on this machine")
    parser.add_argument("--chat-template", metavar="FILE", help="Jinja file in place of the tokenizer's template")
    parser.add_argument("--template-arguments", metavar="JSON", help="for example '{\"enable_thinking\": false}'")
    parser.add_argument("--token", help="API key of the servers")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="longest silence of a server in seconds (default 600)")
    parser.add_argument("--output", metavar="FILE", help="JSON file to write (default outputs/bench/<time>.json)")
    parser.add_argument("--json", action="store_true", help="print plain JSON in place of the table")
    return parser


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text}: allowed is 1 or more")
    return value


def _servers(options: argparse.Namespace) -> dict[str, ServerFacts]:
    """The servers by the name of their column, checked for what they are asked to be."""
    servers = {"with draft": server_facts(_address(options.url), token=options.token)}
    require_drafting(servers["with draft"])
    if options.baseline:
        servers["without"] = server_facts(_address(options.baseline), token=options.token)
        require_plain(servers["without"])
    return servers


def _address(url: str) -> str:
    """``host:port`` and a slash or /v1 at the end are taken as meant."""
    url = url if "://" in url else f"http://{url}"
    return url.rstrip("/").removesuffix("/v1")


def _template(options: argparse.Namespace, facts: ServerFacts) -> ChatTemplate:
    folder = Path(options.tokenizer or facts.tokenizer_path).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"--tokenizer: {folder} is no folder on this machine. Give a folder with the tokenizer of {facts.model_path}.")
    try:
        arguments = json.loads(options.template_arguments or "{}")
    except ValueError as error:
        raise ConfigError(f"--template-arguments: {options.template_arguments} is not JSON ({error}).") from None
    return ChatTemplate(load_tokenizer(folder), read_template(options.chat_template), arguments)


def _prompts(options: argparse.Namespace, template: ChatTemplate) -> tuple[list[list[int]], list[str]]:
    """Token ids that come before each conversation's first reply, and the rows they are from."""
    file = resolve_path(options.prompts, "--prompts")
    report = DataReport(source=file.name)
    prompts, names = [], []
    for row in read_conversations(file, "auto", report, max_samples=options.num_prompts, prompts_only=True):
        until = row.reply_indices[0] if row.reply_indices else len(row.messages)
        try:
            prompts.append(template.render_prompt(row.messages[:until], row.tools))
            names.append(row.row_id or row.where)
        except RowProblem as problem:
            report.skip(row.where, str(problem))
    if not prompts:
        reason = f" First problem: {report.skipped[0][0]}: {report.skipped[0][1]}." if report.skipped else ""
        raise DataError(f"--prompts={file}: none of its {report.rows} rows is a usable prompt.{reason}")
    return prompts, names


def _load(options: argparse.Namespace, servers: dict[str, ServerFacts], prompts: list[list[int]], sampling: Sampling,
          concurrency: int) -> dict[str, Any]:
    """One concurrency on each server."""
    results: dict[str, Any] = {}
    answers: dict[str, list[Answer]] = {}
    for name, facts in servers.items():
        how: dict[str, Any] = {"concurrency": concurrency, "timeout": options.timeout, "token": options.token}
        if options.warmup > 0:
            generate_all(facts.url, prompts[: options.warmup], sampling, **how)
        with counting_bar(f"{name}, {concurrency} at a time", len(prompts)) as advance:
            results[name], answers[name] = measure(facts, prompts, sampling, **how, report=advance)
    if "without" in results:
        fast, slow = results["with draft"], results["without"]
        results["speedup"] = {"output_tokens_per_second": fast["output_tokens_per_second"] / slow["output_tokens_per_second"],
                              "end_to_end_mean": slow["end_to_end"]["mean"] / fast["end_to_end"]["mean"]}
        if options.temperature == 0:
            results["equal_outputs"] = sum(a.tokens == b.tokens for a, b in zip(answers["with draft"], answers["without"], strict=True))
    return {"concurrency": concurrency, **results}


def _setting(options: argparse.Namespace, servers: dict[str, ServerFacts], template: ChatTemplate, names: list[str]) -> dict[str, Any]:
    """What a stored accept_length must say besides its value (conventions.md §7)."""
    draft = servers["with draft"]
    chosen = hashlib.blake2b("\n".join(names).encode(), digest_size=8).hexdigest()
    return {
        "harness": f"sglang {draft.version}", "time": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "servers": {name: vars(facts) for name, facts in servers.items()},
        "num_draft_tokens": draft.num_draft_tokens, "tree": (draft.topk or 1) > 1, "temperature": options.temperature,
        "top_p": options.top_p, "mode": "greedy" if options.temperature == 0 else "the server's", "max_new_tokens": options.max_new_tokens,
        "ignore_eos": options.ignore_eos, "template_digest": template.digest, "template_arguments": template.arguments,
        "prompts": options.prompts, "num_prompts": len(names), "prompt_set_digest": chosen, "warmup": options.warmup,
    }


def show(report: dict[str, Any], path: Path) -> None:
    """One table a concurrency; every number in it is in the JSON file."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if Console().is_terminal else 110)
    draft = report["servers"]["with draft"]
    print(f"{draft['model_path']} with {draft['algorithm']} draft {draft['draft_path']}: {draft['num_steps']} steps, {draft['topk']} "
          f"branches, {report['num_draft_tokens']} drafted tokens a step; SGLang {draft['version']}, {report['mode']}")
    for load in report["loads"]:
        columns = [name for name in report["servers"] if name in load]
        table = Table(title=f"{load['concurrency']} requests in flight, {report['num_prompts']} prompts", title_justify="left")
        table.add_column("")
        for name in columns:
            table.add_column(name, justify="right")
        for label, cell in _ROWS:
            table.add_row(label, *(cell(load[name]) for name in columns))
        console.print(table)
        if "speedup" in load:
            same = f"; {load['equal_outputs']} of {report['num_prompts']} outputs equal" if "equal_outputs" in load else ""
            speedup = load["speedup"]
            print(f"speedup {speedup['output_tokens_per_second']:.2f} in tokens/s, {speedup['end_to_end_mean']:.2f} in time of an answer"
                  f"{same}")
    print(f"written to {path}")


def _drafts(text: Any) -> Any:
    """A cell that only a drafting server has."""
    return lambda result: text(result) if "accept_length" in result else "-"


def _times(name: str) -> Any:
    def cell(result: dict[str, Any]) -> str:
        times = result[name]
        return "-" if times is None else " / ".join(f"{1000 * times[p]:.0f}" for p in ("p50", "p95", "p99"))

    return cell


_ROWS: list[tuple[str, Any]] = [
    ("accept_length", _drafts(lambda r: f"{r['accept_length']:.3f}")),
    ("  95 % interval (requests)", _drafts(lambda r: " - ".join(f"{x:.3f}" for x in r["accept_length_interval_95"]))),
    ("  verify steps", _drafts(lambda r: str(r["num_verify_steps"]))),
    ("acceptance histogram 0 1 2 ...", _drafts(lambda r: " ".join(map(str, r["acceptance_histogram"])))),
    ("output tokens/s", lambda r: f"{r['output_tokens_per_second']:.1f}"),
    ("time to first token, ms: p50/p95/p99", _times("time_to_first_token")),
    ("time of an answer, ms: p50/p95/p99", _times("end_to_end")),
    ("time between tokens, ms: p50/p95/p99", _times("time_between_tokens")),
    ("output tokens", lambda r: str(r["num_output_tokens"])),
]
